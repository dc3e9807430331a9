// The flow diagram: its picture, and the open box's equation, shapes and numbers for the token that the reader follows.

const SHOWN = 8; // numbers or keys that are written out

// The boxes of a stack (`triptych.draw.graph`), each with its step, and the boxes that its inputs come from.
function boxesOf(entries, given) {
  const boxes = given.map((box) => ({ ...box, step: entries[box.entry].instructions[box.index] }));
  for (const box of boxes) {
    box.inputs = box.inputs.map(([key, value, from]) => ({ key, value, from: from === null ? null : boxes[from] }));
    box.weight = box.step.weights.weight ?? null; // which matrix or table it is
    box.shape = entries[box.entry].shapes[box.step.out[0]];
  }
  return boxes;
}

class Flow extends FlowPicture {
  constructor(view) {
    super();
    this.view = view;
    this.followed = { encode: null, decode: null }; // positions; null is where the prediction is made
    this.head = 0;
    const { entries } = view.section.program;
    this.stacks = Object.fromEntries(Object.entries(view.section.boxes)
      .map(([name, boxes]) => [name, boxesOf(entries, boxes)]));
    this.stack = entries.decode ? "decode" : "encode";
    this.layer = 0;
    this.picture = group("picture", "Steps of the model; arrow keys move, Enter opens");
    this.detail = el("div", { class: "detail", "aria-live": "polite" });
    this.tokens = group("strip", "The token that is followed");
    onarrows(this.tokens, () => [...this.tokens.children], (from, across) => (across ? from + across : -1),
      (to) => this.follow(to));
    const names = view.both ? { encode: "Encoder", decode: "Decoder" } : { [this.stack]: "Layer" };
    const layers = Object.entries(this.stacks).flatMap(([stack, boxes]) => [...new Set(boxes.map(({ layer }) => layer))]
      .filter((layer) => Number.isInteger(layer)).sort((a, b) => a - b)
      .map((layer) => [`${stack} ${layer}`, `${names[stack]} ${layer}`]));
    this.chooser = choice("Layer", layers, `${this.stack} 0`, (key) => this.choose(...key.split(" ")));
    this.chooser.classList.add("layers");
    this.node = div("flow",
      quiet(prose`Press a box to see its equation, its shapes and its numbers for the token you follow. Press an arrow
        to cut it: the next box then reads zeros.`),
      this.chooser, this.tokens, div("flow-parts", this.picture, this.detail));
    onarrows(this.picture, () => [...this.buttons.values()], (...step) => this.next(...step),
      (to) => this.open([...this.buttons.keys()][to]));
    onwidth(this.picture, () => this.picture.clientWidth !== this.width && this.draw());
    repaints.push(() => this.explain());
  }

  choose(stack, layer) {
    const before = this.box;
    [this.stack, this.layer] = [stack, Number(layer)];
    this.chooser.mark(`${stack} ${layer}`);
    this.draw();
    const alike = (box) => before && box.kind === before.kind
      && box.site?.replace(/\d+/, "") === before.site?.replace(/\d+/, "");
    this.open(this.shown.find((box) => box === before) ?? this.shown.find(alike) ?? this.shown[0]);
    if (this.view.tokens) this.showTokens();
  }

  // Opens the first box of a layer that `test` fits.
  openWhere(test, layer = this.layer, stack = this.stack) {
    if (stack !== this.stack || layer !== this.layer) this.choose(stack, layer);
    const box = this.shown.find(test);
    if (box) this.open(box);
  }

  open(box) {
    this.box = box;
    this.mark();
    this.explain();
  }

  idsOf(stack, { source, ids } = this.view.tokens) {
    return stack === "encode" && source ? source : ids;
  }

  get ids() {
    return this.idsOf(this.stack);
  }

  // The position that is followed in a stack: the chosen one, else where the prediction is made.
  position(stack, tokens = this.view.tokens) {
    const ids = this.idsOf(stack, tokens);
    const usual = ids === tokens.ids ? this.view.rowsOf(ids)[0] : 0;
    return Math.min(this.followed[stack] ?? usual, ids.length - 1);
  }

  follow(at, stack = this.stack) {
    this.followed[stack] = at;
    this.showTokens();
    this.view.update();
  }

  // The same position for every new text, or after a cut.
  show() {
    if (!this.box && this.shown) this.open(this.shown.find(({ kind }) => kind === "softmax") ?? this.shown[0]);
    this.showTokens();
    this.mark();
    this.explain();
  }

  showTokens() {
    const at = this.position(this.stack);
    const key = `${this.stack} ${at} ${this.ids}`;
    if (this.shownTokens === key) return;
    this.shownTokens = key;
    keepFocus(this.tokens, () => refill(this.tokens, this.view.tokenizer.pieces(this.ids).map((piece, i) =>
      button([bdi(piece), el("sub", {}, i)], null, () => this.follow(i),
        { class: "chip", "aria-pressed": i === at, tabindex: i === at ? 0 : -1 }))));
  }

