// The enlarged head: tokens on both axes and one chosen cell.  Of a long text it shows a part, and the whole beside it.

const STACKS = {
  encoder: { label: "Encoder", query: "query", key: "key", hint: "Each token of the source reads the source" },
  decoder: { label: "Decoder", query: "query", key: "key", hint: "Each token reads itself and those before it" },
  cross: { label: "Alignment", query: "output", key: "source", hint: "Cross-attention: each output token reads the " +
    "source" },
};

const stackChoice = (stacks, pick) => stacks.length > 1
  && choice("Stack", stacks.map((stack) => [stack, STACKS[stack].label, STACKS[stack].hint]), stacks[0], pick);
const shadeChoice = (picked, pick) =>
  choice("Colour scale", Object.entries(SHADES).map(([key, { label, hint }]) => [key, label, hint]), picked, pick);

const LEGIBLE = 11; // a cell this wide, in pixels, still carries a readable token on each axis
const WHOLE = 160; // tokens that are shown at once; of longer texts PART of them are
const PART = 48;
const HIGHEST = 864; // pixels of the map with its labels, as in the style sheet; and of the labels over it
const LABELS = 136;
const OVERVIEW = 224; // pixels of the picture of a whole long text

const nameOf = (head) =>
  head.stack === "cross"
    ? `Alignment · cross-attention layer ${head.layer} · head ${head.head}`
    : `${STACKS[head.stack].label} · layer ${head.layer} · head ${head.head}`;

