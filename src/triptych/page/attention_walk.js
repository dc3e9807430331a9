// One attention, matrix by matrix: every matrix to scale with its sizes, a step at a time (attention_steps.js).  The
// model's own attention (live_walk.js) and one with random weights (text_attention.js) are shown by the same walk.

STACKS.walk = { label: "This step", query: "query", key: "key" };
const SIDE = 40; // pixels of the longest matrix in the picture of all steps
const HIGH = 330; // and, of the open step, in height; one number has at most WIDE pixels
const WIDE = 9;
const CELL = 26; // pixels of a score in the map with tokens, at most

// A matrix of scores as a map with tokens on both axes; hidden scores stay empty.
class ScoreMap extends AnyHead {
  constructor(matrix, queries, keys) {
    super({ stack: "walk", layer: 0, heads: [0], queries: 0, keys: 1 }, 0, [queries, keys]);
    this.matrix = matrix;
    const finite = matrix.data.filter(Number.isFinite);
    this.least = Math.min(0, finite.reduce((least, x) => Math.min(least, x), 0));
    this.max = finite.reduce((most, x) => Math.max(most, x), this.least + 1e-9);
  }

  row(t) {
    return [...this.matrix.row(t)];
  }

  visit(from, to, act) {
    for (let t = from[0]; t < to[0]; t++) {
      for (let s = from[1]; s < to[1]; s++) {
        const x = this.matrix.at(t, s);
        if (x !== -Infinity) act(t, s, (x - this.least) / (this.max - this.least));
      }
    }
  }

  shader() {
    return (shade) => shade;
  }

  // A cross on every hidden score of the part that is shown.
  crosses([top, left], [bottom, right]) {
    let path = "";
    for (let t = top; t < bottom; t++) {
      for (let s = left; s < right; s++) {
        if (this.matrix.at(t, s) === -Infinity) path += `M${s - left + 0.35} ${t - top + 0.35}l.3 .3m0-.3l-.3 .3`;
      }
    }
    return svg("path", { d: path });
  }
}

class AttentionWalk {
  // `paint(change)` is called with what a press of the mask's buttons or cells makes of a painted mask.
  constructor(paint) {
    this.paint = paint;
    this.title = "X"; // of the open step
    this.at = { t: Infinity, s: 0, c: 0, m: 0, o: 0, x: 0, v: 0 };
    this.overview = group("walk-steps", "Steps of the attention, each with its matrices to scale");
    onarrows(this.overview, () => [...this.overview.children], (from, across, down) => from + across + down,
      (to) => this.open(this.steps[to].title));
    [this.heading, this.text, this.figure] = [el("h4"), el("p", { class: "walk-text" }), div("walk-figure")];
    this.plot = new Plot((t, s) => this.choose([t, s]));
    this.map = div("walk-map", this.plot.ruler, this.plot.readout, this.plot.node, this.plot.overview);
    this.cell = el("p", { class: "walk-cell", "aria-live": "polite" });
    this.strips = div("walk-strips");
    this.tools = group("walk-tools", "Masks to begin with");
    [this.back, this.next] = [["Back", -1], ["Next", 1]].map(([label, by]) => button(label, "", () => this.turn(by)));
    this.node = div("walk", this.overview, div("walk-card", div("walk-head", this.heading, this.back, this.next),
      this.text, this.figure, this.cell, this.strips, this.tools, this.map));
    const step = (down, right) => this.choose(this.chosen.map((x, i) => x + [down, right][i]), true);
    for (const node of [this.figure, this.plot.heat]) {
      onkeys(node, { ...moves(step), "[": () => this.turn(-1), "]": () => this.turn(1),
        " ": () => this.flip(), Enter: () => this.flip() });
    }
    this.plot.heat.addEventListener("click", () => this.flip());
    onwidth(this.figure, () => this.steps && this.draw());
    repaints.push(() => this.steps && this.draw());
  }

  // `a`: an attention that is complete.
  show(a) {
    this.a = a;
    this.steps = attentionSteps(a);
    const sizes = this.steps.flatMap(({ figure }) => figure.filter(Array.isArray)).map(([matrix]) => matrix);
    this.most = ["rows", "columns"].map((side) => Math.max(...sizes.map((matrix) => matrix[side])));
    const unit = SIDE / Math.max(...this.most);
    const small = ({ rows, columns, name }) => el("i", { title: name,
      style: { width: `${Math.max(2, columns * unit)}px`, height: `${Math.max(2, rows * unit)}px` } });
    keepFocus(this.overview, () => refill(this.overview, this.steps.map((step) =>
      button([el("span", { class: "walk-shapes" }, step.figure.map((one) => Array.isArray(one) && small(one[0]))),
        step.title], null, () => this.open(step.title), {}))));
    this.open(this.steps.some(({ title }) => title === this.title) ? this.title : "X");
  }

  get step() {
    return this.steps.find(({ title }) => title === this.title);
  }

  turn(by) {
    const to = this.steps.indexOf(this.step) + by;
    if (this.steps[to]) this.open(this.steps[to].title);
  }

