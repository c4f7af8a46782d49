"use strict";

const METRICS = {
  loss: "loss (nats per token)",
  bits_per_byte: "bits per byte",
  learning_rate: "learning rate",
  tokens_per_second: "tokens per second",
};
const AXES = { step: "step", tokens: "tokens", seconds: "training time (s)" };
const LINES = {
  train: { type: "line", strokeWidth: 1.6, aria: false },
  valid: { type: "line", strokeWidth: 1.6, strokeDash: [5, 3], point: { size: 36, filled: true }, aria: false },
};

// The curves of runs, one chart for each metric; dragging across one of them zooms all. `show(runs)` draws.
function curvesSection() {
  const [axis, from, to] = ["x", "from", "to"].map((name) => document.getElementById(`curves-${name}`));
  let runs = [];
  let labels = [];
  let chosen = null; // the range that is being dragged

  function points(metric, x) {
    return runs.flatMap((run, index) => ["train", "valid"].flatMap((split) =>
      run.curves[split]
        .filter((point) => point[metric] !== undefined && point[x] !== undefined)
        .map((point) => ({ run: labels[index], split, x: point[x], y: point[metric] }))));
  }

  function update() {
    const limits = [from, to].map((input) => (input.value === "" ? null : Number(input.value)));
    const inside = ({ x }) => (limits[0] === null || x >= limits[0]) && (limits[1] === null || x <= limits[1]);
    for (const [metric, title] of Object.entries(METRICS)) {
      const all = points(metric, axis.value);
      document.getElementById(`curve-${metric}`).parentElement.hidden = all.length === 0;
      if (all.length > 0) curve(metric, title, all.filter(inside), limits);
    }
  }

  function curve(metric, title, values, limits) {
    const x = axis.value;
    const domain = { ...(limits[0] !== null && { domainMin: limits[0] }), ...(limits[1] !== null && { domainMax: limits[1] }) };
    const shared = {
      x: { field: "x", type: "quantitative", title: AXES[x], axis: { tickCount: 6 }, scale: { zero: false, nice: false, ...domain } },
      y: { field: "y", type: "quantitative", title, axis: { tickCount: 6 }, scale: { zero: false } },
      color: {
        field: "run", type: "nominal", scale: { domain: labels },
        legend: labels.length > 1 ? { orient: "bottom", columns: 1, title: null, symbolType: "stroke" } : null,
      },
    };
    const tooltip = [
      { field: "run", title: "run" },
      { field: "split", title: "split" },
      { field: "x", title: AXES[x], type: "quantitative", format: ",.6~g" },
      { field: "y", title, type: "quantitative", format: ",.5~g" },
    ];
    const spec = {
      width: "container", height: 220, autosize: { type: "fit-x", contains: "padding" },
      data: { name: "points" },
      layer: [
        ...Object.keys(LINES).filter((split) => values.some((point) => point.split === split)).map((split) => ({
          transform: [{ filter: { field: "split", equal: split } }],
          mark: LINES[split],
          encoding: shared,
        })),
        {
          params: [{ name: "range", select: { type: "interval", encodings: ["x"] } }],
          mark: { type: "point", opacity: 0, tooltip: null, aria: false },
          encoding: shared,
        },
        {
          params: [{ name: "near", select: { type: "point", on: "pointerover", nearest: true, clear: "pointerout" } }],
          mark: { type: "point", size: 70, filled: true, aria: false },
          encoding: {
            ...shared, tooltip,
            opacity: { condition: { param: "near", empty: false, value: 1 }, value: 0 },
          },
        },
      ],
    };
    draw(`curve-${metric}`, spec, { points: values }, described(title, x, values)).then((chart) => {
      if (!chart?.fresh) return;
      chart.view.addSignalListener("range", (_, value) => { chosen = value.x ?? null; });
      chart.view.addEventListener("dblclick", showAll);
    });
  }

  // In words: where each run begins and ends.
  function described(title, x, values) {
    const parts = labels.map((label) => {
      const own = values.filter(({ run, split }) => run === label && split === "train");
      if (own.length === 0) return `${label}: no values of training`;
      const [first, last] = [own[0], own.at(-1)];
      return `${label}: from ${first.y.toPrecision(4)} at ${grouped(first.x)} to ${last.y.toPrecision(4)} at ${grouped(last.x)}`;
    });
    return `${title} over ${AXES[x]}. ${parts.join("; ")}.`;
  }

  function showAll() {
    from.value = to.value = "";
    update();
  }

  for (const metric of Object.keys(METRICS)) {
    const figure = document.createElement("figure");
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.id = `curve-${metric}`;
    figure.append(chart);
    document.getElementById("curves-charts").append(figure);
  }
  document.addEventListener("pointerup", () => {
    const range = chosen;
    chosen = null;
    if (!range || range[0] === range[1]) return;
    const digits = axis.value === "seconds" ? 2 : 0;
    from.value = Math.min(...range).toFixed(digits);
    to.value = Math.max(...range).toFixed(digits);
    update();
  });
  axis.addEventListener("change", showAll);
  from.addEventListener("change", update);
  to.addEventListener("change", update);
  document.getElementById("curves-reset").addEventListener("click", showAll);
  return {
    show(shown) {
      runs = shown;
      labels = runs.map((run, index) => (runs.length > 1 ? `${index + 1}: ${run.name}` : run.name));
      update();
    },
    redraw: update,
  };
}
