// The names of sessions in this browser tab; the server knows only their ids.

const STORE = "longspan-names";
const known = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");

function write() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(known));
  } catch {
    // The store is full or forbidden: after a reload the names are gone, nothing else.
  }
}

export const nameOf = (id) => known[id] ?? `Session ${id.slice(0, 6)}`;

// Name a new session.
export function named(id) {
  const numbers = Object.values(known).map((name) => Number(/^Text (\d+)$/.exec(name)?.[1] ?? 0));
  known[id] = `Text ${Math.max(0, ...numbers) + 1}`;
  write();
  return known[id];
}

export function forget(id) {
  delete known[id];
  write();
}
