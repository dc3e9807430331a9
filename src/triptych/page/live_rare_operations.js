// The operations `l2_normalize`, `sinusoids` and `pool`; a page carries them where its model has one.

operation("l2_normalize", ({ x }) => eachVector(x, (vector, out) => {
  let squares = 0;
  for (let i = 0; i < vector.length; i++) squares += vector[i] * vector[i];
  const norm = Math.max(Math.sqrt(squares), 1e-12);
  for (let i = 0; i < out.length; i++) out[i] = vector[i] / norm;
}));

operation("sinusoids", ({ positions, width, theta, layout }) => {
  const out = new Float32Array(positions.data.length * width);
  positions.data.forEach((position, t) => {
    for (let i = 0; i < width / 2; i++) {
      const angle = Math.fround(position * Math.fround(theta ** ((-2 * i) / width)));
      const [a, b] = layout === "interleaved" ? [2 * i, 2 * i + 1] : [i, i + width / 2];
      out[t * width + a] = Math.sin(angle);
      out[t * width + b] = Math.cos(angle);
    }
  });
  return valueOf([positions.data.length, width], out);
});

operation("pool", ({ x, mode }) => {
  const [n, width] = x.shape;
  if (mode !== "mean") {
    return valueOf([1, width], x.data.slice(...(mode === "first" ? [0, width] : [(n - 1) * width])));
  }
  const out = new Float32Array(width);
  for (let i = 0; i < x.data.length; i++) out[i % width] += x.data[i] / n;
  return valueOf([1, width], out);
});
