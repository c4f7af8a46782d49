"use strict";

const MOST_BITS = 12; // the strongest shade

// A text as a list of tokens, shaded by their bits. One is chosen by pointer, tap or arrow keys; `onChoose` gets
// its number.
function tokenList(area, onChoose) {
  let current = -1;
  area.setAttribute("role", "listbox");
  area.setAttribute("aria-orientation", "horizontal");
  area.tabIndex = 0;

  function choose(index) {
    if (index < 0 || index >= area.children.length) return;
    area.children[current]?.setAttribute("aria-selected", "false");
    current = index;
    const chosen = area.children[index];
    chosen.setAttribute("aria-selected", "true");
    area.setAttribute("aria-activedescendant", chosen.id);
    onChoose(index);
  }

  // The token below (or above) the current one: in the next line, nearest in the horizontal direction.
  function inNextLine(direction) {
    const middle = (rect) => (rect.left + rect.right) / 2;
    const start = area.children[Math.max(0, current)].getBoundingClientRect();
    let best = current;
    let line = null;
    for (let at = current + direction; at >= 0 && at < area.children.length; at += direction) {
      const rect = area.children[at].getBoundingClientRect();
      if (Math.abs(rect.top - start.top) < rect.height / 2) continue;
      line ??= rect.top;
      if (Math.abs(rect.top - line) > rect.height / 2) break;
      if (best === current || distance(rect) < distance(area.children[best].getBoundingClientRect())) best = at;
    }
    return best;

    function distance(rect) {
      return Math.abs(middle(rect) - middle(start));
    }
  }

  area.addEventListener("keydown", (event) => {
    const last = area.children.length - 1;
    const moves = {
      ArrowRight: () => current + 1,
      ArrowLeft: () => current - 1,
      ArrowDown: () => inNextLine(1),
      ArrowUp: () => inNextLine(-1),
      Home: () => 0,
      End: () => last,
    };
    if (!moves[event.key] || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, moves[event.key]())));
    area.children[current].scrollIntoView({ block: "nearest" });
  });
  area.addEventListener("focus", () => {
    if (current < 0) choose(0);
  });
  const numberOf = (event) => Array.prototype.indexOf.call(area.children, event.target.closest(".token"));
  area.addEventListener("pointerover", (event) => choose(numberOf(event)));
  area.addEventListener("click", (event) => choose(numberOf(event)));

  return {
    get current() {
      return current;
    },
    choose,
    // No token is chosen; arrow keys go on from where they were.
    release() {
      area.children[current]?.setAttribute("aria-selected", "false");
    },
    // Without `bits` the token is not shaded.
    add(text, bits) {
      const made = document.createElement("span");
      made.textContent = text;
      made.id = `${area.id}-${area.children.length}`;
      made.className = /^\s*\n\s*$/.test(text) ? "token newline" : "token";
      made.setAttribute("role", "option");
      made.setAttribute("aria-selected", "false");
      area.append(made);
      this.set(area.children.length - 1, bits);
    },
    set(index, bits) {
      const token = area.children[index];
      const part = bits === undefined ? 0 : Math.min(1, bits / MOST_BITS);
      token.style.setProperty("--shade", `${Math.round(100 * part)}%`);
      const said = JSON.stringify(token.textContent);
      token.setAttribute("aria-label", bits === undefined ? said : `${said}, ${bits.toFixed(1)} bits`);
    },
    clear() {
      current = -1;
      area.replaceChildren();
      area.removeAttribute("aria-activedescendant");
    },
  };
}
