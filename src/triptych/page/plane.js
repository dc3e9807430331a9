// Tokens as points in a plane, layer by layer: the embedding, then the residual stream after each block.
// With one layer there is nothing to play, and no word is followed at first.

const PLANE = 1000; // steps from the centre to the furthest point of a layer
const NAMED = 120; // points that carry their names; of more only the chosen ones do

class PlaneView {
  constructor(section, place) {
    this.section = section;
    this.stack = section.stacks[0];
    this.layer = this.stack.layers.length - 1;
    this.word = null;
    this.picture = svg("svg", { class: "plane", viewBox: "-1260 -1100 2520 2200", role: "img" });
    this.slider = el("input", {
      type: "range",
      min: 0,
      max: this.layer,
      step: 1,
      "aria-label": "Layer",
      oninput: () => this.show(Number(this.slider.value)),
    });
    this.name = el("output", { class: "layer-name", "aria-live": "polite" });
    this.play = button("Play", "Go through the layers", () => this.run());
    this.words = el("div", {
      class: "words",
      role: "group",
      "aria-label": "Words; press one to follow it through the layers",
    });
    const stacks = section.stacks.map(({ stack }) => [stack, STACKS[stack].label, ""]);
    const chooser = stacks.length > 1 ? [choice("Stack", stacks, stacks[0][0], (stack) => this.pick(stack))] : [];
    const legend = section.texts.map((text, index) =>
      el(
        "span",
        {},
        el("i", { class: `key-${index % COLOURS}` }),
        el("bdi", { title: text.slice(0, 400) }, shown(text.slice(0, 80))),
      ),
    );
    place.append(
      el(
        "div",
        { class: "controls" },
        ...chooser,
        el("label", { class: "layers" }, this.play, this.slider, this.name),
        exportButtons(
          () => fileName(section.title, this.stack.stack, this.stack.layers[this.layer]),
          () => this.drawing(),
          () => this.values(),
        ),
      ),
      el("div", { class: "legend" }, ...legend),
      el("div", { class: "plane-and-words" }, this.picture, this.words),
    );
    for (const one of [this.play, this.slider]) one.hidden = section.stacks.every(({ layers }) => layers.length < 2);
    this.pick(this.stack.stack);
    onwidth(this.picture, () => this.show(this.layer));
  }

  pick(stack) {
    this.stack = this.section.stacks.find((one) => one.stack === stack);
    const { tokens, layers, text } = this.stack;
    this.slider.max = layers.length - 1;
    const key = (token) => token.replaceAll("␣", "").trim().toLowerCase() || token;
    this.keys = tokens.map(key);
    const counts = new Map();
    this.keys.forEach((word, i) => counts.set(word, (counts.get(word) ?? new Set()).add(text[i] * 1e6 + i)));
    // A word that stands in several places shows what its context does, so it comes first.
    const words = [...counts].sort((a, b) => b[1].size - a[1].size).slice(0, 80);
    this.words.replaceChildren(
      ...words.map(([word, places]) => {
        const one = button("", "Follow this word through the layers", () => this.follow(word));
        one.dataset.word = word;
        one.append(bdi(word), ...(places.size > 1 ? [el("sub", {}, `×${places.size}`)] : []));
        return one;
      }),
    );
    const apart = ([, places]) =>
      this.spread(
        [...places].map((one) => one % 1e6),
        layers.length - 1,
      );
    const shared = words.filter(([word, places]) => places.size > 1 && /\p{L}{4}/u.test(word));
    this.word = (layers.length > 1 && shared.sort((a, b) => apart(b) - apart(a))[0]?.[0]) || null;
    this.show(Math.min(this.layer, layers.length - 1));
  }

  follow(word) {
    this.word = this.word === word ? null : word;
    this.show(this.layer);
  }

  // How far apart some points lie at a layer.
  spread(points, layer) {
    const at = points.map((i) => this.at(layer, i));
    return Math.max(...at.flatMap(([x, y]) => at.map(([z, w]) => Math.hypot(x - z, y - w))));
  }

