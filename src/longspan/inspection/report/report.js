"use strict";

const { runs, reload_seconds: reloadSeconds } = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const METRICS = {
  loss: "loss (nats per token)",
  bits_per_byte: "bits per byte",
  learning_rate: "learning rate",
  tokens_per_second: "tokens per second",
};
const AXES = { step: "step", tokens: "tokens", seconds: "training time (s)" };
const LINES = {
  train: { type: "line", strokeWidth: 1.6, opacity: 0.85 },
  valid: { type: "line", strokeWidth: 1.6, strokeDash: [5, 3], point: { size: 36, filled: true } },
};
const labels = runs.map((run, index) => (runs.length > 1 ? `${index + 1}: ${run.name}` : run.name));
const queues = {};

// Draw a Vega-Lite chart. Expressions are interpreted, never compiled: the page allows no eval.
function draw(id, spec) {
  const ink = dark.matches ? "#e6e9ee" : "#1d2430";
  const line = dark.matches ? "#353d4a" : "#d8dde5";
  const config = {
    background: null,
    view: { stroke: line },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line },
    legend: { labelColor: ink, titleColor: ink, labelLimit: 220 },
    header: { labelColor: ink, titleColor: ink },
    title: { color: ink },
  };
  const options = {
    ast: true,
    renderer: "svg",
    config,
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: `longspan-${id}`,
    tooltip: { theme: dark.matches ? "dark" : "light" },
  };
  const whole = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec };
  const next = (queues[id] || Promise.resolve()).then(() => vegaEmbed(`#${id}`, whole, options));
  queues[id] = next.catch((problem) => console.error(id, problem));
  return next;
}

function points(metric, x) {
  const found = [];
  runs.forEach((run, index) => {
    for (const split of ["train", "valid"]) {
      for (const point of run.curves[split]) {
        if (point[metric] !== undefined && point[x] !== undefined) {
          found.push({ run: labels[index], split, x: point[x], y: point[metric] });
        }
      }
    }
  });
  return found;
}

const axis = document.getElementById("curves-x");
const from = document.getElementById("curves-from");
const to = document.getElementById("curves-to");

function drawCurves() {
  const x = axis.value;
  const domain = [from, to].map((input) => (input.value === "" ? null : Number(input.value)));
  for (const [metric, title] of Object.entries(METRICS)) {
    const all = points(metric, x);
    const id = `curve-${metric}`;
    document.getElementById(id).parentElement.hidden = all.length === 0;
    if (all.length === 0) continue;
    const values = all.filter(
      (point) => (domain[0] === null || point.x >= domain[0]) && (domain[1] === null || point.x <= domain[1]),
    );
    curve(id, title, x, values);
  }
}

function curve(id, title, x, values) {
  const colour = {
    field: "run", type: "nominal", sort: labels,
    legend: runs.length > 1 ? { orient: "bottom", columns: 1, title: null } : null,
  };
  const shared = {
    x: { field: "x", type: "quantitative", title: AXES[x], scale: { zero: false, nice: false } },
    y: { field: "y", type: "quantitative", title, scale: { zero: false } },
    color: colour,
  };
  const tooltip = [
    { field: "run", title: "run" },
    { field: "split", title: "split" },
    { field: "x", title: AXES[x], type: "quantitative", format: ",.6~g" },
    { field: "y", title, type: "quantitative", format: ",.5~g" },
  ];
  const spec = {
    width: "container", height: 220, autosize: { type: "fit-x", contains: "padding" },
    data: { values },
    layer: [
      ...["train", "valid"].filter((split) => values.some((point) => point.split === split)).map((split) => ({
        transform: [{ filter: { field: "split", equal: split } }],
        mark: LINES[split],
        encoding: shared,
      })),
      {
        params: [{ name: "near", select: { type: "point", on: "pointerover", nearest: true, clear: "pointerout" } }],
        mark: { type: "point", size: 70, filled: true },
        encoding: {
          ...shared, tooltip,
          opacity: { condition: { param: "near", empty: false, value: 1 }, value: 0 },
        },
      },
      {
        params: [{ name: "range", select: { type: "interval", encodings: ["x"] } }],
        mark: { type: "point", opacity: 0, tooltip: null },
        encoding: shared,
      },
    ],
  };
  draw(id, spec).then(({ view }) => {
    let chosen = null;
    view.addSignalListener("range", (_, value) => { chosen = value.x; });
    view.addEventListener("dblclick", showAll);
    document.getElementById(id).onpointerup = () => {
      if (!chosen || chosen[0] === chosen[1]) return;
      const digits = x === "seconds" ? 2 : 0;
      from.value = Math.min(...chosen).toFixed(digits);
      to.value = Math.max(...chosen).toFixed(digits);
      chosen = null;
      drawCurves();
    };
  }, () => {});
}

function showAll() {
  from.value = to.value = "";
  drawCurves();
}

for (const metric of Object.keys(METRICS)) {
  const figure = document.createElement("figure");
  const chart = document.createElement("div");
  chart.className = "chart";
  chart.id = `curve-${metric}`;
  figure.append(chart);
  document.getElementById("curves-charts").append(figure);
}
axis.addEventListener("change", showAll);
from.addEventListener("change", drawCurves);
to.addEventListener("change", drawCurves);
document.getElementById("curves-reset").addEventListener("click", showAll);

const cells = (entry) =>
  entry.spans.flatMap((row, layer) => row.map((span, head) => ({ layer: layer + 1, head: head + 1, span })));

