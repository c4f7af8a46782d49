"use strict";

// Charts of the report and of the page of `longspan serve`: Vega-Lite with the colours of the page.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const drawn = {}; // by id: the queue of a chart, its view, and the form that it was drawn with

function colours() {
  return dark.matches
    ? { ink: "#e6e9ee", line: "#353d4a", panel: "#1c222c", accent: "#7fb0ff" }
    : { ink: "#1d2430", line: "#d8dde5", panel: "#f5f7fa", accent: "#1f5fbf" };
}

function chartConfig() {
  const { ink, line } = colours();
  const text = { labelColor: ink, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
  return {
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: line },
    axis: { ...text, gridColor: line, domainColor: line, tickColor: line },
    legend: { ...text, labelLimit: 220, symbolSize: 120 },
    header: text,
    range: {
      category: dark.matches
        ? ["#7fb0ff", "#ffb45e", "#6fd3b0", "#ff8f8f", "#c9a6ff", "#e3d26a", "#8fd3f0", "#f0a8cf"]
        : ["#1f5fbf", "#c25a00", "#0e7a5f", "#b3261e", "#7a3fc4", "#7a6500", "#0b7285", "#ad2b76"],
    },
  };
}

// Draw a chart. `spec` names its data, `data` has them by these names. If only the data are new, they are
// exchanged in the chart. Expressions are interpreted, never compiled, and no style element is added: the
// pages allow neither. `description` is what a screen reader says.
function draw(id, spec, data, description) {
  const chart = (drawn[id] ||= { queue: Promise.resolve() });
  const next = chart.queue.then(async () => {
    const form = JSON.stringify([spec, dark.matches]);
    const fresh = chart.form !== form;
    if (fresh) {
      chart.view?.finalize();
      chart.form = undefined;
      const whole = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec, datasets: data };
      const embedded = await vegaEmbed(`#${id}`, whole, {
        ast: true,
        renderer: "svg",
        config: chartConfig(),
        defaultStyle: false,
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: `longspan-${id}`,
        tooltip: { theme: "page", disableDefaultStyle: true },
      });
      chart.view = embedded.view;
      chart.form = form;
    } else {
      for (const [name, values] of Object.entries(data)) chart.view.data(name, values);
      await chart.view.runAsync();
    }
    chart.view.description(description);
    chart.view.container().setAttribute("role", "img"); // one name, not one for each of its marks
    chart.view.container().removeAttribute("aria-roledescription");
    return { view: chart.view, fresh };
  });
  chart.queue = next.catch((problem) => console.error(id, problem));
  return chart.queue;
}

const grouped = (number, digits = 0) => number.toLocaleString("en", { maximumFractionDigits: digits });
