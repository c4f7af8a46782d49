// Tabs by pointer and by arrow keys; the address keeps which one is open. `onShow` gets its name.
export function tabs(onShow) {
  const all = [...document.querySelectorAll('[role="tab"]')];
  const nameOf = (tab) => tab.getAttribute("aria-controls");

  function show(chosen) {
    for (const tab of all) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      document.getElementById(nameOf(tab)).hidden = tab !== chosen;
    }
    history.replaceState(null, "", `#${nameOf(chosen)}`);
    onShow(nameOf(chosen));
  }

  all.forEach((tab, index) => {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = all[(to + all.length) % all.length];
      show(next);
      next.focus();
    });
  });
  show(all.find((tab) => `#${nameOf(tab)}` === location.hash) ?? all[0]);
}
