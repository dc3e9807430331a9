// Position biases, and the tables of relative positions that some models read; a page carries them where it has one.

// [heads, T, S] from a function of head, query position and key position.
function byPositions(heads, q, k, bias) {
  const [n, s] = [q.data.length, k.data.length];
  const out = new Float32Array(heads * n * s);
  for (let h = 0, at = 0; h < heads; h++) {
    for (let t = 0; t < n; t++) for (let j = 0; j < s; j++, at++) out[at] = bias(h, q.data[t], k.data[j]);
  }
  return valueOf([heads, n, s], out);
}

// Tables of Python's, by distance from -reach to reach: the bucket or the row that a distance belongs to.
const atDistance = (table, distance) => table[distance + (table.length - 1) / 2];

operation("alibi_bias", ({ slopes, q_pos: q, k_pos: k }) =>
  byPositions(slopes.length, q, k, (h, i, j) => -slopes[h] * Math.abs(i - j)));

operation("t5_bias", ({ weight, buckets, q_pos: q, k_pos: k, run }) => {
  const [table, heads] = [run.model.tables[buckets], weight.shape[1]];
  return byPositions(heads, q, k, (h, i, j) => weight.data[atDistance(table, j - i) * heads + h]);
});

// The rows of a table that distances up to the longest of this text reach.
operation("reached_table", ({ weight, rows, run }) => {
  const [table, width, longest] = [run.model.tables[rows], weight.shape[1], run.end - 1];
  const [first, end] = [atDistance(table, -longest), atDistance(table, longest) + 1];
  return valueOf([end - first, width], weight.data.slice(first * width, end * width));
});

operation("reached_row", ({ rows, q_pos: q, k_pos: k, run }) => {
  const [table, longest] = [run.model.tables[rows], run.end - 1];
  const first = atDistance(table, -longest);
  return byPositions(1, q, k, (h, i, j) => atDistance(table, Math.min(Math.max(i - j, -longest), longest)) - first);
});

// q . pos_k[row] + pos_q[row] . k of every pair.
operation("disentangled_bias", ({ q, k, row, pos_q: posQ, pos_k: posK }) => {
  const [n, heads, width] = q.shape;
  const [s, groups] = k.shape;
  const out = new Float32Array(heads * n * s);
  const dot = (a, i, b, j) => {
    let sum = 0;
    for (let c = 0; c < width; c++) sum += a.data[i * width + c] * b.data[j * width + c];
    return sum;
  };
  for (let h = 0, at = 0; h < heads; h++) {
    const g = Math.floor((h * groups) / heads);
    for (let t = 0; t < n; t++) {
      for (let j = 0; j < s; j++, at++) {
        const r = row.data[t * s + j];
        if (posK) out[at] += dot(q, t * heads + h, posK, r * posK.shape[1] + Math.floor((h * posK.shape[1]) / heads));
        if (posQ) out[at] += dot(posQ, r * heads + h, k, j * groups + g);
      }
    }
  }
  return valueOf([heads, n, s], out);
});
