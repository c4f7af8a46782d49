"use strict";

const { tokens } = JSON.parse(document.getElementById("data").textContent);
const area = document.getElementById("tokens");
const title = document.getElementById("token-title");
const table = document.getElementById("token-heads");
const MOST_BITS = 12; // the darkest shade
let current = -1;

function cell(row, text, kind = "td") {
  const made = document.createElement(kind);
  made.textContent = text;
  row.append(made);
}

// What a token cost, and for each head how far back it looked when it read this token.
function show(index) {
  if (index < 0 || index >= tokens.length) return;
  if (current >= 0) area.children[current].classList.remove("chosen");
  current = index;
  area.children[index].classList.add("chosen");
  const token = tokens[index];
  title.textContent = `Token ${token.token.toLocaleString("en")}, ${JSON.stringify(token.text)}: ${token.bits.toFixed(3)} bits`;
  table.replaceChildren();
  if (!token.mean_distance) return;
  const head = table.createTHead().insertRow();
  ["layer", "head", "mean distance", "90% within", "largest weights"].forEach((text) => cell(head, text, "th"));
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

tokens.forEach((token, index) => {
  const made = document.createElement("span");
  made.textContent = token.text;
  made.id = `token-${token.token}`;
  made.className = "token";
  made.style.setProperty("--shade", `${Math.round(Math.min(1, token.bits / MOST_BITS) * 75)}%`);
  made.addEventListener("pointerenter", () => show(index));
  made.addEventListener("click", () => show(index));
  area.append(made);
});
area.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  show(Math.max(0, Math.min(tokens.length - 1, current + step)));
});
area.addEventListener("focus", () => { if (current < 0) show(0); });
