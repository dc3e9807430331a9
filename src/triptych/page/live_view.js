// The section that runs a model: texts in, tokens, predictions, parts to cut, the model's own writing, attention.

// The chapters as the reader sees them: one at a time, with its buttons and its question.
class Lessons {
  constructor(view) {
    this.view = view;
    this.at = 0;
    this.acted = false; // whether a button of the open chapter was pressed
    this.card = div("lesson");
    const entries = CHAPTERS.map(({ title }, i) => [i, `${i + 1} ${title}`]);
    this.chooser = choice("Chapter", entries, 0, (i) => this.open(i));
    this.chooser.classList.add("layers");
    this.node = div("lessons", this.chooser, this.card);
    this.pictures = new Map(); // of chapters that have one
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  // Opens the chapter that the address of the page names.
  follow() {
    const at = CHAPTERS.findIndex(({ title }) => `#${fileName(title)}` === location.hash);
    if (at < 0 || at === this.at) return;
    this.open(at);
    this.node.scrollIntoView();
  }

  // The row of the token table that chapter 1 speaks of.
  lookup(tokens) {
    const { tokenBox, reading, flow } = new About(this.view);
    return tokenBox
      && { table: tokenBox.weight, id: flow.idsOf(reading, tokens)[flow.position(reading, tokens)] };
  }

  // What the buttons of one chapter changed is undone in the next.
  open(at) {
    if (this.acted) this.view.asTrained();
    this.acted = false;
    this.at = at;
    this.chooser.mark(at);
    try {
      history.replaceState(null, "", `#${fileName(CHAPTERS[at].title)}`);
    } catch { /* a page inside another may have no address of its own */ }
    if (this.view.now) this.build();
    this.show();
  }

  build() {
    const { title, steps, ask, answer, picture } = CHAPTERS[this.at];
    const about = new About(this.view);
    if (picture && !this.pictures.has(title)) this.pictures.set(title, picture(about));
    this.text = el("p");
    const press = (act) => {
      this.acted = true;
      act(new About(this.view));
      if (!this.view.refreshing) this.show(); // else with the new numbers
    };
    this.steps = steps.filter(([, , , fits]) => !fits || fits(about))
      .map(([label, act, state]) => ({ one: button(label, "", () => press(act)), state }));
    const next = button("Next chapter", "", () => {
      this.open(this.at + 1);
      this.chooser.children[this.at].focus();
    });
    next.disabled = this.at === CHAPTERS.length - 1;
    this.card.replaceChildren(el("h4", {}, `${this.at + 1}. ${title}`), this.text,
      this.pictures.get(title) ?? "", div("lesson-steps", this.steps.map(({ one }) => one)),
      el("details", {}, el("summary", {}, ask), el("p", {}, answer)), next);
  }

  // The numbers of the model as it is now.
  show() {
    if (!this.view.now) return;
    if (!this.text) this.build();
    const about = new About(this.view);
    refill(this.text, CHAPTERS[this.at].text(about));
    for (const { one, state } of this.steps) one.setAttribute("aria-pressed", Boolean(state(about)));
  }
}

class LiveView {
  constructor(section, place) {
    this.section = section;
    this.engine = null; // until its weights are unpacked, behind the first picture of the page
    this.tokenizer = new Tokenizer(section.tokenizer);
    this.parts = section.parts;
    this.both = section.layout === "encoder-decoder";
    this.decodes = section.layout !== "encoder";
    this.generates = this.decodes && section.head === "LMHead";
    this.painted = {}; // masks that the reader painted, by stack
    this.masked = new Set(); // positions that the reader masked, of an encoder's text
    this.now = null; // the last result of the engine, and the tokens that it is of
    this.tokens = null;
    this.before = null; // the reader's text, while a chapter shows another
    this.refreshing = null; // a promise, while the engine works on what is typed and set
    this.seed = 0;
    this.cost = 0; // milliseconds that the last text took
    this.place = place;
    this.build(place);
    this.speed.textContent = "Unpacking the weights …";
    this.started = startEngine(section).then((engine) => (this.engine = engine));
    this.update().then(() => performance.mark("live-ready"));
  }

