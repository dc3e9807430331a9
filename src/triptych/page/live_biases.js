// Position biases, and the tables of relative positions that some models read; a page carries them where it has one.

// [heads, T, S] from a function of head, query and key.
function byPairs(heads, n, s, bias) {
  const out = new Float32Array(heads * n * s);
  for (let h = 0, at = 0; h < heads; h++) {
    for (let t = 0; t < n; t++) for (let j = 0; j < s; j++, at++) out[at] = bias(h, t, j);
  }
  return valueOf([heads, n, s], out);
}

// Tables of Python's, by distance from -reach to reach: the bucket or the row that a distance belongs to.
const atDistance = (table, distance) => table[distance + (table.length - 1) / 2];

operation("alibi_bias", ({ slopes, q_pos: { data: q }, k_pos: { data: k } }) =>
  byPairs(slopes.length, q.length, k.length, (h, t, j) => -slopes[h] * Math.abs(q[t] - k[j])));

operation("t5_bias", ({ weight, buckets, q_pos: { data: q }, k_pos: { data: k }, run }) => {
  const [table, heads] = [run.model.section.tables[buckets], weight.shape[1]];
  const at = (distance) => atDistance(table, distance) * heads;
  return byPairs(heads, q.length, k.length, (h, t, j) => weight.data[at(k[j] - q[t]) + h]);
});

// The rows of a table that distances up to the longest of this text reach.
operation("reached_table", ({ weight, rows, run }) => {
  const [table, width, longest] = [run.model.section.tables[rows], weight.shape[1], run.end - 1];
  const [first, end] = [atDistance(table, -longest), atDistance(table, longest) + 1];
  return valueOf([end - first, width], weight.data.slice(first * width, end * width));
});

operation("reached_row", ({ rows, q_pos: { data: q }, k_pos: { data: k }, run }) => {
  const [table, longest] = [run.model.section.tables[rows], run.end - 1];
  const first = atDistance(table, -longest);
  const within = (distance) => Math.min(Math.max(distance, -longest), longest);
  return byPairs(1, q.length, k.length, (h, t, j) => atDistance(table, within(q[t] - k[j])) - first);
});

// q . pos_k[row] + pos_q[row] . k of every pair.
operation("disentangled_bias", ({ q, k, row, pos_q: posQ, pos_k: posK }) => {
  const [n, heads, width] = q.shape;
  const [s, groups] = k.shape;
  const dot = (a, i, b, j) => {
    let sum = 0;
    for (let c = 0; c < width; c++) sum += a.data[i * width + c] * b.data[j * width + c];
    return sum;
  };
  const within = (h, count) => Math.floor((h * count) / heads);
  return byPairs(heads, n, s, (h, t, j) => {
    const r = row.data[t * s + j];
    const ofQuery = posK ? dot(q, t * heads + h, posK, r * posK.shape[1] + within(h, posK.shape[1])) : 0;
    return Math.fround(ofQuery) + (posQ ? dot(posQ, r * heads + h, k, j * groups + within(h, groups)) : 0);
  });
});
