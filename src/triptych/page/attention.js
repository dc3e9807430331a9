// Attention weights: every head as a thumbnail, one head enlarged with its tokens, one row as a list.

const STACKS = {
  encoder: { label: "Encoder", query: "query", key: "key", hint: "Each token of the source reads the source" },
  decoder: { label: "Decoder", query: "query", key: "key", hint: "Each token reads itself and those before it" },
  cross: { label: "Alignment", query: "output", key: "source", hint: "Cross-attention: each output token reads the source" },
};
const LEGIBLE = 13; // a cell this wide, in pixels, still carries a readable token on each axis

const nameOf = (head) =>
  head.stack === "cross"
    ? `Alignment · cross-attention layer ${head.layer} · head ${head.head}`
    : `${STACKS[head.stack].label} · layer ${head.layer} · head ${head.head}`;

// Heads of one role have one colour, in the order in which the section names the roles.
const ROLE_COLOURS = 15;
const roleClass = (roles, role) => (role ? `role-${roles.indexOf(role) % ROLE_COLOURS}` : "role-none");

const bdi = (token) => el("bdi", { class: "token", title: token }, shown(token));

// Thumbnails of all heads: layers down, heads across.
class Gallery {
  constructor(open, roles) {
    this.open = open;
    this.roles = roles;
    this.node = el("div", { class: "gallery", role: "group", "aria-label": "Every layer and head" });
    this.node.addEventListener("keydown", (event) => this.arrow(event));
  }

  show(heads) {
    const columns = [...new Set(heads.map((head) => head.head))].sort((a, b) => a - b);
    this.columns = columns.length;
    this.node.style.setProperty("--columns", columns.length);
    this.node.replaceChildren(el("span", { class: "corner" }, "layer ╲ head"), ...columns.map((name) => el("span", {}, String(name))));
    this.thumbs = heads.map((head, index) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const label = `layer ${head.layer}, head ${head.head}${head.role ? `: ${head.role}` : ""}`;
      const role = this.roles.length ? `role ${roleClass(this.roles, head.role)}` : null;
      const thumb = el("button", { type: "button", class: role, title: label, "aria-label": label }, canvas);
      thumb.onclick = () => this.open(head);
      thumb.style.gridColumn = columns.indexOf(head.head) + 2;
      if (index === 0 || heads[index - 1].layer !== head.layer) this.node.append(el("span", { class: "layer" }, String(head.layer)));
      this.node.append(thumb);
      return { head, canvas, thumb };
    });
    this.paint();
  }

  // Other weights of the heads that are shown.
  update(heads) {
    heads.forEach((head, index) => {
      const one = this.thumbs[index];
      one.head = head;
      one.thumb.onclick = () => this.open(head);
    });
    this.paint();
  }

  paint() {
    for (const { head, canvas } of this.thumbs) {
      head.thumbnail(canvas, 48, isDark());
      canvas.classList.toggle("coarse", canvas.width < 32); // enlarged, so that smoothing would blur it
    }
  }

  mark(head) {
    for (const one of this.thumbs) {
      one.thumb.setAttribute("aria-pressed", one.head === head);
      one.thumb.tabIndex = one.head === head ? 0 : -1;
    }
  }

  // The tab key reaches only the open head; arrow keys move over the grid and open the head they reach.
  arrow(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    const from = this.thumbs.findIndex(({ thumb }) => thumb === event.target);
    const to = this.thumbs[from + step];
    if (!step || !to) return;
    event.preventDefault();
    to.thumb.focus();
    this.open(to.head);
  }
}