function showSpans(entry, run, history, newRun) {
  if (newRun || !views.heatmap) {
    drawSpans(entry, run, history);
    return;
  }
  views.heatmap.data("spans", cells(entry)).run();
  views.masks.data("masks", masks(entry, run.ramp)).run();
  views.history.data("now", [{ step: entry.step }]).run();
}

const views = {};

function drawSpans(entry, run, history) {
  const limit = Math.max(...history.map((moment) => moment.limit));
  const shortest = Math.max(1, Math.min(limit / 2, ...history.flatMap((moment) => moment.spans.flat())));
  const layers = entry.spans.length;
  const most = Math.max(...entry.spans.map((row) => row.length));
  const ordinal = (field) => ({ field, type: "ordinal", axis: { labelAngle: 0, title: field } });
  const span = { field: "span", type: "quantitative", title: "span in tokens" };
  delete views.heatmap;
  const drawn = [
    draw("spans-heatmap", {
      width: "container", height: Math.max(120, Math.min(420, 34 * layers)),
      autosize: { type: "fit-x", contains: "padding" },
      data: { name: "spans", values: cells(entry) },
      mark: { type: "rect" },
      encoding: {
        x: ordinal("head"), y: ordinal("layer"),
        color: { ...span, scale: { type: "log", domain: [shortest, limit], scheme: "viridis", clamp: true } },
        tooltip: [{ field: "layer" }, { field: "head" }, { ...span, format: ",.0f" }],
      },
    }),
    draw("spans-history", {
      width: "container", height: Math.max(120, Math.min(420, 34 * layers)),
      autosize: { type: "fit-x", contains: "padding" },
      layer: [
        {
          data: {
            values: history.flatMap((moment) => moment.spans.map((row, layer) => ({
              step: moment.step, layer: layer + 1, span: row.reduce((sum, one) => sum + one, 0) / row.length,
            }))),
          },
          mark: { type: "line", point: history.length === 1, tooltip: true },
          encoding: {
            x: { field: "step", type: "quantitative", scale: { zero: false, nice: false } },
            y: { ...span, scale: { type: "log", nice: false } },
            color: { field: "layer", type: "ordinal", scale: { scheme: "viridis" } },
          },
        },
        {
          data: { name: "now", values: [{ step: entry.step }] },
          mark: { type: "rule", strokeDash: [4, 3], color: dark.matches ? "#e6e9ee" : "#1d2430" },
          encoding: { x: { field: "step", type: "quantitative" } },
        },
      ],
    }),
    draw("spans-masks", {
      data: { name: "masks", values: masks(entry, run.ramp) },
      facet: {
        row: { field: "layer", type: "ordinal", header: { labelAngle: 0, labelAlign: "left" } },
        column: { field: "head", type: "ordinal" },
      },
      spacing: 6,
      spec: {
        width: Math.max(44, Math.min(150, 900 / most)), height: 44,
        mark: { type: "area", line: true, opacity: 0.5, tooltip: true },
        encoding: {
          x: {
            field: "distance", type: "quantitative", scale: { domain: [0, limit], nice: false },
            axis: { title: null, tickCount: 2, grid: false },
          },
          y: {
            field: "mask", type: "quantitative", stack: null, scale: { domain: [0, 1] },
            axis: { title: null, values: [0, 1], grid: false },
          },
        },
      },
    }),
  ];
  Promise.all(drawn).then(([heatmap, course, grid]) => {
    Object.assign(views, { masks: grid.view, history: course.view, heatmap: heatmap.view });
  }, () => {});
}

// The corners of each mask: 1 up to the ramp, 0 from the recorded span on, which includes the ramp.
function masks(entry, ramp) {
  const found = [];
  entry.spans.forEach((row, layer) => row.forEach((span, head) => {
    const corners = [[0, Math.min(1, span / ramp)], [span, 0]];
    if (span > ramp) corners.splice(1, 0, [span - ramp, 1]);
    if (span < entry.limit) corners.push([entry.limit, 0]);
    for (const [distance, mask] of corners) found.push({ layer: layer + 1, head: head + 1, distance, mask });
  }));
  return found;
}

function probabilities(entry) {
  return entry.probabilities.flatMap((row, block) =>
    row.map((probability, index) => ({ block: block + 1, candidate: entry.candidates[index], probability })));
}

function showSearch(entry, run, history, newRun) {
  if (!newRun && views.search) {
    views.search.data("cells", probabilities(entry)).run();
    return;
  }
  delete views.search;
  draw("search-heatmap", {
    width: { step: 34 }, height: { step: 30 },
    data: { name: "cells", values: probabilities(entry) },
    encoding: { x: { field: "block", type: "ordinal", axis: { labelAngle: 0 } }, y: { field: "candidate", type: "nominal", sort: null } },
    layer: [
      {
        mark: { type: "rect", tooltip: true },
        encoding: { color: { field: "probability", type: "quantitative", scale: { domain: [0, 1], scheme: "blues" } } },
      },
    ],
  }).then(({ view }) => { views.search = view; }, () => {});
}

const players = [
  player("spans", runs, (run) => run.spans, showSpans),
  player("search", runs, (run) => run.search, showSearch),
  player("samples", runs, (run) => run.samples, (entry) => {
    document.getElementById("samples-text").textContent = entry.text;
  }),
];
drawCurves();
dark.addEventListener("change", () => {
  drawCurves();
  players.forEach((one) => one && one.redraw());
});
if (reloadSeconds) setTimeout(() => location.reload(), 1000 * reloadSeconds);
