// Attention weights: their colours, heads that hold them, and thumbnails of all heads.

// Two scales, from nothing to much: paper to ultramarine by day, night to gold in the dark.  In each, lightness
// alone goes steadily one way, so order survives any colour vision, and a grey print.
const SCALES = {
  light: ["#f7f5ef", "#d3e2e4", "#9fc6d3", "#64a2c0", "#3a77a8", "#28508c", "#1d2d66", "#140f3c"],
  dark: ["#16181f", "#1d2b52", "#34477a", "#55658a", "#7d8290", "#aaa184", "#d5c46f", "#ffe98f"],
};

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// The 256 colours of a scale, and the same as 32-bit pixels of this machine.
function palette(scale) {
  const stops = scale.map(channels);
  const colours = Array.from({ length: 256 }, (_, shade) => {
    const place = (shade / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, channel) => Math.round(value + (place - low) * (stops[low + 1][channel] - value)));
  });
  return { colours, pixels: new Uint32Array(new Uint8Array(colours.flatMap((one) => [...one, 255])).buffer) };
}

const PALETTES = new Map([[false, palette(SCALES.light)], [true, palette(SCALES.dark)]]); // by whether it is dark

// How a weight becomes a shade in [0, 1]: against the head's largest, or its root (small weights show), or against 1.
const SHADES = {
  head: { label: "linear", hint: "From 0 to the largest weight of this head", top: (max) => max,
    shade: (w, max) => w / max },
  root: { label: "√", hint: "Square root, so that small weights show", top: (max) => max,
    shade: (w, max) => Math.sqrt(w / max) },
  one: { label: "0–1", hint: "The same scale for every head, 0 to 1", top: () => 1, shade: (w) => w },
};

// Weights in [0, 1], one pixel each, or `zoom` by `zoom` pixels.
function paintWeights(canvas, { values, width }, shade, zoom = 1) {
  const height = values.length / width;
  [canvas.width, canvas.height] = [width * zoom, height * zoom];
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const out = new Uint32Array(image.data.buffer);
  const table = PALETTES.get(isDark()).pixels;
  for (let y = 0, i = 0; y < canvas.height; y++) {
    const row = Math.floor(y / zoom) * width;
    for (let x = 0; x < canvas.width; x++) out[i++] =
      table[Math.round(shade(values[row + (zoom === 1 ? x : Math.floor(x / zoom))]) * 255)];
  }
  context.putImageData(image, 0, 0);
}

const tidy = (weight) => Number(weight.toFixed(6));

// What all heads have in common; `visit(from, to, act)` calls `act(t, s, weight)` with their weights but zeros.
class AnyHead {
  constructor(map, index, tokens) {
    this.stack = map.stack;
    this.layer = map.layer;
    this.head = map.heads[index];
    this.role = map.roles?.[index] ?? "";
    this.measures = Object.entries(map.measures ?? {}).map(([name, values]) => [name, values[index]]);
    this.queries = tokens[map.queries];
    this.keys = tokens[map.keys];
  }

  row(t) {
    const row = new Array(this.keys.length).fill(0);
    this.visit([t, 0], [t + 1, row.length], (_, s, weight) => (row[s] = weight));
    return row;
  }

  // The weights of some rows and columns, each pixel the largest of `each` by `each`: thin diagonals and single bright
  // cells must not vanish in a small picture.
  pooled(each = 1, from = [0, 0], to = [this.queries.length, this.keys.length]) {
    const width = Math.ceil((to[1] - from[1]) / each);
    const values = new Float32Array(width * Math.ceil((to[0] - from[0]) / each));
    this.visit(from, to, (t, s, weight) => {
      const place = Math.floor((t - from[0]) / each) * width + Math.floor((s - from[1]) / each);
      if (weight > values[place]) values[place] = weight;
    });
    return { values, width };
  }

  shader(shade) {
    return (weight) => SHADES[shade].shade(weight, this.max);
  }

  // A whole number of pixels to a weight, or of weights to a pixel, at most `side` pixels across, in root scale.
  thumbnail(canvas, side) {
    const longest = Math.max(this.queries.length, this.keys.length);
    const zoom = Math.max(1, Math.floor((1.12 * side) / longest));
    paintWeights(canvas, this.pooled(Math.ceil(longest / side)), this.shader("root"), zoom);
  }
}

