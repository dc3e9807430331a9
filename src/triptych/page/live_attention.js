// Attention's operations: masks, the cache's `extend`, and `attend`; live_biases.js has the position biases.

// Who may see whom, by position (`triptych.spec.masks`): each gives (q, k) -> boolean.
const masks = {
  Full: () => () => true,
  Causal: () => (q, k) => k <= q,
  Window: ({ back, ahead = 0 }) => (q, k) => q - k < back && q - k >= -ahead,
  Prefix: ({ lengths }) => (q, k) => k < lengths[0],
  SameDocument: () => () => true, // one text is one document
  BlockSparse: ({ block, local = 1, first = 0, every = 0, powers = false }) => (q, k) => {
    const [i, j] = [Math.floor(q / block), Math.floor(k / block)];
    const far = Math.abs(i - j);
    return far < local || j < first || (every > 0 && (j + 1) % every === 0) || (powers && (far & (far - 1)) === 0);
  },
  And: ({ parts }) => all(parts.map(visible), true),
  Or: ({ parts }) => all(parts.map(visible), false),
};
const visible = (mask) => masks[mask.part](mask);
const all = (tests, both) => (q, k) => (both ? tests.every((test) => test(q, k)) : tests.some((test) => test(q, k)));

Object.assign(operations, {
  extend({ k, v, layer, leaf, run, out }) {
    const fresh = k ?? v;
    if (run.cache) return run.cache.extend(layer, leaf, fresh);
    return run.held?.tokens ? joinRows(run.held.run.values.get(out), run.past, fresh) : fresh;
  },

  attend,
});

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

// The three ways to score a query against keys, each into `row`: of the vector of `q` at `from`, and for every key in
// `shown` the vector of `k` at `offset + key * stride`.  Short functions over plain arrays are compiled first.
const positive = (x) => (x > 0 ? x + 1 : Math.exp(x)); // elu(x) + 1 (Katharopoulos et al. 2020)
const scorers = {
  dot_product(q, from, k, offset, stride, width, shown, count, row) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += q[from + i] * k[at + i];
      row[c] = sum;
    }
  },
  additive(q, from, k, offset, stride, width, shown, count, row, weight) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += weight[i] * Math.tanh(q[from + i] + k[at + i]);
      row[c] = sum;
    }
  },
  linear(q, from, k, offset, stride, width, shown, count, row) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += positive(q[from + i]) * positive(k[at + i]);
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

// softmax(mask(softcap(scale · q kᵀ) + bias)) v, in the order of `triptych.attention.reference`.  Heads that are cut
// are not computed and give zeros.
function attend({ q, k, v, bias, sinks, weight, mask, scale, softcap, keys, mechanism, ports, run }) {
  const { how, past } = run;
  const [n, heads, width] = q.shape;
  const [s, groups, valueWidth] = v.shape;
  const part = ports[0].slice(0, ports[0].lastIndexOf("."));
  const seen = how.mask === false || keys === "cross" ? () => true : visible(mask);
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
