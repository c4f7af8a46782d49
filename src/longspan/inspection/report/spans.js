"use strict";

// Charts of one moment of a training: spans and masks of all heads, or the probabilities of a search.

const cells = (entry) =>
  entry.spans.flatMap((row, layer) => row.map((span, head) => ({ layer: layer + 1, head: head + 1, span })));

const mean = (row) => row.reduce((sum, one) => sum + one, 0) / row.length;

function showSpans(entry, run, history) {
  // Powers of two, so that they rarely change while a run is watched.
  const every = history.flatMap((moment) => moment.spans.flat());
  const longest = 2 ** Math.ceil(Math.log2(Math.max(4, ...every)));
  const shortest = Math.min(longest / 2, 2 ** Math.floor(Math.log2(Math.max(1, Math.min(...every)))));
  const height = Math.max(120, Math.min(420, 34 * entry.spans.length));
  const most = Math.max(...entry.spans.map((row) => row.length));
  const ordinal = (field) => ({ field, type: "ordinal", axis: { labelAngle: 0, title: field } });
  const span = { field: "span", type: "quantitative", title: "span in tokens" };
  const room = document.getElementById("spans-masks").parentElement.clientWidth - 90;
  const at = `at step ${grouped(entry.step)}`;
  draw("spans-heatmap", {
    width: "container", height, autosize: { type: "fit-x", contains: "padding" },
    data: { name: "spans" },
    mark: { type: "rect" },
    encoding: {
      x: ordinal("head"), y: ordinal("layer"),
      color: { ...span, scale: { type: "log", base: 2, domain: [shortest, longest], scheme: "viridis", clamp: true } },
      tooltip: [{ field: "layer" }, { field: "head" }, { ...span, format: ",.0f" }],
    },
  }, { spans: cells(entry) }, `Spans ${at}, in tokens. ${inWords(entry)}`);
  draw("spans-history", {
    width: "container", height, autosize: { type: "fit-x", contains: "padding" },
    layer: [
      {
        data: { name: "means" },
        mark: { type: "line", point: history.length === 1, tooltip: true, aria: false },
        encoding: {
          x: { field: "step", type: "quantitative", axis: { tickCount: 6 }, scale: { zero: false, nice: false } },
          y: { ...span, title: "mean span in tokens", axis: { tickCount: 5 }, scale: { type: "log", base: 2, nice: false } },
          color: {
            field: "layer", type: "ordinal",
            scale: { range: entry.spans.map((_, layer) => layerColour(layer, entry.spans.length)) },
          },
        },
      },
      {
        data: { name: "now" },
        mark: { type: "rule", strokeDash: [4, 3], color: colours().ink, aria: false },
        encoding: { x: { field: "step", type: "quantitative" } },
      },
    ],
  }, {
    means: history.flatMap((moment) =>
      moment.spans.map((row, layer) => ({ step: moment.step, layer: layer + 1, span: mean(row) }))),
    now: [{ step: entry.step }],
  }, `Mean span of each layer over training. ${inWords(entry)}`);
  draw("spans-masks", {
    data: { name: "masks" },
    facet: {
      row: { field: "layer", type: "ordinal", title: "layer", header: { labelAngle: 0, labelAlign: "left" } },
      column: { field: "head", type: "ordinal", title: "head" },
    },
    spacing: 8,
    spec: {
      width: Math.max(56, Math.min(260, Math.floor(room / most) - 8)), height: 48,
      mark: { type: "area", line: true, opacity: 0.5, tooltip: true, color: colours().accent, aria: false },
      encoding: {
        x: {
          field: "distance", type: "quantitative", scale: { domain: [0, longest], nice: false },
          axis: { title: null, tickCount: 2, grid: false },
        },
        y: {
          field: "mask", type: "quantitative", stack: null, scale: { domain: [0, 1] },
          axis: { title: null, values: [0, 1], format: "d", grid: false },
        },
      },
    },
  }, { masks: masks(entry, run.ramp, longest) }, `Masks of all heads ${at}.`);
}

const inWords = (entry) =>
  entry.spans.map((row, layer) =>
    `Layer ${layer + 1}: ${row.map((span) => grouped(span)).join(", ")}`).join(". ") + ".";

// From blue over green to orange: every one of them can be seen on its background.
function layerColour(layer, layers) {
  const part = layers === 1 ? 0 : layer / (layers - 1);
  return `hsl(${Math.round(225 - 200 * part)}, 65%, ${dark.matches ? 65 : 40}%)`;
}

// The corners of each mask: 1 up to the ramp, 0 from the recorded span on, which includes the ramp.
function masks(entry, ramp, longest) {
  const found = [];
  entry.spans.forEach((row, layer) => row.forEach((span, head) => {
    const corners = [[0, Math.min(1, span / ramp)], [span, 0]];
    if (span > ramp) corners.splice(1, 0, [span - ramp, 1]);
    if (span < longest) corners.push([longest, 0]);
    for (const [distance, mask] of corners) found.push({ layer: layer + 1, head: head + 1, distance, mask });
  }));
  return found;
}

function probabilities(entry) {
  return entry.probabilities.flatMap((row, block) =>
    row.map((probability, index) => ({ block: block + 1, candidate: entry.candidates[index], probability })));
}

function showSearch(entry) {
  const { line, accent } = colours();
  const best = entry.probabilities.map((row) => entry.candidates[row.indexOf(Math.max(...row))]).join("");
  draw("search-heatmap", {
    width: { step: 34 }, height: { step: 30 },
    data: { name: "cells" },
    mark: { type: "rect", tooltip: true },
    encoding: {
      x: { field: "block", type: "ordinal", axis: { labelAngle: 0 } },
      y: { field: "candidate", type: "nominal", sort: null },
      color: { field: "probability", type: "quantitative", scale: { domain: [0, 1], range: [line, accent] } },
    },
  }, { cells: probabilities(entry) }, `Search at step ${grouped(entry.step)}: the most probable blocks are ${best}.`);
}
