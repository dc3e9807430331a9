// The weights of a model in memory, by name: matrices of int8 codes with a scale for every 32 columns, or fp32 numbers.

// A half-precision number from its 16 bits.
function half(bits) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// The weights of a model by name: `matrix` for those that stay int8, `numbers` for fp32 ones, each with its shape.
// `tensors` tells where each lies in `base64`: codes [rows, padded columns] and then fp16 scales, or fp32 numbers.
class Weights {
  constructor(tensors, base64, plain = false) {
    const raw = bytesOf(base64);
    let bytes = 0;
    const places = Object.entries(tensors).map(([name, { kind, shape }]) => {
      const count = kind === "int8" ? shape[0] * padded(shape[1]) : shape.reduce((a, b) => a * b, 1);
      const place = { name, count, at: bytes };
      if (kind === "int8") bytes += aligned(count) + aligned((count / GROUP) * 4);
      return place;
    });
    this.kernel = makeKernel(bytes, plain);
    this.entries = Object.fromEntries(places.map(({ name, count, at }) =>
      [name, this.load(tensors[name], count, at, raw)]));
  }

  load({ kind, shape, offset }, count, at, raw) {
    const stored = (from, length) => raw.slice(offset + from, offset + from + length).buffer;
    // fp32 numbers are few, and stay outside the kernel's memory: a view of that is detached when the memory grows.
    if (kind === "fp32") return { shape, data: new Float32Array(stored(0, count * 4)) };
    new Uint8Array(this.kernel.buffer, at, count).set(raw.subarray(offset, offset + count));
    const [scales, halves] = [at + aligned(count), new Uint16Array(stored(count, (count / GROUP) * 2))];
    new Float32Array(this.kernel.buffer, scales, halves.length).set(Float32Array.from(halves, half));
    return { shape, codes: at, scales, rows: shape[0], columns: shape[1], stride: padded(shape[1]) };
  }

  entry(name) {
    const entry = this.entries[name];
    if (!entry) throw new Error(`no weight ${name}`);
    return entry;
  }

  // One row of a matrix, in `into` from `place` on.
  row(name, index, into, place) {
    const { rows, columns, stride, codes, scales } = this.entry(name);
    if (!(index >= 0 && index < rows)) throw new Error(`${name} has no row ${index}`);
    const own = new Int8Array(this.kernel.buffer, codes + index * stride, columns);
    const steps = new Float32Array(this.kernel.buffer, scales + (index * stride * 4) / GROUP, stride / GROUP);
    expandRow(own, 0, steps, columns, into.subarray(place));
    return into;
  }
}