// The enlarged head: tokens on both axes and one chosen cell.
class Plot {
  constructor(choose) {
    this.choose = choose; // called with (t, s) when the reader points at a cell
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.marks = svg("svg", { class: "marks", preserveAspectRatio: "none", "aria-hidden": "true" });
    [this.rowBand, this.columnBand, this.cellBand] = ["row", "column", "cell"].map((name) => el("div", { class: `band ${name}` }));
    this.heat = el("div", { class: "heat", tabindex: 0, role: "application" }, this.canvas, this.marks, this.rowBand, this.columnBand, this.cellBand);
    this.top = el("div", { class: "top", "aria-hidden": "true" });
    this.side = el("div", { class: "side", "aria-hidden": "true" });
    this.corner = el("div", { class: "corner" });
    this.grid = el("div", { class: "grid" }, this.corner, this.top, this.side, this.heat);
    this.node = el("div", { class: "scroll" }, this.grid);
    this.ruler = el("div", { class: "ruler" }); // as wide as the map may become
    this.heat.addEventListener("pointermove", (event) => this.point(event));
    this.heat.addEventListener("pointerdown", (event) => this.point(event));
  }

  point(event) {
    const frame = this.heat.getBoundingClientRect();
    const t = Math.floor((event.clientY - frame.top) / this.cell);
    const s = Math.floor((event.clientX - frame.left) / this.cell);
    if (t >= 0 && s >= 0 && t < this.head.queries.length && s < this.head.keys.length) this.choose(t, s);
  }

  // `cell` pixels to a weight, or null for as large as fits while tokens stay legible.
  show(head, shade, cell) {
    this.head = head;
    const words = STACKS[head.stack];
    this.corner.replaceChildren(el("span", {}, `${words.key} →`), el("span", {}, `${words.query} ↓`));
    this.heat.setAttribute("aria-label", `${nameOf(head)}; arrow keys move from weight to weight`);
    this.wanted = cell;
    this.layOut();
    this.paint(shade);
  }

  fit() {
    const available = this.ruler.clientWidth - this.side.offsetWidth - 2;
    return clamp(Math.floor(available / this.head.keys.length), 1, 44);
  }

  // The row that is chosen first: the last one that is visible together with its diagonal cell.
  lastInView() {
    const across = this.node.clientWidth - this.side.offsetWidth;
    const down = this.node.clientHeight - this.top.offsetHeight;
    return clamp(Math.floor(Math.min(across, down) / this.cell) - 1, 0, this.head.queries.length - 1);
  }

  layOut() {
    const { queries, keys } = this.head;
    this.grid.style.setProperty("--type", "13px");
    this.axis(this.side, queries, 1); // in full, so that fit() knows how wide it is
    this.cell = this.wanted ?? Math.max(this.fit(), LEGIBLE);
    const every = Math.ceil(11 / this.cell); // cells too small for a token each: name every n-th
    this.grid.style.setProperty("--cell", `${this.cell}px`);
    this.grid.style.setProperty("--type", `${clamp(this.cell * every - 3, 9, 13)}px`);
    this.labels = { queries: this.axis(this.side, queries, every), keys: this.axis(this.top, keys, every) };
    this.turnLabels();
    this.heat.style.width = `${keys.length * this.cell}px`;
    this.heat.style.height = `${queries.length * this.cell}px`;
  }

  axis(place, tokens, every) {
    const labels = tokens.map((token, index) => (index % every ? null : el("span", {}, bdi(token))));
    place.style.setProperty("--every", every);
    place.replaceChildren(...labels.filter((label) => label));
    return labels;
  }

  // Tokens over the map stand upright where each fits its columns, as single letters do, and are turned where not.
  turnLabels() {
    this.top.classList.add("upright");
    const labels = [...this.top.children];
    this.top.classList.toggle("upright", labels.every((label) => label.scrollWidth <= label.clientWidth));
  }

  paint(shade) {
    this.head.paint(this.canvas, shade, isDark());
    const { queries, keys, stack } = this.head;
    this.marks.setAttribute("viewBox", `0 0 ${keys.length} ${queries.length}`);
    const strongest = stack === "cross" ? queries.map((_, t) => [t, argmax(this.head.row(t))]) : [];
    this.marks.replaceChildren(...strongest.map(([t, s]) => svg("circle", { cx: s + 0.5, cy: t + 0.5, r: 0.16 })));
  }

