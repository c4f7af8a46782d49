// The panel about one token: bits, alternatives, and how far back each head looked.
import { make } from "./elements.js";

const [panel, title, note, facts] = ["token", "token-title", "token-note", "token-facts"].map((id) => document.getElementById(id));
const HELP = note.textContent;

document.getElementById("token-close").addEventListener("click", clearToken);

export function clearToken() {
  panel.classList.remove("open");
  title.textContent = "Token";
  note.textContent = HELP;
  facts.replaceChildren();
}

// `layers` are those of an inspection; `missing` says why a token has no look-back.
export function showToken(piece, layers, missing) {
  const cost = piece.bits === undefined ? "" : `: ${piece.bits.toFixed(2)} bits`;
  panel.classList.add("open");
  title.textContent = `Token ${JSON.stringify(piece.text)}${cost}`;
  facts.replaceChildren();
  if (piece.top) facts.append(alternatives(piece));
  if (piece.look !== undefined && layers?.length) {
    facts.append(heads(layers, piece.look));
    note.textContent = "";
  } else {
    note.textContent = layers?.length === 0 ? "This model has no attention." : missing;
  }
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "\\n").replaceAll("\t", "\\t");

function alternatives({ top, token }) {
  const rows = Object.entries(top).sort(([, a], [, b]) => b - a).slice(0, 6).map(([text, nats]) => {
    const part = Math.exp(nats);
    const bar = make("td", { className: "bar" }, `${(100 * part).toFixed(1)}%`);
    bar.style.setProperty("--part", `${(100 * part).toFixed(1)}%`);
    const name = make("th", { scope: "row" }, make("code", {}, visible(text)));
    if (text === token) name.append(make("span", { className: "soft" }, " chosen"));
    return make("tr", {}, name, bar);
  });
  return make("table", { className: "alternatives" },
    make("caption", {}, "Expected here, before temperature"), make("tbody", {}, ...rows));
}

function heads(layers, at) {
  const most = Math.max(...layers.map((layer) => layer.mean_distance.length));
  const far = Math.max(2, ...layers.flatMap((layer) => layer.mean_distance.map((head) => head[at] ?? 0)));
  const head = make("tr", {}, make("td", {}, ""),
    ...Array.from({ length: most }, (_, number) => make("th", { scope: "col", "aria-label": `head ${number + 1}` }, String(number + 1))));
  const rows = layers.map((layer, number) => make("tr", {}, make("th", { scope: "row", "aria-label": `layer ${number + 1}` }, String(number + 1)),
    ...layer.mean_distance.map((means, which) => {
      const [mean, reach] = [means[at], layer.reach[which][at]];
      if (mean === null || mean === undefined) return make("td", {}, "–");
      const cell = make("td", {}, mean.toFixed(1), make("small", {}, ` ≤${Math.round(reach)}`));
      cell.style.setProperty("--part", `${Math.round((45 * Math.log1p(mean)) / Math.log1p(far))}%`);
      return cell;
    })));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Look-back of each head" },
    make("table", { className: "heads" },
      make("caption", {}, "Look-back in tokens, layers down and heads across: mean distance, ≤ the distance of 90% of the attention"),
      make("thead", {}, head), make("tbody", {}, ...rows)));
}
