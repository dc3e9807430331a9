// What the boxes of the flow diagram are called, and what they do.

const LINEAR_NAMES = {
  q: ["Queries", "What each token looks for: its vector times the query matrix, cut into heads."],
  k: ["Keys", "What each token offers to be found by: its vector times the key matrix, cut into heads."],
  v: ["Values", "What each token hands over when it is read: its vector times the value matrix, cut into heads."],
  "attn.out": ["Output projection", "Joins the heads' results and brings them back to the width of the stream."],
  "cross.out": ["Output projection", "Joins the heads' results and brings them back to the width of the stream."],
  gate: ["Gate", "One number for every neuron, which will scale what the neuron carries."],
  up: ["Up projection", "Widens each vector to one number for every neuron of the MLP."],
  "mlp.out": ["Down projection", "Brings the neurons back to the width of the stream."],
  router: ["Router", "Scores the experts, of which each token takes the best."],
  logits: ["Unembedding", "Compares the vector with every token of the vocabulary: one number, a logit, for each."],
};

const BOX_NAMES = {
  scores: ["Scores", "The dot product of this token's query with every key it may see, scaled; then the position's " +
    "bias and the mask."],
  softmax: ["Softmax", "Turns the scores of each row into weights that are positive and sum to 1."],
  mix: ["Weighted sum", "Adds up the values of the tokens, each times its weight."],
  rms_norm: ["RMSNorm", "Divides the vector by the root of the mean of its squares, then scales every number by a " +
    "learned weight."],
  layer_norm: ["LayerNorm", "Subtracts the vector's mean and divides by its standard deviation; then a learned scale " +
    "and shift."],
  l2_normalize: ["Normalize", "Divides the vector by its length."],
  add: ["Add", "Adds the result to the residual stream, which carries everything computed so far."],
  multiply: ["Multiply", "Multiplies number by number."],
  rotate: ["Rotate", "Turns each pair of numbers by an angle that grows with the position, so that scores depend on " +
    "distance."],
  silu: ["SiLU", "Lets positive numbers pass and presses negative ones towards zero."],
  gelu: ["GELU", "Lets positive numbers pass and presses negative ones towards zero."],
  relu: ["ReLU", "Sets negative numbers to zero."],
  tanh: ["Tanh", "Presses every number into -1 to 1."],
  scale: ["Scale", "Multiplies by one fixed number."],
  softcap: ["Soft cap", "Keeps numbers within a bound, smoothly."],
  t5_bias: ["Position bias", "A learned number for every head and distance, added to the scores."],
  alibi_bias: ["Position bias", "A penalty that grows with the distance, with a slope for every head, added to the " +
    "scores."],
  disentangled_bias: ["Position bias", "Scores between contents and relative positions."],
  sinusoids: ["Sinusoids", "Sines and cosines of the position, at many wavelengths."],
  experts: ["Experts", "Each token passes through the MLPs with the best scores, weighted."],
  pool: ["Pool", "One vector for the whole text."],
  embedding: ["Embedding", "Looks up one row of a table for every token."],
};

// [title, what it does] of a box.
function wordsOf(box) {
  const site = box.site ?? "";
  const table = box.weight ?? "";
  if (box.kind === "embedding") {
    if (/position/.test(table)) return ["Position embedding", "Looks up the row of each position."];
    if (/type/.test(table)) return ["Segment embedding", "Looks up the row of the segment, here always the first."];
    return ["Token embedding", "Looks up the row of each token: the same row wherever the token stands."];
  }
  if (box.kind === "linear") {
    const found = Object.entries(LINEAR_NAMES).find(([leaf]) => site === leaf || site.endsWith(`.${leaf}`));
    if (found) return found[1];
    const named = /\.([^.]+)\.weight$/.exec(table);
    return [named ? `Linear (${named[1]})` : "Linear", "Multiplies each vector by a matrix."];
  }
  if (box.kind === "rotate") return [/q_rot$/.test(site) ? "Rotate queries" : "Rotate keys", BOX_NAMES.rotate[1]];
  if (box.kind === "add" && /(^|\.)embed$|^$/.test(site) && box.layer === "start") {
    return ["Add", "Adds the embeddings."];
  }
  return BOX_NAMES[box.kind] ?? [box.kind.replaceAll("_", " "), "An operation of the program."];
}

const EQUATIONS = { scores: "scale · q kᵀ (+ bias), masked", softmax: "exp(score) / Σ exp(score)",
  mix: "Σ weight · v" };
