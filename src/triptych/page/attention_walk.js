// One attention, matrix by matrix: every matrix to scale with its sizes, a step at a time, and how each number of a
// result comes about, in words.  The model's own attention (live_walk.js) and one with random weights
// (text_attention.js) are shown by the same walk.

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
}

// The largest products of a row and a column, and their sum in words.
function sumOfProducts(row, column, sum, name, bias = 0) {
  const products = Float64Array.from(row, (x, i) => x * column[i]);
  const order = [...products.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a])).slice(0, 3);
  const signed = (x) => (x < 0 ? `(${decimal(x)})` : decimal(x));
  const rest = products.length - order.length;
  return [order.map((i) => `${signed(row[i])}·${signed(column[i])}`).join(" + "),
    rest > 0 ? ` + … (${rest} smaller ${rest === 1 ? "product" : "products"})` : "",
    bias ? ` + ${signed(bias)} (bias)` : "", " = ", number(name, sum)];
}

// The steps of an attention `a`.  Each has a `title`, a sentence (`text`), the `figure`: matrices, each with what of it
// belongs to the chosen number, and signs between them; the `result` with the `axes` of the chosen number; its
// explanation (`cell`), and the strips of numbers whose products it sums.
// Axes: t a query, s a key, c a number of the head, m one of all heads together, o one of the result.
function attentionSteps(a) {
  const { X, Y, WQ, WK, WV, Q, K, V, QR, KR, dots, scaled, masked, weights, z, concat, WO, out } = a;
  const [query, key] = [(t) => bdi(a.queries[t]), (s) => bdi(a.keys[s])];
  const [d, width] = [X.columns, Q.columns];
  const projection = (title, from, W, result, axis, role, use, bias) => ({
    title, figure: [[from, "row"], "×", [W, "column"], "=", [result, "cell"]], result, axes: [axis, "c"],
    text: `Each row of ${from.name} times ${W.name} gives the ${role} of that token: ${use}.`,
    cell: (i, c) => [`Number ${c} of the ${role} of `, (axis === "t" ? query : key)(i), `: its row of ${from.name} times
      column ${c} of ${W.name}: `, sumOfProducts(from.row(i), W.column(c), result.at(i, c), "sum", bias?.[c]), "."],
    strips: (i, c) => [["row", from.row(i)], ["column", W.column(c)]],
  });
  const before = (what, t, s) => prose`${what} of ${query(t)} and ${key(s)}: `;
  const divided = (a.scale === 1 ? "not divided" : `divided by √${width}`)
    + (a.temperature === 1 ? "" : `, divided by the temperature ${a.temperature}`);
  const dotWords = (t, s) => ["The query of ", query(t), " times the key of ", key(s), ": ",
    sumOfProducts(QR.row(t), KR.row(s), dots.at(t, s), "dot")];
  const scaleWords = (t, s) => [divided, a.softcap ? `, capped at ±${a.softcap}` : "",
    a.bias ? [" plus ", number("bias", a.bias.at(t, s)), " for the distance"] : "", ": ",
    number("score", scaled.at(t, s))];
  // Of a weight: its product, what softmax makes of it, in words and numbers.
  a.words = (t, s) => {
    const start = [dotWords(t, s), "; ", scaleWords(t, s), "; "];
    if (masked.at(t, s) === -Infinity) return [start, "hidden by the mask, so the weight is ", number("weight", 0), "."];
    const sum = masked.row(t).reduce((all, x) => all + Math.exp(x), a.sink === null ? 0 : Math.exp(a.sink));
    return [start, `softmax: e^${decimal(masked.at(t, s))} = `, number("power", Math.exp(masked.at(t, s))),
      " of ", number("powers", sum), " in this row gives ", number("weight", weights.at(t, s)), "."];
  };
  const square = { axes: ["t", "s"], square: true };
  const shift = a.head * z.columns;
  return [
    { title: "X", figure: [[X, "row"], Y !== X && "and", Y !== X && [Y, null]], result: X, axes: ["t", "x"],
      text: `Each row of X is the vector of one token as it enters this attention: ${X.rows} tokens, ${d} numbers each.${
        Y === X ? "" : ` ${Y.name} has those of the text that is read.`}`,
      cell: (t, x) => [`Number ${x} of the vector of `, query(t), " is ", number("value", X.at(t, x)), "."] },
    { title: "W", figure: [[WQ, "cell"], "and", [WK, null], "and", [WV, null]], result: WQ, axes: ["x", "c"],
      text: `Three ${a.learned} matrices, the same for every token, make its query, its key and its value: each has a
        column of ${d} weights for every one of the head's ${width} numbers.`,
      cell: (x, c) => [`The weight with which number ${x} of a vector adds to number ${c} of its query is `,
        number("value", WQ.at(x, c)), "."] },
    projection("Q", X, WQ, Q, "t", "query", "what it compares with the keys", a.biases.q),
    projection("K", Y, WK, K, "s", "key", "what the queries are compared with", a.biases.k),
    projection("V", Y, WV, V, "s", "value", "what is averaged", a.biases.v),
    a.moved && { title: a.moved.title, figure: [[Q, "cell"], "→", [QR, "cell"], "and", [K, null], "→", [KR, null]],
      result: QR, axes: ["t", "c"], text: a.moved.text,
      cell: (t, c) => [`Number ${c} of the query of `, query(t), " was ", number("before", Q.at(t, c)), " and is now ",
        number("value", QR.at(t, c)), "."] },
    { ...square, title: "QKᵀ", figure: [[QR, "row"], "×", [a.KT, "column"], "=", [dots, "cell"]], result: dots,
      text: "Every query times every key is one number for each pair of tokens: large where both have a similar direction.",
      cell: (t, s) => [dotWords(t, s), "."], strips: (t, s) => [["query", QR.row(t)], ["key", KR.row(s)]] },
    { ...square, title: "scaled", figure: [[dots, "cell"], "→", [scaled, "cell"]], result: scaled,
      text: a.trained === 1
        ? "This model does not divide its scores by √d; it was trained so. What it adds for the distance of the tokens " +
          "is part of the score."
        : `The sum of ${width} products grows with √${width} = ${decimal(Math.sqrt(width))}, so the scores are divided by it${
          a.scale === 1 ? " – here they are not, because it is switched off" : ""}${
          a.bias ? "; what the model adds for the distance of the tokens is part of the score" : ""}.`,
      cell: (t, s) => [before("The score", t, s), number("dot", dots.at(t, s)), ", ", scaleWords(t, s), "."] },
    { ...square, title: "masked", figure: [[scaled, "cell"], "→", [masked, "cell"]], result: masked, paints: true,
      text: "The mask sets the scores of hidden keys to −∞. Paint it: click a cell, or press Space on it, to hide that " +
        "key from that query or to show it.",
      cell: (t, s) => (masked.at(t, s) === -Infinity ? [query(t), " does not see ", key(s), ": the score ",
        number("score", scaled.at(t, s)), " becomes −∞."]
        : [query(t), " sees ", key(s), ": the score stays ", number("score", scaled.at(t, s)), "."]) },
    { ...square, title: "softmax", figure: [[masked, "cell"], "→", [weights, "cell"]], result: weights,
      text: "Softmax makes positive weights of every row, which sum to 1; a hidden key gets exactly 0.", cell: a.words },
    { title: "A·V", figure: [[weights, "row"], "×", [V, "column"], "=", [z, "cell"]], result: z, axes: ["t", "v"],
      text: "Each row of weights averages the values: this is what the head brings to that token from the others.",
      cell: (t, c) => [`Number ${c} of the head's result for `, query(t), ": its weights times that number of every value: ",
        sumOfProducts(weights.row(t), V.column(c), z.at(t, c), "sum"), "."],
      strips: (t, c) => [["weights", weights.row(t)], ["values", V.column(c)]] },
    { title: "concat", figure: [[z, null], "→", [concat, "cell"]], result: concat, axes: ["t", "m"],
      text: `The results of all ${a.heads} heads stand side by side: ${a.heads} × ${z.columns} = ${concat.columns}
        numbers for each token. Those of head ${a.head} are numbers ${shift} to ${shift + z.columns - 1}.`,
      cell: (t, m) => [`Number ${m} of `, query(t), ` is number ${m % z.columns} of head ${Math.floor(m / z.columns)}: `,
        number("value", concat.at(t, m)), "."] },
    { title: "W_O", figure: [[concat, "row"], "×", [WO, "column"], "=", [out, "cell"]], result: out, axes: ["t", "o"],
      text: `One more matrix mixes the heads and maps them to ${out.columns} numbers, which are added to the token's vector.`,
      cell: (t, o) => [`Number ${o} of the result for `, query(t), ": ",
        sumOfProducts(concat.row(t), WO.column(o), out.at(t, o), "sum", a.biases.o?.[o]), "."],
      strips: (t, o) => [["row", concat.row(t)], ["column", WO.column(o)]] },
  ].filter((step) => step);
}