  build(place) {
    const typed = () => {
      this.before = null;
      this.masked.clear();
      this.schedule();
    };
    const field = (label, value) => {
      const input = el("textarea",
        { rows: 2, spellcheck: "false", autocapitalize: "off", dir: "auto", oninput: typed });
      input.value = value;
      return { input, node: el("label", { class: "field" }, el("span", {}, label), input) };
    };
    this.source = field(this.both ? "Source" : "Text", this.section.text);
    this.target = this.both ? field("Target", this.section.target) : null;
    this.strips = div("strips");
    this.warning = statusLine();
    this.board = new Board(this.parts, () => this.update());
    this.bars = [];
    this.predictions = div("predictions");
    this.effect = el("p", { class: "effect", "aria-live": "polite" });
    this.speed = quiet();
    this.maps = div("maps");
    this.flow = new Flow(this);
    this.lessons = new Lessons(this);
    this.walk = new LiveWalk(this);
    this.below = [ // what is empty for an empty text
      el("h3", {}, `${CHAPTERS.length} short chapters`), this.lessons.node,
      el("h3", {}, "One attention, matrix by matrix"),
      quiet(prose`All matrices of one head, to scale and with the model's own weights and numbers. Go through the steps,
        press a number or move with the arrow keys, and read how it comes about.`),
      this.walk.node];
    this.last = [el("h3", {}, "The model's operations, step by step"), this.flow.node,
      el("h3", {}, "Attention"), this.maps];
    place.append(
      div("desk",
        el("div", {}, this.source.node, this.target?.node, this.strips, this.warning, ...this.writing()),
        el("div", {}, this.predictions, this.effect, this.speed)),
      ...this.below,
      el("h3", {}, "Parts"),
      quiet(prose`Every head and MLP of the model. Press one to remove it: it then adds nothing, and a line on each bar
        marks the probability in the whole model.`),
      this.board.node,
      this.switches(),
      ...this.last);
    this.flow.draw();
  }

  // What a model that generates has besides (live_writing.js).
  writing() {
    return [];
  }

  // Whether scores are masked and scaled; pressed is as the model was trained.
  switches() {
    this.off = { mask: false, scale: false };
    this.toggles = {};
    const add = (label, key, hint) => {
      this.toggles[key] = button(label, hint, () => this.switch(key, !this.off[key]), { "aria-pressed": true });
    };
    if (this.decodes) {
      add("Mask", "mask", "Off: every token also sees those after it, which the model never saw in training");
    }
    if (this.scales) {
      add("1/√d", "scale", "Off: scores are not divided by the root of the head's width, so softmax is sharper");
    }
    const all = Object.values(this.toggles);
    return all.length ? group("switches choice", "Attention as trained", all) : "";
  }

  switch(key, off) {
    this.off[key] = off;
    this.toggles[key].setAttribute("aria-pressed", !off);
    this.update();
  }

  // Whether the model scales its scores: T5 does not.
  get scales() {
    const { encode, decode } = this.section.program.entries;
    return [encode, decode].some((entry) => entry?.instructions
      .some(({ op, attributes }) => op === "attend" && attributes.scale !== 1));
  }

  // How many numbers the cache keeps for each token.
  get numbersPerPosition() {
    const { instructions, shapes } = this.section.program.entries.decode;
    const kept = instructions.filter((step) => step.op === "extend").map((step) => shapes[step.out[0]]);
    return kept.reduce((sum, [, groups, width]) => sum + groups * width, 0);
  }

  get masks() {
    return !this.decodes && this.section.ids.mask !== null && this.section.head === "MaskedLMHead";
  }

  // Another text, until `restoreText`; what is typed stays.
  setText(text) {
    this.before ??= this.source.input.value;
    this.source.input.value = text;
    this.masked.clear();
    this.update();
  }

  restoreText() {
    if (this.before === null) return;
    this.setText(this.before);
    this.before = null;
  }

  // The reader's text, no token hidden; nothing is cut, and scores are masked and scaled.
  asTrained() {
    this.restoreText();
    this.masked.clear();
    this.painted = {};
    for (const key of Object.keys(this.toggles)) this.switch(key, false);
    this.board.set([]);
  }

  // Soon: at once in a worker, or where the last text was fast; else when the reader pauses.
  schedule() {
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.update(), this.engine?.note && this.cost > 60 ? 150 : 0);
  }

  // At most as many tokens as the page computes: the last of a text that goes on, else the first.
  cut(ids, what) {
    const { limit } = this.section;
    if (ids.length <= limit) return ids;
    const first = this.both || !this.decodes;
    this.warning.textContent =
      `The ${what} has ${ids.length} tokens; this page computes ${limit}, the ${first ? "first" : "last"}.`;
    return first ? ids.slice(0, limit) : ids.slice(-limit);
  }

