// The tab Training: the charts of the report, drawn again when the run has new lines.
import { get } from "./api.js";
import { make } from "./elements.js";
import { attempt, clear, complain } from "./notices.js";

const SECONDS = 2;
const SCRIPTS = ["vendor/vega", "vendor/vega-lite", "vendor/vega-embed"].map((name) => `/page/${name}.min.js`)
  .concat(["charts", "curves", "spans", "player"].map((name) => `/page/report/${name}.js`));
const [choice, progress, place] = ["run", "run-progress", "run-sections"].map((id) => document.getElementById(id));

const script = (src) => new Promise((resolve, reject) => {
  document.head.append(make("script", {
    src,
    onload: resolve,
    onerror: () => reject(new Error(`${src} could not be loaded. Load the page again.`)),
  }));
});

// The drawing library is large: it is loaded when the tab is first opened.
async function load() {
  for (const src of SCRIPTS) await script(src);
  const answer = await fetch("/page/report/sections.html");
  place.innerHTML = await answer.text();
  const { data } = await get("/v1/runs");
  choice.replaceChildren(...data.map(({ name }) => make("option", { value: name }, name)));
  if (data.length === 0) progress.textContent = "The server knows no run folder.";
  const parts = [
    curvesSection(),
    player("spans", (run) => run.spans, showSpans),
    player("search", (run) => run.search, showSearch),
    player("samples", (run) => run.samples, (entry) => {
      document.getElementById("samples-text").textContent = entry.text;
    }),
  ];
  dark.addEventListener("change", () => parts.forEach((part) => part.redraw()));
  return parts;
}

export function training() {
  let parts = null;
  let shown = false;
  let timer = null;
  let last = "";
  let failed = false;

  async function update() {
    clearTimeout(timer);
    if (!shown || document.hidden || !choice.value) return;
    const name = choice.value;
    try {
      const run = await get(`/v1/runs/${encodeURIComponent(name)}`);
      const text = JSON.stringify(run);
      if (text !== last && name === choice.value) {
        last = text;
        draw(run);
      }
      if (failed) clear();
      failed = false;
    } catch (error) {
      failed = true;
      complain(error);
    }
    clearTimeout(timer);
    if (shown && !document.hidden) timer = setTimeout(update, 1000 * SECONDS);
  }

  function draw(run) {
    const steps = run.steps ? ` of ${run.steps.toLocaleString("en")}` : "";
    const score = run.score?.valid?.bits_per_byte;
    progress.textContent = [
      run.finished ? `finished, ${run.step.toLocaleString("en")} steps` : `step ${run.step.toLocaleString("en")}${steps}`,
      ...(score === undefined ? [] : [`${score.toFixed(4)} bits per byte on valid`]),
    ].join(" · ");
    for (const part of parts) part.show([run]);
  }

  choice.addEventListener("change", () => {
    last = "";
    update();
  });
  document.addEventListener("visibilitychange", update);
  return {
    async show(now) {
      shown = now;
      if (!now) return;
      parts ??= attempt(load);
      parts = await parts;
      if (parts) update();
      else parts = null;
    },
  };
}