// What follows from queries, keys and values: completes an attention `a` for `attentionSteps`.
function completed(a) {
  const factor = a.scale / a.temperature;
  a.KT = a.KR.transposed("Kᵀ");
  a.dots = a.QR.times(a.KT, "QKᵀ");
  a.scaled = a.dots.map("scores", (x, t, s) => {
    const capped = a.softcap ? a.softcap * Math.tanh((x * factor) / a.softcap) : x * factor;
    return a.bias ? capped + a.bias.at(t, s) : capped;
  });
  a.masked = a.scaled.map("masked", (x, t, s) => (a.visible(t, s) ? x : -Infinity));
  a.weights = a.masked.softmax("A", a.sink);
  return a;
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
    return [one("All visible", "Every query sees every key", () => ({ ...asItWas(), rule: "all" })),
      !this.a.cross && one("Causal", "A query sees itself and the keys before it", () => ({ ...asItWas(), rule: "causal" })),
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
      this.hatch(step.result);
      this.plot.heat.setAttribute("aria-label", `${step.title}; arrow keys move from number to number${
        step.paints ? ", Space hides or shows one" : ""}`);
    }
    this.choose(this.chosen, false);
  }

  // A cross on every hidden score of the map.
  hatch(matrix) {
    const [[top, left], [bottom, right]] = [this.plot.from, this.plot.to];
    let path = "";
    for (let t = top; t < bottom; t++) {
      for (let s = left; s < right; s++) {
        if (matrix.at(t, s) === -Infinity) path += `M${s - left + 0.35} ${t - top + 0.35}l.3 .3m0-.3l-.3 .3`;
      }
    }
    this.plot.marks.append(svg("path", { class: "hatch", d: path }));
  }

  matrix([matrix, mark], unit) {
    const canvas = el("canvas", { "aria-hidden": "true" });
    paintNumbers(canvas, matrix.data, matrix.columns);
    const band = div("walk-mark");
    const own = matrix === this.step.result;
    const label = `${matrix.name} ${matrix.sizes}`;
    const frame = el("div", { class: "walk-matrix", ...(own ? { tabindex: 0, role: "application",
      "aria-label": `${label}; arrow keys move from number to number`, onpointerdown: (event) => this.point(event, frame) }
      : { role: "img", "aria-label": label }), style: { width: `${Math.max(3, matrix.columns * unit)}px`,
      height: `${Math.max(3, matrix.rows * unit)}px` } }, canvas, mark && band);
    this.marks.push({ matrix, mark, band });
    return div("walk-one", frame, el("span", {}, el("b", {}, matrix.name), ` ${matrix.sizes}`));
  }

  point(event, frame) {
    const { left, top, width, height } = frame.getBoundingClientRect();
    const { rows, columns } = this.step.result;
    this.choose([Math.floor(((event.clientY - top) / height) * rows), Math.floor(((event.clientX - left) / width) * columns)]);
  }

  get chosen() {
    const { axes, result } = this.step;
    return [clamp(this.at[axes[0]], 0, result.rows - 1), clamp(this.at[axes[1]], 0, result.columns - 1)];
  }

  // Chooses a number of the step's result, and says how it comes about.
  choose([row, column], scroll = false) {
    const { step } = this;
    const { axes, result, strips } = step;
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
    refill(this.cell, step.cell(i, j).flat(Infinity).map((one) => (typeof one === "string" ? one.replace(/\s+/g, " ") : one)));
    const rows = strips ? strips(i, j) : [];
    if (rows.length) rows.push(["products", Float64Array.from(rows[0][1], (x, k) => x * rows[1][1][k])]);
    refill(this.strips, rows.map(([name, numbers]) => {
      const canvas = el("canvas", { class: "numbers", "aria-hidden": "true" });
      paintNumbers(canvas, numbers);
      return div("strip-of", el("span", {}, name), canvas);
    }));
    if (step.square) this.plot.mark(i, j, scroll && document.activeElement === this.plot.heat);
    this.result = result;
  }
}
