// Tokens as points in a plane, layer by layer: the embedding, then the residual stream after each block.
// With one layer there is nothing to play, and no word is followed at first.

const PLANE = 1000; // steps from the centre to the furthest point of a layer
const EDGE = 1250; // of the picture, and there in pixels the width of a letter and the height of a line
const [LETTER, LINE] = [8, 13];
const FAR = 8; // lines
const NAMED = 120; // points that carry their names; of more only the chosen ones do

class PlaneView {
  constructor(section, place) {
    this.section = section;
    this.stack = section.stacks[0];
    this.layer = this.stack.layers.length - 1;
    this.word = null;
    this.picture = svg("svg", { class: "plane", viewBox: "-1260 -1100 2520 2200", role: "img" });
    this.slider = el("input", { type: "range", min: 0, max: this.layer, step: 1, "aria-label": "Layer",
      oninput: () => this.show(Number(this.slider.value)) });
    this.name = el("output", { class: "layer-name", "aria-live": "polite" });
    this.note = el("p", { class: "quiet", role: "status" });
    this.play = button("Play", "Go through the layers", () => this.run());
    this.words = group("words", "Words; press one to follow it through the layers");
    const stacks = section.stacks.map(({ stack }) => [stack, STACKS[stack]?.label ?? stack]);
    const legend = section.texts.map((text, index) => el("span", {}, el("i", { class: `key-${index % COLOURS}` }),
      el("bdi", { title: text.slice(0, 400) }, shortened(shown(text), 80))));
    place.append(
      div("controls",
        stacks.length > 1 && choice("Points", stacks, stacks[0][0], (stack) => this.pick(stack)),
        el("label", { class: "layers" }, this.play, this.slider, this.name), exportButtons(this)),
      div("legend", legend),
      div("plane-and-words", this.picture, this.words), this.note,
    );
    for (const one of [this.play, this.slider]) one.hidden = section.stacks.every(({ layers }) => layers.length < 2);
    this.pick(this.stack.stack);
    onwidth(this.picture, () => this.show(this.layer));
  }

  pick(stack) {
    this.stack = this.section.stacks.find((one) => one.stack === stack);
    const { tokens, layers } = this.stack;
    this.slider.max = layers.length - 1;
    this.keys = tokens.map((token) => token.replaceAll("␣", "").trim().toLowerCase() || token);
    const places = new Map(); // word -> its places
    this.keys.forEach((word, i) => places.set(word, [...(places.get(word) ?? []), i]));
    // A word that stands in several places shows what its context does, so it comes first.
    const words = [...places].sort((a, b) => b[1].length - a[1].length).slice(0, 80);
    refill(this.words, words.map(([word, { length }]) =>
      button([bdi(word), length > 1 && el("sub", {}, `×${length}`)], "Follow this word through the layers",
        () => this.follow(word), { "data-word": word })));
    const apart = ([, points]) => {
      const ends = points.map((i) => this.at(layers.length - 1, i));
      return Math.max(...ends.flatMap(([x, y]) => ends.map(([z, w]) => Math.hypot(x - z, y - w))));
    };
    const shared = words.filter(([word, points]) => points.length > 1 && /\p{L}{4}/u.test(word));
    this.word = (layers.length > 1 && shared.sort((a, b) => apart(b) - apart(a))[0]?.[0]) || null;
    this.show(Math.min(this.layer, layers.length - 1));
  }

  follow(word) {
    this.word = this.word === word ? null : word;
    this.show(this.layer);
  }

  // A token, behind the one before it where it is followed: the same word differs by its context.
  label(i) {
    const { tokens, text, place } = this.stack;
    const short = (token) => shown(token.slice(0, 40)).replaceAll("␣", "") || "␣";
    const before = i > 0 && text[i - 1] === text[i] && place[i - 1] === place[i] - 1;
    return this.isOn(i) && before ? `${short(tokens[i - 1])} ${short(tokens[i])}` : short(tokens[i]);
  }

  isOn(i) {
    return this.keys[i] === this.word;
  }

  at(layer, i) {
    const flat = this.stack.at[layer];
    return [flat[2 * i], -flat[2 * i + 1]];
  }