  // The values that the diagram and the chapters read, by entry: of the chosen layer, of layer 0 and of no layer.
  get names() {
    const names = {};
    for (const { entry, layer, step, site, inputs } of Object.values(this.stacks).flat()) {
      names[entry] ??= new Set();
      if (layer > 0 && layer !== this.layer) continue;
      for (const name of [step.out[0], site, ...inputs.map(({ value }) => value)]) names[entry].add(name);
    }
    return names;
  }

  // Numbers of a box's result, or of another value, for the followed token; of one head where it has heads.
  numbers(box, name = box.step.out[0], head = null) {
    const { shape, data } = this.view.now.runs[box.entry].values.get(name);
    const stack = box.entry === "decode" ? "decode" : box.entry === "unembed" ? null : "encode";
    const row = Math.min(stack ? this.position(stack) : 0, shape[0] - 1);
    const width = data.length / shape[0];
    const all = data.subarray(row * width, (row + 1) * width);
    if (head === null || shape.length < 3) return all;
    const own = Math.floor((head * shape[1]) / this.heads(box));
    return all.subarray(own * shape[2], (own + 1) * shape[2]);
  }

  // How many heads the attention around a box has, or 0.
  heads(box) {
    if (box.step.op !== "attend" && box.shape.length < 3 && !/\.(q|k|v|q_rot|k_rot)$/.test(box.site ?? "")) return 0;
    return this.partOf(box)?.heads ?? 0;
  }

  partOf(box) {
    const name = box.step.op === "attend" ? attendPart(box.step) : (box.site ?? "").replace(/\.[^.]+$/, "");
    return this.view.parts.find(({ part }) => part === name);
  }

  // The engine is asked again where its last answer has no numbers of this box.
  explain() {
    const { box } = this;
    if (!box || !this.view.now) return;
    const run = this.view.now.runs[box.entry];
    if (!run.values.has(box.step.out[0])) return this.view.update();
    const heads = this.heads(box);
    this.head = Math.min(this.head, Math.max(0, heads - 1));
    const [what, equation] = this.view.section.words[box.words];
    const chooser = heads > 1 && choice("Head", Array.from({ length: heads }, (_, h) => [h, h]), this.head, (h) => {
      this.head = h;
      this.explain();
    });
    if (chooser) chooser.prepend(el("small", {}, "head"));
    keepFocus(this.detail, () => refill(this.detail,
      el("h4", {}, box.title), el("p", {}, what), el("p", { class: "formula" }, equation), this.shapes(box, run),
      chooser, box.step.op === "attend" ? this.attention(box) : this.vectors(box, run, heads),
      div("cuts", this.cutButtons(box))));
  }

  shapes(box, run) {
    const size = (name) => run.values.get(name)?.shape.join(" × ");
    const { tensors } = this.view.section;
    const rows = box.inputs.filter(({ key }) => key && key !== "ids").map(({ key, value }) => [key, size(value)]);
    for (const [key, name] of Object.entries(box.step.weights)) rows.push([key, tensors[name].shape.join(" × ")]);
    if (box.part === "scores" || box.part === "softmax") {
      const pattern = run.patterns.get(attendPart(box.step));
      rows.push(["result", `${pattern.heads} × ${pattern.queries} × ${pattern.keys}`]);
    } else rows.push(["result", size(box.step.out[0])]);
    return el("p", { class: "shapes" }, rows.filter(([, shape]) => shape)
      .map(([key, shape]) => el("span", {}, `${key} `, el("b", {}, shape))));
  }

  // The inputs and the result for the followed token, as strips and first numbers.
  vectors(box, run, heads) {
    const head = heads ? this.head : null; // of values that have no heads, `numbers` gives all
    const inputs = box.inputs.filter(({ key, value }) => key && key !== "ids" && run.values.has(value)
      && run.values.get(value).data instanceof Float32Array);
    const cut = (key) => this.view.board.cuts.has(arrowName(box.entry, box.step, key));
    const parts = inputs.map(({ key, value }) => this.strip(cut(key) ? `${key}, cut` : key,
      this.numbers(box, value, head), false, cut(key)));
    const result = this.numbers(box, box.step.out[0], head);
    const matrix = /^q|^k|^v/.test((box.site ?? "").split(".").at(-1)) && box.step.op === "linear" && heads;
    const own = matrix ? this.numbers(box, box.site, head) : result;
    return [parts, this.strip("result", own, true), isLogits(box) && this.likeliest(result)];
  }

  strip(name, numbers, written, cut = false) {
    const canvas = el("canvas", { class: "numbers", "aria-hidden": "true" });
    paintNumbers(canvas, cut ? numbers.map(() => 0) : numbers);
    const few = [...numbers.subarray(0, SHOWN)].map(decimal);
    const largest = numbers.reduce((most, x) => (Math.abs(x) > Math.abs(most) ? x : most), 0);
    const rest = numbers.length > SHOWN ? ` of ${numbers.length}` : "";
    return div("strip-of", el("span", {}, name), canvas, written && [this.table(null, [few]),
      quiet(prose`The first ${few.length}${rest} numbers; root mean square ${decimal(rootMeanSquare(numbers))}, largest
        ${decimal(largest)}.`)]);
  }

