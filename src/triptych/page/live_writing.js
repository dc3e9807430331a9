// The model's own writing, where it generates: temperature and top-p, tokens one at a time, and the cache that fills.

const MOST_NEW = 120; // tokens of one press of "Write"

// The cache while the model writes: a row for each layer, a column for each position.
class CachePicture {
  constructor(layers, numbers) {
    Object.assign(this, { layers, numbers });
    this.canvas = el("canvas", { class: "cache", "aria-hidden": "true" });
    this.text = statusLine();
    this.node = el("div", { class: "kv", hidden: "" }, el("h4", {}, "KV cache"), this.canvas, this.text);
    repaints.push(() => this.last && this.show(...this.last));
  }

  // `filled` positions, of which the last step computed `fresh`.
  show(filled, fresh, capacity) {
    this.node.hidden = false;
    this.last = [filled, fresh, capacity];
    [this.canvas.width, this.canvas.height] = [capacity, this.layers];
    const context = this.canvas.getContext("2d");
    const colours = getComputedStyle(this.node);
    const fill = (colour, from, to) => {
      context.fillStyle = colours.getPropertyValue(colour);
      context.fillRect(from, 0, to - from, this.layers);
    };
    const seen = Math.max(fresh, capacity / 128); // wide, so that one position of many can be seen
    fill(isDark() ? "--kept-dark" : "--kept-light", 0, filled - fresh);
    fill(isDark() ? "--fresh-dark" : "--fresh-light", Math.max(0, filled - seen), filled);
    const kib = (4 * this.numbers * filled) / 1024;
    refill(this.text, prose`${filled} of ${capacity} positions, ${kib.toFixed(1)} KiB. This step computed keys and
      values of ${fresh} ${fresh === 1 ? "token" : "tokens"} and read those of ${filled - fresh} from the cache.`);
  }
}

class WritingView extends LiveView {
  writing() {
    const changed = () => this.schedule();
    this.temperature = slider("Temperature", { min: 0, max: 2, step: 0.05, value: 0.8 }, changed);
    this.top = slider("Top-p", { min: 0.05, max: 1, step: 0.05, value: 0.95 }, changed);
    this.write = button("Write", "Let the model continue, one token at a time", () => this.toggle());
    this.step = button("One token", "Append one token", () => this.generate(1));
    const tower = this.parts.filter((one) => one.stack === "decoder");
    this.cachePicture = new CachePicture(tower.filter((one) => !one.mlp).length, this.numbersPerPosition);
    return [div("writing", this.write, this.step, this.temperature.node, this.top.node), this.cachePicture.node];
  }

  heat(temperature) {
    this.temperature.input.value = temperature;
    this.temperature.input.dispatchEvent(new Event("input"));
    this.update();
  }

  toggle() {
    if (this.running) this.running = false;
    else {
      this.seed += 1;
      this.generate(MOST_NEW);
    }
  }

  get field() {
    return this.both ? this.target.input : this.source.input;
  }

  // The chosen token behind the text, as if it had been typed.
  append(id) {
    const { ids } = this.read();
    if (this.section.ids.stop.includes(id)) return;
    this.extend(ids, [id], this.field.value);
    this.update();
  }

  // The text with the tokens `fresh` behind those of `ids`.
  extend(ids, fresh, text) {
    const own = this.both ? ids.slice(1) : ids;
    this.field.value = text + this.tokenizer.decode([...own, ...fresh]).slice(this.tokenizer.decode(own).length);
  }

  // Up to `count` tokens.  Each is awaited from the engine and not from a frame, which a hidden tab never gets.
  async generate(count) {
    if (this.running) return;
    this.running = true;
    this.write.textContent = "Stop";
    try {
      await this.started;
      await this.writeTokens(count);
    } catch ({ message }) {
      this.warning.textContent = `The model could not write: ${message}.`;
      return;
    } finally {
      this.running = false;
      this.write.textContent = "Write";
    }
    await this.update();
  }

  async writeTokens(count) {
    const { source, ids } = this.read();
    const { limit } = this.section;
    if (!ids.length || ids.length >= limit) return;
    await this.engine.call("begin", { source, how: this.how() });
    const [text, fresh] = [this.field.value, []];
    let next = ids;
    while (this.running && fresh.length < count && ids.length + fresh.length < limit) {
      const { logits, length } = await this.engine.call("step", next);
      this.cachePicture.show(length, next.length, limit);
      const chances = probabilities([...logits], Number(this.temperature.input.value));
      const kept = nucleus(chances, Number(this.top.input.value));
      const id = choose(chances, kept, uniform(this.seed, length));
      this.bars[0]?.show(chances, null, kept, (index) => this.nameOf(index));
      if (this.section.ids.stop.includes(id)) return;
      fresh.push(id);
      this.extend(ids, fresh, text);
      next = [id];
      await new Promise((done) => setTimeout(done, 0)); // so that the step is seen, and "Stop" is heard
    }
  }
}

mounts.live = (section, place) => {
  place.live = new WritingView(section, place);
};
