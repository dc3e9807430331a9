// One head as lines from each token to those it reads: queries on the left, keys on the right.

const LINE_ROW = 18; // pixels from token to token
const LEAST_LINE = 0.03; // weights below are not drawn
const LINES_EACH = 6; // of one query

class Lines {
  constructor(choose) {
    this.choose = choose;
    this.node = el("div", { class: "scroll lines", tabindex: 0, role: "application" });
  }

  // The rows and columns that `plot` shows.
  show(plot, chosen) {
    const { head, from, to, tokens: [queries, keys] } = plot;
    this.node.setAttribute("aria-label",
      `${nameOf(head)} as lines; the arrow keys up and down choose the token that reads`);
    const [left, gap, side] = [170, 260, 10];
    const longest = Math.max(queries.length, keys.length);
    const word = (token, i, attributes, press) =>
      svg("text", { y: side + (i + 0.7) * LINE_ROW, onclick: press, onpointerenter: press, ...attributes },
        shortened(shown(token), 20));
    this.rows = queries.map((_, i) => {
      const t = from[0] + i;
      const best = head.row(t).map((weight, s) => [s, weight]).filter(([, weight]) => weight >= LEAST_LINE);
      const drawn = best.sort((a, b) => b[1] - a[1]).slice(0, LINES_EACH).filter(([s]) => s >= from[1] && s < to[1]);
      return svg("g", {}, drawn.map(([s, weight]) => {
        const [y, z] = [i, s - from[1]].map((row) => side + (row + 0.5) * LINE_ROW);
        return svg("path", { d: `M${left},${y}C${left + gap / 2},${y} ${left + gap / 2},${z} ${left + gap},${z}`,
          "stroke-opacity": weight.toFixed(3), "stroke-width": (0.7 + 3 * weight).toFixed(2) });
      }));
    });
    const first = (i) => argmax(head.row(from[0] + i));
    this.queries = queries.map((token, i) => word(token, i, { x: left - 8, "text-anchor": "end" },
      () => this.choose(from[0] + i, first(i))));
    this.keys = keys.map((token, i) => word(token, i, { x: left + gap + 8 }, null));
    this.from = from;
    const width = 2 * left + gap;
    const height = longest * LINE_ROW + 2 * side;
    this.picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
      this.rows, this.queries, this.keys);
    this.node.replaceChildren(this.picture);
    this.mark(...chosen);
  }

  // The lines of one query stand out, and the keys that it reads.
  mark(t, s) {
    if (!this.picture) return;
    for (const [nodes, at] of [[this.rows, t - this.from[0]], [this.queries, t - this.from[0]],
      [this.keys, s - this.from[1]]]) nodes.forEach((one, i) => one.classList.toggle("on", i === at));
  }

  drawing(head) {
    const [ink, accent, mark] = ["--ink", "--accent", "--mark"].map(colourOf);
    const copy = inked(this.picture, { path: { fill: "none", stroke: accent }, ".on path": { stroke: mark },
      text: { fill: ink } });
    const [width, height] = ["width", "height"].map((name) => Number(copy.getAttribute(name)));
    return sheet(width + 40, height + 70, nameOf(head),
      svg("g", { transform: "translate(20 50)", "font-family": "monospace", "font-size": 12 }, ...copy.childNodes));
  }
}
