"use strict";

const { tokens } = JSON.parse(document.getElementById("data").textContent);
const title = document.getElementById("token-title");
const table = document.getElementById("token-heads");

function cell(row, text, scope) {
  const made = document.createElement(scope ? "th" : "td");
  if (scope) made.scope = scope;
  made.textContent = text;
  row.append(made);
}

// What a token cost, and for each head how far back it looked when it read this token.
function show(index) {
  const token = tokens[index];
  title.textContent = `Token ${token.token.toLocaleString("en")}, ${JSON.stringify(token.text)}: ${token.bits.toFixed(3)} bits`;
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

const list = tokenList(document.getElementById("tokens"), show);
for (const token of tokens) list.add(token.text, token.bits);
