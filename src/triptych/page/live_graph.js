// The flow diagram's boxes and arrows, from the program: every operation that computes is a box, and operations that
// only name, reshape or store a value are passed through.

const PASSED = new Set(["site", "split_heads", "merge_heads", "cast", "extend", "shift"]);
const UNDRAWN = new Set(["rotation_cos", "rotation_sin"]); // the tables of a rotation, which its box speaks of
// Attention is one operation, and three boxes: input -> the box that reads it.
const ATTENTION = { scores: ["q", "k", "bias"], softmax: [], mix: ["v"] };

// One box: the step it stands for (of an entry), and which part of it; `inputs` are { key, value, from }, where `from`
// is a box, or null for what comes from outside the picture.
class Box {
  constructor(entry, step, part, layer) {
    Object.assign(this, { entry, step, part, layer, inputs: [], site: null, depth: 0, lane: 0 });
    this.id = `${entry}:${step.out[0]}${part ? `:${part}` : ""}`;
    this.kind = part ?? step.op;
  }

  // The weight that says which matrix or table it is.
  get weight() {
    return this.step.weights.weight ?? null;
  }
}

const layerOf = (name) => {
  const found = /(?:^|\.)blocks\.(\d+)\./.exec(name);
  return found && Number(found[1]);
};

// The layer of each step: of the next site that names one; behind the last of them, "end", before the first, "start".
function layersOf(instructions) {
  const layers = Array(instructions.length).fill("end");
  let layer = "end";
  for (let at = instructions.length - 1; at >= 0; at--) {
    const { op, out, attributes } = instructions[at];
    const named = op === "site" ? layerOf(out[0]) : op === "attend" ? layerOf(attributes.ports[0]) : null;
    if (op === "site" && /(^|\.)embed$/.test(out[0])) layer = "start";
    else if (named !== null) layer = named;
    layers[at] = layer;
  }
  return layers;
}

// All boxes of a stack, "encode" or "decode", with what a decoder reads of the encoder and, at the end, the head.
function boxesOf(program, stack) {
  const made = new Map(); // "entry:value" -> the box that makes it
  const boxes = [];
  const add = (box, inputs) => {
    box.inputs = inputs;
    boxes.push(box);
    return box;
  };
  const entries = [...(stack === "decode" && program.entries.cross_kv ? ["cross_kv"] : []), stack];
  const main = program.entries.decode ? "decode" : "encode";
  if (stack === main && program.entries.unembed) entries.push("unembed");
  for (const entry of entries) {
    const { instructions, inputs: given, outputs } = program.entries[entry];
    const from = (value) => made.get(`${entry}:${value}`) ?? null;
    if (entry === "unembed") made.set(`unembed:${given[0]}`, made.get(`${stack}:${program.entries[stack].outputs[0]}`));
    if (entry === "decode") for (const value of given) if (made.has(`cross_kv:${value}`)) {
      made.set(`decode:${value}`, made.get(`cross_kv:${value}`));
    }
    const layers = entry === "unembed" ? instructions.map(() => "end") : layersOf(instructions);
    instructions.forEach((step, at) => {
      const inputs = Object.entries(step.inputs).map(([key, value]) => ({ key, value, from: from(value) }));
      let box;
      if (PASSED.has(step.op)) {
        box = inputs[0]?.from ?? null;
        if (step.op === "site" && box && !box.site) box.site = step.out[0];
      } else if (step.op === "attend") {
        const own = (part) => inputs.filter(({ key }) => ATTENTION[part].includes(key));
        const scores = add(new Box(entry, step, "scores", layers[at]), own("scores"));
        const softmax = add(new Box(entry, step, "softmax", layers[at]), [{ key: null, value: null, from: scores }]);
        box = add(new Box(entry, step, "mix", layers[at]), [{ key: null, value: null, from: softmax }, ...own("mix")]);
      } else if (!UNDRAWN.has(step.op)) {
        box = add(new Box(entry, step, null, layers[at]),
          inputs.filter(({ key }) => !["cos", "sin", "q_pos", "k_pos", "positions"].includes(key)));
      }
      if (box) made.set(`${entry}:${step.out[0]}`, box);
    });
    if (entry === "unembed" && stack === main) boxes.at(-1).site ??= outputs[0];
  }
  return boxes;
}

// Places the boxes of one layer: `depth` is the row, `lane` 0 the residual stream, and 1, 2, ... what is beside it.
function place(boxes) {
  const own = new Set(boxes);
  const stream = (box) => box.lane === 0;
  for (const box of boxes) {
    const inside = box.inputs.filter(({ from }) => own.has(from));
    box.depth = inside.length ? 1 + Math.max(...inside.map(({ from }) => from.depth)) : 0;
    const outer = box.inputs.filter(({ from, key }) => !own.has(from) && key);
    const adds = box.step.op === "add" && (outer.length > 0 || inside.some(({ from }) => stream(from)));
    const after = /norm$/.test(box.step.op) && /resid_(mid|post|pre)$|(^|\.)embed$/.test(box.site ?? "")
      && inside.some(({ from }) => stream(from));
    box.lane = adds || after ? 0 : 1;
  }
  // A box that nothing waits for until later stands just above its reader: a value's projection beside the rotations.
  for (const box of [...boxes].reverse()) {
    const readers = boxes.filter((other) => other.inputs.some(({ from }) => from === box));
    if (readers.length && !box.inputs.some(({ from }) => own.has(from))) box.depth =
      Math.max(box.depth, Math.min(...readers.map(({ depth }) => depth)) - 1);
  }
  const rows = Math.max(-1, ...boxes.map(({ depth }) => depth)) + 1;
  for (let depth = 0; depth < rows; depth++) {
    boxes.filter((box) => box.depth === depth && box.lane).forEach((box, i) => (box.lane = i + 1));
  }
  return rows;
}
