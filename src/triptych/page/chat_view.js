// The page at the root of a server: a conversation, its settings, and the probabilities of what the model writes.

const WHERE = "blocks.*"; // of a decoder, which alone chats
const ENDS = { length: "ended at the limit of tokens", stop: "" };

class ChatView {
  constructor(section, place) {
    Object.assign(this, { server: new ChatServer(), settings: new ChatSettings(), turns: [], running: null });
    this.log = div("conversation");
    this.problem = el("p", { class: "problem", role: "alert" });
    this.status = statusLine();
    const attention = section.inspect ? new ChatAttention((piece) => this.attention(piece)) : null;
    this.panel = new TokenPanel((piece, entry) => this.branch(piece, entry), attention);
    this.keyForm = this.askKey();
    this.form = this.composer();
    place.append(div("chat-parts",
      div("talk", this.log, this.problem, this.keyForm, this.form, this.status),
      div("aside", this.panel.node, this.settings.node)));
    let before = 0; // an answer stays in view while it grows, until its reader scrolls up
    addEventListener("scroll", () => {
      this.following &&= scrollY >= before;
      before = scrollY;
    });
    onkeys(place, { Escape: () => (this.running ? this.stop() : this.panel.forget()) });
    const saved = ({ message, answer }) => ({ ...message(), tokens: answer?.pieces.map(({ entry }) => entry) });
    Object.defineProperty(section, "turns", { enumerable: true, get: () => this.turns.map(saved) }); // for "Data"
    if (section.key) this.wantKey();
    else this.connect();
  }

  composer() {
    this.input = el("textarea", { rows: 2, "aria-label": "Message", placeholder: "Message" });
    const act = () => (this.running ? this.stop() : this.submit());
    this.send = button("Send", "Send the message, or stop the answer", act);
    this.restart = button("New", "Begin a new conversation", () => this.reset());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    return div("composer field", this.input, div("composer-buttons", this.send, this.restart));
  }

  askKey() {
    const input = el("input", { type: "password", autocomplete: "off", "aria-label": "Key of the server" });
    const use = (event) => {
      event.preventDefault();
      this.server.key = input.value;
      input.value = "";
      this.connect();
    };
    return el("form", { class: "key field", hidden: "", onsubmit: use },
      el("label", {}, el("span", {}, "The key of this server. It is kept until this page is closed."), input),
      el("button", { type: "submit" }, "Use the key"));
  }

  // Ask the server what it has; the form for the key stands there for as long as it refuses.
  async connect() {
    this.problem.textContent = "";
    await this.guarded(async () => {
      this.settings.offer(await this.server.models());
      this.keyForm.hidden = true;
      this.form.hidden = false;
      this.input.focus();
      await this.showMemory();
    });
  }