  open(title) {
    this.title = title;
    const { step } = this;
    const place = this.steps.indexOf(step);
    [...this.overview.children].forEach((one, i) => {
      one.setAttribute("aria-pressed", i === place);
      one.tabIndex = i === place ? 0 : -1;
    });
    this.heading.textContent = `${place + 1} of ${this.steps.length} · ${step.title}`;
    this.text.textContent = step.text.replace(/\s+/g, " ");
    const held = document.activeElement;
    [this.back.disabled, this.next.disabled] = [place === 0, place === this.steps.length - 1];
    if (held?.disabled) (held === this.back ? this.next : this.back).focus();
    this.tools.hidden = !step.paints;
    if (step.paints) keepFocus(this.tools, () => refill(this.tools, this.masks()));
    this.draw();
  }

  // What a press makes of the painted mask.
  masks() {
    const key = () => this.chosen[1];
    const one = (label, hint, change) => button(label, hint, () => this.paint(change));
    const rule = (name) => () => ({ ...asItWas(), rule: name });
    return [one("All visible", "Every query sees every key", rule("all")),
      !this.a.cross && one("Causal", "A query sees itself and the keys before it", rule("causal")),
      one("Padding: hide this key", "No query sees the key of the chosen column, as if it were padding; again: they do",
        (mask) => ({ ...mask, hidden: toggled(mask.hidden, key()) })),
      one("As it was", "Undo all painting", asItWas)];
  }

  flip() {
    if (!this.step.paints) return false;
    const place = this.chosen[0] * PAINTED + this.chosen[1];
    this.paint((mask) => ({ ...mask, flips: toggled(mask.flips, place) }));
    return true;
  }

  draw() {
    const { step, a, figure } = this;
    if (!figure.clientWidth) return;
    const unit = Math.min(WIDE, HIGH / this.most[0], (figure.clientWidth - 4) / this.most[1]);
    this.marks = [];
    const held = document.activeElement?.parentNode?.parentNode === figure;
    refill(figure, step.figure.map((one) => (Array.isArray(one) ? this.matrix(one, unit)
      : one && el("span", { class: "walk-sign" }, one))));
    if (held) figure.querySelector("[tabindex]").focus();
    this.map.hidden = !step.square;
    if (step.square) {
      const cell = clamp(Math.floor((this.plot.ruler.clientWidth - 70) / a.keys.length), LEGIBLE, CELL);
      this.plot.show(new ScoreMap(step.result, a.queries, a.keys), "one", cell, this.chosen);
      this.plot.heat.setAttribute("aria-label", `${step.title}; arrow keys move from number to number${
        step.paints ? ", Space hides or shows one" : ""}`);
    }
    this.choose(this.chosen, false);
  }

  matrix([matrix, mark], unit) {
    const canvas = el("canvas", { "aria-hidden": "true" });
    paintNumbers(canvas, matrix.data, matrix.columns);
    const band = div("walk-mark");
    const own = matrix === this.step.result;
    const label = `${matrix.name} ${matrix.sizes}`;
    const keys = "; arrow keys move from number to number";
    const use = own ? { tabindex: 0, role: "application", "aria-label": label + keys,
      onpointerdown: (event) => this.point(event, frame) } : { role: "img", "aria-label": label };
    const [width, height] = [matrix.columns, matrix.rows].map((size) => `${Math.max(3, size * unit)}px`);
    const frame = el("div", { class: "walk-matrix", style: { width, height }, ...use }, canvas, mark && band);
    this.marks.push({ matrix, mark, band });
    return div("walk-one", frame, el("span", {}, el("b", {}, matrix.name), ` ${matrix.sizes}`));
  }

  point(event, frame) {
    const { left, top, width, height } = frame.getBoundingClientRect();
    const { rows, columns } = this.step.result;
    const [down, right] = [(event.clientY - top) / height, (event.clientX - left) / width];
    this.choose([Math.floor(down * rows), Math.floor(right * columns)]);
  }

  get chosen() {
    const { axes, result } = this.step;
    return [clamp(this.at[axes[0]], 0, result.rows - 1), clamp(this.at[axes[1]], 0, result.columns - 1)];
  }

  // Chooses a number of the step's result, and says how it comes about.
  choose([row, column], scroll = false) {
    const { step } = this;
    const { axes, strips } = step;
    Object.assign(this.at, { [axes[0]]: row, [axes[1]]: column });
    const [i, j] = this.chosen;
    Object.assign(this.at, { [axes[0]]: i, [axes[1]]: j });
    for (const { matrix, mark, band } of this.marks) {
      if (!mark) continue;
      const [across, down] = [[j, matrix.columns], [i, matrix.rows]];
      const place = ([at, size], all) => (all ? ["0", "100%"] : [`${(100 * at) / size}%`, `max(2px, ${100 / size}%)`]);
      const [left, width] = place(across, mark === "row");
      const [top, height] = place(down, mark === "column");
      Object.assign(band.style, { left, width, top, height });
    }
    const spaced = (one) => (typeof one === "string" ? one.replace(/\s+/g, " ") : one);
    refill(this.cell, step.cell(i, j).flat(Infinity).map(spaced));
    const rows = strips ? strips(i, j) : [];
    if (rows.length) rows.push(["products", Float64Array.from(rows[0][1], (x, k) => x * rows[1][1][k])]);
    refill(this.strips, rows.map(([name, numbers]) => {
      const canvas = el("canvas", { class: "numbers", "aria-hidden": "true" });
      paintNumbers(canvas, numbers);
      return div("strip-of", el("span", {}, name), canvas);
    }));
    if (step.square) this.plot.mark(i, j, scroll && document.activeElement === this.plot.heat);
  }
}
