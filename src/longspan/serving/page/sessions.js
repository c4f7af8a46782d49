// The list of sessions on the server: open, save, download, delete.
import { download, get, post, remove } from "./api.js";
import { button, make } from "./elements.js";
import { forget, nameOf } from "./names.js";
import { attempt, say } from "./notices.js";

const list = document.getElementById("session-list");
const asked = new Set(); // sessions whose button to delete was pressed once

// `on` has: open(session), deleted(id), isOpen(id).
export function sessionList(on) {
  async function refresh() {
    const { data } = await get("/v1/sessions");
    const focused = document.activeElement?.dataset.action;
    list.replaceChildren(...data.sort((a, b) => b.last_used - a.last_used).map(row));
    if (focused) list.querySelector(`[data-action="${focused}"]`)?.focus();
    return data;
  }

  function row(session) {
    const name = nameOf(session.id);
    const act = (label, work, more = {}) => {
      const made = button(label, () => attempt(work), { "aria-label": `${label} ${name}`, ...more });
      made.dataset.action = `${label}-${session.id}`;
      return made;
    };
    const facts = [session.model, `${session.tokens.toLocaleString("en")} tokens`, session.saved ? "saved" : "not saved"];
    const erase = act("Delete", () => ask(erase, name, session.id, async () => {
      await remove(`/v1/sessions/${session.id}`);
      forget(session.id);
      on.deleted(session.id);
      await refresh();
      say(`${name} is deleted.`);
    }));
    show(erase, name, session.id);
    return make("li", {},
      make("span", {}, make("strong", {}, name), " ", make("span", { className: "soft" }, facts.join(" · "))),
      make("span", { className: "controls" },
        act("Open", () => on.open(session), { disabled: on.isOpen(session.id) }),
        act("Save", async () => {
          await post(`/v1/sessions/${session.id}/save`);
          await refresh();
          say(`${name} is saved on the server.`);
        }, { disabled: session.saved }),
        act("Download", async () => {
          const file = URL.createObjectURL(await download(`/v1/sessions/${session.id}/file`));
          make("a", { href: file, download: `${name.replaceAll(" ", "-").toLowerCase()}.safetensors` }).click();
          setTimeout(() => URL.revokeObjectURL(file), 10_000);
        }),
        erase));
  }
  return { refresh };
}

// A second press within a few seconds is needed, also if the list was drawn again in between.
function ask(pressed, name, id, work) {
  if (asked.has(id)) return work();
  asked.add(id);
  show(pressed, name, id);
  setTimeout(() => {
    asked.delete(id);
    show(list.querySelector(`[data-action="Delete-${id}"]`), name, id);
  }, 5000);
  return undefined;
}

function show(erase, name, id) {
  if (!erase) return;
  erase.textContent = asked.has(id) ? "Really delete" : "Delete";
  erase.setAttribute("aria-label", `${erase.textContent} ${name}`);
}
