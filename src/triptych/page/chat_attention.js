// Where the model looked when it wrote a token: the attention of the position before it, averaged over the heads of a
// layer or of all, over the tokens of the whole prompt.  Only servers started with --inspect answer this.

class ChatAttention {
  // `ask(piece)` gives the answer of /v1/inspect for what the model had read when it wrote a piece.
  constructor(ask) {
    Object.assign(this, { ask, answer: null, piece: null });
    this.open = button("Attention", "Show which tokens the model read when it wrote this one", () => this.load());
    this.layer = el("select", { "aria-label": "Layer", onchange: () => this.show() });
    const name = { role: "group", "aria-label": "Tokens that were read" };
    this.tokens = el("p", { class: "read-tokens", dir: "auto", tabindex: 0, ...name });
    this.mostRead = statusLine();
    this.content = div("attention-of-token", this.layer, this.tokens, this.mostRead);
    this.node = div("attention-part", this.open, this.content);
    this.forget();
  }

  // Another piece is looked at.
  of(piece) {
    if (piece === this.piece) return;
    this.forget();
    this.piece = piece;
  }

  forget() {
    this.piece = this.answer = null;
    this.content.hidden = true;
  }

  async load() {
    const { piece } = this;
    const answer = await this.ask(piece);
    if (!answer || piece !== this.piece) return; // another one has been chosen meanwhile
    this.answer = answer;
    this.layers = Object.values(answer.reads).map(({ values }) => values[0][0]);
    const names = [["", "all layers"], ...this.layers.map((_, i) => [i, `layer ${i}`])];
    refill(this.layer, names.map(([value, name]) => el("option", { value }, name)));
    this.content.hidden = false;
    this.show();
  }

  show() {
    const rows = this.layer.value === "" ? this.layers : [this.layers[Number(this.layer.value)]];
    const weights = this.answer.tokens.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
    const most = Math.max(...weights.slice(1), Number.MIN_VALUE); // the first token takes what heads do not need
    refill(this.tokens, this.answer.tokens.map(({ text }, i) => {
      const tint = Math.min(9, Math.round((9 * weights[i]) / most));
      return el("span", { class: `tint-${tint}`, title: `${shown(text)} ${percent(weights[i])}` }, text || "∅");
    }));
    const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 5);
    const best = order.map((i) => [" ", bdi(this.answer.tokens[i].text), ` ${percent(weights[i])}`]);
    refill(this.mostRead, "Most of it:", best);
  }
}
