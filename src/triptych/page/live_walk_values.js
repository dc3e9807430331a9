// The matrices of one head of one attention, of a run of the model: what the walk through an attention shows.

// The linear step that a value comes from, through steps that only rearrange, rotate or normalize it; null where there
// is none.  `runs` are those of the entry and, for keys and values of an encoder's memory, of "cross_kv".
function projectionOf(runs, value) {
  const changes = [];
  let [name, run] = [value, runs[0]];
  for (;;) {
    const produces = (one) => one?.entry.instructions.find(({ out }) => out[0] === name);
    const step = produces(run) ?? produces((run = runs[1]));
    if (!step) return null;
    if (step.op === "linear") return { run, step, changes };
    if (!["site", "split_heads", "extend"].includes(step.op)) changes.push(step.op);
    name = step.inputs.x ?? step.inputs.k ?? step.inputs.v;
    if (!name) return null;
  }
}

// Rows `from` to `from + count` of a matrix [out, in], as the columns of a matrix [in, count] that vectors are
// multiplied by.
function weightColumns(weights, name, from, count) {
  const { columns } = weights.entry(name);
  const line = new Float32Array(columns);
  const data = new Float32Array(columns * count);
  for (let r = 0; r < count; r++) {
    weights.row(name, from + r, line, 0);
    for (let c = 0; c < columns; c++) data[c * count + r] = line[c];
  }
  return { shape: [columns, count], data };
}

// One head of a value [N, heads, width], or those columns of [N, heads * width].
function headOf({ shape, data }, head, width) {
  const [n] = shape;
  const all = data.length / n;
  const out = new Float32Array(n * width);
  for (let t = 0; t < n; t++) out.set(data.subarray(t * all + head * width, t * all + (head + 1) * width), t * width);
  return { shape: [n, width], data: out };
}

// { problem } where the attention is of another kind than the walk shows.
function walkOf(model, { encoder, decoder }, { part, head }) {
  const attends = ({ op, attributes }) => op === "attend" && attributes.ports[0].startsWith(`${part}.`);
  const run = [encoder?.run, decoder?.run].find((one) => one?.entry.instructions.some(attends));
  const at = run?.entry.instructions.findIndex(attends);
  const step = run?.entry.instructions[at];
  if (step?.attributes.mechanism !== "dot_product") return { problem: "its scores are not dot products" };
  const { weights } = model;
  const read = (own, name) => own.values.get(name);
  const input = (key) => {
    const value = read(run, step.inputs[key]);
    return run.how.cuts?.has(arrowName(run.name, step, key)) ? zeros(value) : value;
  };
  const [q, k, v] = ["q", "k", "v"].map(input);
  const [heads, groups, width, valueWidth] = [q.shape[1], k.shape[1], last(q), last(v)];
  const group = Math.floor((head * groups) / heads);
  const parts = {};
  for (const [key, value, own, size] of [["q", q, head, width], ["k", k, group, width], ["v", v, group, valueWidth]]) {
    const from = projectionOf([run, encoder?.keys], step.inputs[key]);
    if (!from || read(from.run, from.step.out[0]).data.length !== value.data.length) {
      return { problem: `its ${{ q: "queries", k: "keys", v: "values" }[key]} are not one product with a matrix` };
    }
    const { weight, bias } = from.step.weights;
    parts[key] = { x: read(from.run, from.step.inputs.x), w: weightColumns(weights, weight, own * size, size),
      b: bias && weights.entry(bias).data.slice(own * size, (own + 1) * size), changes: from.changes,
      projected: headOf(read(from.run, from.step.out[0]), own, size), used: headOf(value, own, size) };
  }
  // Behind the attention: the results of all heads, and the matrix that mixes them.
  const seen = new Set([step.out[0]]);
  const behind = run.entry.instructions.slice(at + 1).find(({ op, out, inputs }) => {
    if (!seen.has(inputs.x)) return false;
    if (["site", "merge_heads"].includes(op)) seen.add(out[0]);
    return op === "linear";
  });
  if (!behind) return { problem: "no matrix follows its heads" };
  const z = read(run, step.out[0]);
  const bias = step.inputs.bias && read(run, step.inputs.bias);
  const [size] = weights.entry(behind.weights.weight).shape;
  const sinks = step.weights.sinks && weights.entry(step.weights.sinks).data[head];
  const { scale, softcap } = step.attributes;
  const square = q.shape[0] * k.shape[0];
  return {
    part, head, heads, parts, softcap, scale: run.how.scale === false ? 1 : scale, trained: scale, sink: sinks ?? null,
    bias: bias && bias.data.slice(head * square, (head + 1) * square),
    concat: { shape: [z.shape[0], heads * valueWidth], data: z.data },
    out: { w: weightColumns(weights, behind.weights.weight, 0, size),
      b: behind.weights.bias && weights.entry(behind.weights.bias).data, value: read(run, behind.out[0]) },
  };
}
