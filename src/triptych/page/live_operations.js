// The operations of a program (`triptych.ops`), one function each: (step, call) -> value.
//
// `operation(name, function)` adds one; the exporter reads the names from the scripts.  A value is { shape, data }: a
// Float32Array, row after row.  `call` gives the inputs by argument name (`call.x`), the weights by name, the
// attributes of the step, and the run.  One row of text runs at a time, so N is its length.

const valueOf = (shape, data) => ({ shape, data });
const last = (x) => x.shape[x.shape.length - 1];

function mapped(x, act) {
  const out = new Float32Array(x.data.length);
  for (let i = 0; i < out.length; i++) out[i] = act(x.data[i]);
  return valueOf(x.shape, out);
}

// `combine` of each pair; the smaller operand is repeated over the leading dimensions of the larger.
function paired(x, y, combine) {
  const [shape, n] = x.data.length >= y.data.length ? [x.shape, x.data.length] : [y.shape, y.data.length];
  const out = new Float32Array(n);
  for (let at = 0, i = 0, j = 0; at < n; at++) {
    out[at] = combine(x.data[i], y.data[j]);
    if (++i === x.data.length) i = 0;
    if (++j === y.data.length) j = 0;
  }
  return valueOf(shape, out);
}

// The error function by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - poly * Math.exp(-x * x));
}
const gelu = (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
const geluTanh = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

// `act(vector, out)` of each vector along the last dimension, as subarrays.
function eachVector(x, act) {
  const width = last(x);
  const out = new Float32Array(x.data.length);
  for (let at = 0; at < out.length; at += width) act(x.data.subarray(at, at + width), out.subarray(at, at + width));
  return valueOf(x.shape, out);
}

// Each vector, `centred` or not, divided by the root of the mean of its squares; then scaled and shifted.
function normed({ x, weight, bias, offset, eps }, centred) {
  return eachVector(x, (vector, out) => {
    let mean = 0;
    let squares = 0;
    if (centred) for (let i = 0; i < vector.length; i++) mean += vector[i];
    mean /= vector.length;
    for (let i = 0; i < vector.length; i++) squares += (vector[i] - mean) ** 2;
    const factor = 1 / Math.sqrt(squares / vector.length + eps);
    for (let i = 0; i < out.length; i++) {
      out[i] = (vector[i] - mean) * factor * (weight.data[i] + (offset ?? 0)) + (bias ? bias.data[i] : 0);
    }
  });
}

const operations = {};
const operation = (name, compute) => (operations[name] = compute);

operation("site", ({ x }) => x);
operation("cast", ({ x }) => x); // the exporter refuses another dtype than float32
operation("relu", ({ x }) => mapped(x, (value) => Math.max(value, 0)));
operation("silu", ({ x }) => mapped(x, (value) => value / (1 + Math.exp(-value))));
operation("tanh", ({ x }) => mapped(x, Math.tanh));
operation("gelu", ({ x, approximate }) => mapped(x, approximate === "tanh" ? geluTanh : gelu));
operation("softcap", ({ x, cap }) => mapped(x, (value) => cap * Math.tanh(value / cap)));
operation("scale", ({ x, factor }) => mapped(x, (value) => value * factor));
operation("shift", ({ x, offset }) => mapped(x, (value) => value + offset));
operation("add", ({ x, y }) => paired(x, y, (a, b) => a + b));
operation("multiply", ({ x, y }) => paired(x, y, (a, b) => a * b));
operation("split_heads", ({ x, shape }) => valueOf([x.shape[0], last(x) / shape[2], shape[2]], x.data));
operation("merge_heads", ({ x }) => valueOf([x.shape[0], x.shape[1] * x.shape[2]], x.data));

operation("embedding", ({ ids, run, names }) => {
  const width = run.weights.entry(names.weight).columns;
  const out = new Float32Array(ids.data.length * width);
  ids.data.forEach((id, t) => run.weights.row(names.weight, id, out, t * width));
  return valueOf([ids.data.length, width], out);
});

operation("linear", ({ x, bias, run, names }) => {
  const matrix = run.weights.entry(names.weight);
  const { rows, columns } = matrix;
  const out = run.weights.kernel.multiply(x.data, x.data.length / columns, matrix);
  if (bias) for (let i = 0, j = 0; i < out.length; i++, j = j + 1 === rows ? 0 : j + 1) out[i] += bias.data[j];
  return valueOf([...x.shape.slice(0, -1), rows], out);
});

operation("layer_norm", (call) => normed(call, true));
// Without an `eps` it is fp32's epsilon, as in torch.
operation("rms_norm", (call) => normed({ ...call, eps: call.eps ?? 2 ** -23 }, false));

// In place, in double precision where it sums.
function softmax(scores) {
  normalize(scores, scores.length, false, -Infinity);
  return scores;
}
