// Operations that a page carries only where its model has one of them.

Object.assign(operations, {
  l2_normalize({ x }) {
    return eachVector(x, (vector, out) => {
      let squares = 0;
      for (let i = 0; i < vector.length; i++) squares += vector[i] * vector[i];
      const norm = Math.max(Math.sqrt(squares), 1e-12);
      for (let i = 0; i < out.length; i++) out[i] = vector[i] / norm;
    });
  },

  sinusoids({ positions, width, theta, layout }) {
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
  },

  // One row of [M, inputs], padded with zeros.
  conv1d({ x, weight, bias, stride }) {
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
  },

  patches({ x, first, weight, bias }) {
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
  },

  pool({ x, mode }) {
    const [n, width] = x.shape;
    if (mode !== "mean") {
      return valueOf([1, width], x.data.slice(...(mode === "first" ? [0, width] : [(n - 1) * width])));
    }
    const out = new Float32Array(width);
    for (let i = 0; i < x.data.length; i++) out[i % width] += x.data[i] / n;
    return valueOf([1, width], out);
  },
});
