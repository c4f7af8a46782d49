"use strict";

const { tokens } = JSON.parse(document.getElementById("data").textContent);
const area = document.getElementById("tokens");
const title = document.getElementById("token-title");
const table = document.getElementById("token-heads");

function cell(row, text, scope) {
  const made = document.createElement(scope ? "th" : "td");
  if (scope) made.scope = scope;
  made.textContent = text;
  row.append(made);
}

// Underline the tokens that the heads looked at most: the largest weights, summed over all heads.
function underline(index) {
  for (const token of area.querySelectorAll(".seen")) token.classList.remove("seen");
  const heads = (tokens[index].top ?? []).flat();
  const sums = new Map();
  for (const [distance, weight] of heads.flat()) sums.set(index - distance, (sums.get(index - distance) ?? 0) + weight);
  const most = Math.max(...sums.values());
  for (const [seen, weight] of sums) {
    if (seen < 0 || weight < 0.05 * most) continue;
    area.children[seen].classList.add("seen");
    area.children[seen].style.setProperty("--seen", `${Math.round((100 * weight) / most)}%`);
  }
}

// What a token cost, and for each head how far back it looked when it read this token.
function show(index) {
  const token = tokens[index];
  title.textContent = `Token ${token.token.toLocaleString("en")}, ${JSON.stringify(token.text)}: ${token.bits.toFixed(3)} bits`;
  underline(index);
  table.replaceChildren();
  if (!token.mean_distance) return;
  const head = table.createTHead().insertRow();
  ["layer", "head", "mean distance", "90% within", "largest weights"].forEach((text) => cell(head, text, "col"));
  const body = table.createTBody();
  token.mean_distance.forEach((means, layer) => means.forEach((mean, number) => {
    const row = body.insertRow();
    const top = token.top[layer][number].map(([distance, weight]) => {
      const seen = tokens[index - distance];
      return `${weight.toFixed(2)} ${seen ? JSON.stringify(seen.text) : "before the text"} (${distance} back)`;
    });
    const far = mean === null ? "–" : mean.toFixed(1);
    [layer + 1, number + 1, far, token.reach_90[layer][number], top.join(", ")].forEach((text) => cell(row, text));
  }));
}

const list = tokenList(area, show);
for (const token of tokens) list.add(token.text, token.bits);
