// The board of buttons that cut parts of a model (`LiveExport.parts`) out.

// One row a layer: its heads, the heads of its cross-attention, its MLP.  Pressed parts are in; `changed` is called
// after each press, and `cuts` are those that are out, named as the interpreter's.
class Board {
  constructor(parts, changed) {
    this.changed = changed;
    this.cuts = new Set();
    this.keys = [];
    const layers = {};
    for (const one of parts) (layers[`${one.tower} ${one.layer}`] ??= []).push(one);
    const both = new Set(parts.map((one) => one.tower)).size > 1;
    const rows = group("rows", "Parts of the model; press one to cut it out or put it back",
      Object.values(layers).map((ones) => this.row(ones, both)));
    this.reset = button("Put all back", "Undo every cut", () => this.set([]));
    this.node = div("board", rows, this.reset);
    onarrows(rows, () => this.keys.map(({ one }) => one),
      (from, across, down) => from + across + down, () => this.mark());
    this.mark();
  }

  row(ones, both) {
    const { tower, layer } = ones[0];
    const name = both ? `${tower === "encode" ? "encoder" : "decoder"} ${layer}` : `layer ${layer}`;
    const groups = ones.map(({ part, mlp, stack, heads }) => {
      if (mlp) return el("span", { class: "group" }, this.key(part, "MLP", `${name}, MLP`));
      const [kind, attention] = stack === "cross" ? ["cross", "cross-attention"] : ["heads", "attention"];
      return el("span", { class: "group" }, el("small", {}, kind), Array.from({ length: heads }, (_, h) =>
        this.key(`${part}:${h}`, h, `${name}, ${attention} head ${h}`)));
    });
    return div("row", el("span", { class: "layer" }, name), groups);
  }

  key(cut, label, name) {
    const one = button(label, "Cut out or put back", () => this.press(cut), { "aria-label": name });
    this.keys.push({ cut, one });
    return one;
  }

  press(cut) {
    this.set(this.cuts.has(cut) ? [...this.cuts].filter((one) => one !== cut) : [...this.cuts, cut]);
  }

  set(cuts) {
    this.cuts = new Set(cuts);
    this.mark();
    this.changed();
  }

  cutsAre(cuts) {
    return cuts.length === this.cuts.size && cuts.every((cut) => this.cuts.has(cut));
  }

  // The tab key reaches one part, arrow keys move among them.
  mark() {
    const at = Math.max(0, this.keys.findIndex(({ one }) => one === document.activeElement));
    this.keys.forEach(({ cut, one }, index) => {
      one.setAttribute("aria-pressed", !this.cuts.has(cut));
      one.tabIndex = index === at ? 0 : -1;
    });
    const held = this.reset === document.activeElement;
    this.reset.disabled = this.cuts.size === 0;
    if (held && this.reset.disabled) this.keys[at].one.focus(); // a disabled button would lose the keyboard's place
  }
}

// The attention weights of a run as heads of the attention maps; cut heads are empty.
function headsOf(parts, patterns, names) {
  const heads = {};
  for (const { part, stack, layer } of parts) {
    const pattern = patterns.get(part);
    if (!pattern) continue;
    const [queries, keys] = stack === "cross" ? [names.decoder, names.encoder] : [names[stack], names[stack]];
    const map = { stack, layer, heads: [...Array(pattern.heads).keys()], queries: 0, keys: 1 };
    const own = map.heads.map((h) => new Head(map, h, pattern.data, [queries, keys], 1));
    heads[stack] = [...(heads[stack] ?? []), ...own];
  }
  return heads;
}
