// Mixtures of experts; a page carries them where its model has one.

// The steps of one expert on some vectors, with that expert's weights.
function expertOf(run, entry, number, x) {
  const own = (name) => name.replace(".experts.0.", `.experts.${number}.`);
  const inside = Object.create(run); // the same run with values of its own: names repeat
  inside.values = new Map([[entry.inputs[0], x]]);
  inside.how = {}; // cuts name steps of the entry, not of its experts
  for (const step of entry.instructions) {
    const weights = Object.fromEntries(Object.entries(step.weights).map(([key, name]) => [key, own(name)]));
    inside.values.set(step.out[0], inside.result({ ...step, weights }));
  }
  return inside.values.get(entry.outputs[0]);
}

// Each token through the experts with the largest scores, weighted by the softmax of all scores.
operation("experts", ({ x, scores, top_k: top, normalize, expert, run }) => {
  const [width, count] = [last(x), last(scores)];
  const out = new Float32Array(x.data.length);
  const chosen = Array.from({ length: count }, () => []);
  for (let t = 0; t < x.shape[0]; t++) {
    const weights = softmax(scores.data.slice(t * count, (t + 1) * count));
    const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, top);
    const sum = normalize ? best.reduce((total, e) => total + weights[e], 0) : 1;
    for (const e of best) chosen[e].push([t, weights[e] / sum]);
  }
  chosen.forEach((tokens, number) => {
    if (!tokens.length) return;
    const rows = new Float32Array(tokens.length * width);
    tokens.forEach(([t], i) => rows.set(x.data.subarray(t * width, (t + 1) * width), i * width));
    const result = expertOf(run, expert.entry, number, valueOf([tokens.length, width], rows)).data;
    tokens.forEach(([t, weight], i) => {
      for (let j = 0; j < width; j++) out[t * width + j] += weight * result[i * width + j];
    });
  });
  return valueOf(x.shape, out);
});
