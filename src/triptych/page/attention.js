// The section of attention: every head as a thumbnail, one head enlarged with its tokens, one row as a list.

const UNPACKING = "Unpacking the attention weights …";
const notUnpacked = (error) =>
  `The attention weights could not be unpacked (${error.message}). Open this file in a browser from 2023 or later.`;

const unpackedMaps = new WeakMap(); // the data of a layer -> a promise of its heads

// The heads of one layer, unpacked once, whichever section asks.
function headsIn(map, { tokens, steps }) {
  if (!unpackedMaps.has(map)) {
    const heads = map.top
      ? unpackTop(map.top, tokens[map.queries].length).then((top) => map.heads.map((_, index) => new TopHead(map, index, top, tokens)))
      : unpack(map.weights).then((values) => map.heads.map((_, index) => new Head(map, index, values, tokens, steps)));
    unpackedMaps.set(map, heads);
  }
  return unpackedMaps.get(map);
}

// The heads of a stack in the order of layers; one with all its weights stands in place of the same without.
async function unpackedHeads(section, stack) {
  const layers = await Promise.all(section.maps.filter((map) => map.stack === stack).map((map) => headsIn(map, section)));
  const heads = new Map();
  for (const head of layers.flat().sort((a, b) => Boolean(b.count) - Boolean(a.count))) heads.set(`${head.layer} ${head.head}`, head);
  return [...heads.values()].sort((a, b) => a.layer - b.layer || a.head - b.head);
}

// The keys that one query reads, largest weight first.
class Reading {
  constructor() {
    this.node = el("aside", { class: "reading", "aria-label": "The chosen row" });
  }

  // `choose` is called with the key that is pressed.
  show(head, t, s, choose) {
    const row = head.row(t);
    const order = row.map((_, index) => index).sort((a, b) => row[b] - row[a]).slice(0, 8);
    const sum = row.reduce((total, weight) => total + weight, 0);
    const items = order.filter((index) => row[index] > 0).map((index) => {
      const bar = el("i");
      bar.style.width = `${(row[index] / row[order[0]]) * 100}%`;
      return el("li", { class: index === s ? "on" : null, onclick: () => choose?.(index) }, bdi(head.keys[index]), el("sub", {}, String(index)), el("b", {}, three(row[index])), bar);
    });
    this.node.replaceChildren(
      el("h4", {}, bdi(head.queries[t]), el("sub", {}, String(t)), " reads"),
      el("ol", {}, ...items),
      el("p", { class: "quiet" }, head.count ? `The largest weights of this row, of at least 0.02 and at most ${head.count}; they sum to ${sum.toFixed(3)}.` : `This row sums to ${sum.toFixed(3)} over ${row.length} keys.`),
    );
  }
}

class AttentionView {
  constructor(section, place) {
    this.section = section;
    this.place = place;
    this.shade = section.maps?.some((map) => map.top) ? "root" : "head"; // the small weights of a long text show
    this.as = "map";
    this.order = "layer";
    this.cell = null;
    this.heads = section.heads ?? {}; // stack -> its heads; those of a trace are unpacked when first shown
    this.roles = [...new Set((section.maps ?? []).flatMap((map) => map.roles ?? []))].filter((role) => role);
    this.gallery = new Gallery((head) => this.open(head), this.roles);
    this.plot = new Plot((t, s) => this.choose(t, s, false));
    this.lines = new Lines((t, s) => this.choose(t, s, false));
    this.reading = new Reading();
    this.stacks = section.heads ? Object.keys(section.heads) : [...new Set(section.maps.map((map) => map.stack))];
    place.append(this.build());
    this.keyboard();
    repaints.push(() => this.repaint());
    onwidth(this.plot.ruler, () => this.resize());
    this.pick(this.stacks[0]);
  }

