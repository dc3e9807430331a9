// Numbers on a page: as text that carries the exact value, as strips and matrices of colours, and products of matrices.

const decimal = (x) => (x === -Infinity ? "−∞" : (Math.abs(x) >= 1000 ? x.toFixed(0) : Math.abs(x) >= 100 ? x.toFixed(1)
  : x.toFixed(3)).replace("-", "−"));
const rootMeanSquare = (numbers) => Math.sqrt(numbers.reduce((sum, x) => sum + x * x, 0) / numbers.length);

// Numbers in a text, which carry their exact values.
const number = (name, value, shown = decimal(value)) =>
  el("b", { class: "number", "data-name": name, "data-value": value }, shown);
const count = (name, value) => number(name, value, value.toLocaleString("en"));

// Numbers as colours, `columns` in a row: blue below zero, orange above; what is not finite stays empty.
function paintNumbers(canvas, numbers, columns = numbers.length) {
  const ends = STRIP[isDark() ? "dark" : "light"].map(channels);
  const largest = numbers.reduce((best, x) => (Number.isFinite(x) ? Math.max(best, Math.abs(x)) : best), 0) || 1;
  [canvas.width, canvas.height] = [columns, numbers.length / columns];
  const image = new ImageData(canvas.width, canvas.height);
  numbers.forEach((x, i) => Number.isFinite(x)
    && image.data.set([...ends[x < 0 ? 0 : 1], 255 * Math.sqrt(Math.abs(x) / largest)], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
const STRIP = { light: ["#2b5ea7", "#c4561a"], dark: ["#7fb0f5", "#f39a5f"] };

// A matrix with its name and the letters of its sizes: "Q", ["T", 8], ["d_head", 32].
class Matrix {
  constructor(name, [down, rows], [across, columns], data) {
    Object.assign(this, { name, down, rows, across, columns, data });
  }

  get sizes() {
    return `[${this.down} ${this.rows}, ${this.across} ${this.columns}]`;
  }

  at(i, j) {
    return this.data[i * this.columns + j];
  }

  row(i) {
    return this.data.subarray(i * this.columns, (i + 1) * this.columns);
  }

  column(j) {
    return Float64Array.from({ length: this.rows }, (_, i) => this.at(i, j));
  }

  // The same sizes, each number replaced by `act(number, row, column)`.
  map(name, act) {
    const { columns } = this;
    const data = Float64Array.from(this.data, (x, at) => act(x, Math.floor(at / columns), at % columns));
    return new Matrix(name, [this.down, this.rows], [this.across, columns], data);
  }

  transposed(name) {
    const data = new Float64Array(this.data.length);
    for (let i = 0, at = 0; i < this.rows; i++) {
      for (let j = 0; j < this.columns; j++) data[j * this.rows + i] = this.data[at++];
    }
    return new Matrix(name, [this.across, this.columns], [this.down, this.rows], data);
  }

  times(other, name) {
    const data = new Float64Array(this.rows * other.columns);
    for (let i = 0; i < this.rows; i++) {
      for (let k = 0; k < this.columns; k++) {
        const x = this.data[i * this.columns + k];
        for (let j = 0; j < other.columns; j++) data[i * other.columns + j] += x * other.data[k * other.columns + j];
      }
    }
    return new Matrix(name, [this.down, this.rows], [other.across, other.columns], data);
  }

  // Of each row; a `sink` is one more score, whose weight is dropped, or null.
  softmax(name, sink = null) {
    const data = new Float64Array(this.data.length);
    for (let i = 0; i < this.rows; i++) {
      const most = this.row(i).reduce((best, x) => Math.max(best, x), sink ?? -Infinity);
      const shares = this.row(i).map((x) => (most === -Infinity ? 0 : Math.exp(x - most)));
      const sum = shares.reduce((a, b) => a + b, sink === null ? 0 : Math.exp(sink - most)) || 1;
      data.set(shares.map((x) => x / sum), i * this.columns);
    }
    return new Matrix(name, [this.down, this.rows], [this.across, this.columns], data);
  }
}
