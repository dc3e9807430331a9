// Attention weights as a page stores them, and the heads that hold them.

// Base64 of deflated bytes.
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// All high bytes, then all low bytes -> Uint16Array of steps.
async function unpack(text) {
  const planes = await inflate(text);
  const count = planes.length / 2;
  const steps = new Uint16Array(count);
  for (let i = 0; i < count; i++) steps[i] = (planes[i] << 8) | planes[count + i];
  return steps;
}

// The largest weights of each query, [heads, count, queries]: their keys and the roots of the weights, in bytes.
async function unpackTop(text, queries) {
  const planes = await inflate(text);
  const count = planes.length / 3;
  const keys = new Uint16Array(count);
  for (let i = 0; i < count; i++) keys[i] = ((planes[i] << 8) | planes[count + i]) + (i % queries ? keys[i - 1] : 0);
  return { keys, roots: planes.subarray(2 * count) };
}

// One head of a long text, with the largest weights of each query alone.
class TopHead extends AnyHead {
  constructor(map, index, { keys, roots }, tokens) {
    super(map, index, tokens);
    this.count = map.count;
    const size = this.queries.length * this.count;
    this.kept = keys.subarray(index * size, (index + 1) * size);
    this.roots = roots.subarray(index * size, (index + 1) * size);
    this.max = (this.roots.reduce((max, value) => Math.max(max, value), 0) / 255) ** 2 || 1;
  }

  row(t) {
    const row = new Array(this.keys.length).fill(0);
    this.visit([t, 0], [t + 1, row.length], (_, s, weight) => (row[s] = weight));
    return row;
  }

  at(t, s) {
    for (let k = 0, i = t; k < this.count; k++, i += this.queries.length) if (this.kept[i] === s) {
      return (this.roots[i] / 255) ** 2;
    }
    return 0;
  }

  // The weights that are kept.
  numbers() {
    const largest = this.queries.map(() => []);
    this.visit([0, 0], [this.queries.length, this.keys.length], (t, s, weight) => largest[t].push([s, tidy(weight)]));
    return { largest };
  }

  visit(from, to, act) {
    for (let k = 0; k < this.count; k++) {
      for (let t = from[0], i = k * this.queries.length + t; t < to[0]; t++, i++) {
        const s = this.kept[i];
        if (s >= from[1] && s < to[1]) act(t, s, (this.roots[i] / 255) ** 2);
      }
    }
  }
}

// While a view unpacks its heads, and where it cannot, it shows a text in place of its content.
function showStatus({ place, status, content }, text, busy = false) {
  place.setAttribute("aria-busy", busy);
  status.textContent = text;
  status.hidden = !text;
  content.hidden = Boolean(text);
}

const showUnpacking = (view) => showStatus(view, "Unpacking the attention weights …", true);
const showProblem = (view, { message }) => showStatus(view,
  `The attention weights could not be unpacked (${message}). Open this file in a browser from 2023 or later.`);

const unpackedMaps = new WeakMap(); // the data of a layer -> a promise of its heads

// The heads of one layer, unpacked once, whichever section asks.
function headsIn(map, { tokens, steps }) {
  if (!unpackedMaps.has(map)) {
    const heads = map.top
      ? unpackTop(map.top, tokens[map.queries].length)
        .then((top) => map.heads.map((_, index) => new TopHead(map, index, top, tokens)))
      : unpack(map.weights).then((values) => map.heads.map((_, index) => new Head(map, index, values, tokens, steps)));
    unpackedMaps.set(map, heads);
  }
  return unpackedMaps.get(map);
}

// The heads of a stack in the order of layers; one with all its weights stands in place of the same without.
async function unpackedHeads(section, stack) {
  const layers = await Promise.all(section.maps.filter((map) => map.stack === stack)
    .map((map) => headsIn(map, section)));
  const heads = new Map();
  for (const head of layers.flat().sort((a, b) => Boolean(b.count) - Boolean(a.count))) {
    heads.set(`${head.layer} ${head.head}`, head);
  }
  return [...heads.values()].sort((a, b) => a.layer - b.layer || a.head - b.head);
}
