// Attention weights: unpacking them, their colours, and pictures of them.

// Base64 of deflated byte planes (all high bytes, then all low bytes) -> Uint16Array of steps.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 2;
  const steps = new Uint16Array(count);
  for (let i = 0; i < count; i++) steps[i] = (planes[i] << 8) | planes[count + i];
  return steps;
}

// Two scales, from nothing to much: paper to ultramarine by day, night to gold in the dark.  In each, lightness
// alone goes steadily one way, so order survives any colour vision, and a grey print.
const SCALES = {
  light: ["#f7f5ef", "#d3e2e4", "#9fc6d3", "#64a2c0", "#3a77a8", "#28508c", "#1d2d66", "#140f3c"],
  dark: ["#16181f", "#1d2b52", "#34477a", "#55658a", "#7d8290", "#aaa184", "#d5c46f", "#ffe98f"],
};

function palette(dark) {
  const stops = SCALES[dark ? "dark" : "light"].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 256 }, (_, shade) => {
    const place = (shade / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, channel) => Math.round(value + (place - low) * (stops[low + 1][channel] - value)));
  });
}

const PALETTES = { light: palette(false), dark: palette(true) };
const colours = (dark) => PALETTES[dark ? "dark" : "light"];
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// How a weight becomes a shade in [0, 1]: against the head's largest, or its root (small weights show), or against 1.
const SHADES = {
  head: { label: "linear", hint: "From 0 to the largest weight of this head", top: (max) => max, shade: (w, max) => w / max },
  root: { label: "√", hint: "Square root, so that small weights show", top: (max) => max, shade: (w, max) => Math.sqrt(w / max) },
  one: { label: "0–1", hint: "The same scale for every head, 0 to 1", top: () => 1, shade: (w) => w },
};

function paintSteps(canvas, values, width, shade, dark) {
  canvas.width = width;
  canvas.height = values.length / width;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const table = colours(dark);
  for (let i = 0; i < values.length; i++) {
    const [r, g, b] = table[Math.round(shade(values[i]) * 255)];
    image.data.set([r, g, b, 255], i * 4);
  }
  context.putImageData(image, 0, 0);
}

// One head's weights; `at(t, s)` is in [0, 1].
class Head {
  constructor(map, index, values, tokens, steps) {
    this.stack = map.stack;
    this.layer = map.layer;
    this.head = map.heads[index];
    this.role = map.roles?.[index] ?? "";
    this.queries = tokens[map.queries];
    this.keys = tokens[map.keys];
    const size = this.queries.length * this.keys.length;
    this.values = values.subarray(index * size, (index + 1) * size);
    this.steps = steps;
    this.max = this.values.reduce((max, value) => Math.max(max, value), 0) / steps || 1;
  }

  at(t, s) {
    return this.values[t * this.keys.length + s] / this.steps;
  }

  row(t) {
    return Array.from(this.keys, (_, s) => this.at(t, s));
  }

  // One pixel a weight; whoever shows it scales it up.
  paint(canvas, shade, dark) {
    paintSteps(canvas, this.values, this.keys.length, (step) => SHADES[shade].shade(step / this.steps, this.max), dark);
  }

  // At most `side` pixels across, each the largest weight it stands for, in root scale: thin diagonals and single
  // bright cells must not vanish in a small picture.
  thumbnail(canvas, side, dark) {
    const [rows, columns] = [this.queries.length, this.keys.length];
    const each = Math.ceil(Math.max(rows, columns) / side);
    const width = Math.ceil(columns / each);
    const small = new this.values.constructor(width * Math.ceil(rows / each));
    for (let t = 0, i = 0; t < rows; t++) {
      const start = Math.floor(t / each) * width;
      for (let s = 0; s < columns; s++, i++) {
        const place = start + Math.floor(s / each);
        if (this.values[i] > small[place]) small[place] = this.values[i];
      }
    }
    paintSteps(canvas, small, width, (step) => SHADES.root.shade(step / this.steps, this.max), dark);
  }
}

const argmax = (row) => row.reduce((best, value, index) => (value > row[best] ? index : best), 0);

// Tokens as they are read: spaces and line ends that would not show get a sign.
function shown(token) {
  if (token === "") return "∅";
  return token.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (gap) => "·".repeat(gap.length));
}

const three = (weight) => (weight > 0 && weight < 0.0005 ? "<0.001" : weight.toFixed(3));

// A picture of one head for a document: title, both axes, weights, scale.
function picture(head, title, shade, dark) {
  const cell = clamp(Math.floor(7000 / Math.max(head.keys.length, head.queries.length)), 1, 28);
  const font = Math.max(10, Math.min(20, cell - 6));
  const every = Math.ceil((font + 2) / cell);
  const canvas = el("canvas");
  const context = canvas.getContext("2d");
  const type = (weight, size) => (context.font = `${weight} ${size}px system-ui, sans-serif`);
  type(400, font);
  const cut = (text) => ([...text].length > 24 ? [...text].slice(0, 23).join("") + "…" : text);
  const width = (tokens) => Math.max(...tokens.map((token) => context.measureText(cut(shown(token))).width));
  const left = width(head.queries) + 40;
  const upright = width(head.keys) <= cell * every; // as in the page: single letters are not turned
  const top = (upright ? font : width(head.keys)) + 90;
  canvas.width = Math.max(left + head.keys.length * cell + 30, 460);
  canvas.height = top + head.queries.length * cell + 80;

  const style = getComputedStyle(root);
  const ink = style.getPropertyValue(dark ? "--ink-dark" : "--ink-light");
  context.fillStyle = style.getPropertyValue(dark ? "--paper-dark" : "--paper-light");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = ink;
  context.textBaseline = "middle";
  type(600, 22);
  context.fillText(title, 24, 36);

  const heat = el("canvas");
  head.paint(heat, shade, dark);
  context.imageSmoothingEnabled = false;
  context.drawImage(heat, left, top, head.keys.length * cell, head.queries.length * cell);

  type(400, font);
  context.textAlign = "right";
  head.queries.forEach((token, t) => t % every || context.fillText(cut(shown(token)), left - 8, top + (t + 0.5) * cell));
  context.textAlign = upright ? "center" : "left";
  head.keys.forEach((token, s) => {
    if (s % every) return;
    context.save();
    context.translate(left + (s + 0.5) * cell, top - 8);
    if (!upright) context.rotate(-Math.PI / 2);
    context.fillText(cut(shown(token)), 0, 0);
    context.restore();
  });

  const bar = canvas.height - 44;
  colours(dark).forEach((colour, index) => {
    context.fillStyle = css(colour);
    context.fillRect(left + index, bar, 1.5, 14);
  });
  context.fillStyle = ink;
  type(400, 14);
  context.textAlign = "right";
  context.fillText("0", left - 8, bar + 7);
  context.textAlign = "left";
  context.fillText(`${SHADES[shade].top(head.max).toFixed(3)}${shade === "root" ? " (square root)" : ""}`, left + 266, bar + 7);
  return canvas;
}
