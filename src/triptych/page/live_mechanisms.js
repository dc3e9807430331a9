// The scores of additive and linear attention.

const positive = (x) => (x > 0 ? x + 1 : Math.exp(x)); // elu(x) + 1 (Katharopoulos et al. 2020)
Object.assign(scorers, {
  additive(q, from, k, offset, stride, width, shown, count, row, weight) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += weight[i] * Math.tanh(q[from + i] + k[at + i]);
      row[c] = sum;
    }
  },
  linear(q, from, k, offset, stride, width, shown, count, row) {
    for (let c = 0; c < count; c++) {
      const at = offset + shown[c] * stride;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += positive(q[from + i]) * positive(k[at + i]);
      row[c] = sum;
    }
  },
});
