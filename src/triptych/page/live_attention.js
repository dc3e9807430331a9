// Attention's operations: masks, the cache's `extend`, and `attend`.

// Who may see whom, by position (`triptych.spec.masks`): each gives (q, k) -> boolean.
const masks = {};
const mask = (name, rule) => (masks[name] = rule);
mask("Full", () => () => true);
mask("Causal", () => (q, k) => k <= q);
mask("Window", ({ back, ahead = 0 }) => (q, k) => q - k < back && q - k >= -ahead);
const visible = (mask) => masks[mask.part](mask);

operation("extend", ({ k, v, layer, leaf, run, out }) => {
  const fresh = k ?? v;
  if (run.cache) return run.cache.extend(layer, leaf, fresh);
  return run.held?.tokens ? joinRows(run.held.run.values.get(out), run.past, fresh) : fresh;
});

operation("attend", attend);

// The keys and values of the tokens so far, [capacity, G, K] a layer.
class Cache {
  constructor(capacity) {
    this.capacity = capacity;
    this.length = 0; // tokens of all finished steps
    this.layers = {};
  }

  extend(layer, leaf, { shape, data }) {
    const [n, ...rest] = shape;
    const width = rest[0] * rest[1];
    if (this.length + n > this.capacity) throw new Error(`the cache holds ${this.capacity} tokens`);
    const store = (this.layers[`${leaf}${layer}`] ??= new Float32Array(this.capacity * width));
    store.set(data, this.length * width);
    return valueOf([this.length + n, ...rest], store.subarray(0, (this.length + n) * width));
  }
}

// How a query is scored against keys, into `row`: of the vector of `q` at `from`, and for every key in `shown` the
// vector of `k` at `offset + key * stride`.  Short functions over plain arrays are compiled first.
const scorers = {
  dot_product(q, from, k, offset, stride, width, shown, count, row) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += q[from + i] * k[at + i];
      row[c] = sum;
    }
  },
};

// scale -> softcap -> bias, in place.
function adjust(row, count, scale, softcap, bias, place, shown) {
  for (let c = 0; c < count; c++) {
    let x = row[c] * scale;
    if (softcap) x = softcap * Math.tanh(x / softcap);
    row[c] = bias ? x + bias[place + shown[c]] : x;
  }
}

// The values of the shown keys, weighted by `row`, added to `out` from `to` on.
function gather(row, shown, count, v, offset, stride, width, out, to) {
  for (let c = 0; c < count; c++) {
    const at = offset + shown[c] * stride;
    const w = row[c];
    for (let i = 0; i < width; i++) out[to + i] += w * v[at + i];
  }
}

// Whether a query sees a key: by the mask of the model, by none, or by one that the reader painted over it.
function seenBy({ how, name }, { mask, keys }) {
  const own = how.mask === false || keys === "cross" ? () => true : visible(mask);
  const painted = how.painted?.[keys === "cross" ? "cross" : name === "encode" ? "encoder" : "decoder"];
  return painted ? paintedMask(painted, own) : own;
}

// softmax(mask(softcap(scale · q kᵀ) + bias)) v, in the order of `triptych.attention.reference`.  Heads that are cut
// are not computed and give zeros.
function attend({ q, k, v, bias, sinks, weight, mask, scale, softcap, keys, mechanism, ports, run }) {
  const { how, past } = run;
  const [n, heads, width] = q.shape;
  const [s, groups, valueWidth] = v.shape;
  const part = ports[0].slice(0, ports[0].lastIndexOf("."));
  const seen = seenBy(run, { mask, keys });
  const factor = how.scale === false ? 1 : scale;
  const linear = mechanism === "linear";
  const out = new Float32Array(n * heads * valueWidth);
  const pattern = how.patterns ? new Float32Array(heads * n * s) : null;
  const row = new Float64Array(s);
  const shown = new Int32Array(s);
  for (let t = 0; t < n; t++) {
    let count = 0; // the keys this query sees come first in `shown`
    for (let j = 0; j < s; j++) if (seen(past + t, j)) shown[count++] = j;
    for (let h = 0; h < heads; h++) {
      if (!count || how.cuts?.has(`${part}:${h}`)) continue;
      const g = Math.floor((h * groups) / heads);
      const from = (t * heads + h) * width;
      const place = (h * n + t) * s;
      scorers[mechanism](q.data, from, k.data, g * width, groups * width, width, shown, count, row, weight?.data);
      if (!linear) adjust(row, count, factor, softcap, bias?.data, place, shown);
      normalize(row, count, linear, sinks ? sinks.data[h] : -Infinity);
      gather(row, shown, count, v.data, g * valueWidth, groups * valueWidth, valueWidth, out,
        (t * heads + h) * valueWidth);
      if (pattern) for (let c = 0; c < count; c++) pattern[place + shown[c]] = row[c];
    }
  }
  if (pattern) run.patterns.set(part, { heads, queries: n, keys: s, data: pattern });
  return valueOf([n, heads, valueWidth], out);
}

// Scores become weights, in place: softmax with an optional sink beside the keys, or division by the sum.
function normalize(row, count, plain, sink) {
  let largest = sink;
  let sum = 0;
  if (!plain) for (let c = 0; c < count; c++) if (row[c] > largest) largest = row[c];
  for (let c = 0; c < count; c++) sum += plain ? row[c] : (row[c] = Math.exp(row[c] - largest));
  if (sink !== -Infinity) sum += Math.exp(sink - largest);
  for (let c = 0; c < count; c++) row[c] /= sum || 1;
}
