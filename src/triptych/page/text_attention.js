// Attention over words that the reader writes, with random weights: its sizes, its temperature and its mask are chosen,
// and every number is computed again at once.

const MODEL = 64; // numbers of a word's vector
const WORDS = 16;

// Standard normal numbers that depend on the seed, a name and their place alone (Box and Muller 1958), times `scale`.
function randomNumbers(seed, name, length, scale = 1) {
  const own = [...name].reduce((hash, letter) => (Math.imul(hash, 31) + letter.codePointAt(0)) | 0, seed);
  return Float64Array.from({ length }, (_, i) => scale
    * Math.sqrt(-2 * Math.log(1 - uniform(own, 2 * i))) * Math.cos(2 * Math.PI * uniform(own, 2 * i + 1)));
}

const SLIDERS = [ // name, setting, attributes, what the position of the slider means
  ["Head width d", "width", { min: 0, max: 6, step: 1, value: 4 }, (x) => 2 ** x],
  ["Heads", "heads", { min: 1, max: 8, step: 1, value: 2 }, Number],
  ["Temperature", "temperature", { min: 0.1, max: 4, step: 0.1, value: 1 }, Number],
  ["Length", "length", { min: 1, max: WORDS, step: 1, value: WORDS }, Number],
];

class TextAttention {
  constructor(section, place) {
    this.painted = asItWas();
    Object.assign(this, { cross: false, scaled: true, seed: 0, head: 0 });
    const field = (label, value) => {
      const input = el("input", { spellcheck: "false", "aria-label": label, oninput: () => this.show() });
      input.value = value;
      return { input, node: el("label", { class: "walk-field" }, el("span", {}, label), input) };
    };
    this.text = field("Text", section.text);
    this.other = field("Text that is read", section.other);
    const sliders = SLIDERS.map(([name, key, attributes, meaning]) => {
      const output = el("output");
      const read = () => {
        this[key] = meaning(input.value);
        output.textContent = this[key];
        input.setAttribute("aria-valuetext", this[key]);
      };
      const changed = () => {
        read();
        this.show();
      };
      const input = el("input", { type: "range", "aria-label": name, oninput: changed, ...attributes });
      read();
      return el("label", { class: "slider" }, name, input, output);
    });
    const pick = (name, key, entries) => choice(name, entries, this[key], (value) => {
      this[key] = value;
      if (key === "cross") this.painted = asItWas();
      this.show();
    });
    this.headChoice = div("walk-heads");
    this.walk = new AttentionWalk((change) => {
      this.painted = change(this.painted);
      this.show();
    });
    this.summary = el("p", { class: "walk-cell", role: "status" });
    place.append(
      div("walk-fields", this.text.node, this.other.node),
      div("walk-settings", sliders),
      div("walk-settings",
        pick("What the text reads", "cross", [[false, "reads itself"], [true, "reads another text"]]),
        pick("Scale of the scores", "scaled", [[true, "1/√d"], [false, "no scale"]]),
        button("Other random weights", "Draw all weights and word vectors anew", () => {
          this.seed += 1;
          this.show();
        }), this.headChoice),
      this.summary, this.walk.node);
    this.show();
  }

  // The attention that is set, with all its matrices.
  attention(words, read) {
    const { width, heads, cross, seed } = this;
    const vectors = (name, down, list) => {
      const data = new Float64Array(list.length * MODEL);
      list.forEach((word, i) => data.set(randomNumbers(seed, `word ${word}`, MODEL), i * MODEL));
      return new Matrix(name, [down, list.length], ["d", MODEL], data);
    };
    const X = vectors("X", "T", words);
    const Y = cross ? vectors("Y", "S", read) : X;
    const random = (name, down, across, scale) =>
      new Matrix(name.split(" ")[0], down, across, randomNumbers(seed, name, down[1] * across[1], scale));
    const one = (head) => {
      const [WQ, WK, WV] = ["W_Q", "W_K", "W_V"].map((name) =>
        random(`${name} ${head}`, ["d", MODEL], ["d_head", width], 1 / Math.sqrt(MODEL)));
      const [Q, K, V] = [X.times(WQ, "Q"), Y.times(WK, "K"), Y.times(WV, "V")];
      const a = completed({ X, Y, WQ, WK, WV, Q, K, V, QR: Q, KR: K, moved: null, head, heads, cross,
        queries: words, keys: cross ? read : words, scale: this.scaled ? 1 / Math.sqrt(width) : 1,
        trained: 1 / Math.sqrt(width), softcap: null, sink: null, bias: null, temperature: this.temperature,
        learned: "random", biases: {}, visible: paintedMask(this.painted, () => true) });
      a.z = a.weights.times(V, "A·V");
      return a;
    };
    const all = Array.from({ length: heads }, (_, head) => one(head));
    const joined = new Float64Array(words.length * heads * width);
    all.forEach(({ z }, h) => words.forEach((_, t) => joined.set(z.row(t), (t * heads + h) * width)));
    const concat = new Matrix("concat", ["T", words.length], [`${heads}·d_head`, heads * width], joined);
    const WO = random("W_O", [`${heads}·d_head`, heads * width], ["d", MODEL], 1 / Math.sqrt(heads * width));
    return Object.assign(all[this.head], { concat, WO, out: concat.times(WO, "output") });
  }

  show() {
    const words = ({ input }) => input.value.split(/\s+/).filter((word) => word).slice(0, this.length);
    const [queries, read] = [words(this.text), words(this.other)];
    this.other.node.hidden = !this.cross;
    const empty = !queries.length || (this.cross && !read.length);
    this.walk.node.hidden = empty;
    if (empty) return refill(this.summary, "There are no words yet; write some.");
    const { heads } = this;
    this.head = Math.min(this.head, heads - 1);
    const names = Array.from({ length: heads }, (_, h) => [h, `head ${h}`]);
    keepFocus(this.headChoice, () => refill(this.headChoice, choice("Head", names, this.head, (h) => {
      this.head = h;
      this.show();
    })));
    const a = this.a = this.attention(queries, read);
    this.walk.show(a);
    this.summarize(a);
  }

  // What the settings do to the scores and the weights of the head.
  summarize({ dots, scaled, masked, weights, Q }) {
    const spread = (numbers) => {
      const mean = numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
      return Math.sqrt(numbers.reduce((sum, x) => sum + (x - mean) ** 2, 0) / numbers.length);
    };
    const rows = Array.from({ length: weights.rows }, (_, t) => weights.row(t));
    const mean = (of) => rows.reduce((sum, row, t) => sum + of(row, t), 0) / rows.length;
    const entropy = (row) => row.reduce((sum, w) => sum - (w > 0 ? w * Math.log(w) : 0), 0);
    refill(this.summary, prose`The products of queries and keys have a standard deviation of ${
      number("spread of products", spread(dots.data))} (√d is ${number("root", Math.sqrt(Q.columns))}), the scores one
      of ${number("spread of scores", spread(scaled.data))}. A row of weights has an entropy of ${
      number("entropy", mean(entropy))} nats, the mean of all rows; even weights over the visible keys would have ${
      number("even", mean((_, t) => Math.log(masked.row(t).filter(Number.isFinite).length || 1)))}.`);
  }
}

mounts.textattention = (section, place) => {
  place.attention = new TextAttention(section, place);
};
