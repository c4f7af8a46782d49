// One text with its session: it streams, continues, is stopped, and shows the token under the pointer.
import { post, stream } from "./api.js";
import { button, make } from "./elements.js";
import { clearToken, showToken } from "./look.js";
import { attempt, say } from "./notices.js";
import { collector, inspected, tail } from "./pieces.js";

const INSPECTED_BYTES = 1024; // of the end of a text, or less if the server says so
const ALTERNATIVES = 5;
const FRAME = 60; // milliseconds
let count = 0;

export class Branch {
  // `on` has: settings(), changed(), chosen(branch), fork(branch), close(branch).
  constructor(session, name, pieces, limits, on) {
    Object.assign(this, { session, name, pieces, limits, on, layers: null, running: null, generated: 0 });
    this.missing = "The look-back is measured after the last token.";
    const id = `text-${(count += 1)}`;
    this.area = make("div", { id, className: "text", "aria-label": `${name}, tokens` });
    this.size = make("span", { className: "soft" });
    this.more = make("textarea", { rows: 1, spellcheck: false, onkeydown: (event) => this.key(event) });
    this.go = button("Continue", () => (this.running ? this.stop() : attempt(() => this.proceed())));
    this.fork = button("Fork", () => attempt(() => on.fork(this)), { title: "A second text from this state" });
    this.element = make("article", { className: "branch", "aria-label": name },
      make("header", {}, make("h2", {}, name), this.size),
      this.area,
      make("label", { className: "grow" }, make("span", {}, "Add text"), this.more),
      make("div", { className: "controls" }, this.go, this.fork,
        button("Close", () => on.close(this), { title: "The session stays on the server" })));
    this.list = tokenList(this.area, (index) => {
      on.chosen(this);
      showToken(this.pieces[index], this.layers, this.missing);
    });
    this.show(pieces);
    this.count();
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.running) {
      event.preventDefault();
      attempt(() => this.proceed());
    }
  }

  show(pieces) {
    const before = this.list.current;
    this.pieces = pieces;
    this.list.clear();
    for (const { text, bits } of pieces) this.list.add(text, bits);
    if (before >= 0) clearToken();
  }

  // Pieces are drawn together: laying out a long text again for each of them would keep the browser busy.
  add(piece) {
    this.pieces.push(piece);
    this.drawing ??= setTimeout(() => this.draw(), FRAME);
  }

  draw() {
    clearTimeout(this.drawing);
    this.drawing = null;
    const { scrollTop, scrollHeight, clientHeight } = this.area;
    for (const { text, bits } of this.pieces.slice(this.area.children.length)) this.list.add(text, bits);
    if (scrollTop + clientHeight >= scrollHeight - 40) this.area.scrollTop = this.area.scrollHeight;
    this.count();
  }

  count() {
    const running = this.running ? ` + ${this.generated}` : "";
    this.size.textContent = `${this.session.tokens.toLocaleString("en")}${running} tokens`;
  }

  // Read the text that was added, then generate.
  async proceed() {
    const text = this.more.value;
    if (text) {
      this.session = await post(`/v1/sessions/${this.session.id}/append`, { text });
      this.more.value = "";
      this.add({ text });
    }
    await this.generate();
  }

  async generate() {
    const body = { ...this.on.settings(), logprobs: ALTERNATIVES };
    const collect = collector();
    const begin = this.pieces.length;
    this.running = new AbortController();
    this.generated = 0;
    this.state(true);
    say(`${this.name}: generating.`);
    try {
      for await (const event of stream(`/v1/sessions/${this.session.id}/generate`, body, this.running.signal)) {
        const choice = event.choices[0];
        if (!choice) continue;
        this.generated += choice.logprobs?.tokens.length ?? 0;
        const piece = collect(choice);
        if (piece) this.add(piece);
      }
      this.session = { ...this.session, tokens: this.session.tokens + this.generated, saved: false };
    } catch (error) {
      // The session is where it was before. What is on the page becomes part of it.
      const text = this.pieces.slice(begin).map((piece) => piece.text).join("");
      if (text) this.session = await appended(this.session, text);
      if (error.name !== "AbortError") throw error;
    } finally {
      this.running = null;
      this.draw();
      this.state(false);
      say(this.ended(begin));
    }
    await this.inspect();
  }

  state(running) {
    this.go.textContent = running ? "Stop" : "Continue";
    this.fork.disabled = running; // the server's state is still the one before
    this.area.classList.toggle("running", running);
    this.area.setAttribute("aria-busy", String(running));
    this.count();
    this.on.changed();
  }

  ended(begin) {
    const own = this.pieces.slice(begin).filter((piece) => piece.bits !== undefined);
    const bits = own.reduce((sum, piece) => sum + piece.bits, 0);
    const tokens = own.reduce((sum, piece) => sum + (piece.tokens ?? 1), 0);
    const mean = tokens ? `, ${(bits / tokens).toFixed(2)} bits each` : "";
    return `${this.name}: finished, ${tokens} tokens${mean}.`;
  }

  stop() {
    this.running?.abort();
  }

  // Bits of the prompt, and the look-back at all tokens, for the end of the text.
  async inspect() {
    const most = Math.min(INSPECTED_BYTES, this.limits?.inspected_tokens ?? INSPECTED_BYTES);
    const text = tail(this.text, most);
    if (!text) return;
    const found = await post("/v1/inspect", { model: this.session.model, text });
    if (this.running) return; // it has grown meanwhile
    const pieces = inspected(this.pieces, text, found.tokens);
    this.missing = pieces
      ? `The look-back is measured for the last ${most.toLocaleString("en")} bytes of a text.`
      : "The tokens of the inspected text do not make up this text, so there is no look-back.";
    if (!pieces) return;
    this.layers = found.layers;
    const [chosen, added] = [this.list.current, pieces.length - this.pieces.length];
    const focused = document.activeElement === this.area;
    const top = this.area.scrollTop;
    this.show(pieces);
    this.area.scrollTop = top;
    if (chosen >= 0 || focused) this.list.choose(Math.max(0, chosen + added));
  }
}

// A server may notice only after a moment that a stream was closed; until then the session is in use.
async function appended(session, text) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await post(`/v1/sessions/${session.id}/append`, { text });
    } catch (error) {
      if (error.status !== 409 || tries === 20) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }
}
