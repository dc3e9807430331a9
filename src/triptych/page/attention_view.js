// The view of attention weights: thumbnails of all heads, one enlarged head, and one row as a list.  The page that runs
// a model gives the heads of each text; those of a trace are a `TraceView` (attention_trace.js).

// The keys that one query reads, largest weight first; `choose` is called with the key that is pressed.
function reading(head, t, s, choose) {
  const row = head.row(t);
  const order = row.map((_, index) => index).sort((a, b) => row[b] - row[a]).slice(0, 8);
  const total = row.reduce((sum, weight) => sum + weight, 0).toFixed(3);
  const items = order.filter((index) => row[index] > 0).map((index) =>
    el("li", { class: index === s ? "on" : null, onclick: () => choose(index) }, bdi(head.keys[index]),
      el("sub", {}, index), el("b", {}, three(row[index])),
      el("i", { style: { width: `${(row[index] / row[order[0]]) * 100}%` } })));
  return [el("h4", {}, bdi(head.queries[t]), el("sub", {}, t), " reads"), el("ol", {}, items),
    quiet(head.count ? `The largest weights of this row, of 0.02 or more, at most ${head.count}; they sum to ${total}.`
      : `This row sums to ${total} over ${row.length} keys.`)];
}

class AttentionView {
  // `heads` of each stack, `shade` of the first picture, `roles` that heads may have, and a `note` below the map.
  // `explain`, if any, gives what a weight is made of: (head, t, s) -> pieces; `row` the row that is chosen at first.
  constructor({ heads, stacks, shade = "head", roles = [], note = "", explain = null, row = () => null }, place) {
    Object.assign(this, { place, heads, stacks, shade, roles, note, explain, row });
    this.product = el("p", { class: "walk-cell", "aria-live": "polite", hidden: explain ? null : "" });
    this.gallery = new Gallery((head) => this.open(head), this.roles);
    this.plot = new Plot((t, s) => this.choose(t, s, false));
    this.reading = el("aside", { class: "reading", "aria-label": "The chosen row" });
    place.append(this.build());
    const step = (down, right) => this.choose(this.chosen[0] + down, this.chosen[1] + right, true);
    const turn = (by) => () => {
      const all = this.heads[this.stack];
      this.open(all.at((all.indexOf(this.head) + by) % all.length));
    };
    this.keys = { ...moves(step), "[": turn(-1), "]": turn(1) };
    onkeys(this.plot.heat, this.keys);
    repaints.push(() => this.repaint());
  }

  build() {
    this.title = el("h3");
    this.numbers = el("p", { class: "numbers" });
    this.plot.readout.setAttribute("aria-live", "polite");
    this.bar = el("i", { class: "bar" });
    this.top = el("span");
    this.controls = div("controls",
      shadeChoice(this.shade, (shade) => { this.shade = shade; this.repaint(); }),
      group("choice", "Size",
        button("−", "Smaller cells", () => this.zoom(Math.min(this.plot.cell - 1, Math.round(this.plot.cell / 1.3)))),
        button("Fit", "As large as fits the page", () => this.zoom(this.plot.fit())),
        button("+", "Larger cells", () => this.zoom(Math.max(this.plot.cell + 1, Math.round(this.plot.cell * 1.3))))),
      exportButtons(this));
    const large = div("large", this.title, this.numbers, this.plot.readout, this.controls, this.plot.ruler,
      this.product, div("map", this.plot.node, div("beside", this.reading, this.plot.overview)),
      div("scale", el("span", {}, "0"), this.bar, this.top),
      quiet(`Point, tap or use the arrow keys to read a weight; [ and ] change the head.${this.note}`));
    this.content = div("heads-and-map", this.gallery.node, large);
    this.chooser = stackChoice(this.stacks, (stack) => this.pick(stack));
    return el("div", {}, div("controls", this.chooser), this.content);
  }

  // Opens a head that was chosen elsewhere.
  turnTo(stack, layer, head) {
    if (stack !== this.stack) {
      if (this.chooser) this.chooser.mark(stack);
      this.pick(stack);
    }
    const wanted = this.heads[stack].find((one) => one.layer === layer && one.head === head);
    if (wanted && wanted !== this.head) this.open(wanted);
  }

  pick(stack) {
    this.stack = stack;
    this.head = null;
    this.chosen = null;
    this.arrange();
    this.open(this.heads[stack][0]);
  }

  // The thumbnails stand above the map instead of beside it where they are wide, or few beside a large map.
  arrange() {
    const heads = this.heads[this.stack];
    this.gallery.show(heads);
    const few = heads.length <= 3 * this.gallery.columns && heads[0].keys.length > 24;
    this.content.classList.toggle("above", this.gallery.columns > 12 || few);
  }

  // The same heads on another text, or changed: what was chosen stays chosen where it can.
  update(heads) {
    const sizes = (head) => `${head.queries.length} ${head.keys.length}`;
    const before = this.head;
    this.heads = heads;
    this.gallery.update(heads[this.stack]);
    const head = heads[this.stack].find((one) => one.layer === before.layer && one.head === before.head);
    if (sizes(head) !== sizes(before)) this.chosen = null;
    this.open(head);
  }

  open(head) {
    this.head = head;
    this.gallery.mark(head);
    this.title.textContent = nameOf(head) + (head.role ? ` · ${head.role}` : "");
    refill(this.numbers, head.measures.map(([name, value]) =>
      el("span", {}, `${name} `, el("b", {}, readable(Number(value.toPrecision(3)))))));
    this.plot.show(head, this.shade, this.cell, this.chosen);
    this.showScale();
    this.choose(...(this.chosen ?? this.plot.first(this.row())), false);
  }

  choose(t, s, scroll) {
    this.plot.mark(t, s, scroll);
    this.chosen = this.plot.at;
    refill(this.reading, reading(this.head, ...this.chosen, (key) => this.choose(this.chosen[0], key, true)));
    if (this.explain) refill(this.product, this.explain(this.head, ...this.chosen));
  }

  showScale() {
    const stops = PALETTES.get(isDark()).colours.filter((_, index) => index % 15 === 0);
    this.bar.style.background = `linear-gradient(to right, ${stops.map((rgb) => `rgb(${rgb.join(" ")})`).join(", ")})`;
    const { label, top } = SHADES[this.shade];
    const marked = this.stack === "cross" ? " · ○ strongest source of each output" : "";
    this.top.textContent = `${top(this.head.max).toFixed(3)} · ${label}${marked}`;
  }

  repaint() {
    if (!this.head) return;
    this.gallery.paint();
    this.plot.paint(this.shade);
    this.showScale();
  }

  zoom(cell) {
    this.cell = clamp(cell, 1, 48);
    this.plot.resize(this.cell);
  }

  file() {
    return fileName(this.stack, "layer", this.head.layer, "head", this.head.head);
  }

  drawing() {
    return this.plot.drawing();
  }

  values() {
    const { stack, layer, head, role, queries, keys } = this.head;
    const measures = Object.fromEntries(this.head.measures);
    return { stack, layer, head, role, measures, queries, keys, ...this.head.numbers() };
  }
}
