// Convolutions of texts and frames, and patches of pictures; a page carries them where its model has one.

// One row of [M, inputs], padded with zeros.
function convolved({ x, weight, bias, stride }) {
  const [outputs, inputs, kernel] = weight.shape;
  const padding = Math.floor(kernel / 2);
  const n = Math.floor((x.shape[0] + 2 * padding - kernel) / stride) + 1;
  const out = new Float32Array(n * outputs);
  for (let t = 0; t < n; t++) {
    for (let o = 0; o < outputs; o++) {
      let sum = bias ? bias.data[o] : 0;
      for (let j = 0; j < kernel; j++) {
        const row = t * stride + j - padding;
        if (row < 0 || row >= x.shape[0]) continue;
        for (let i = 0; i < inputs; i++) sum += x.data[row * inputs + i] * weight.data[(o * inputs + i) * kernel + j];
      }
      out[t * outputs + o] = sum;
    }
  }
  return valueOf([n, outputs], out);
}

operation("conv1d", convolved);

operation("patches", ({ x, first, weight, bias }) => {
  const filters = valueOf([first.data.length, x.shape[1], 1], weight.data);
  return joinRows(first, 1, convolved({ x, weight: filters, bias, stride: 1 }));
});
