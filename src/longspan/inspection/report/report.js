"use strict";

const { runs, reload_seconds: reloadSeconds } = JSON.parse(document.getElementById("data").textContent);
const curves = curvesSection();
const players = [
  player("spans", (run) => run.spans, showSpans),
  player("search", (run) => run.search, showSearch),
  player("samples", (run) => run.samples, (entry) => {
    document.getElementById("samples-text").textContent = entry.text;
  }),
];
for (const part of [curves, ...players]) part.show(runs);
dark.addEventListener("change", () => {
  for (const part of [curves, ...players]) part.redraw();
});
if (reloadSeconds) setTimeout(() => location.reload(), 1000 * reloadSeconds);
