// The walk through one attention of the model that runs in the page, on the text that stands in it.

const MOVED = {
  rotate: "turned by an angle that grows with the position (RoPE), so that their products depend on the distance",
  rms_norm: "divided by their root mean square", layer_norm: "normalized",
};

class LiveWalk {
  constructor(view) {
    this.view = view;
    this.attentions = view.parts.filter(({ mlp }) => !mlp);
    this.part = this.attentions.find(({ stack }) => stack === "cross") ?? this.attentions[0];
    this.head = 0;
    this.walk = new AttentionWalk((change) => view.paintMask(this.part.stack, change));
    this.note = quiet();
    const several = new Set(this.attentions.map(({ stack }) => stack)).size > 1;
    const name = ({ stack, layer }) => `${several ? `${stack} ` : "layer "}${layer}`;
    this.layers = choice("Layer of the attention", this.attentions.map((one) => [one.part, name(one)]), this.part?.part,
      (part) => this.pick(this.attentions.find((one) => one.part === part), this.head));
    this.layers.classList.add("layers");
    this.heads = div("walk-heads");
    this.node = div("live-walk", div("controls", this.layers, this.heads), this.note, this.walk.node);
  }

  // What the engine is asked for.
  get wanted() {
    return this.part ? { part: this.part.part, head: this.head } : null;
  }

  pick(part, head) {
    [this.part, this.head] = [part, Math.min(head, part.heads - 1)];
    this.a = null;
    this.layers.mark(part.part);
    this.view.attention?.turnTo(part.stack, part.layer, this.head);
    this.view.update();
  }

  // The attention of the engine's last answer.
  show() {
    const given = this.view.now.walk;
    if (!given) return;
    const { heads } = this.part;
    keepFocus(this.heads, () => refill(this.heads, heads > 1 && choice("Head of the attention",
      Array.from({ length: heads }, (_, h) => [h, `head ${h}`]), this.head, (h) => this.pick(this.part, h))));
    this.walk.node.hidden = Boolean(given.problem);
    this.a = given.problem ? null : this.attention(given);
    const gone = this.view.board.cuts.has(`${this.part.part}:${this.head}`);
    this.note.textContent = given.problem ? `This attention cannot be shown so: ${given.problem}.`
      : [gone && "This head is removed, so its part of the results of all heads is 0.",
        this.view.painted[this.part.stack] && "Its mask is painted by hand; “As it was” in its step undoes that."]
        .filter((one) => one).join(" ");
    this.note.hidden = !this.note.textContent;
    if (!this.a) return;
    if (this.walk.at.t === Infinity) this.walk.at.t = this.view.flow.position(this.part.tower); // at first
    this.walk.show(this.a);
  }

  attention({ parts: { q, k, v }, head, heads, concat, out, bias, scale, trained, softcap, sink }) {
    const { view, part } = this;
    const cross = part.stack === "cross";
    const S = cross ? "S" : "T";
    const of = (name, down, across, { shape, data }) => new Matrix(name, [down, shape[0]], [across, shape[1]], data);
    const square = ({ data, shape }) => ({ data, shape: [shape[0], data.length / shape[0]] });
    const [queries, keys] = [view.flow.idsOf(part.tower), cross ? view.tokens.source : view.flow.idsOf(part.tower)]
      .map((ids) => view.tokenizer.pieces(ids));
    const X = of("X", "T", "d", square(q.x));
    const [Q, K] = [["Q", "T", q], ["K", S, k]].map(([name, down, one]) => of(name, down, "d_head", one.projected));
    const V = of("V", S, "d_head", v.used);
    const changes = [...new Set([...q.changes, ...k.changes])];
    const ways = changes.map((op) => MOVED[op] ?? op).join(", and ");
    const moved = ways && { title: "Q, K moved", text: `Before they are compared, queries and keys are ${ways}.` };
    return completed({
      X, Y: cross ? of("memory", "S", "d", square(k.x)) : X, Q, K, V, cross, queries, keys, head, heads, moved,
      WQ: of("W_Q", "d", "d_head", q.w), WK: of("W_K", "d", "d_head", k.w), WV: of("W_V", "d", "d_head", v.w),
      QR: of(moved ? "Q′" : "Q", "T", "d_head", q.used), KR: of(moved ? "K′" : "K", S, "d_head", k.used),
      scale, trained, softcap, sink, temperature: 1, learned: "learned",
      bias: bias && new Matrix("bias", ["T", queries.length], [S, keys.length], bias),
      concat: of("concat", "T", `${heads}·d_head`, concat), WO: of("W_O", `${heads}·d_head`, "d", out.w),
      out: of("output", "T", "d", square(out.value)), biases: { q: q.b, k: k.b, v: v.b, o: out.b },
      z: of("A·V", "T", "d_head", headOf(concat, head, V.columns)),
      visible: seenBy({ how: view.how(), name: part.tower }, this.step(part).attributes),
    });
  }

  // The step of the program that an attention is.
  step({ part, tower }) {
    return this.view.section.program.entries[tower].instructions
      .find((step) => step.op === "attend" && attendPart(step) === part);
  }

  // What a weight of the attention maps is made of; the walk then shows that head.
  explain({ stack, layer, head }, t, s) {
    const part = this.attentions.find((one) => one.stack === stack && one.layer === layer);
    if (part !== this.part || head !== this.head) {
      this.pick(part, head);
      return [];
    }
    return this.a?.words(t, s) ?? [];
  }
}