  likeliest(logits) {
    const chances = probabilities([...logits]);
    const first = nucleus(chances, 1).slice(0, SHOWN);
    return this.table(["token", "logit", "probability"],
      first.map((id) => [bdi(this.view.nameOf(id)), decimal(logits[id]), percent(chances[id])]));
  }

  table(header, rows) {
    const name = { class: "wide", tabindex: 0, role: "group", "aria-label": "Numbers" };
    return el("div", name, el("table", { class: "cells" },
      header && el("thead", {}, el("tr", {}, header.map((cell) => el("th", { scope: "col" }, cell)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)))))));
  }

  // A row of attention: what a head of the followed token reads.
  row({ entry, step }, head = this.head) {
    const run = this.view.now.runs[entry];
    const { keys, data, queries } = run.patterns.get(attendPart(step));
    const t = this.position(run.name);
    const place = (head * queries + t) * keys;
    const weights = data.subarray(place, place + keys);
    const of = (key) => {
      const value = run.values.get(step.inputs[key]);
      return value && run.how.cuts?.has(arrowName(run.name, step, key)) ? zeros(value) : value;
    };
    const [q, k, bias] = [of("q"), of("k"), of("bias")];
    const { scale, softcap, mechanism } = step.attributes;
    const seen = seenBy(run, step.attributes);
    const width = last(q);
    const g = Math.floor((head * k.shape[1]) / q.shape[1]);
    const every = Array.from({ length: keys }, (_, j) => j);
    const dots = every.map(() => 0);
    const from = (t * q.shape[1] + head) * width;
    scorers.dot_product(q.data, from, k.data, g * width, k.shape[1] * width, width, every, keys, dots);
    const scores = dots.slice();
    adjust(scores, keys, run.how.scale === false ? 1 : scale, softcap, bias?.data, place, every);
    return { t, weights, dots: mechanism === "dot_product" ? dots : null, scores,
      seen: every.map((j) => seen(t, j)), trained: scale };
  }

  attention(box) {
    const row = this.row(box);
    const { source } = this.view.tokens;
    const pieces = this.view.tokenizer.pieces(box.step.attributes.keys === "cross" ? source : this.ids);
    const order = [...row.weights.keys()].filter((j) => row.seen[j])
      .sort((a, b) => row.weights[b] - row.weights[a] || (row.dots ? row.dots[b] - row.dots[a] : 0));
    const scored = (j) => (row.dots ? [decimal(row.dots[j]), decimal(row.scores[j])] : ["–", "–"]);
    const rows = order.slice(0, SHOWN).map((j) =>
      [el("span", {}, bdi(pieces[j]), el("sub", {}, j)), ...scored(j), three(row.weights[j])]);
    const rest = order.slice(SHOWN).reduce((sum, j) => sum + row.weights[j], 0);
    const hidden = row.seen.filter((one) => !one).length;
    const notes = [order.length > SHOWN ? `${order.length - SHOWN} more keys have ${three(rest)} together.` : "",
      hidden ? `The mask hides ${hidden} later ${hidden === 1 ? "key" : "keys"}.` : ""];
    return [quiet("Query ", bdi(this.view.tokenizer.pieces(this.ids)[row.t]), el("sub", {}, row.t),
      `, head ${this.head}:`),
    this.table(["key", "q · k", "score", "weight"], rows), quiet(notes.filter((one) => one).join(" ")),
    box.part === "mix" && this.strip("result", this.numbers(box, box.step.out[0], this.head), true)];
  }

  partCuts(box) {
    const found = this.partOf(box);
    if (found?.mlp) return [{ cut: found.part, name: "this MLP" }];
    return found && this.heads(box) ? [{ cut: `${found.part}:${this.head}`, name: `head ${this.head}` }] : [];
  }

  cutButtons(box) {
    const inputs = box.inputs.filter(({ key }) => key);
    const start = (from) => (from ? from.title : box.entry === "cross_kv" ? "the encoder" : "the stream");
    const arrows = inputs.filter(({ key }) => key !== "ids").map(({ key, from }) => ({
      cut: arrowName(box.entry, box.step, key),
      name: `the arrow from ${start(from)}${inputs.length > 1 ? ` (${key})` : ""}`,
    }));
    return [...this.partCuts(box), ...arrows].map(({ cut, name }) => {
      const gone = this.view.board.cuts.has(cut);
      const hint = "A part that is cut adds nothing; behind a cut arrow a box reads zeros";
      return button(`${gone ? "Put back" : "Cut"} ${name}`, hint, () => this.view.board.press(cut),
        { "aria-pressed": gone });
    });
  }
}
