"use strict";

// A slider over moments with play and pause. `ids` is the prefix of the elements' ids; `entries(run)` are the
// moments of a run; `show(entry, run, entries, newRun)` draws one of them.
function player(ids, runs, entries, show) {
  const own = runs.filter((run) => entries(run).length > 0);
  if (own.length === 0) return;
  const get = (name) => document.getElementById(`${ids}-${name}`);
  const [choice, play, slider, step] = ["run", "play", "slider", "step"].map(get);
  let timer = null;

  function moment(newRun) {
    const run = own[Number(choice.value)];
    const entry = entries(run)[Number(slider.value)];
    const more = entry.temperature === undefined ? "" : `, temperature ${entry.temperature.toFixed(2)}`;
    step.textContent = `step ${entry.step.toLocaleString("en")}${more}`;
    slider.setAttribute("aria-valuetext", step.textContent);
    show(entry, run, entries(run), newRun);
  }
  function pick() {
    const last = entries(own[Number(choice.value)]).length - 1;
    slider.max = last;
    slider.value = last;
    play.disabled = last === 0;
    moment(true);
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  }
  function start() {
    if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
    moment(false);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      moment(false);
      if (Number(slider.value) >= Number(slider.max)) pause();
    }, 200);
  }

  own.forEach((run, index) => choice.add(new Option(run.name, index)));
  choice.parentElement.hidden = own.length === 1;
  choice.addEventListener("change", () => { pause(); pick(); });
  slider.addEventListener("input", () => { pause(); moment(false); });
  play.addEventListener("click", () => (timer === null ? start() : pause()));
  document.getElementById(ids).hidden = false;
  pick();
  return { redraw: () => moment(true) };
}
