// The scores of additive and linear attention.

const positive = (x) => (x > 0 ? x + 1 : Math.exp(x)); // elu(x) + 1 (Katharopoulos et al. 2020)
const scorer = (term) => (q, from, k, offset, stride, width, shown, count, row, weight) => {
  for (let c = 0; c < count; c++) {
    const at = offset + shown[c] * stride;
    let sum = 0;
    for (let i = 0; i < width; i++) sum += term(q[from + i], k[at + i], weight, i);
    row[c] = sum;
  }
};
scorers.additive = scorer((x, y, weight, i) => weight[i] * Math.tanh(x + y));
scorers.linear = scorer((x, y) => positive(x) * positive(y));
