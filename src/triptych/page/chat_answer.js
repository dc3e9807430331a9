// An answer as tokens with their probabilities, which the pointer and the arrow keys reach.

// Texts of tokens and the text that a stream has settled do not come together: bytes of a character wait for the rest
// of it, and what may begin a stop string waits for its end.  This joins them to pieces, each with the tokens that its
// text is made of; one with several tokens has the probability of the first.
class Pieces {
  waiting = [];
  text = "";

  // The new pieces after an event with this text and these entries of `logprobs.content`.
  put(text, entries) {
    this.text += text;
    this.waiting.push(...entries.filter(({ token }) => token)); // special tokens have no text
    const pieces = [];
    while (this.waiting.length && this.text.startsWith(this.waiting[0].token)) {
      const entry = this.waiting.shift();
      this.text = this.text.slice(entry.token.length);
      pieces.push({ text: entry.token, entry, count: 1 });
    }
    return this.text && !this.waiting.some(({ token }) => this.text && token.startsWith(this.text))
      ? [...pieces, ...this.rest()] : pieces;
  }

  // What is left, as one piece.
  rest() {
    const { text, waiting } = this;
    [this.text, this.waiting] = ["", []];
    return text || waiting.length ? [{ text, entry: waiting[0] ?? null, count: waiting.length }] : [];
  }
}

class Answer {
  // `look(piece)` is called when the pointer or the focus comes to a piece, `keep(piece)` when it is pressed.
  constructor(look, keep) {
    Object.assign(this, { look, keep, pieces: [], notes: "" });
    this.node = el("p", { class: "tokens", dir: "auto", role: "group", "aria-label": "Answer, token by token" });
    onarrows(this.node, () => this.spans(), (from, across, down) => from + across + down, (to) => this.stop(to));
  }

  get text() {
    return this.pieces.map(({ text }) => text).join("");
  }

  get message() {
    return { role: "assistant", content: this.text };
  }

  get count() {
    return this.pieces.reduce((sum, { count }) => sum + count, 0);
  }

  spans() {
    return [...this.node.children];
  }

  // One tab stop for all tokens: the one that the keyboard was at last.
  stop(place) {
    this.spans().forEach((span, i) => (span.tabIndex = i === place ? 0 : -1));
  }

  add(pieces) {
    for (const piece of pieces) {
      piece.answer = this;
      piece.place = this.pieces.length;
      this.pieces.push(piece);
      this.node.append(this.span(piece));
    }
  }

  span(piece) {
    const p = piece.entry ? Math.exp(piece.entry.logprob) : null;
    const span = el("span", {
      class: p === null ? null : `tint-${Math.round(3 * (1 - p))}`, tabindex: piece.place ? -1 : 0, role: "button",
      "aria-pressed": "false", "aria-label": p === null ? shown(piece.text) : `${shown(piece.text)} ${percent(p)}`,
      onpointerenter: () => this.look(piece), onfocus: () => this.look(piece),
      onclick: () => (this.stop(piece.place), this.keep(piece)),
    }, piece.text);
    onkeys(span, { Enter: () => this.keep(piece), " ": () => this.keep(piece) });
    return (piece.node = span);
  }

  // Forget the pieces from this place on.
  cut(place) {
    for (const { node } of this.pieces.splice(place)) node.remove();
    if (!this.spans().some((span) => span.tabIndex === 0)) this.stop(0);
  }
}

// A token with its probability, and the likeliest ones in its place; `take(piece, entry)` continues from another one.
class TokenPanel {
  // `attention` is a `ChatAttention`, or null where the server shows none.
  constructor(take, attention) {
    Object.assign(this, { take, attention, pressed: null, piece: null, entries: [] });
    this.bars = new Bars(9, (index) => this.take(this.piece, this.entries[index]));
    this.chance = el("p", { class: "numbers" });
    this.node = el("section", { class: "token-panel", "aria-label": "Token", hidden: "" }, this.chance,
      button("Close", "Close this list", () => this.close()), this.bars.node,
      quiet("The model's own probabilities, before temperature and top-p. Press a token of the answer to keep it ",
        "here, then another one to continue from that."), attention?.node ?? []);
  }

  look(piece) {
    if (!this.pressed) this.show(piece);
  }

  keep(piece) {
    const again = this.pressed === piece;
    this.forget();
    if (again) return;
    this.pressed = piece;
    piece.node.setAttribute("aria-pressed", true);
    this.show(piece);
  }

  close() {
    const { piece } = this;
    piece.node.focus();
    this.forget();
  }

  forget() {
    this.pressed?.node.setAttribute("aria-pressed", false);
    this.pressed = this.piece = null;
    this.attention?.forget();
    this.node.hidden = true;
  }

  show(piece) {
    const { entry } = piece;
    this.node.hidden = !entry;
    if (!entry) return;
    this.piece = piece;
    this.attention?.of(piece);
    const top = entry.top_logprobs;
    this.entries = top.some(({ token }) => token === entry.token) ? top : [...top, entry];
    const [chances, p] = [this.entries.map(({ logprob }) => Math.exp(logprob)), Math.exp(entry.logprob)];
    refill(this.chance, bdi(entry.token), " ", el("b", {}, percent(p)), ` (${three(entry.logprob)} nats)`);
    this.bars.title.textContent = "In its place";
    this.bars.show(chances, null, null, (index) => this.entries[index].token);
    for (const { node, index } of this.bars.rows) {
      if (node.hidden) continue;
      const { token } = this.entries[index];
      node.classList.toggle("chosen", token === entry.token);
      // Half a character is no text that a request could carry.
      node.firstChild.disabled = token === entry.token || token.includes("\ufffd");
    }
  }
}
