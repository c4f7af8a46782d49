// Requests to the server: the API key, errors in one line, streams of completions.

let key = "";
let asking = null; // the dialog for the key, while it is open

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key from the dialog; all requests that wait for it get the same answer.
function askForKey(wrong) {
  asking ??= new Promise((resolve, reject) => {
    const [dialog, form, input, note, cancel] =
      ["key-dialog", "key-form", "key", "key-note", "key-cancel"].map((id) => document.getElementById(id));
    if (wrong) note.textContent = "That key is not right. Type the one that the server was started with.";
    const end = (settle) => (event) => {
      event.preventDefault();
      asking = null;
      settle();
      input.value = "";
      dialog.close();
    };
    form.onsubmit = end(() => { key = input.value; resolve(); });
    cancel.onclick = dialog.oncancel = end(() =>
      reject(new Problem("The server needs its API key. Load the page again to type it.", 401)));
    dialog.showModal();
  });
  return asking;
}

async function send(path, options) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new Problem("The server does not answer. Is 'longspan serve' still running?", 0);
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (used === key) await askForKey(used !== "");
      continue;
    }
    throw new Problem(await said(answer), answer.status);
  }
}

async function said(answer) {
  const more = answer.status === 429 || answer.status === 503 ? " Try again in a moment." : "";
  try {
    const { error } = await answer.json();
    return sentence(error.message) + more;
  } catch {
    return `The server answered with status ${answer.status}.${more}`;
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

const withBody = (method, body, signal) => ({
  method,
  signal,
  ...(body !== undefined && { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
});

export const get = async (path) => (await send(path, {})).json();
export const post = async (path, body) => (await send(path, withBody("POST", body))).json();
export const remove = async (path) => (await send(path, { method: "DELETE" })).json();
export const download = async (path) => (await send(path, {})).blob();
export const upload = async (path, file) =>
  (await send(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file })).json();

// The events of a completion, one after the other.
export async function* stream(path, body, signal) {
  const answer = await send(path, withBody("POST", { ...body, stream: true }, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Problem("The stream ended too early. Is the server still running?", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(sentence(event.error.message), 500);
      yield event;
    }
  }
}
