// The same head on two texts, side by side; the heads that differ most come first.

const COMPARED = 60; // heads that are offered

// One of the two: a map with what is read under the pointer.
class Panel {
  constructor(chosen) {
    this.plot = new Plot((t, s) => chosen(t, s));
    this.readout = el("output", { class: "readout" });
    this.overview = this.plot.overview;
    this.title = el("h4", { dir: "auto" });
    this.node = el("div", { class: "panel" }, this.title, this.readout, this.plot.ruler, this.plot.node, this.overview);
  }

  show(head, shade, text) {
    this.title.textContent = shown(text.slice(0, 300));
    if (head !== this.head) this.at = null;
    this.head = head;
    this.plot.show(head, shade, null, this.at);
    this.choose(...(this.at ?? this.plot.first()), false);
  }

  choose(t, s, scroll) {
    const { queries, keys } = this.head;
    this.at = [clamp(t, 0, queries.length - 1), clamp(s, 0, keys.length - 1)];
    this.plot.mark(...this.at, scroll);
    this.readout.replaceChildren(
      bdi(queries[this.at[0]]),
      el("span", {}, " → "),
      bdi(keys[this.at[1]]),
      " ",
      el("b", {}, three(this.head.at(...this.at))),
    );
  }
}

// How far two patterns are apart: half the sum of the differences of a query's weights, its mean over the queries.  For
// texts of other lengths, the largest difference of the measures that lie between 0 and 1.
function distance(one, other) {
  const same = one.queries.length === other.queries.length && one.keys.length === other.keys.length;
  if (!same) {
    const shares = one.measures.map(([name, value], i) =>
      name === "first" || name === "previous" ? Math.abs(value - other.measures[i][1]) : 0,
    );
    return Math.max(0, ...shares);
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
    this.panels = [0, 1].map((side) => new Panel((t, s) => this.choose(side, t, s, false)));
    this.gallery = new Gallery((head) => this.open(head), []);
    const stacks = [...new Set(this.first.maps.map((map) => map.stack))].map((stack) => [
      stack,
      STACKS[stack].label,
      STACKS[stack].hint,
    ]);
    const others = section.texts.slice(1).map((text, index) => [index, `Text ${index + 2}`, text.slice(0, 200)]);
    const shades = Object.entries(SHADES).map(([key, { label, hint }]) => [key, label, hint]);
    this.title = el("h3");
    this.status = el("p", { class: "quiet", role: "status" });
    this.pair = el("div", { class: "pair" }, ...this.panels.map((one) => one.node));
    const picks = [
      ...(stacks.length > 1 ? [choice("Stack", stacks, stacks[0][0], (stack) => this.pick(stack, this.other))] : []),
      ...(others.length > 1
        ? [choice("The other text", others, 0, (index) => this.pick(this.stack, section.others[index]))]
        : []),
    ];
    const tools = [
      choice("Colour scale", shades, this.shade, (shade) => {
        this.shade = shade;
        this.open(this.head);
      }),
      exportButtons(
        () => fileName("two-texts", this.stack, this.head.layer, this.head.head),
        () => this.drawing(),
        () => this.values(),
      ),
    ];
    const controls = el("div", { class: "controls" }, ...tools);
    this.content = el("div", { hidden: "" }, controls, this.gallery.node, this.title, this.pair);
    place.append(el("div", { class: "controls" }, ...picks), this.status, this.content);
    this.panels.forEach((panel, side) =>
      onkeys(panel.plot.heat, {
        ArrowUp: () => this.step(side, -1, 0),
        ArrowDown: () => this.step(side, 1, 0),
        ArrowLeft: () => this.step(side, 0, -1),
        ArrowRight: () => this.step(side, 0, 1),
      }),
    );
    repaints.push(() => this.head && this.repaint());
    this.pick(stacks[0][0], this.other);
  }

  // Until the weights of both texts are unpacked the section shows `text`, and nothing that would act on them.
  wait(text, busy) {
    this.place.setAttribute("aria-busy", busy);
    this.status.textContent = text;
    this.content.hidden = Boolean(text);
  }

  async pick(stack, other) {
    [this.stack, this.other] = [stack, other];
    this.wait(UNPACKING, true);
    let both;
    try {
      both = await Promise.all([this.first, other].map((section) => unpackedHeads(section, stack)));
    } catch (error) {
      this.wait(notUnpacked(error), false);
      return;
    }
    if (this.stack !== stack || this.other !== other) return; // others were picked in the meantime
    const [ours, theirs] = both;
    this.partners = new Map(
      ours.map((head) => [head, theirs.find((one) => one.layer === head.layer && one.head === head.head)]),
    );
    const apart = new Map(ours.map((head) => [head, distance(head, this.partners.get(head))]));
    const order = [...ours].sort((a, b) => apart.get(b) - apart.get(a));
    this.wait("", false);
    showGroups(this.gallery, [
      [
        "most different first",
        "role-none",
        order.slice(0, COMPARED),
        (head) => `${head.layer}.${head.head} · ${apart.get(head).toFixed(2)}`,
      ],
    ]);
    this.apart = apart;
    this.open(order[0]);
  }

  open(head) {
    this.head = head;
    this.gallery.mark(head);
    this.title.textContent = `${nameOf(head)} · difference ${this.apart.get(head).toFixed(3)}`;
    const index = this.section.others.indexOf(this.other) + 1;
    this.panels[0].show(head, this.shade, this.section.texts[0]);
    this.panels[1].show(this.partners.get(head), this.shade, this.section.texts[index]);
  }

  // Where both texts have the same number of tokens, the same place is chosen in both.
  choose(side, t, s, scroll) {
    this.panels[side].choose(t, s, scroll);
    const [one, other] = [this.panels[side].head, this.panels[1 - side].head];
    if (one.queries.length === other.queries.length && one.keys.length === other.keys.length)
      this.panels[1 - side].choose(t, s, false);
  }

  step(side, down, right) {
    const [t, s] = this.panels[side].at;
    this.choose(side, t + down, s + right, true);
  }

  repaint() {
    this.gallery.paint();
    this.panels.forEach((panel) => panel.plot.paint(this.shade));
  }

  drawing() {
    const [a, b] = this.panels.map((panel) => panel.plot.drawing());
    const [wide, high] = ["width", "height"].map((name) => [a, b].map((one) => Number(one.getAttribute(name))));
    [a, b].forEach((one, i) => one.setAttribute("x", i * wide[0]));
    [a, b].forEach((one) => one.setAttribute("y", 44));
    return sheet(wide[0] + wide[1], Math.max(...high) + 44, this.title.textContent, a, b);
  }

  values() {
    const one = (head) => ({
      queries: head.queries,
      keys: head.keys,
      weights: head.queries.map((_, t) => head.row(t).map(tidy)),
    });
    const { stack, layer, head } = this.head;
    return { stack, layer, head, texts: [one(this.head), one(this.partners.get(this.head))] };
  }
}

// The first section of attention, in tabs or not.
const attentionOf = (sections) =>
  sections
    .flatMap((one) => (one.sections ? [attentionOf(one.sections)] : one.kind === "attention" ? [one] : []))
    .find((one) => one);

mounts.comparison = (section, place) => new ComparisonView(section, place);
