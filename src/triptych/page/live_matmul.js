// The product of vectors with a matrix of int8 codes that have a scale for every 32 columns: by the WebAssembly of
// live_linear.wat, or, where there is none, by plain JavaScript (`makeKernel`).  Either holds the same bytes: all
// matrices, then a scratch area that grows with the texts.

const GROUP = 32; // columns that share a scale
const aligned = (bytes) => Math.ceil(bytes / 16) * 16;
const padded = (columns) => Math.ceil(columns / GROUP) * GROUP;

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// One row of a matrix as fp32 numbers; `from` is a multiple of 32.
function expandRow(codes, from, scales, columns, line) {
  for (let c = 0; c < columns; c++) line[c] = codes[from + c] * scales[(from + c) >> 5];
}

function oneDot(line, x, from, columns) {
  let sum = 0;
  for (let i = 0; i < columns; i++) sum += line[i] * x[from + i];
  return sum;
}

// One row of a matrix against four vectors that follow each other in `x` from `first` on.
function fourDots(line, x, first, columns, out, to, rows) {
  const second = first + columns;
  const third = second + columns;
  const fourth = third + columns;
  let [a, b, c, d] = [0, 0, 0, 0];
  for (let i = 0; i < columns; i++) {
    const w = line[i];
    a += w * x[first + i];
    b += w * x[second + i];
    c += w * x[third + i];
    d += w * x[fourth + i];
  }
  out[to] = a;
  out[to + rows] = b;
  out[to + 2 * rows] = c;
  out[to + 3 * rows] = d;
}

class PlainKernel {
  constructor(bytes) {
    this.buffer = new ArrayBuffer(bytes);
    this.name = "JavaScript";
  }

  // x [n, columns] -> [n, rows], without a bias.
  multiply(x, n, matrix) {
    const { rows, columns, stride } = matrix;
    const out = new Float32Array(n * rows);
    const codes = new Int8Array(this.buffer, matrix.codes, rows * stride);
    const scales = new Float32Array(this.buffer, matrix.scales, (rows * stride) / GROUP);
    const line = new Float32Array(stride);
    for (let r = 0; r < rows; r++) {
      expandRow(codes, r * stride, scales, columns, line);
      let t = 0;
      for (; t + 4 <= n; t += 4) fourDots(line, x, t * columns, columns, out, t * rows + r, rows);
      for (; t < n; t++) out[t * rows + r] = oneDot(line, x, t * columns, columns);
    }
    return out;
  }
}

class SimdKernel {
  constructor(bytes, code) {
    this.scratch = aligned(bytes);
    this.memory = new WebAssembly.Memory({ initial: Math.ceil(bytes / 65536) + 1 });
    const module = new WebAssembly.Module(code);
    this.linear = new WebAssembly.Instance(module, { page: { memory: this.memory } }).exports.linear;
    this.name = "WebAssembly SIMD";
  }

  get buffer() {
    return this.memory.buffer;
  }

  multiply(x, n, matrix) {
    const { rows, columns, stride } = matrix;
    const line = this.scratch;
    const [vectors, out] = [line + 4 * stride, line + 4 * (stride + n * stride)];
    const missing = out + 4 * n * rows - this.buffer.byteLength;
    if (missing > 0) this.memory.grow(Math.ceil(missing / 65536)); // which detaches every older view of the memory
    const inside = new Float32Array(this.buffer, vectors, n * stride);
    if (columns === stride) inside.set(x);
    else {
      inside.fill(0);
      for (let t = 0; t < n; t++) inside.set(x.subarray(t * columns, (t + 1) * columns), t * stride);
    }
    this.linear(vectors, n, stride, matrix.codes, matrix.scales, rows, line, out);
    return new Float32Array(this.buffer, out, n * rows).slice();
  }
}

function makeKernel(bytes, plain) {
  if (!plain && typeof WebAssembly === "object") {
    try {
      return new SimdKernel(bytes, bytesOf(LINEAR_WASM));
    } catch {
      // No SIMD, or a policy that refuses WebAssembly: the same numbers, more slowly.
    }
  }
  return new PlainKernel(bytes);
}
