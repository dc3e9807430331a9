// Rotations of queries and keys by their positions; a page carries them where its model has one.

// cos or sin of one rotation [N, 1, width]; `signed` is the sine, negated in the first dimension of each pair.
function angles({ spec, positions, length }, signed) {
  const far = spec.long && length.data[0] > spec.original;
  const frequencies = far ? spec.long : spec.frequencies;
  const [half, n] = [frequencies.length, positions.data.length];
  const out = new Float32Array(n * 2 * half);
  for (let t = 0; t < n; t++) {
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(positions.data[t] * Math.fround(frequencies[i]));
      const value = (signed ? Math.sin(angle) : Math.cos(angle)) * spec.factor;
      const [a, b] = spec.pairing === "half" ? [i, i + half] : [2 * i, 2 * i + 1];
      out[t * 2 * half + a] = signed ? -value : value;
      out[t * 2 * half + b] = value;
    }
  }
  return valueOf([n, 1, 2 * half], out);
}

operation("rotation_cos", (call) => angles(call, false));
operation("rotation_sin", (call) => angles(call, true));

// The first dimensions of each head are turned, the rest pass.
operation("rotate", ({ x, cos, sin, pairing }) => {
  const [n, heads, width] = x.shape;
  const turned = last(cos);
  const out = x.data.slice();
  for (let t = 0; t < n; t++) {
    for (let h = 0; h < heads; h++) {
      const at = (t * heads + h) * width;
      for (let i = 0; i < turned; i++) {
        const partner = pairing === "half" ? (i + turned / 2) % turned : i ^ 1;
        out[at + i] = x.data[at + i] * cos.data[t * turned + i] + x.data[at + partner] * sin.data[t * turned + i];
      }
    }
  }
  return valueOf(x.shape, out);
});
