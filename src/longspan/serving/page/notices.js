// What the page tells its reader: problems in one visible line, and news for a screen reader.

const [problem, text, said] = ["problem", "problem-text", "said"].map((id) => document.getElementById(id));
document.getElementById("problem-close").addEventListener("click", clear);

export function clear() {
  problem.hidden = true;
}

export function complain(error) {
  text.textContent = error.message;
  problem.hidden = false;
}

export function say(words) {
  said.textContent = words;
}

// Run something that a user asked for; if it fails, say why.
export async function attempt(work) {
  clear();
  try {
    return await work();
  } catch (error) {
    complain(error);
    return undefined;
  }
}
