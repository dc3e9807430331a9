// The attention of a trace: heads are unpacked when their stack is shown, may have roles, and can be drawn as lines.

// Base64 of deflated bytes.
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// All high bytes, then all low bytes -> 16-bit numbers.
function wholeNumbers(planes, count) {
  const numbers = new Uint16Array(count);
  for (let i = 0; i < count; i++) numbers[i] = (planes[i] << 8) | planes[count + i];
  return numbers;
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

const unpackedMaps = new WeakMap(); // the data of a layer -> a promise of its heads, whichever section asks

async function unpackLayer(map, { tokens, steps }) {
  const planes = await inflate(map.top ?? map.weights);
  if (!map.top) {
    const values = wholeNumbers(planes, planes.length / 2);
    return map.heads.map((_, index) => new Head(map, index, values, tokens, steps));
  }
  // The largest weights of each query, [heads, count, queries]: their keys and the roots of the weights, in bytes.
  const [count, queries] = [planes.length / 3, tokens[map.queries].length];
  const keys = wholeNumbers(planes, count);
  for (let i = 0; i < count; i++) if (i % queries) keys[i] += keys[i - 1];
  const top = { keys, roots: planes.subarray(2 * count) };
  return map.heads.map((_, index) => new TopHead(map, index, top, tokens));
}

// The heads of a stack in the order of layers; one with all its weights stands in place of the same without.
async function unpackedHeads(section, stack) {
  const maps = section.maps.filter((map) => map.stack === stack);
  for (const map of maps) if (!unpackedMaps.has(map)) unpackedMaps.set(map, unpackLayer(map, section));
  const layers = await Promise.all(maps.map((map) => unpackedMaps.get(map)));
  const heads = new Map();
  for (const head of layers.flat().sort((a, b) => Boolean(b.count) - Boolean(a.count))) {
    heads.set(`${head.layer} ${head.head}`, head);
  }
  return [...heads.values()].sort((a, b) => a.layer - b.layer || a.head - b.head);
}

// The heads of a stack in each section, for a view that waits for them; null where they cannot be unpacked, or the view
// has asked for others in the meantime.
async function headsFor(view, stack, sections) {
  const asked = (view.asked = Symbol(stack));
  showStatus(view, "Unpacking the attention weights …", true);
  const [all, problem] = await Promise.all(sections.map((section) => unpackedHeads(section, stack)))
    .then((heads) => [heads, ""], ({ message }) => [null,
      `The attention weights could not be unpacked (${message}). Open this file in a browser from 2023 or later.`]);
  if (view.asked !== asked) return null;
  showStatus(view, problem);
  return all;
}

const LINE_ROW = 18; // pixels from token to token
const LEAST_LINE = 0.03; // weights below are not drawn
const LINES_EACH = 6; // of one query

// One head as lines from each token to those it reads: queries on the left, keys on the right.
class Lines {
  constructor(choose) {
    this.choose = choose;
    this.node = el("div", { class: "scroll lines", tabindex: 0, role: "application" });
  }

  show(plot) {
    const { head, from, to, tokens: [queries, keys] } = plot;
    this.node.setAttribute("aria-label",
      `${nameOf(head)} as lines; the arrow keys up and down choose the token that reads`);
    const [left, gap, side] = [170, 260, 10];
    const longest = Math.max(queries.length, keys.length);
    const word = (token, i, attributes, press) =>
      svg("text", { y: side + (i + 0.7) * LINE_ROW, onclick: press, onpointerenter: press, ...attributes },
        shortened(shown(token), 20));
    this.rows = queries.map((_, i) => {
      const t = from[0] + i;
      const best = head.row(t).map((weight, s) => [s, weight]).filter(([, weight]) => weight >= LEAST_LINE);
      const drawn = best.sort((a, b) => b[1] - a[1]).slice(0, LINES_EACH).filter(([s]) => s >= from[1] && s < to[1]);
      return svg("g", {}, drawn.map(([s, weight]) => {
        const [y, z] = [i, s - from[1]].map((row) => side + (row + 0.5) * LINE_ROW);
        return svg("path", { d: `M${left},${y}C${left + gap / 2},${y} ${left + gap / 2},${z} ${left + gap},${z}`,
          "stroke-opacity": weight.toFixed(3), "stroke-width": (0.7 + 3 * weight).toFixed(2) });
      }));
    });
    this.queries = queries.map((token, i) => word(token, i, { x: left - 8, "text-anchor": "end" },
      () => this.choose(from[0] + i, argmax(head.row(from[0] + i)))));
    this.keys = keys.map((token, i) => word(token, i, { x: left + gap + 8 }, null));
    Object.assign(this, { head, from });
    const width = 2 * left + gap;
    const height = longest * LINE_ROW + 2 * side;
    this.picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
      this.rows, this.queries, this.keys);
    this.node.replaceChildren(this.picture);
  }

  // The lines of one query stand out, and the keys that it reads.
  mark(t, s) {
    for (const [nodes, at] of [[this.rows, t - this.from[0]], [this.queries, t - this.from[0]],
      [this.keys, s - this.from[1]]]) nodes.forEach((one, i) => one.classList.toggle("on", i === at));
  }

  drawing() {
    const [ink, accent, mark] = ["--ink", "--accent", "--mark"].map(colourOf);
    const copy = inked(this.picture, { path: { fill: "none", stroke: accent }, ".on path": { stroke: mark },
      text: { fill: ink } });
    const [width, height] = ["width", "height"].map((name) => Number(copy.getAttribute(name)));
    return sheet(width + 40, height + 70, nameOf(this.head),
      svg("g", { transform: "translate(20 50)", "font-family": "monospace", "font-size": 12 }, ...copy.childNodes));
  }
}

