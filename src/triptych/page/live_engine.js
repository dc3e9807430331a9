// Runs the page's requests to its model, in a worker so that typing is not delayed; live_worker_calls.js sends them.

const NEIGHBOURS = 4000; // rows of a table among which the closest is looked for

class Engine {
  constructor(section, plain = false) {
    this.section = section;
    this.model = new LiveModel(section, plain);
    this.now = null; // earlier results, of which a later one computes only what changed
    this.whole = null;
    this.writing = null;
  }

  get kernel() {
    return this.model.weights.kernel.name;
  }

  // One text through all stacks, with the logits at `rows`, or of a head that reads the text as a whole for null.
  forward({ source, ids, rows }, how, earlier) {
    const { model } = this;
    const of = (stack) => earlier.map((one) => one?.[stack]);
    const decodes = "decode" in model.entries;
    const read = source ?? (decodes ? null : ids);
    const encoder = read && model.encode(read, how, of("encoder"));
    const decoder = decodes ? model.decode(ids, how, encoder?.memory, null, of("decoder")) : null;
    const { hidden } = decoder ?? encoder;
    const all = model.logits(hidden, rows);
    const width = last(all);
    const logits = (rows ?? [0]).map((_, i) => all.data.slice(i * width, (i + 1) * width));
    return { encoder, decoder, hidden, logits };
  }

  // What the page shows of one text:
  //   runs    of each entry the attention weights and those values that `names` has; of the head at the position `at`
  //   logits  at `rows`, and `whole`, the same of the model as it was trained
  //   token   what `tokenOf` gives for `lookup`
  //   walk    what `walkOf` gives for it
  compute({ names = {}, at = 0, lookup = null, walk = null, ...text }) {
    const asTrained = { patterns: true };
    const { how = asTrained } = text;
    const key = JSON.stringify([text.source, text.ids, text.rows]);
    const now = this.forward(text, { patterns: true, ...how }, [this.now, this.whole]);
    const changed = how.cuts?.size || how.mask === false || how.scale === false || how.painted;
    if (!changed) this.whole = { ...now, key };
    else if (this.whole?.key !== key) this.whole = { ...this.forward(text, asTrained, [this.whole]), key };
    this.now = now;
    const { encoder, decoder, hidden, logits } = now;
    const head = this.model.unembed(hidden, text.rows && [at]);
    const all = { encode: encoder?.run, cross_kv: encoder?.keys, decode: decoder?.run, unembed: head };
    const runs = {};
    for (const [entry, run] of Object.entries(all).filter(([, one]) => one)) {
      const values = new Map([...run.values].filter(([value]) => names[entry]?.has(value)));
      runs[entry] = { name: run.name, how: run.how, patterns: run.patterns, values };
    }
    return { runs, logits, whole: this.whole.logits, token: lookup && this.tokenOf(lookup),
      walk: walk && walkOf(this.model, now, walk) };
  }

  // The size of a table, the first number of the row `id`, and the row that points most the same way.
  tokenOf({ table, id }) {
    if (this.token?.id === id && this.token.table === table) return this.token;
    const { rows, columns } = this.model.weights.entry(table);
    const row = (i) => this.model.weights.row(table, i, new Float32Array(columns), 0);
    const dot = (a, b) => oneDot(a, b, 0, columns);
    const own = row(id);
    const token = { table, id, rows, columns, first: own[0], closest: -1, cosine: -Infinity };
    for (let i = 0; i < Math.min(rows, NEIGHBOURS); i++) {
      const other = row(i);
      const cosine = dot(own, other) / (Math.sqrt(dot(own, own) * dot(other, other)) || 1);
      if (i !== id && cosine > token.cosine) Object.assign(token, { closest: i, cosine });
    }
    return (this.token = token);
  }

  // Writing: the source once, then tokens through a cache, the whole text first and then one a step.
  begin({ source, how }) {
    const memory = source ? this.model.encode(source, how).memory : {};
    this.writing = { how, memory, cache: new Cache(this.section.limit) };
  }

  step(ids) {
    const { how, memory, cache } = this.writing;
    const { hidden } = this.model.decode(ids, how, memory, cache);
    return { logits: this.model.logits(hidden, [hidden.shape[0] - 1]).data, length: cache.length };
  }
}

// In the worker: each message is { id, call, given }, the first of them the call "load".
function serve() {
  let engine = null;
  globalThis.onmessage = ({ data: { id, call, given } }) => {
    try {
      const answer = call === "load" ? (engine = new Engine(given)).kernel : engine[call](given);
      postMessage({ id, answer });
    } catch ({ message }) {
      postMessage({ id, problem: message });
    }
  };
}
