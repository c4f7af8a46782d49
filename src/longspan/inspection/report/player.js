"use strict";

// A slider over moments with play and pause. `ids` is the prefix of the elements' ids; `entries(run)` are the
// moments of a run; `draw(entry, run, entries)` draws one of them. `show(runs)` may be called again with
// newer moments: a slider at the end stays at the end.
function player(ids, entries, draw) {
  const get = (name) => document.getElementById(`${ids}-${name}`);
  const [choice, play, slider, step] = ["run", "play", "slider", "step"].map(get);
  const section = document.getElementById(ids);
  let own = [];
  let timer = null;

  const run = () => own[Number(choice.value)];
  function moment() {
    const entry = entries(run())[Number(slider.value)];
    const more = entry.temperature === undefined ? "" : `, temperature ${entry.temperature.toFixed(2)}`;
    step.textContent = `step ${entry.step.toLocaleString("en")}${more}`;
    slider.setAttribute("aria-valuetext", step.textContent);
    draw(entry, run(), entries(run()));
  }
  function fit(toEnd) {
    const last = entries(run()).length - 1;
    const atEnd = toEnd || Number(slider.value) >= Number(slider.max);
    slider.max = last;
    if (atEnd && timer === null) slider.value = last;
    slider.disabled = play.disabled = last === 0;
    moment();
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  function start() {
    if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
    moment();
    play.textContent = "Pause";
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      moment();
      if (Number(slider.value) >= Number(slider.max)) pause();
    }, 200);
  }

  choice.addEventListener("change", () => { pause(); fit(true); });
  slider.addEventListener("input", () => { pause(); moment(); });
  play.addEventListener("click", () => (timer === null ? start() : pause()));
  return {
    show(runs) {
      const before = own.map(({ name }) => name).join("\n");
      own = runs.filter((one) => entries(one).length > 0);
      section.hidden = own.length === 0;
      const others = own.map(({ name }) => name).join("\n") !== before;
      if (others) {
        pause();
        choice.replaceChildren(...own.map(({ name }, index) => new Option(name, index)));
        choice.parentElement.hidden = own.length === 1;
      }
      if (own.length > 0) fit(others);
    },
    redraw() {
      if (own.length > 0) moment();
    },
  };
}
