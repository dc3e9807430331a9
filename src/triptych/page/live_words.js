// What the boxes of the flow diagram are called, and what they do.

const LINEAR_NAMES = {
  q: ["Queries", "Its vector times the query matrix, split into heads; compared with the keys."],
  k: ["Keys", "Each token's vector times the key matrix, split into heads; compared with queries."],
  v: ["Values", "Each token's vector times the value matrix, split into heads; averaged by the weights."],
  "attn.out": ["Output projection", "Joins the heads' results and brings them back to the width of the stream."],
  "cross.out": ["Output projection", "Joins the heads' results and brings them back to the width of the stream."],
  gate: ["Gate", "One number for every neuron, by which the neuron's value is multiplied after the activation."],
  up: ["Up projection", "Maps each vector to one number for every neuron of the MLP."],
  "mlp.out": ["Down projection", "Maps the neurons back to the width of the residual stream."],
  router: ["Router", "Scores the experts; each token is computed by those with the best scores."],
  logits: ["Unembedding", "Compares the vector with every token of the vocabulary: one number, a logit, for each."],
};

const BOX_NAMES = {
  scores: ["Scores", "The dot product of this token's query with every key it may see, scaled; then the position's " +
    "bias and the mask."],
  softmax: ["Softmax", "Turns the scores of each row into weights that are positive and sum to 1."],
  mix: ["Weighted sum", "Adds up the values of the tokens, each times its weight."],
  rms_norm: ["RMSNorm", "Divides the vector by its root mean square, then multiplies every number by a " +
    "learned weight."],
  layer_norm: ["LayerNorm", "Subtracts the vector's mean and divides by its standard deviation; then a learned scale " +
    "and shift."],
  l2_normalize: ["Normalize", "Divides the vector by its length."],
  add: ["Add", "Adds the result to the residual stream, which carries everything computed so far."],
  multiply: ["Multiply", "Multiplies number by number."],
  rotate: ["Rotate", "Rotates each pair of numbers by an angle that grows with the position, so that scores depend " +
    "on distance."],
  silu: ["SiLU", "x · sigmoid(x): close to x for large numbers, close to zero for very negative ones."],
  gelu: ["GELU", "x · Φ(x), Φ of the normal distribution: close to x for large numbers, to zero for negative ones."],
  relu: ["ReLU", "Sets negative numbers to zero."],
  tanh: ["Tanh", "Maps every number to one between -1 and 1."],
  scale: ["Scale", "Multiplies by one fixed number."],
  softcap: ["Soft cap", "Keeps numbers within a bound, smoothly."],
  t5_bias: ["Position bias", "A learned number for every head and distance, added to the scores."],
  alibi_bias: ["Position bias", "A penalty that grows with the distance, with a slope for every head, added to the " +
    "scores."],
  disentangled_bias: ["Position bias", "Scores between contents and relative positions."],
  sinusoids: ["Sinusoids", "Sines and cosines of the position, at many wavelengths."],
  experts: ["Experts", "The weighted sum of the MLPs (experts) that the router chose for each token."],
  pool: ["Pool", "One vector for the whole text."],
  embedding: ["Embedding", "Looks up one row of a table for every token."],
};

// [title, what it does] of a box.
function wordsOf(box) {
  const site = box.site ?? "";
  const table = box.weight ?? "";
  if (box.kind === "embedding") {
    if (/position/.test(table)) return ["Position embedding", "Looks up the row of each position."];
    if (/type/.test(table)) {
      return ["Token type embedding", "Looks up the row of the token type, first or second sentence; here the first."];
    }
    return ["Token embedding", "Looks up the row of each token: the same row at every position."];
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