  // Where the names of points stand: beside them, but moved towards the middle until they cover no name and no point.
  // One that would be far from its point is left out.
  labels(shown, unit) {
    const at = (i) => this.at(this.layer, i);
    const points = shown.map(at).map(([x, y]) => ({ left: x - 5 * unit, right: x + 5 * unit, y }));
    const placed = new Map();
    for (const i of shown.sort((a, b) => Math.abs(at(b)[1]) - Math.abs(at(a)[1]))) {
      const [x, y] = at(i);
      const wide = LETTER * unit * [...this.label(i)].length;
      const left = x + (x + 8 * unit + wide < EDGE ? 8 * unit : -8 * unit - wide);
      const own = { left, right: left + wide, y };
      const covered = () => [...points, ...placed.values()].find((one) => Math.abs(one.y - own.y) < LINE * unit - 1e-6
        && one.left < own.right && own.left < one.right);
      for (let one = covered(); one; one = covered()) own.y = one.y + (y < 0 ? LINE : -LINE) * unit;
      if (Math.abs(own.y - y) <= FAR * LINE * unit || this.isOn(i)) placed.set(i, own);
    }
    return placed;
  }

  show(layer) {
    this.layer = layer;
    this.slider.value = layer;
    const { tokens, layers, share, text, place, named, sentences, between, chance } = this.stack;
    this.name.textContent = `${layers[layer]} · the plane shows ${Math.round(100 * share[layer])}% of the variance`;
    this.picture.setAttribute("aria-label", `${tokens.length} tokens in a plane, ${layers[layer]}`);
    // Of one word in many sentences: those that are followed, and how far the texts are apart.
    const followed = sentences?.filter((_, i) => this.isOn(i)) ?? [];
    this.note.textContent = [between && `${percent(between[layer])} of the variance of all dimensions lies between the
      two topics; between random groups ${percent(chance[layer])}.`.replace(/\s+/g, " "), ...followed]
      .filter((one) => one).join(" · ");
    for (const one of this.words.children) one.setAttribute("aria-pressed", one.dataset.word === this.word);
    const unit = 2520 / (this.picture.clientWidth || 900); // of the picture to a pixel
    const labels = this.labels([...tokens.keys()].filter((i) => (this.isOn(i) && layers.length > 1)
      || tokens.length <= NAMED || named.includes(i)), unit);
    const points = tokens.map((token, i) => {
      const [x, y] = this.at(layer, i);
      const on = this.isOn(i);
      const label = labels.get(i);
      const colour = text[i] % COLOURS;
      const path = () => Array.from({ length: layer + 1 }, (_, l) => this.at(l, i).join(",")).join("L");
      const group = svg("g", { class: on ? "on" : this.word === null ? "" : "dim" },
        on && layer > 0 && svg("path", { class: `stroke-${colour}`, d: `M${path()}` }),
        svg("circle", { class: `fill-${colour}`, cx: x, cy: y, r: (on ? 6 : 4) * unit,
          onclick: () => this.follow(this.keys[i]) },
        svg("title", {}, sentences?.[i] ?? `${shown(token.slice(0, 80))} · text ${text[i] + 1}, token ${place[i]}`)),
        label && Math.abs(label.y - y) > unit && svg("path", { class: `leader stroke-${colour}`,
          d: `M${x},${y}L${label.left > x ? label.left : label.right},${label.y}` }),
        label && svg("text", { x: label.left, y: label.y + 4 * unit, "font-size": (on ? 13 : 11) * unit },
          this.label(i)));
      return [on, group];
    });
    refill(this.picture, points.sort((a, b) => a[0] - b[0]).map(([, group]) => group));
  }

  run() {
    if (this.timer) return this.halt();
    this.play.textContent = "Stop";
    this.timer = setInterval(() => {
      const { length } = this.stack.layers;
      this.show((this.layer + 1) % length);
      if (this.layer === length - 1) this.halt();
    }, 350);
  }

  halt() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  file() {
    return fileName(this.section.title, this.stack.stack, this.stack.layers[this.layer]);
  }

  values() {
    const { stack, layers, tokens, text, place, share } = this.stack;
    const at = layers.map((_, l) =>
      tokens.map((_, i) => this.at(l, i).map((x, axis) => ((axis ? -x : x) || 0) / PLANE)));
    return { stack, layers, tokens, text, place, share, at, texts: this.section.texts };
  }

  drawing() {
    const styles = { text: { fill: colourOf("--ink") }, ".dim": { opacity: 0.35 } };
    for (let i = 0; i < COLOURS; i++) {
      const colour = colourOf(`--series-${i}`);
      styles[`.fill-${i}`] = { fill: colour };
      styles[`.stroke-${i}`] = { stroke: colour, fill: "none", "stroke-width": 4, "stroke-opacity": 0.5 };
    }
    return sheet(900, 840, `${this.section.title} · ${this.stack.layers[this.layer]}`,
      svg("g", { transform: "translate(450 440) scale(0.35)" }, ...inked(this.picture, styles).childNodes));
  }
}

mounts.plane = (section, place) => new PlaneView(section, place);