  // A token, behind the one before it where it is followed: the same word differs by its context.
  label(i) {
    const { tokens, text, place } = this.stack;
    const short = (token) => shown(token.slice(0, 40)).replaceAll("␣", "");
    const before = i > 0 && text[i - 1] === text[i] && place[i - 1] === place[i] - 1;
    return this.keys[i] === this.word && before ? `${short(tokens[i - 1])} ${short(tokens[i])}` : short(tokens[i]);
  }

  at(layer, i) {
    const flat = this.stack.at[layer];
    return [flat[2 * i], -flat[2 * i + 1]];
  }

  show(layer) {
    this.layer = layer;
    this.slider.value = layer;
    const { tokens, layers, share, text, place, named } = this.stack;
    this.name.textContent = `${layers[layer]} · the plane shows ${Math.round(100 * share[layer])}% of the variance`;
    this.picture.setAttribute("aria-label", `${tokens.length} tokens in a plane, ${layers[layer]}`);
    for (const one of this.words.children) one.setAttribute("aria-pressed", one.dataset.word === this.word);
    const unit = 2520 / (this.picture.clientWidth || 900); // of the picture to a pixel
    const points = tokens.map((token, i) => {
      const [x, y] = this.at(layer, i);
      const on = this.keys[i] === this.word;
      const label = (on && layers.length > 1) || tokens.length <= NAMED || named.includes(i);
      const trail =
        on && layer
          ? [
              svg("path", {
                class: `stroke-${text[i] % COLOURS}`,
                d: `M${Array.from({ length: layer + 1 }, (_, l) => this.at(l, i).join(",")).join("L")}`,
              }),
            ]
          : [];
      const name = label
        ? [svg("text", { x: x + 8 * unit, y: y + 4 * unit, "font-size": (on ? 13 : 11) * unit }, this.label(i))]
        : [];
      const point = svg(
        "circle",
        {
          class: `fill-${text[i] % COLOURS}`,
          cx: x,
          cy: y,
          r: (on ? 6 : 4) * unit,
          onclick: () => this.follow(this.keys[i]),
        },
        svg("title", {}, `${shown(token.slice(0, 80))} · text ${text[i] + 1}, token ${place[i]}`),
      );
      return [on, svg("g", { class: on ? "on" : this.word === null ? "" : "dim" }, ...trail, point, ...name)];
    });
    this.picture.replaceChildren(...points.sort((a, b) => a[0] - b[0]).map(([, node]) => node));
  }

  run() {
    if (this.timer) return this.halt();
    this.play.textContent = "Stop";
    if (this.layer === this.stack.layers.length - 1) this.layer = -1;
    this.timer = setInterval(() => {
      this.show(this.layer + 1);
      if (this.layer === this.stack.layers.length - 1) this.halt();
    }, 350);
  }

  halt() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  values() {
    const { stack, layers, tokens, text, place, share } = this.stack;
    const at = layers.map((_, l) =>
      tokens.map((_, i) => this.at(l, i).map((x, axis) => ((axis ? -x : x) || 0) / PLANE)),
    );
    return { stack, layers, tokens, text, place, share, at, texts: this.section.texts };
  }

  drawing() {
    const copy = this.picture.cloneNode(true);
    const ink = colourOf("--ink");
    copy.querySelectorAll("text").forEach((one) => one.setAttribute("fill", ink));
    const series = Array.from({ length: COLOURS }, (_, i) => colourOf(`--series-${i}`));
    for (const [i, colour] of series.entries()) {
      copy.querySelectorAll(`.fill-${i}`).forEach((one) => one.setAttribute("fill", colour));
      copy
        .querySelectorAll(`.stroke-${i}`)
        .forEach((one) =>
          Object.entries({ stroke: colour, fill: "none", "stroke-width": 4, "stroke-opacity": 0.5 }).forEach(
            ([name, value]) => one.setAttribute(name, value),
          ),
        );
    }
    copy.querySelectorAll(".dim").forEach((one) => one.setAttribute("opacity", 0.35));
    return sheet(
      900,
      840,
      `${this.section.title} · ${this.stack.layers[this.layer]}`,
      svg("g", { transform: "translate(450 440) scale(0.35)" }, ...copy.childNodes),
    );
  }
}

mounts.plane = (section, place) => new PlaneView(section, place);