  build() {
    this.title = el("h3");
    this.numbers = el("p", { class: "numbers" });
    this.readout = el("output", { class: "readout", "aria-live": "polite" });
    this.bar = el("i", { class: "bar" });
    this.top = el("span");
    const stacks = this.stacks.map((stack) => [stack, STACKS[stack].label, STACKS[stack].hint]);
    const shades = Object.entries(SHADES).map(([key, { label, hint }]) => [key, label, hint]);
    const kept = this.section.heads ? "" : ` Weights are kept in steps of 1/${this.section.steps}, those of long texts to within 0.004.`;
    this.lines.node.hidden = true;
    const controls = el("div", { class: "controls" },
      choice("Drawn as", [["map", "Map", "Queries by keys"], ["lines", "Lines", "From each token to those it reads"]], this.as, (as) => this.draw(as)),
      choice("Colour scale", shades, this.shade, (shade) => { this.shade = shade; this.repaint(); }),
      el("div", { class: "choice", role: "group", "aria-label": "Size" },
        button("−", "Smaller cells", () => this.zoom(Math.min(this.plot.cell - 1, Math.round(this.plot.cell / 1.3)))),
        button("Fit", "As large as fits the page", () => this.zoom(this.plot.fit())),
        button("+", "Larger cells", () => this.zoom(Math.max(this.plot.cell + 1, Math.round(this.plot.cell * 1.3))))),
      exportButtons(() => this.file(), () => (this.as === "lines" ? this.lines.drawing(this.head) : this.plot.drawing()), () => this.values()));
    const large = el("div", { class: "large" }, this.title, this.numbers, this.readout, controls, this.plot.ruler,
      el("div", { class: "map" }, this.plot.node, this.lines.node, el("div", { class: "beside" }, this.reading.node, this.plot.overview)),
      el("div", { class: "scale" }, el("span", {}, "0"), this.bar, this.top),
      el("p", { class: "quiet" }, `Point, tap or use the arrow keys to read a weight; [ and ] change the head.${kept}`));
    this.status = el("p", { class: "quiet", role: "status" });
    this.content = el("div", { class: "heads-and-map", hidden: "" }, this.gallery.node, large);
    const chooser = stacks.length > 1 ? [choice("Stack", stacks, stacks[0][0], (stack) => this.pick(stack))] : [];
    const orders = [["layer", "By layer", "Layers down, heads across"], ["role", "By role", "Heads of one role together"]];
    const legend = this.roles.length ? [choice("Order of the heads", orders, this.order, (order) => this.arrange(order)), this.legend()] : [];
    return el("div", {}, el("div", { class: "controls" }, ...chooser, ...legend), this.status, this.content);
  }

  // The roles with their colours; choosing one shows its heads alone, and opens the first of them.
  legend() {
    this.role = null;
    const buttons = [...this.roles, ""].map((role) => {
      const one = el("button", { type: "button", "aria-pressed": "false", onclick: () => pick(role) },
        el("i", { class: roleClass(this.roles, role) }), role || "no role");
      one.dataset.role = role;
      return one;
    });
    const pick = (role) => {
      this.role = this.role === role ? null : role;
      buttons.forEach((one) => one.setAttribute("aria-pressed", one.dataset.role === this.role));
      this.dim();
      const first = this.heads[this.stack]?.find((head) => (head.role ?? "") === this.role);
      if (this.role !== null && first) this.open(first);
    };
    return el("div", { class: "roles", role: "group", "aria-label": "Roles" }, ...buttons);
  }

  // The thumbnails in the order of layers, or in groups of one role.
  arrange(order) {
    this.order = order;
    const heads = this.heads[this.stack];
    const grouped = order === "role" && this.roles.length;
    if (grouped) {
      const groups = [...this.roles, ""].map((role) => [role || "no role", roleClass(this.roles, role), heads.filter((head) => head.role === role), (head) => `${head.layer}.${head.head}`]);
      this.gallery.showGroups(groups.filter(([, , members]) => members.length));
    } else this.gallery.show(heads);
    // The thumbnails stand above the map instead of beside it where they are wide, or few beside a large map.
    const few = heads.length <= 3 * this.gallery.columns && heads[0].keys.length > 24;
    this.content.classList.toggle("above", !grouped && (this.gallery.columns > 12 || few));
    this.dim();
    if (this.head) this.gallery.mark(this.head);
  }

  // The enlarged head as a map or as lines.
  draw(as) {
    this.as = as;
    this.plot.node.hidden = as !== "map";
    this.lines.node.hidden = as !== "lines";
    this.linesOf = null;
    this.plot.mark(...this.chosen, false);
    this.showLines();
  }

  // Lines are drawn anew for another head or other rows, else only marked.
  showLines() {
    if (this.as !== "lines") return;
    const { head, from } = this.plot;
    if (this.linesOf?.[0] === head && this.linesOf[1] === from) return this.lines.mark(...this.chosen);
    this.linesOf = [head, from];
    this.lines.show(this.plot, this.chosen);
  }

  dim() {
    for (const { head, thumb } of this.gallery.thumbs) {
      thumb.classList.toggle("dim", this.role !== null && this.role !== undefined && (head.role ?? "") !== this.role);
    }
  }

  // Unpacking is asynchronous: until `busy` is false the section shows `text` in place of the heads and the map.
  show(text, busy) {
    this.place.setAttribute("aria-busy", busy);
    this.status.textContent = text;
    this.status.hidden = !text;
    this.content.hidden = Boolean(text);
  }

