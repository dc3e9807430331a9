// The interpreter: runs the entries of a program on one text, as `triptych.program.interpret` does.
//
// `how` says what is run differently and what is kept:
//   cuts       a Set of parts that contribute nothing: "blocks.0.attn:3" is a head, "blocks.0.mlp" an MLP.
//   mask       false: every query sees every key.      scale     false: scores are not scaled by 1/√d.
//   patterns   true: keep the attention weights of every head.

const integers = (numbers) => ({ shape: [numbers.length], data: Int32Array.from(numbers) });
const counting = (from, count) => integers(Array.from({ length: count }, (_, i) => from + i));

// One entry on one text.  `values` has every value by name afterwards, `patterns` the attention weights by part.
class Run {
  constructor(model, entry, given, how, cache) {
    Object.assign(this, { model, how, cache, weights: model.weights });
    const tokens = given.tokens;
    this.past = cache ? cache.length : 0;
    this.end = this.past + tokens;
    this.patterns = new Map();
    this.values = new Map(Object.entries(given.values));
    const own = {
      positions: () => counting(this.past, tokens),
      q_pos: () => counting(this.past, tokens),
      k_pos: () => counting(0, this.end),
      row_ends: () => integers(Array(tokens).fill(this.end)),
      token_types: () => integers(Array(tokens).fill(0)),
    };
    for (const name of entry.inputs) if (!this.values.has(name) && own[name]) this.values.set(name, own[name]());
    this.outputs = this.steps(entry);
    if (cache && cache.length < this.end) cache.length = this.end;
  }

  steps(entry) {
    for (const step of entry.instructions) this.values.set(step.out[0], this.result(step));
    return entry.outputs.map((name) => this.values.get(name));
  }

  result(step) {
    const call = { ...step.attributes, run: this, names: step.weights };
    for (const [key, name] of Object.entries(step.inputs)) call[key] = this.values.get(name);
    for (const [key, name] of Object.entries(step.weights)) {
      if (this.model.section.tensors[name].kind === "fp32") call[key] = this.weights.numbers(name);
    }
    const value = operations[step.op](call);
    return this.how.cuts?.has(step.op === "site" && this.partOf(step.out[0])) ? zeros(value) : value;
  }

  // "blocks.0.mlp" for the site "blocks.0.mlp.out", where an MLP's contribution passes.
  partOf(site) {
    return site.endsWith(".mlp.out") ? site.slice(0, -".out".length) : null;
  }

  // The steps of one expert of a mixture, with that expert's weights.
  expert(entry, number, x) {
    const own = (name) => name.replace(".experts.0.", `.experts.${number}.`);
    const renamed = (step) => ({ ...step, weights: Object.fromEntries(Object.entries(step.weights).map(([k, v]) => [k, own(v)])) });
    const inside = Object.create(this); // the same run with values of its own: names repeat
    inside.values = new Map([[entry.inputs[0], x]]);
    return inside.steps({ ...entry, instructions: entry.instructions.map(renamed) })[0];
  }
}

const zeros = (value) => valueOf(value.shape, new Float32Array(value.data.length));

class LiveModel {
  // `section` is what the exporter wrote (triptych/page/live_export.py); `plain` forbids WebAssembly.
  constructor(section, plain = false) {
    this.section = section;
    this.entries = section.program.entries;
    this.tables = section.tables;
    this.weights = new Weights(section.tensors, section.weights, plain);
  }

  // The encoder on a text; `memory` is what a decoder beside it reads: its keys and values of every layer.
  encode(input, how = {}) {
    const run = new Run(this, this.entries.encode, this.given(input), how, null);
    if (!this.entries.cross_kv) return { run, hidden: run.outputs[0] };
    const [hidden] = run.outputs;
    const entry = this.entries.cross_kv;
    const keys = new Run(this, entry, { tokens: hidden.shape[0], values: { memory: hidden } }, how, null);
    return { run, hidden, memory: Object.fromEntries(entry.outputs.map((name, i) => [name, keys.outputs[i]])) };
  }

  // The decoder on ids; with a cache, on those that follow the ones it holds.
  decode(ids, how = {}, memory = {}, cache = null) {
    const { tokens, values } = this.given(ids);
    const run = new Run(this, this.entries.decode, { tokens, values: { ...values, ...memory } }, how, cache);
    return { run, hidden: run.outputs[0] };
  }

  // Token ids, or frames or patches as a value.
  given(input) {
    if (!input.shape) return { tokens: input.length, values: { ids: integers(input) } };
    const name = this.entries.encode.inputs.find((one) => one === "frames" || one === "patches");
    const tokens = name === "patches" ? input.shape[0] + 1 : Math.floor(input.shape[0] / this.section.stride);
    return { tokens, values: { [name]: input } };
  }

  // What the head gives: of all vectors, or of those at `rows` alone.
  logits(hidden, rows = null) {
    if (!this.entries.unembed) return hidden;
    const width = last(hidden);
    let chosen = hidden;
    if (rows) {
      chosen = valueOf([rows.length, width], new Float32Array(rows.length * width));
      rows.forEach((row, i) => chosen.data.set(hidden.data.subarray(row * width, (row + 1) * width), i * width));
    }
    const given = { tokens: chosen.shape[0], values: { hidden: chosen } };
    return new Run(this, this.entries.unembed, given, {}, null).outputs[0];
  }
}
