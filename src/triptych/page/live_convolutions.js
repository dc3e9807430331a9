// Convolutions of texts and frames, and patches of pictures; a page carries them where its model has one.

// One row of [M, inputs], padded with zeros.
operation("conv1d", ({ x, weight, bias, stride }) => {
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
});

operation("patches", ({ x, first, weight, bias }) => {
  const [count, size, width] = [x.shape[0], x.shape[1], first.data.length];
  const out = new Float32Array((count + 1) * width);
  out.set(first.data);
  for (let t = 0; t < count; t++) {
    for (let o = 0; o < width; o++) {
      let sum = bias.data[o];
      for (let i = 0; i < size; i++) sum += x.data[t * size + i] * weight.data[o * size + i];
      out[(t + 1) * width + o] = sum;
    }
  }
  return valueOf([count + 1, width], out);
});