  mark(t, s, scroll) {
    const { cell } = this;
    this.rowBand.style.transform = `translateY(${t * cell}px)`;
    this.columnBand.style.transform = `translateX(${s * cell}px)`;
    this.cellBand.style.transform = `translate(${s * cell}px, ${t * cell}px)`;
    for (const label of this.marked ?? []) label?.classList.remove("on");
    this.marked = [this.labels.queries[t], this.labels.keys[s]];
    for (const label of this.marked) label?.classList.add("on");
    if (!scroll) return;
    this.cellBand.style.scrollMargin = `${this.top.offsetHeight + 4}px 4px 4px ${this.side.offsetWidth + 4}px`;
    this.cellBand.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

// The keys that one query reads, largest weight first.
class Reading {
  constructor() {
    this.node = el("aside", { class: "reading", "aria-label": "The chosen row" });
  }

  show(head, t, s) {
    const row = head.row(t);
    const order = row.map((_, index) => index).sort((a, b) => row[b] - row[a]).slice(0, 8);
    const sum = row.reduce((total, weight) => total + weight, 0);
    const items = order.filter((index) => row[index] > 0).map((index) => {
      const bar = el("i");
      bar.style.width = `${(row[index] / row[order[0]]) * 100}%`;
      return el("li", index === s ? { class: "on" } : {}, bdi(head.keys[index]), el("sub", {}, String(index)), el("b", {}, three(row[index])), bar);
    });
    this.node.replaceChildren(
      el("h4", {}, bdi(head.queries[t]), el("sub", {}, String(t)), " reads"),
      el("ol", {}, ...items),
      el("p", { class: "quiet" }, `This row sums to ${sum.toFixed(3)} over ${row.length} keys.`),
    );
  }
}

class AttentionView {
  constructor(section, place) {
    this.section = section;
    this.place = place;
    this.shade = "head";
    this.cell = null;
    this.heads = section.heads ?? {}; // stack -> its heads; those of a trace are unpacked when first shown
    this.roles = [...new Set((section.maps ?? []).flatMap((map) => map.roles ?? []))].filter((role) => role);
    this.gallery = new Gallery((head) => this.open(head), this.roles);
    this.plot = new Plot((t, s) => this.choose(t, s, false));
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
    this.readout = el("output", { class: "readout", "aria-live": "polite" });
    this.bar = el("i", { class: "bar" });
    this.top = el("span");
    const stacks = this.stacks.map((stack) => [stack, STACKS[stack].label, STACKS[stack].hint]);
    const shades = Object.entries(SHADES).map(([key, { label, hint }]) => [key, label, hint]);
    const controls = el("div", { class: "controls" },
      choice("Colour scale", shades, this.shade, (shade) => { this.shade = shade; this.repaint(); }),
      el("div", { class: "choice", role: "group", "aria-label": "Size" },
        button("−", "Smaller cells", () => this.zoom(Math.min(this.plot.cell - 1, Math.round(this.plot.cell / 1.3)))),
        button("Fit", "As large as fits the page", () => this.zoom(this.plot.fit())),
        button("+", "Larger cells", () => this.zoom(Math.max(this.plot.cell + 1, Math.round(this.plot.cell * 1.3))))),
      button("PNG", "Save this map as a picture", () => this.savePng()),
      button("JSON", "Save the tokens and weights of this map", () => this.saveJson()));
    const large = el("div", { class: "large" }, this.title, this.readout, controls, this.plot.ruler,
      el("div", { class: "map" }, this.plot.node, this.reading.node),
      el("div", { class: "scale" }, el("span", {}, "0"), this.bar, this.top),
      el("p", { class: "quiet" }, `Point, tap or use the arrow keys to read a weight; [ and ] change the head.${this.section.heads ? "" : ` Weights are kept in steps of 1/${this.section.steps}.`}`));
    this.status = el("p", { class: "quiet", role: "status" });
    this.content = el("div", { class: "heads-and-map", hidden: "" }, this.gallery.node, large);
    const chooser = stacks.length > 1 ? [choice("Stack", stacks, stacks[0][0], (stack) => this.pick(stack))] : [];
    const legend = this.roles.length ? [this.legend()] : [];
    return el("div", {}, ...chooser, ...legend, this.status, this.content);
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

  async unpacked(stack) {
    const { maps, tokens, steps } = this.section;
    const heads = await Promise.all(maps.filter((map) => map.stack === stack).map(async (map) => {
      const values = await unpack(map.weights);
      return map.heads.map((_, index) => new Head(map, index, values, tokens, steps));
    }));
    return heads.flat().sort((a, b) => a.layer - b.layer || a.head - b.head);
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
      this.show("Unpacking the attention weights …", true);
      try {
        this.heads[stack] = await this.unpacked(stack);
      } catch (error) {
        if (this.stack === stack) this.show(`The attention weights could not be unpacked (${error.message}). Open this file in a browser from 2023 or later.`, false);
        return;
      }
    }
    if (this.stack !== stack) return; // another stack was picked in the meantime
    this.show("", false);
    this.gallery.show(this.heads[stack]);
    this.dim();
    // The thumbnails stand above the map instead of beside it where they are wide, or few beside a large map.
    const { length, 0: first } = this.heads[stack];
    const above = this.gallery.columns > 12 || (length <= 3 * this.gallery.columns && first.keys.length > 24);
    this.content.classList.toggle("above", above);
    this.chosen = null;
    this.open(this.heads[stack][0]);
  }

  open(head) {
    this.head = head;
    this.gallery.mark(head);
    this.title.textContent = nameOf(head) + (head.role ? ` · ${head.role}` : "");
    this.plot.show(head, this.shade, this.cell);
    this.showScale();
    const row = this.plot.lastInView();
    this.choose(...(this.chosen ?? [row, argmax(head.row(row))]), false);
  }

  choose(t, s, scroll) {
    const { head } = this;
    this.chosen = [clamp(t, 0, head.queries.length - 1), clamp(s, 0, head.keys.length - 1)];
    const [row, column] = this.chosen;
    this.plot.mark(row, column, scroll);
    this.reading.show(head, row, column);
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
    this.plot.show(this.head, this.shade, this.cell);
    this.plot.mark(...this.chosen, false);
  }

  keyboard() {
    const step = (down, right) => () => this.choose(this.chosen[0] + down, this.chosen[1] + right, true);
    const turn = (by) => () => {
      const heads = this.heads[this.stack];
      this.open(heads.at((heads.indexOf(this.head) + by) % heads.length));
    };
    onkeys(this.plot.heat, {
      ArrowUp: step(-1, 0), ArrowDown: step(1, 0), ArrowLeft: step(0, -1), ArrowRight: step(0, 1),
      Home: step(0, -Infinity), End: step(0, Infinity), PageUp: step(-10, 0), PageDown: step(10, 0),
      "[": turn(-1), "]": turn(1),
    });
  }

  file(extension) {
    return fileName(this.stack, "layer", this.head.layer, "head", this.head.head) + extension;
  }

  savePng() {
    picture(this.head, nameOf(this.head), this.shade, isDark()).toBlob((blob) => save(this.file(".png"), blob));
  }

  saveJson() {
    const { stack, layer, head, queries, keys } = this.head;
    const weights = queries.map((_, t) => this.head.row(t).map((weight) => Number(weight.toFixed(6))));
    saveJson(this.file(".json"), { stack, layer, head, queries, keys, weights });
  }
}

mounts.attention = (section, place) => {
  if (section.maps.length) new AttentionView(section, place);
  else place.append(el("p", { class: "quiet" }, "No maps."));
};