  // Run `act` and show what went wrong in it.
  async guarded(act) {
    try {
      await act();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Refused)) throw error;
      this.problem.textContent = error.status === 401 ? "The server refuses this key." : error.message;
      if (error.status === 401) this.wantKey();
    }
  }

  wantKey() {
    this.form.hidden = true;
    this.keyForm.hidden = false;
    this.keyForm.querySelector("input").focus();
  }

  async showMemory() {
    const bytes = await this.server.memory();
    const size = readable(Math.round(bytes / 2 ** 20));
    this.status.textContent = bytes === null ? "" : `The server holds ${size} MiB of memory.`;
  }

  submit() {
    const text = this.input.value;
    this.problem.textContent = this.settings.problem();
    if (!text.trim() || this.problem.textContent) return;
    this.input.value = "";
    this.ask(text);
    this.reply();
  }

  reset() {
    this.cut(0);
    this.problem.textContent = "";
    this.input.focus();
  }

  // End the answer that is written; what is there stays.
  stop() {
    this.running?.abort();
  }

  // The same for an answer that is left out, or goes on from another place.
  drop() {
    this.stop();
    this.busy(null);
  }

  // A turn with the name of who speaks, and the buttons that act on it.
  turn(role, content, message, ...buttons) {
    const name = role === "user" ? "You" : "Model";
    const node = el("article", { class: `turn ${role}`, "aria-label": name },
      el("h3", {}, name), content, div("turn-buttons", buttons));
    this.turns.push({ node, message });
    this.log.append(node);
    return this.turns.at(-1);
  }

  ask(text) {
    const edit = button("Edit", "Write this message again; what follows is left out", () => {
      this.cut(this.turns.indexOf(turn));
      this.input.value = text;
      this.input.focus();
    });
    const message = { role: "user", content: text };
    const turn = this.turn("user", el("p", { class: "said", dir: "auto" }, text), () => message, edit);
  }

  // Leave out the turns from this place on.
  cut(place) {
    this.drop();
    for (const { node } of this.turns.splice(place)) node.remove();
    this.panel.forget();
  }

  reply() {
    const answer = new Answer((piece) => this.panel.look(piece), (piece) => this.panel.keep(piece));
    const note = el("span", { class: "quiet" });
    const retry = button("Retry", "Write this answer again; what follows is left out", () => {
      this.cut(this.turns.indexOf(turn));
      this.reply();
      this.turns.at(-1).node.querySelector("button").focus();
    });
    const more = button("Continue", "Let the model go on from where this answer ends", () => {
      this.cut(this.turns.indexOf(turn) + 1);
      this.write(turn);
    });
    const turn = this.turn("assistant", answer.node, () => answer.message, retry, more, note);
    Object.assign(turn, { answer, note });
    return this.write(turn);
  }

  // Put another token in the place of a piece, and let the model go on from there; the empty one ends the answer.
  branch(piece, entry) {
    const { answer, place } = piece;
    const turn = this.turns.find((one) => one.answer === answer);
    this.cut(this.turns.indexOf(turn) + 1);
    answer.cut(place);
    if (!entry.token) {
      turn.note.textContent = "ended here";
      return null;
    }
    // The first token of an answer may have lost the space that it begins with.
    const text = piece.entry.token === ` ${piece.text}` ? entry.token.replace(/^ /, "") : entry.token;
    answer.add([{ text, count: 1, entry: { ...piece.entry, ...entry } }]);
    answer.stop(place);
    answer.node.lastChild.focus();
    return this.write(turn);
  }

  // What the model looked at when it wrote a piece: the last position of the conversation up to it.
  async attention({ answer, place }) {
    const before = this.turns.slice(0, this.turns.findIndex((turn) => turn.answer === answer));
    const text = answer.pieces.slice(0, place).map((piece) => piece.text).join("");
    const { model, messages } = this.settings.body(before.map((turn) => turn.message()));
    const read = [{ site: `${WHERE}.attn.pattern`, at: -1, reduce: "mean_heads" }];
    const body = { model, messages: [...messages, { role: "assistant", content: text }], read };
    let result = null;
    await this.guarded(async () => (result = await this.server.inspect({ ...body, continue_final_message: true })));
    return result;
  }

  // Let the model write the answer of a turn, or go on with what it has.
  async write(turn) {
    this.drop();
    const { answer } = turn;
    const [running, pieces, begun, had] = [new AbortController(), new Pieces(), performance.now(), answer.count];
    const known = this.turns.slice(0, this.turns.indexOf(turn) + (answer.text ? 1 : 0));
    const body = this.settings.body(known.map((one) => one.message()));
    if (answer.text) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    this.busy(running, turn);
    this.following = true;
    let [first, end] = [null, "stopped"];
    await this.guarded(async () => {
      for await (const { choices: [choice] } of this.server.stream(body, running.signal)) {
        if (this.running !== running) return;
        if (!choice) continue;
        const entries = choice.logprobs?.content ?? [];
        if (entries.length) first ??= performance.now();
        answer.add(pieces.put(choice.delta.content ?? "", entries));
        if (choice.finish_reason) end = ENDS[choice.finish_reason] ?? choice.finish_reason;
        this.tell(turn, answer.count - had, begun, first);
      }
    });
    if (this.running !== running) return; // it was left out, or goes on from another place
    answer.add(pieces.rest().filter(({ text }) => text));
    this.tell(turn, answer.count - had, begun, first, end);
    this.busy(null);
    await this.guarded(() => this.showMemory());
  }

  // Tokens a second are those after the first one, which waits for the prompt.
  tell(turn, count, begun, first, end = "") {
    const [wait, seconds] = [((first ?? performance.now()) - begun) / 1000, (performance.now() - first) / 1000];
    const speed = count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    const facts = [`${count} tokens`, speed, `the first after ${wait.toFixed(2)} s`, end];
    turn.note.textContent = facts.filter(Boolean).join(", ");
    if (this.following) turn.node.scrollIntoView({ block: "end", behavior: "instant" });
  }

  // `running` ends the answer of `turn`; null where none is written.
  busy(running, turn = null) {
    this.running = running;
    for (const one of this.turns) one.node.setAttribute("aria-busy", one === turn);
    this.send.textContent = running ? "Stop" : "Send";
  }
}

mounts.chat = (section, place) => {
  place.chat = new ChatView(section, place);
};