class Plot {
  constructor(choose) {
    this.choose = choose; // called with (t, s) when the reader points at a cell
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.marks = svg("svg", { class: "marks", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.bands = ["row", "column", "cell"].map((name) => div(`band ${name}`));
    this.heat = el("div", { class: "heat", tabindex: 0, role: "application",
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event) },
    this.canvas, this.marks, this.bands);
    [this.top, this.side] = ["top", "side"].map((name) => el("div", { class: name, "aria-hidden": "true" }));
    this.corner = div("corner");
    this.grid = div("grid", this.corner, this.top, this.side, this.heat);
    this.node = div("scroll", this.grid);
    this.ruler = div("ruler"); // as wide as the map may become
    this.readout = el("output", { class: "readout" }); // the chosen weight
    this.whole = el("canvas", { "aria-hidden": "true" });
    this.frame = div("frame");
    this.overview = el("div", { class: "overview", hidden: "", onpointerdown: (event) => this.leap(event) },
      this.whole, this.frame);
    onwidth(this.ruler, () => this.resize(this.wanted));
  }

  resize(cell) {
    if (!this.head || !this.ruler.clientWidth) return; // nothing is shown, or it is hidden
    this.measured = null;
    this.show(this.head, this.shade, cell, this.at);
    this.mark(...this.at, false);
  }

  point(event) {
    const frame = this.heat.getBoundingClientRect();
    const t = this.from[0] + Math.floor((event.clientY - frame.top) / this.cell);
    const s = this.from[1] + Math.floor((event.clientX - frame.left) / this.cell);
    if (this.holds(t, s)) this.choose(t, s);
  }

  // Whether a weight is among those that are shown.
  holds(t, s) {
    return t >= this.from[0] && s >= this.from[1] && t < this.to[0] && s < this.to[1];
  }

  // A press on the picture of the whole text chooses the place under it.
  leap(event) {
    const frame = this.whole.getBoundingClientRect();
    this.choose(Math.floor(((event.clientY - frame.top) / frame.height) * this.head.queries.length),
      Math.floor(((event.clientX - frame.left) / frame.width) * this.head.keys.length));
  }

  // `cell` pixels to a weight, or null for as large as fits while tokens stay legible; `at` is shown in any case.
  show(head, shade, cell, at) {
    const same = this.head && this.head.queries === head.queries && this.head.keys === head.keys;
    this.head = head;
    const words = STACKS[head.stack];
    this.corner.replaceChildren(el("span", {}, `${words.key} →`), el("span", {}, `${words.query} ↓`));
    this.heat.setAttribute("aria-label", `${nameOf(head)}; arrow keys move from weight to weight`);
    this.wanted = cell;
    this.long = Math.max(head.queries.length, head.keys.length) > WHOLE;
    if (!same) this.cut(at ?? [head.queries.length - 1, head.keys.length - 1]);
    this.layOut(shade);
  }

  // The rows and columns that are shown: all, or of a long text those around `at`.
  cut([t, s]) {
    const { queries, keys } = this.head;
    const start = (place, length) => (this.long ? clamp(place - PART / 2, 0, Math.max(0, length - PART)) : 0);
    this.from = [start(t, queries.length), start(s, keys.length)];
    this.to = [queries, keys].map(({ length }, i) => (this.long ? Math.min(length, this.from[i] + PART) : length));
  }

  // How wide and high the cells may be together.  To measure makes the browser lay out the whole page, so it is done
  // after a resize, and where the longest label is another, but not for every text.
  measure(queries) {
    const longest = queries.reduce((most, token) => (token.length > most.length ? token : most), "");
    if (this.measured?.longest === longest) return;
    this.grid.style.setProperty("--type", "13px");
    this.axis(this.side, queries, 1);
    const across = this.ruler.clientWidth - this.side.offsetWidth - 6;
    this.measured = { longest, across, down: Math.min(0.75 * innerHeight, HIGHEST) - LABELS };
  }

  fit() {
    return clamp(Math.floor(this.measured.across / (this.to[1] - this.from[1])), 1, 44);
  }

  // The cell that is chosen first: the largest of a row, by default the last that is visible with its diagonal.
  first(given = null) {
    const { across, down } = this.measured;
    const last = this.head.queries.length - 1;
    const row = given ?? (this.long ? last : clamp(Math.floor(Math.min(across, down) / this.cell) - 1, 0, last));
    return [row, argmax(this.head.row(row))];
  }

  get tokens() {
    const { head, from, to } = this;
    return [head.queries.slice(from[0], to[0]), head.keys.slice(from[1], to[1])];
  }

  layOut(shade) {
    const [queries, keys] = this.tokens;
    this.measure(queries);
    this.cell = this.wanted ?? Math.max(this.fit(), LEGIBLE);
    const every = Math.ceil(11 / this.cell); // cells too small for a token each: name every n-th
    this.grid.style.setProperty("--cell", `${this.cell}px`);
    this.grid.style.setProperty("--type", `${clamp(this.cell * every - 3, 9, 13)}px`);
    this.labels = { queries: this.axis(this.side, queries, every), keys: this.axis(this.top, keys, every) };
    this.turnLabels(keys);
    const [width, height] = [keys, queries].map(({ length }) => `${length * this.cell}px`);
    Object.assign(this.heat.style, { width, height });
    this.top.style.width = width; // the last label stands for more columns than there are
    this.paint(shade);
  }

  axis(place, tokens, every) {
    const labels = tokens.map((token, index) => (index % every ? null : el("span", {}, bdi(token))));
    place.style.setProperty("--every", every);
    refill(place, labels);
    return labels;
  }

  // Tokens over the map stand upright where each fits its columns, as single letters do, and are turned where not.
  turnLabels(keys) {
    const sizes = `${this.cell} ${keys.reduce((most, token) => Math.max(most, token.length), 0)}`;
    if (this.measured.sizes === sizes) return;
    this.measured.sizes = sizes;
    this.top.classList.add("upright");
    const labels = [...this.top.children];
    this.top.classList.toggle("upright", labels.every((label) => label.scrollWidth <= label.clientWidth));
  }

  paint(shade) {
    this.shade = shade;
    const { stack } = this.head;
    const [rows, columns] = this.tokens.map(({ length }) => length);
    paintWeights(this.canvas, this.head.pooled(1, this.from, this.to), this.head.shader(shade));
    this.marks.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    const strongest = (t) =>
      svg("circle", { cx: argmax(this.head.row(this.from[0] + t)) - this.from[1] + 0.5, cy: t + 0.5, r: 0.16 });
    refill(this.marks, this.head.crosses?.(this.from, this.to),
      stack === "cross" && Array.from({ length: rows }, (_, t) => strongest(t)));
    this.overview.hidden = !this.long;
    if (this.long) this.paintWhole();
  }

  // The whole of a long text in root scale, each pixel the largest weight it stands for.
  paintWhole() {
    const { queries, keys } = this.head;
    const longest = Math.max(queries.length, keys.length);
    const each = Math.ceil(longest / (OVERVIEW * Math.max(1, Math.round(devicePixelRatio))));
    paintWeights(this.whole, this.head.pooled(each), this.head.shader("root"));
    const pixels = (count) => `${(count * OVERVIEW) / longest}px`;
    const place = (node, [t, s], [rows, columns]) => Object.assign(node.style,
      { left: pixels(s), top: pixels(t), width: pixels(columns), height: pixels(rows) });
    place(this.whole, [0, 0], [queries.length, keys.length]);
    place(this.frame, this.from, this.tokens.map(({ length }) => length));
    Object.assign(this.overview.style, { width: pixels(keys.length), height: pixels(queries.length) });
  }

  // Marks the weight that is nearest to such a place, and says how large it is.
  mark(row, column, scroll) {
    const { queries, keys } = this.head;
    const [t, s] = (this.at = [clamp(row, 0, queries.length - 1), clamp(column, 0, keys.length - 1)]);
    refill(this.readout, bdi(queries[t]), el("span", {}, " → "), bdi(keys[s]), " ",
      el("b", {}, three(this.head.row(t)[s])));
    if (!this.holds(t, s)) {
      this.cut([t, s]);
      this.layOut(this.shade);
    }
    const [y, x] = [t - this.from[0], s - this.from[1]];
    const [down, right] = [`${y * this.cell}px`, `${x * this.cell}px`];
    const shifts = [`translateY(${down})`, `translateX(${right})`, `translate(${right}, ${down})`];
    this.bands.forEach((band, i) => (band.style.transform = shifts[i]));
    for (const label of this.marked ?? []) label?.classList.remove("on");
    this.marked = [this.labels.queries[y], this.labels.keys[x]];
    for (const label of this.marked) label?.classList.add("on");
    if (!scroll) return;
    const chosen = this.bands[2];
    chosen.style.scrollMargin = `${this.top.offsetHeight + 4}px 4px 4px ${this.side.offsetWidth + 4}px`;
    chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  // What is shown as a drawing: title, both axes, weights, scale.
  drawing() {
    const { head, from, to } = this;
    const [queries, keys] = this.tokens.map((tokens) => tokens.map((token) => shortened(shown(token), 24)));
    const cell = clamp(Math.floor(1400 / Math.max(queries.length, keys.length)), 11, 28);
    const width = (labels) => 8 * Math.max(...labels.map((label) => [...label].length));
    const [left, top] = [width(queries) + 40, width(keys) + 70];
    const heat = el("canvas");
    paintWeights(heat, head.pooled(1, from, to), head.shader(this.shade));
    const ink = colourOf("--ink");
    const word = (label, attributes) => svg("text", { fill: ink, "font-family": "monospace",
      "font-size": clamp(cell - 3, 9, 13), ...attributes }, label);
    const rows = queries.map((label, t) =>
      word(label, { x: left - 8, y: top + (t + 0.7) * cell, "text-anchor": "end" }));
    const columns = keys.map((label, s) =>
      word(label, { transform: `translate(${left + (s + 0.7) * cell} ${top - 8}) rotate(-90)` }));
    const [across, down] = [keys.length * cell, queries.length * cell];
    const image = svg("image", { x: left, y: top, width: across, height: down, href: heat.toDataURL(),
      preserveAspectRatio: "none", "image-rendering": "pixelated", style: { imageRendering: "pixelated" } });
    const scale = svg("text", { x: left, y: top + down + 28, fill: ink },
      `0 to ${SHADES[this.shade].top(head.max).toFixed(3)}${this.shade === "root" ? ", square root" : ""}`);
    return sheet(Math.max(left + across + 30, 460), top + down + 50, nameOf(head), image, rows, columns, scale);
  }
}
