// How the page chooses the next token: temperature, top-p, and numbers that depend on the seed alone; and how far two
// predictions are apart.

// Probabilities of logits at a temperature; at 0 all of it is on the largest.
function probabilities(logits, temperature = 1) {
  const largest = logits.reduce((best, x) => Math.max(best, x), -Infinity);
  if (temperature === 0) return Float64Array.from(logits, (x, i) => (i === logits.indexOf(largest) ? 1 : 0));
  return softmax(Float64Array.from(logits, (x) => (x - largest) / temperature));
}

// The indices of the smallest set of tokens that has at least `top` of the probability, likeliest first.
function nucleus(chances, top) {
  const order = [...chances.keys()].sort((a, b) => chances[b] - chances[a]);
  let sum = 0;
  const count = order.findIndex((index) => (sum += chances[index]) >= top - 1e-12);
  return order.slice(0, count < 0 ? order.length : count + 1);
}

// A number in [0, 1) that depends on the seed and the position alone.
function uniform(seed, position) {
  let x = Math.imul(seed + 1, 0x9e3779b1) ^ Math.imul(position + 1, 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 16), 0x7feb352d);
  x = Math.imul(x ^ (x >>> 15), 0x846ca68b);
  return ((x ^ (x >>> 16)) >>> 0) / 2 ** 32;
}

// One of the tokens `among`, by a number in [0, 1).
function choose(chances, among, number) {
  let left = number * among.reduce((sum, index) => sum + chances[index], 0);
  return among.find((index) => (left -= chances[index]) < 0) ?? among[0];
}

// How far `now` is from `before`, in nats: the Kullback-Leibler divergence of both.
const divergence = (before, now) =>
  before.reduce((sum, p, i) => sum + (p > 0 ? p * Math.log(p / Math.max(now[i], 1e-30)) : 0), 0);