  // The same heads on another text, or changed: what was chosen stays chosen where it can.
  update(heads) {
    const sizes = (head) => `${head.queries.length} ${head.keys.length}`;
    const before = this.head;
    this.heads = heads;
    this.gallery.update(heads[this.stack]);
    const head = heads[this.stack].find((one) => one.layer === before.layer && one.head === before.head);
    if (sizes(head) !== sizes(before)) this.chosen = null;
    this.open(head);
  }

  async pick(stack) {
    this.stack = stack;
    if (!this.heads[stack]) {
      this.show(UNPACKING, true);
      try {
        this.heads[stack] = await unpackedHeads(this.section, stack);
      } catch (error) {
        if (this.stack === stack) this.show(notUnpacked(error), false);
        return;
      }
    }
    if (this.stack !== stack) return; // another stack was picked in the meantime
    this.show("", false);
    this.head = null;
    this.arrange(this.order);
    this.chosen = null;
    this.open(this.heads[stack][0]);
  }

  open(head) {
    this.head = head;
    this.gallery.mark(head);
    this.title.textContent = nameOf(head) + (head.role ? ` · ${head.role}` : "");
    this.numbers.replaceChildren(...head.measures.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, readable(Number(value.toPrecision(3)))))));
    this.plot.show(head, this.shade, this.cell, this.chosen);
    this.showScale();
    const row = this.plot.lastInView();
    this.choose(...(this.chosen ?? [row, argmax(head.row(row))]), false);
  }

  choose(t, s, scroll) {
    const { head } = this;
    this.chosen = [clamp(t, 0, head.queries.length - 1), clamp(s, 0, head.keys.length - 1)];
    const [row, column] = this.chosen;
    this.plot.mark(row, column, scroll);
    this.reading.show(head, row, column, (key) => this.choose(row, key, true));
    this.showLines();
    this.readout.replaceChildren(bdi(head.queries[row]), el("span", {}, " → "), bdi(head.keys[column]), " ", el("b", {}, three(head.at(row, column))));
  }

  showScale() {
    const stops = colours(isDark()).filter((_, index) => index % 15 === 0).map(css);
    this.bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const { label, top } = SHADES[this.shade];
    const marked = this.stack === "cross" ? " · ○ strongest source of each output" : "";
    this.top.textContent = `${top(this.head.max).toFixed(3)} · ${label}${marked}`;
  }

  repaint() {
    if (!this.head) return;
    this.gallery.paint();
    this.plot.paint(this.shade);
    this.showScale();
  }

  zoom(cell) {
    this.cell = clamp(cell, 1, 48);
    this.resize();
  }

  resize() {
    if (!this.head) return;
    this.plot.show(this.head, this.shade, this.cell, this.chosen);
    this.plot.mark(...this.chosen, false);
  }

  keyboard() {
    const step = (down, right) => () => this.choose(this.chosen[0] + down, this.chosen[1] + right, true);
    const turn = (by) => () => {
      const heads = this.heads[this.stack];
      this.open(heads.at((heads.indexOf(this.head) + by) % heads.length));
    };
    const [down, up] = [step(1, 0), step(-1, 0)];
    onkeys(this.lines.node, { ArrowDown: down, ArrowUp: up, "[": turn(-1), "]": turn(1) });
    onkeys(this.plot.heat, {
      ArrowUp: step(-1, 0), ArrowDown: step(1, 0), ArrowLeft: step(0, -1), ArrowRight: step(0, 1),
      Home: step(0, -Infinity), End: step(0, Infinity), PageUp: step(-10, 0), PageDown: step(10, 0),
      "[": turn(-1), "]": turn(1),
    });
  }

  file() {
    return fileName(this.stack, "layer", this.head.layer, "head", this.head.head, ...(this.as === "lines" ? ["lines"] : []));
  }

  // All weights of the head; of a long text those that are kept.
  values() {
    const { stack, layer, head, role, queries, keys, count } = this.head;
    const measures = Object.fromEntries(this.head.measures);
    const tidy = (weight) => Number(weight.toFixed(6));
    if (!count) return { stack, layer, head, role, measures, queries, keys, weights: queries.map((_, t) => this.head.row(t).map(tidy)) };
    const largest = queries.map(() => []);
    this.head.visit([0, 0], [queries.length, keys.length], (t, s, weight) => largest[t].push([s, tidy(weight)]));
    return { stack, layer, head, role, measures, queries, keys, largest };
  }
}

mounts.attention = (section, place) => {
  if (section.maps.length) new AttentionView(section, place);
  else place.append(el("p", { class: "quiet" }, "No maps."));
};