  read() {
    this.warning.textContent = "";
    const ids = this.cut(this.tokenizer.encode(this.source.input.value), this.both ? "source" : "text");
    if (!this.both) return { ids: ids.map((id, at) => (this.masked.has(at) ? this.section.ids.mask : id)) };
    const { start, stop } = this.section.ids;
    const written = this.target.input.value ? this.tokenizer.encode(this.target.input.value) : [];
    while (stop.includes(written.at(-1))) written.pop(); // the target goes on
    return { source: ids, ids: this.cut([start, ...written], "target") };
  }

  how() {
    const how = { cuts: new Set(this.board.cuts), mask: !this.off.mask, scale: !this.off.scale };
    return Object.keys(this.painted).length ? { ...how, painted: this.painted } : how;
  }

  get changed() {
    return this.board.cuts.size > 0 || this.off.mask || this.off.scale || Object.keys(this.painted).length > 0;
  }

  // `change` makes of the painted mask of a stack another, which all its layers and heads then have.
  paintMask(stack, change) {
    const { [stack]: before = asItWas(), ...others } = this.painted;
    const mask = change(before);
    this.painted = isPainted(mask) ? { ...others, [stack]: mask } : others;
    this.update();
  }

  // What the engine computes for tokens; null for `rows` where the head reads all vectors and gives one row.
  request(tokens) {
    const shown = this.section.head === "ClassHead" ? null : this.rowsOf(tokens.ids);
    // Without the mask, what an earlier token predicts is what changes most: chapter 5 shows the middle one.
    const rows = shown && this.off.mask && tokens.ids.length > 1 ? [...shown, this.middle(tokens.ids)] : shown;
    const main = this.decodes ? "decode" : "encode";
    const at = this.flow.position(main, tokens);
    return { ...tokens, rows, at, how: this.how(), names: this.flow.names,
      lookup: this.lessons.lookup(tokens), walk: this.walk.wanted };
  }

  // The positions whose predictions are shown: the last of a text that goes on, the masks, or the first.
  rowsOf(ids) {
    if (this.decodes) return [ids.length - 1];
    const masks = ids.map((id, at) => (id === this.section.ids.mask ? at : -1)).filter((at) => at >= 0);
    return masks.length ? masks.slice(0, 4) : [0];
  }

  middle(ids) {
    return Math.floor((ids.length - 1) / 2);
  }

  // One request at a time: what changes while the engine works is asked for next, and the answer that is then stale is
  // dropped.  The promise ends when the page shows what is typed and set.
  update() {
    clearTimeout(this.soon);
    this.stale = true;
    this.refreshing ??= this.refresh().finally(() => (this.refreshing = null));
    return this.refreshing;
  }

  async refresh() {
    this.place.setAttribute("aria-busy", "true");
    while (this.stale) await this.ask();
    this.place.setAttribute("aria-busy", "false");
  }

  async ask() {
    let [tokens, now, began] = [null, null, 0];
    try {
      await this.started;
      began = performance.now();
      this.stale = false;
      tokens = this.read();
      if (!this.source.input.value || !tokens.ids.length) return this.showNothing(); // some models add tokens
      now = await this.engine.call("compute", this.request(tokens));
    } catch ({ message }) {
      this.stale = false;
      this.warning.textContent = `The model could not be run: ${message}.`;
      return;
    }
    if (!this.stale) this.show(tokens, now, began);
  }

  show(tokens, now, began) {
    [this.tokens, this.now] = [tokens, now];
    for (const node of [...this.below, ...this.last]) node.hidden = false;
    this.showTokens(tokens);
    this.showPredictions(tokens);
    this.walk.show();
    this.showAttention(tokens);
    this.flow.show();
    this.lessons.show();
    this.cost = performance.now() - began;
    const count = tokens.ids.length + (tokens.source?.length ?? 0);
    const { kernel, note } = this.engine;
    this.speed.textContent =
      `${count} ${count === 1 ? "token" : "tokens"} in ${this.cost.toFixed(0)} ms, ${kernel}.${note}`;
  }