// Heads of one role have one colour, in the order in which the section names the roles.
const ROLE_COLOURS = 15;
const roleClass = (roles, role) => (role ? `role-${roles.indexOf(role) % ROLE_COLOURS}` : "role-none");

// Thumbnails in groups: [title, class of its colour, heads, function(head) -> what stands under a head].
function showGroups(gallery, groups) {
  gallery.begin(0);
  gallery.end(groups.map(([title, colour, heads, under]) => {
    const ones = heads.map((head) =>
      el("div", {}, gallery.thumb(head, `, ${under(head)}`), el("span", {}, under(head))));
    return div("group", el("h4", {}, el("i", { class: colour }), title, el("sub", {}, heads.length)), div("row", ones));
  }));
}

class TraceView extends AttentionView {
  constructor(section, place) {
    super({
      heads: {},
      stacks: [...new Set(section.maps.map((map) => map.stack))],
      shade: section.maps.some((map) => map.top) ? "root" : "head", // the small weights of a long text show
      roles: [...new Set(section.maps.flatMap((map) => map.roles ?? []))].filter((role) => role),
      note: ` Weights are kept in steps of 1/${section.steps}, those of long texts to within 0.004.`,
    }, place);
    this.section = section;
    const { ArrowDown, ArrowUp, "[": before, "]": after } = this.keys;
    onkeys(this.lines.node, { ArrowDown, ArrowUp, "[": before, "]": after });
    this.pick(this.stacks[0]);
  }

  build() {
    const view = super.build();
    this.order = "layer";
    this.role = null; // whose heads alone are shown
    this.status = statusLine();
    this.content.before(this.status);
    this.content.hidden = true;
    this.as = "map";
    this.lines = new Lines((t, s) => this.choose(t, s, false));
    this.lines.node.hidden = true;
    this.plot.node.after(this.lines.node);
    const ways = [["map", "Map", "Queries by keys"], ["lines", "Lines", "From each token to those it reads"]];
    this.controls.prepend(choice("Drawn as", ways, this.as, (as) => this.draw(as)));
    if (!this.roles.length) return view;
    const orders = [["layer", "By layer", "Layers down, heads across"],
      ["role", "By role", "Heads of one role together"]];
    view.firstChild.append(choice("Order of the heads", orders, this.order, (order) => {
      this.order = order;
      this.arrange();
    }), this.legend());
    return view;
  }

  draw(as) {
    this.as = as;
    this.plot.node.hidden = as !== "map";
    this.lines.node.hidden = as !== "lines";
    this.plot.mark(...this.chosen, false);
    this.showLines();
  }

  // Lines are drawn anew for another head or other rows, else only marked.
  showLines() {
    if (this.as !== "lines") return;
    const { head, from } = this.plot;
    if (this.lines.head !== head || this.lines.from !== from) this.lines.show(this.plot);
    this.lines.mark(...this.chosen);
  }

  choose(t, s, scroll) {
    super.choose(t, s, scroll);
    this.showLines();
  }

  file() {
    return this.as === "lines" ? `${super.file()}-lines` : super.file();
  }

  drawing() {
    return this.as === "lines" ? this.lines.drawing() : super.drawing();
  }

  // The roles with their colours; choosing one shows its heads alone, and opens the first of them.
  legend() {
    const entries = [...this.roles, ""].map((role) =>
      [role, [el("i", { class: roleClass(this.roles, role) }), role || NO_ROLE]]);
    const row = choice("Roles", entries, this.role, (role) => {
      this.role = this.role === role ? null : role;
      row.mark(this.role);
      this.dim();
      const first = this.heads[this.stack]?.find((head) => head.role === this.role);
      if (first) this.open(first);
    });
    row.className = "roles";
    return row;
  }

  // The thumbnails in the order of layers, or in groups of one role.
  arrange() {
    if (this.order === "layer") super.arrange();
    else {
      const of = (role) => this.heads[this.stack].filter((head) => head.role === role);
      const under = (head) => `${head.layer}.${head.head}`;
      const groups = [...this.roles, ""].map((role) => [role || NO_ROLE, roleClass(this.roles, role), of(role), under]);
      showGroups(this.gallery, groups.filter(([, , members]) => members.length));
      this.content.classList.remove("above");
    }
    this.dim();
    if (this.head) this.gallery.mark(this.head);
  }

  dim() {
    for (const { head, thumb } of this.gallery.thumbs) {
      thumb.classList.toggle("dim", this.role !== null && head.role !== this.role);
    }
  }

  async pick(stack) {
    this.stack = stack;
    const heads = await headsFor(this, stack, [this.section]);
    if (!heads) return;
    [this.heads[stack]] = heads;
    super.pick(stack);
  }
}

const NO_ROLE = "no role";

mounts.attention = (section, place) => {
  if (section.maps.length) new TraceView(section, place);
  else place.append(quiet("No maps."));
};
