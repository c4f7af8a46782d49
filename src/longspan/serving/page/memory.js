// Names and texts of sessions, as far as this browser tab knows them: the server keeps states, not texts.

const MOST = 20_000; // characters of one text
const STORE = "longspan-texts";
const known = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");

function write() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(known));
  } catch {
    // The store is full or forbidden: after a reload the texts are gone, nothing else.
  }
}

export const recall = (id) => known[id] ?? { name: `Session ${id.slice(0, 6)}`, text: "" };

export function remember(id, name, text) {
  known[id] = { name, text: text.slice(-MOST) };
  write();
}

export function forget(id) {
  delete known[id];
  write();
}

export function newName() {
  const numbers = Object.values(known).map(({ name }) => Number(/^Text (\d+)/.exec(name)?.[1] ?? 0));
  return `Text ${Math.max(0, ...numbers) + 1}`;
}
