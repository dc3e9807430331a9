// The same head on two texts, side by side; the heads that differ most come first.

const COMPARED = 60; // heads that are offered

const sameSizes = (one, other) => one.queries.length === other.queries.length && one.keys.length === other.keys.length;

// How far two patterns are apart: half the sum of the differences of a query's weights, its mean over the queries.  For
// texts of other lengths, the largest difference of the measures that lie between 0 and 1.
function distance(one, other) {
  if (!sameSizes(one, other)) {
    return Math.max(0, ...one.measures.map(([name, value], i) =>
      name === "first" || name === "previous" ? Math.abs(value - other.measures[i][1]) : 0));
  }
  let sum = 0;
  const { values: a } = one.pooled();
  const { values: b } = other.pooled();
  for (let i = 0; i < a.length; i++) sum += Math.abs(a[i] - b[i]);
  return sum / 2 / one.queries.length;
}

class ComparisonView {
  constructor(section, place) {
    this.section = section;
    this.place = place;
    this.first = attentionOf(page.sections);
    this.other = section.others[0];
    this.shade = "head";
    this.plots = [0, 1].map((side) => new Plot((t, s) => this.choose(side, t, s, false)));
    this.texts = this.plots.map(() => el("h4", { dir: "auto" }));
    this.gallery = new Gallery((head) => this.open(head));
    const stacks = [...new Set(this.first.maps.map((map) => map.stack))];
    const others = section.texts.slice(1).map((text, index) => [index, `Text ${index + 2}`, text.slice(0, 200)]);
    this.title = el("h3");
    this.status = statusLine();
    const recolour = (shade) => {
      this.shade = shade;
      this.open(this.head);
    };
    this.content = el("div", { hidden: "" }, div("controls", shadeChoice(this.shade, recolour), exportButtons(this)),
      this.gallery.node, this.title,
      div("pair", this.plots.map((plot, side) =>
        div("panel", this.texts[side], plot.readout, plot.ruler, plot.node, plot.overview))));
    place.append(
      div("controls", stackChoice(stacks, (stack) => this.pick(stack, this.other)), others.length > 1
        && choice("The other text", others, 0, (index) => this.pick(this.stack, section.others[index]))),
      this.status, this.content);
    this.plots.forEach((plot, side) => onkeys(plot.heat, moves((down, right) =>
      this.choose(side, plot.at[0] + down, plot.at[1] + right, true))));
    repaints.push(() => this.head && this.repaint());
    this.pick(stacks[0], this.other);
  }

  async pick(stack, other) {
    [this.stack, this.other] = [stack, other];
    const both = await headsFor(this, stack, [this.first, other]);
    if (!both) return;
    const [ours, theirs] = both;
    const partner = (head) => theirs.find((one) => one.layer === head.layer && one.head === head.head);
    this.partners = new Map(ours.map((head) => [head, partner(head)]));
    this.apart = new Map(ours.map((head) => [head, distance(head, this.partners.get(head))]));
    const order = [...ours].sort((a, b) => this.apart.get(b) - this.apart.get(a));
    const under = (head) => `${head.layer}.${head.head} · ${this.apart.get(head).toFixed(2)}`;
    showGroups(this.gallery, [["most different first", "role-none", order.slice(0, COMPARED), under]]);
    this.open(order[0]);
  }

  open(head) {
    this.head = head;
    this.gallery.mark(head);
    this.title.textContent = `${nameOf(head)} · difference ${this.apart.get(head).toFixed(3)}`;
    const texts = [this.section.texts[0], this.section.texts[this.section.others.indexOf(this.other) + 1]];
    [head, this.partners.get(head)].forEach((one, side) => {
      const plot = this.plots[side];
      const at = plot.head === one ? plot.at : null;
      this.texts[side].textContent = shown(texts[side].slice(0, 300));
      plot.show(one, this.shade, null, at);
      plot.mark(...(at ?? plot.first()), false);
    });
  }

  // Where both texts have the same number of tokens, the same place is chosen in both.
  choose(side, t, s, scroll) {
    const [own, other] = [this.plots[side], this.plots[1 - side]];
    own.mark(t, s, scroll);
    if (sameSizes(own.head, other.head)) other.mark(t, s, false);
  }

  repaint() {
    this.gallery.paint();
    this.plots.forEach((plot) => plot.paint(this.shade));
  }

  file() {
    return fileName("two-texts", this.stack, this.head.layer, this.head.head);
  }

  drawing() {
    const both = this.plots.map((plot) => plot.drawing());
    const [wide, high] = ["width", "height"].map((name) => both.map((one) => Number(one.getAttribute(name))));
    both.forEach((one, i) => fill(one, { x: i * wide[0], y: 44 }));
    return sheet(wide[0] + wide[1], Math.max(...high) + 44, this.title.textContent, both);
  }

  values() {
    const one = (head) => ({ queries: head.queries, keys: head.keys,
      weights: head.queries.map((_, t) => head.row(t).map(tidy)) });
    const { stack, layer, head } = this.head;
    return { stack, layer, head, texts: [one(this.head), one(this.partners.get(this.head))] };
  }
}

const attentionOf = (sections) =>
  sections.flatMap((one) => [one, ...(one.sections ?? [])]).find(({ kind }) => kind === "attention");

mounts.comparison = (section, place) => new ComparisonView(section, place);
