// The interpreter: runs the entries of a program on one text, as `triptych.program.interpret` does.
//
// `how` says what is run differently and what is kept:
//   cuts       a Set of what contributes nothing: "blocks.0.attn:3" is a head, "blocks.0.mlp" an MLP, and
//              "decode:t18<x" the arrow into the input `x` of the step whose result is t18.
//   mask       false: every query sees every key.      scale     false: scores are not scaled by 1/√d.
//   patterns   true: keep the attention weights of every head.

const integers = (numbers) => ({ shape: [numbers.length], data: Int32Array.from(numbers) });
const counting = (from, count) => integers(Array.from({ length: count }, (_, i) => from + i));

// One entry on one text.  `values` has every value by name afterwards, `patterns` the attention weights by part.
// `held` is what still holds of an earlier run (live_run_reuse.js).
class Run {
  constructor(model, name, given, how, cache = null, held = null) {
    const entry = model.entries[name];
    Object.assign(this, { model, name, entry, given, how, cache, held, weights: model.weights });
    this.past = cache ? cache.length : held?.tokens ?? 0;
    this.end = this.past + given.tokens;
    this.patterns = new Map();
    this.values = new Map(Object.entries(given.values));
    this.own(given.tokens);
    entry.instructions.forEach((step, index) => this.values.set(step.out[0],
      this.earlier(step, index) ?? this.result(step)));
    if (held?.tokens) joinRuns(this, held);
    if (cache && cache.length < this.end) cache.length = this.end;
    this.outputs = entry.outputs.map((output) => this.values.get(output));
  }

  // Inputs that are made from the number of tokens alone.
  own(tokens) {
    const positions = counting(this.past, tokens);
    const made = { positions, q_pos: positions, k_pos: counting(0, this.end),
      row_ends: integers(Array(tokens).fill(this.end)), token_types: integers(Array(tokens).fill(0)) };
    for (const input of this.entry.inputs) {
      if (!(input in this.given.values) && made[input]) this.values.set(input, made[input]);
    }
  }

  // What an earlier run of the same text has for a step before the first one that changed.
  earlier(step, index) {
    if (!this.held || index >= this.held.step) return undefined;
    const { run } = this.held;
    if (step.op === "attend" && run.patterns.has(attendPart(step))) {
      this.patterns.set(attendPart(step), run.patterns.get(attendPart(step)));
    }
    return run.values.get(step.out[0]);
  }

  result(step) {
    const call = { ...step.attributes, run: this, names: step.weights, out: step.out[0] };
    for (const [key, name] of Object.entries(step.inputs)) {
      const value = this.values.get(name);
      call[key] = this.how.cuts?.has(arrowName(this.name, step, key)) ? zeros(value) : value;
    }
    for (const [key, name] of Object.entries(step.weights)) {
      if (this.model.section.tensors[name].kind === "fp32") call[key] = this.weights.entry(name);
    }
    const value = operations[step.op](call);
    return this.how.cuts?.has(step.op === "site" && mlpPart(step)) ? zeros(value) : value;
  }
}

// "blocks.0.mlp" for the site "blocks.0.mlp.out", where an MLP's contribution passes; "blocks.0.attn" for an attention.
const mlpPart = (step) => (step.out[0].endsWith(".mlp.out") ? step.out[0].slice(0, -".out".length) : null);
const attendPart = (step) => step.attributes.ports[0].slice(0, step.attributes.ports[0].lastIndexOf("."));

// The arrow into one input of a step: cut, the step reads zeros there.
const arrowName = (entry, step, key) => `${entry}:${step.out[0]}<${key}`;
const zeros = (value) => valueOf(value.shape, new Float32Array(value.data.length));

class LiveModel {
  // `section` is what the exporter wrote (triptych/page/live_export.py); `plain` forbids WebAssembly.
  constructor(section, plain = false) {
    this.section = section;
    this.entries = section.program.entries;
    this.weights = new Weights(section.tensors, section.weights, plain);
  }

  // The encoder on a text; `memory` is what a decoder beside it reads: its keys and values of every layer.  Earlier
  // results of this method shorten the run where they can.
  encode(input, how = {}, earlier = []) {
    const run = this.run("encode", this.given(input), how, earlier.map((one) => one?.run));
    if (!this.entries.cross_kv) return { run, hidden: run.outputs[0] };
    const [hidden] = run.outputs;
    const given = { tokens: hidden.shape[0], values: { memory: hidden } };
    const keys = this.run("cross_kv", given, how, earlier.map((one) => one?.keys));
    const memory = Object.fromEntries(keys.entry.outputs.map((name, i) => [name, keys.outputs[i]]));
    return { run, hidden, keys, memory };
  }

  // The decoder on ids; with a cache, on those that follow the ones it holds.
  decode(ids, how = {}, memory = {}, cache = null, earlier = []) {
    const { tokens, values } = this.given(ids);
    const given = { tokens, values: { ...values, ...memory } };
    const run = cache ? new Run(this, "decode", given, how, cache)
      : this.run("decode", given, how, earlier.map((one) => one?.run));
    return { run, hidden: run.outputs[0] };
  }

  // An entry, of which as much is computed as no earlier run has.
  run(name, given, how, earlier) {
    const held = mostHeld(this.entries[name], given, how, earlier);
    const rest = held?.tokens ? { tokens: given.tokens - held.tokens,
      values: { ...given.values, ids: integers(given.values.ids.data.subarray(held.tokens)) } } : given;
    const run = new Run(this, name, rest, how, null, held);
    run.given = given;
    for (const [key, value] of Object.entries(given.values)) run.values.set(key, value);
    run.held = null; // or every run would keep all those before it
    return run;
  }

  // Token ids, or frames or patches as a value.
  given(input) {
    if (!input.shape) return { tokens: input.length, values: { ids: integers(input) } };
    const name = this.entries.encode.inputs.find((one) => one === "frames" || one === "patches");
    const tokens = name === "patches" ? input.shape[0] + 1 : Math.floor(input.shape[0] / this.section.stride);
    return { tokens, values: { [name]: input } };
  }

  // The head's run, on all vectors or on those at `rows` alone; null for a model that has none.
  unembed(hidden, rows = null) {
    if (!this.entries.unembed) return null;
    const width = last(hidden);
    const chosen = rows ? valueOf([rows.length, width], new Float32Array(rows.length * width)) : hidden;
    rows?.forEach((row, i) => chosen.data.set(hidden.data.subarray(row * width, (row + 1) * width), i * width));
    return new Run(this, "unembed", { tokens: chosen.shape[0], values: { hidden: chosen } }, {});
  }

  logits(hidden, rows = null) {
    return this.unembed(hidden, rows)?.outputs[0] ?? hidden;
  }
}
