// Facts about the model and the followed token, for the texts of the chapters.

class About {
  constructor(view) {
    this.view = view;
    const { section, flow, tokens } = view;
    Object.assign(this, { section, flow, tokens, both: view.both, decodes: view.decodes });
    this.main = view.decodes ? "decode" : "encode"; // the stack whose end is the prediction
    this.reading = view.both ? "encode" : this.main; // the stack that reads the text
  }

  // The followed token of a stack, as it is shown.
  piece(stack = this.main, at = this.flow.position(stack)) {
    return bdi(this.view.tokenizer.pieces([this.flow.idsOf(stack)[at]])[0]);
  }

  // The first box of a layer, or of all for null, that `test` fits.
  box(stack, test, layer = 0) {
    return this.flow.stacks[stack].find((box) => (layer === null || box.layer === layer) && test(box, this)) ?? null;
  }

  open(stack, test, layer = 0) {
    const box = this.box(stack, test, layer);
    const shownLayer = Number.isInteger(box?.layer) ? box.layer : stack === this.flow.stack ? this.flow.layer : 0;
    this.flow.openWhere((one) => one === box, shownLayer, stack);
    this.flow.node.scrollIntoView({ block: "nearest" });
  }

  get tokenBox() {
    return this.box(this.reading, (box) => box.kind === "embedding" && !/position|type/.test(box.weight), null);
  }

  // The attention of the prediction's stack in layer 0: its own, or the one that reads the encoder.
  attention(cross = false) {
    return this.box(this.main, ({ kind, step }) => kind === "softmax" && (step.attributes.keys === "cross") === cross);
  }

  // How far the prediction is from that of the whole model, or null.
  get moved() {
    return this.view.changed ? this.movedAt(0) : null;
  }

  // The same of the prediction at one of the rows that the engine gave.
  movedAt(row) {
    const { now } = this.view;
    return divergence(...[now.whole, now.logits].map((logits) => probabilities([...logits[row]])));
  }

  // " It is cut, and the prediction has changed by 0.123 nats." after a change.
  effect(what) {
    const { moved } = this;
    return moved === null ? "" : prose` ${what}, and the prediction at temperature 1 has changed by
      ${number("moved", moved, three(moved))} nats.`;
  }

  // Whether norms stand before the parts that read them.
  get prenorm() {
    const before = ({ weights }) => Object.values(weights).some((name) => /norm\.pre/.test(name));
    return Object.values(this.section.program.entries).some(({ instructions }) => instructions.some(before));
  }

  // The numbers of an MLP's neurons, the MLP of layer 0, and the heads of layer 0.
  get neurons() {
    const activation = ({ kind }) => /^(gelu|relu|silu)$/.test(kind);
    return this.box(this.main, ({ site }) => /mlp\.act$/.test(site)) ?? this.box(this.main, activation);
  }

  get mlp() {
    return this.view.parts.find(({ mlp, layer, tower }) => mlp && layer === 0 && tower === this.main)?.part;
  }

  get headCuts() {
    const box = this.attention(this.both);
    return Array.from({ length: this.flow.heads(box) }, (_, h) => `${attendPart(box.step)}:${h}`);
  }

  // The addition of layer 0's attention, and its input that is the residual stream.
  get streamAdd() {
    return this.box(this.main, ({ kind, lane }) => kind === "add" && lane === 0);
  }

  get streamInput() {
    const { inputs } = this.streamAdd;
    return inputs.find(({ from }) => !from || from.layer !== 0) ?? inputs[0];
  }
}

const entropyOf = (weights) => weights.reduce((sum, w) => sum - (w > 0 ? w * Math.log(w) : 0), 0);
const POSITIONS = ["rotate", "t5_bias", "alibi_bias", "disentangled_bias", "sinusoids"];
const isPosition = (box) => POSITIONS.includes(box.kind) || (box.kind === "embedding" && /position/.test(box.weight));
const isLogits = ({ site }) => /(^|\.)logits$/.test(site ?? "");
