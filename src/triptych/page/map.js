// The enlarged head: tokens on both axes and one chosen cell.  Of a long text it shows a part, and the whole beside it.

const STACKS = {
  encoder: { label: "Encoder", query: "query", key: "key", hint: "Each token of the source reads the source" },
  decoder: { label: "Decoder", query: "query", key: "key", hint: "Each token reads itself and those before it" },
  cross: { label: "Alignment", query: "output", key: "source", hint: "Cross-attention: each output token reads the " +
    "source" },
};
const LEGIBLE = 13; // a cell this wide, in pixels, still carries a readable token on each axis
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
    [this.rowBand, this.columnBand, this.cellBand] = ["row", "column", "cell"]
      .map((name) => el("div", { class: `band ${name}` }));
    this.heat = el("div", { class: "heat", tabindex: 0, role: "application" }, this.canvas, this.marks, this.rowBand,
      this.columnBand, this.cellBand);
    this.top = el("div", { class: "top", "aria-hidden": "true" });
    this.side = el("div", { class: "side", "aria-hidden": "true" });
    this.corner = el("div", { class: "corner" });
    this.grid = el("div", { class: "grid" }, this.corner, this.top, this.side, this.heat);
    this.node = el("div", { class: "scroll" }, this.grid);
    this.ruler = el("div", { class: "ruler" }); // as wide as the map may become
    this.heat.addEventListener("pointermove", (event) => this.point(event));
    this.heat.addEventListener("pointerdown", (event) => this.point(event));
    this.whole = el("canvas", { "aria-hidden": "true" });
    this.frame = el("div", { class: "frame" });
    this.overview = el("div", { class: "overview", hidden: "" }, this.whole, this.frame);
    this.overview.addEventListener("pointerdown", (event) => this.leap(event));
    onwidth(this.ruler, () => this.resize(this.wanted));
  }

  // Other cells, or another width of the page.
  resize(cell) {
    this.measured = null;
    if (!this.head) return;
    this.show(this.head, this.shade, cell, this.at);
    this.mark(...this.at, false);
  }

  point(event) {
    const frame = this.heat.getBoundingClientRect();
    const t = this.from[0] + Math.floor((event.clientY - frame.top) / this.cell);
    const s = this.from[1] + Math.floor((event.clientX - frame.left) / this.cell);
    if (t >= this.from[0] && s >= this.from[1] && t < this.to[0] && s < this.to[1]) this.choose(t, s);
  }

  // A press on the picture of the whole text chooses the place under it.
  leap(event) {
    const frame = this.whole.getBoundingClientRect();
    const { queries, keys } = this.head;
    this.choose(
      clamp(Math.floor(((event.clientY - frame.top) / frame.height) * queries.length), 0, queries.length - 1),
      clamp(Math.floor(((event.clientX - frame.left) / frame.width) * keys.length), 0, keys.length - 1));
  }

  // `cell` pixels to a weight, or null for as large as fits while tokens stay legible; `at` is shown in any case.
  show(head, shade, cell, at) {
    const same = this.head && this.head.queries === head.queries && this.head.keys === head.keys;
    this.head = head;
    this.shade = shade;
    const words = STACKS[head.stack];
    this.corner.replaceChildren(el("span", {}, `${words.key} →`), el("span", {}, `${words.query} ↓`));
    this.heat.setAttribute("aria-label", `${nameOf(head)}; arrow keys move from weight to weight`);
    this.wanted = cell;
    this.long = Math.max(head.queries.length, head.keys.length) > WHOLE;
    if (!same || !this.from) this.cut(at ?? [head.queries.length - 1, head.keys.length - 1]);
    this.layOut();
    this.paint(shade);
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
    const across = this.ruler.clientWidth - this.side.offsetWidth - 2;
    this.measured = { longest, across, down: Math.min(0.75 * innerHeight, HIGHEST) - LABELS };
  }

  fit() {
    return clamp(Math.floor(this.measured.across / (this.to[1] - this.from[1])), 1, 44);
  }

  // The cell that is chosen first: the largest of the last row that is visible together with its diagonal.
  first() {
    const { across, down } = this.measured;
    const last = this.head.queries.length - 1;
    const row = this.long ? last : clamp(Math.floor(Math.min(across, down) / this.cell) - 1, 0, last);
    return [row, argmax(this.head.row(row))];
  }

  layOut() {
    const queries = this.head.queries.slice(this.from[0], this.to[0]);
    const keys = this.head.keys.slice(this.from[1], this.to[1]);
    this.measure(queries);
    this.cell = this.wanted ?? Math.max(this.fit(), LEGIBLE);
    const every = Math.ceil(11 / this.cell); // cells too small for a token each: name every n-th
    this.grid.style.setProperty("--cell", `${this.cell}px`);
    this.grid.style.setProperty("--type", `${clamp(this.cell * every - 3, 9, 13)}px`);
    this.labels = { queries: this.axis(this.side, queries, every), keys: this.axis(this.top, keys, every) };
    this.turnLabels(keys);
    this.heat.style.width = `${keys.length * this.cell}px`;
    this.heat.style.height = `${queries.length * this.cell}px`;
  }

  axis(place, tokens, every) {
    const labels = tokens.map((token, index) => (index % every ? null : el("span", {}, bdi(token))));
    place.style.setProperty("--every", every);
    place.replaceChildren(...labels.filter((label) => label));
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
    const [rows, columns] = [this.to[0] - this.from[0], this.to[1] - this.from[1]];
    paintWeights(this.canvas, this.head.pooled(1, this.from, this.to), this.head.shader(shade), isDark());
    this.marks.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    const strongest = stack === "cross" ? [...Array(rows).keys()]
      .map((t) => [t, argmax(this.head.row(this.from[0] + t)) - this.from[1]]) : [];
    this.marks.replaceChildren(...strongest.map(([t, s]) => svg("circle", { cx: s + 0.5, cy: t + 0.5, r: 0.16 })));
    this.overview.hidden = !this.long;
    if (this.long) this.paintWhole();
  }

  // The whole of a long text in root scale, each pixel the largest weight it stands for.
  paintWhole() {
    const { queries, keys } = this.head;
    const each = Math.ceil(Math.max(queries.length,
      keys.length) / (OVERVIEW * Math.max(1, Math.round(devicePixelRatio))));
    paintWeights(this.whole, this.head.pooled(each), this.head.shader("root"), isDark());
    const scale = OVERVIEW / Math.max(queries.length, keys.length);
    const place = (node, [t, s], [rows, columns]) => {
      Object.assign(node.style, { left: `${s * scale}px`, top: `${t * scale}px`, width: `${columns * scale}px`,
        height: `${rows * scale}px` });
    };
    place(this.whole, [0, 0], [queries.length, keys.length]);
    place(this.frame, this.from, [this.to[0] - this.from[0], this.to[1] - this.from[1]]);
    this.overview.style.width = `${keys.length * scale}px`;
    this.overview.style.height = `${queries.length * scale}px`;
  }

  mark(t, s, scroll) {
    this.at = [t, s];
    const inside = t >= this.from[0] && s >= this.from[1] && t < this.to[0] && s < this.to[1];
    if (!inside) {
      this.cut([t, s]);
      this.layOut();
      this.paint(this.shade);
    }
    const { cell, from } = this;
    const [row, column] = [t - from[0], s - from[1]];
    this.rowBand.style.transform = `translateY(${row * cell}px)`;
    this.columnBand.style.transform = `translateX(${column * cell}px)`;
    this.cellBand.style.transform = `translate(${column * cell}px, ${row * cell}px)`;
    for (const label of this.marked ?? []) label?.classList.remove("on");
    this.marked = [this.labels.queries[row], this.labels.keys[column]];
    for (const label of this.marked) label?.classList.add("on");
    if (!scroll) return;
    this.cellBand.style.scrollMargin = `${this.top.offsetHeight + 4}px 4px 4px ${this.side.offsetWidth + 4}px`;
    this.cellBand.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  // What is shown as a drawing: title, both axes, weights, scale.
  drawing() {
    const { head, from, to } = this;
    const [queries, keys] = [head.queries.slice(from[0], to[0]), head.keys.slice(from[1], to[1])];
    const cell = clamp(Math.floor(1400 / Math.max(queries.length, keys.length)), 11, 28);
    const cut = (text) => ([...text].length > 24 ? [...text].slice(0, 23).join("") + "…" : text);
    const width = (tokens) => 8 * Math.max(...tokens.map((token) => [...cut(shown(token))].length));
    const [left, top] = [width(queries) + 40, width(keys) + 70];
    const heat = el("canvas");
    paintWeights(heat, head.pooled(1, from, to), head.shader(this.shade), isDark());
    const ink = colourOf("--ink");
    const word = (token, attributes) => svg("text", { fill: ink, "font-family": "monospace",
      "font-size": clamp(cell - 3, 9, 13), ...attributes }, cut(shown(token)));
    const rows = queries.map((token, t) => word(token, { x: left - 8, y: top + (t + 0.7) * cell,
      "text-anchor": "end" }));
    const columns = keys.map((token, s) =>
      word(token, { transform: `translate(${left + (s + 0.7) * cell} ${top - 8}) rotate(-90)` }));
    const [across, down] = [keys.length * cell, queries.length * cell];
    const image = svg("image", { x: left, y: top, width: across, height: down, href: heat.toDataURL(),
      preserveAspectRatio: "none", "image-rendering": "pixelated" });
    image.style.imageRendering = "pixelated";
    const scale = svg("text", { x: left, y: top + down + 28, fill: ink },
      `0 to ${SHADES[this.shade].top(head.max).toFixed(3)}${this.shade === "root" ? ", square root" : ""}`);
    return sheet(Math.max(left + across + 30, 460), top + down + 50, nameOf(head), image, ...rows, ...columns, scale);
  }
}