  // Of an empty text: no tokens, no predictions.
  showNothing() {
    this.warning.textContent = "There are no tokens yet; type something.";
    for (const node of [...this.below, ...this.last]) node.hidden = true;
    this.speed.textContent = this.effect.textContent = "";
    this.strips.replaceChildren();
    this.shownTokens = null;
    for (const { node } of this.bars) node.hidden = true;
  }

  showTokens({ source, ids }) {
    const key = JSON.stringify([source, ids, [...this.masked]]);
    if (this.shownTokens === key) return;
    this.shownTokens = key;
    const strip = (label, list, mask) => {
      const chips = this.tokenizer.pieces(list).map((piece, at) => {
        const content = [bdi(piece), el("sub", {}, list[at])];
        return mask ? button(content, "Mask this token, or show it again", () => this.maskToken(at),
          { class: "chip", "aria-pressed": this.masked.has(at) }) : el("span", { class: "chip" }, content);
      });
      return group("strip", `${label} tokens`, chips);
    };
    keepFocus(this.strips, () => refill(this.strips, source && strip("source", source, false),
      strip(source ? "target" : "text", ids, this.masks)));
  }

  maskToken(at) {
    if (!this.masked.delete(at)) this.masked.add(at);
    this.update();
  }

  nameOf(index) {
    const { head, labels } = this.section;
    return head?.endsWith("LMHead") ? this.tokenizer.pieces([index])[0] : labels[index] ?? `class ${index}`;
  }

  showPredictions({ ids }) {
    const { logits, whole } = this.now;
    const known = ["LMHead", "MaskedLMHead", "ClassHead", "TokenHead"].includes(this.section.head);
    const rows = this.section.head === "ClassHead" ? [0] : this.rowsOf(ids);
    const count = known ? rows.length : 0;
    while (this.bars.length < count) {
      this.bars.push(new Bars(this.generates ? 10 : 6, this.generates ? (id) => this.append(id) : null));
      this.predictions.append(this.bars.at(-1).node);
    }
    this.bars.forEach((bars, i) => (bars.node.hidden = i >= count));
    const temperature = this.generates ? Number(this.temperature.input.value) : 1;
    const pairs = rows.slice(0, count).map((row, i) => {
      const now = probabilities([...logits[i]], temperature);
      const before = this.changed ? probabilities([...whole[i]], temperature) : null;
      const kept = this.generates ? nucleus(now, Number(this.top.input.value)) : null;
      this.bars[i].title.textContent = this.heading(ids, row);
      this.bars[i].show(now, before, kept, (index) => this.nameOf(index));
      return [before, now];
    });
    this.effect.textContent = this.changed && pairs.length ? this.effectOf(pairs[0]) : "";
  }

  heading(ids, row) {
    if (this.generates) return `Next token, at temperature ${Number(this.temperature.input.value).toFixed(2)}`;
    if (this.section.head === "ClassHead") return "Label";
    return `Token ${row}${ids[row] === this.section.ids.mask ? ", masked" : ""}`;
  }

  effectOf([before, now]) {
    const was = nucleus(before, 1)[0];
    const is = nucleus(now, 1)[0];
    const name = (index) => `“${shown(this.nameOf(index))}”`;
    const first = was === is ? `${name(is)} stays likeliest: ${percent(before[is])} → ${percent(now[is])}.`
      : `${name(is)} is now likeliest (${percent(now[is])}), before it was ${name(was)} (${percent(before[was])}).`;
    return `${first} The prediction changed by ${divergence(before, now).toFixed(3)} nats (KL divergence).`;
  }

  showAttention(tokens) {
    const patterns = new Map(Object.values(this.now.runs).flatMap((run) => [...run.patterns]));
    const pieces = (ids) => ids && this.tokenizer.pieces(ids);
    const names = this.both ? { encoder: pieces(tokens.source), decoder: pieces(tokens.ids) }
      : { [this.section.layout]: pieces(tokens.ids) };
    const heads = headsOf(this.parts, patterns, names);
    const stacks = ["cross", "encoder", "decoder"].filter((stack) => heads[stack]);
    if (this.attention) this.attention.update(heads);
    else if (stacks.length) {
      this.attention = new AttentionView({ heads, stacks,
        row: () => (this.decodes ? null : this.flow.position("encode")),
        explain: (head, t, s) => this.walk.explain(head, t, s) }, this.maps);
      this.attention.pick(stacks[0]);
    }
  }
}

// `section.live` on the element is the view, for readers who look further in the console.
mounts.live = (section, place) => {
  place.live = new LiveView(section, place);
};
