// The tab Write: prompt, settings, texts side by side, sessions.
import { get, post, upload } from "./api.js";
import { Branch } from "./branch.js";
import { make } from "./elements.js";
import { clearToken } from "./look.js";
import { nameOf, named } from "./names.js";
import { attempt, say } from "./notices.js";
import { sessionList } from "./sessions.js";

const get_ = (id) => document.getElementById(id);
const [composer, prompt, generate, stop, model, settings, place, legend, file] =
  ["composer", "prompt", "generate", "stop", "model", "settings", "branches", "legend", "upload"].map(get_);
const FIELDS = { max_tokens: "max-tokens", temperature: "temperature", top_p: "top-p", top_k: "top-k", seed: "seed" };

export async function writing() {
  let branches = [];
  const limits = {};
  const sessions = sessionList({
    isOpen: (id) => branches.some((branch) => branch.session.id === id),
    open: async ({ id }) => {
      const session = await get(`/v1/sessions/${id}`); // with the last characters of its text
      const branch = add(session, nameOf(id), session.text_tail ? [{ text: session.text_tail }] : []);
      await sessions.refresh();
      await branch.inspect();
    },
    deleted: (id) => branches.filter((branch) => branch.session.id === id).forEach(close),
  });
  const on = {
    settings: sampling,
    changed() {
      const running = branches.some((branch) => branch.running);
      stop.hidden = !running;
      generate.disabled = running;
      if (!running) attemptQuietly(sessions.refresh);
    },
    chosen(branch) {
      branches.filter((one) => one !== branch).forEach((one) => one.list.release());
    },
    async fork(branch) {
      const made = await post(`/v1/sessions/${branch.session.id}/fork`);
      const name = named(made.id);
      const copy = add(made, name, [...branch.pieces], branch);
      copy.layers = branch.layers;
      await sessions.refresh();
      say(`${name} is a fork of ${branch.name}.`);
      copy.go.focus();
    },
    close(branch) {
      close(branch);
      attemptQuietly(sessions.refresh);
    },
  };

  function sampling() {
    const found = {};
    for (const [name, id] of Object.entries(FIELDS)) {
      if (get_(id).value !== "") found[name] = Number(get_(id).value);
    }
    return found;
  }

  function add(session, name, pieces, after) {
    const branch = new Branch(session, name, pieces, limits[session.model], on);
    branches.splice(after ? branches.indexOf(after) + 1 : branches.length, 0, branch);
    if (after) after.element.after(branch.element);
    else place.append(branch.element);
    legend.hidden = false;
    return branch;
  }

  function close(branch) {
    branch.stop();
    branch.element.remove();
    branches = branches.filter((one) => one !== branch);
    legend.hidden = branches.length === 0;
    clearToken();
    on.changed();
  }

  async function start() {
    if (!composer.reportValidity()) return;
    const text = prompt.value;
    generate.disabled = true;
    try {
      const session = await post("/v1/sessions", { model: model.value, text });
      [...branches].forEach(close);
      await add(session, named(session.id), text ? [{ text }] : []).generate();
    } finally {
      generate.disabled = branches.some((branch) => branch.running);
    }
  }

  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(start);
  });
  // A field of the closed settings cannot be shown as wrong.
  composer.addEventListener("invalid", () => { settings.open = true; }, true);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !generate.disabled) {
      event.preventDefault();
      attempt(start);
    }
  });
  function limit() {
    const most = limits[model.value]?.max_tokens;
    if (most) get_("max-tokens").max = most;
  }
  model.addEventListener("change", limit);
  stop.addEventListener("click", () => branches.forEach((branch) => branch.stop()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") branches.forEach((branch) => branch.stop());
  });
  file.addEventListener("change", () => attempt(async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    file.value = "";
    const session = await upload(`/v1/sessions/load?model=${encodeURIComponent(model.value)}`, chosen);
    const name = named(session.id);
    await sessions.refresh();
    say(`${name} was uploaded.`);
  }));

  async function attemptQuietly(work) {
    try {
      await work();
    } catch {
      // The next request of the user tells what is wrong.
    }
  }

  await attempt(async () => {
    const { data } = await get("/v1/models");
    for (const one of data) {
      model.append(make("option", { value: one.id }, one.id));
      limits[one.id] = one.limits;
    }
    limit();
    await sessions.refresh();
  });
}