class Head extends AnyHead {
  constructor(map, index, values, tokens, steps) {
    super(map, index, tokens);
    const size = this.queries.length * this.keys.length;
    this.values = values.subarray(index * size, (index + 1) * size);
    this.steps = steps;
    this.max = this.values.reduce((max, value) => Math.max(max, value), 0) / steps || 1;
  }

  numbers() {
    return { weights: this.queries.map((_, t) => this.row(t).map(tidy)) };
  }

  visit(from, to, act) {
    for (let t = from[0]; t < to[0]; t++) {
      const row = t * this.keys.length;
      for (let s = from[1]; s < to[1]; s++) {
        if (this.values[row + s]) act(t, s, this.values[row + s] / this.steps);
      }
    }
  }
}

const argmax = (row) => row.reduce((best, value, index) => (value > row[best] ? index : best), 0);

const SIDES = [36, 26]; // pixels of a thumbnail; of many layers, and on a narrow page, the second
const MANY_LAYERS = 16; // layers

class Gallery {
  constructor(open, roles = []) {
    this.open = open;
    this.roles = roles;
    this.node = group("gallery", "Every layer and head");
    // The tab key reaches only the open head; arrow keys move over the grid and open the head they reach.
    onarrows(this.node, () => this.thumbs.map(({ thumb }) => thumb),
      (from, across, down) => (across ? from + across : this.nextRow(from, down)),
      (to) => this.open(this.thumbs[to].head));
  }

  thumb(head, label = "") {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const name = `layer ${head.layer}, head ${head.head}${head.role ? `: ${head.role}` : ""}${label}`;
    const role = this.roles.length ? `role ${roleClass(this.roles, head.role)}` : null;
    const one = { head, canvas };
    one.thumb = button(canvas, name, () => this.open(one.head), { class: role, "aria-label": name });
    this.thumbs.push(one);
    return one.thumb;
  }

  show(heads) {
    const columns = [...new Set(heads.map((head) => head.head))].sort((a, b) => a - b);
    this.begin(columns.length, new Set(heads.map((head) => head.layer)).size > MANY_LAYERS);
    this.end(el("span", { class: "corner" }, "head →", el("br"), "layer ↓"),
      columns.map((name) => el("span", {}, name)),
      heads.map((head, index) => [
        head.layer !== heads[index - 1]?.layer && el("span", { class: "layer" }, head.layer),
        fill(this.thumb(head), { style: { gridColumn: columns.indexOf(head.head) + 2 } })]));
  }

  begin(columns, many = false) {
    this.columns = columns;
    this.side = SIDES[Number(many || innerWidth < 520)];
    this.thumbs = [];
    this.node.classList.toggle("grouped", !columns);
    this.node.style.setProperty("--side", `${this.side}px`);
    this.node.style.setProperty("--columns", columns);
  }

  end(...cells) {
    refill(this.node, cells);
    this.paint();
  }

  update(heads) {
    this.thumbs.forEach((one) => {
      one.head = heads.find((head) => head.layer === one.head.layer && head.head === one.head.head) ?? one.head;
    });
    this.paint();
  }

  // Pixels of the canvas are pixels of the screen, so that nothing is blurred.
  paint() {
    const density = Math.max(1, Math.round(devicePixelRatio));
    for (const { head, canvas } of this.thumbs) {
      head.thumbnail(canvas, this.side * density);
      canvas.style.width = `${canvas.width / density}px`;
      canvas.style.height = `${canvas.height / density}px`;
    }
  }

  mark(head) {
    for (const one of this.thumbs) {
      one.thumb.setAttribute("aria-pressed", one.head === head);
      one.thumb.tabIndex = one.head === head ? 0 : -1;
    }
  }

  // Of the thumbnails in the next row, the place of the one nearest in line.
  nextRow(from, down) {
    const boxes = this.thumbs.map(({ thumb }) => thumb.getBoundingClientRect());
    const below = ({ top }) => (top - boxes[from].top) * down;
    const aside = ({ left }) => Math.abs(left - boxes[from].left);
    const row = Math.min(...boxes.map(below).filter((distance) => distance > 4));
    const line = boxes.filter((box) => below(box) > 4 && below(box) < row + 4);
    return boxes.indexOf(line.sort((a, b) => aside(a) - aside(b))[0]);
  }
}
