// The picture of the flow diagram: boxes and arrows of one layer, and of what stands before and after all layers.

const BOX = { height: 50, gap: 26, most: 148, narrow: 72, between: 8 };

class FlowPicture {
  get bands() {
    const boxes = this.stacks[this.stack];
    return [["start", "Before the layers"], [this.layer, `Layer ${this.layer}`], ["end", "After the layers"]]
      .map(([layer, title]) => ({ layer, title, boxes: boxes.filter((box) => box.layer === layer) }))
      .filter((band) => band.boxes.length);
  }

  draw() {
    const width = (this.width = this.picture.clientWidth);
    if (!width) return;
    const lines = svg("svg", { "aria-hidden": "true" });
    const nodes = [];
    this.shown = [];
    this.buttons = new Map();
    this.arrows = [];
    let [top, above] = [0, null];
    for (const { title, boxes } of this.bands) {
      const rows = 1 + Math.max(...boxes.map(({ depth }) => depth));
      const stream = boxes.some(({ lane }) => lane === 0);
      const own = new Set(boxes);
      nodes.push(el("span", { class: "band", style: { top: `${top}px` } }, title));
      top += 24;
      this.frames(boxes, rows, width, stream, top);
      const entry = stream ? width * 0.12 : width / 2;
      if (above) lines.append(svg("path", { class: "line between", d: this.curve(above, { x: entry, y: top - 4 }) }));
      for (const box of boxes) for (const input of box.inputs) this.arrow(lines, box, input, own, top, entry);
      for (const box of [...boxes].sort((a, b) => a.depth - b.depth || a.lane - b.lane)) nodes.push(this.button(box));
      const { frame } = boxes.at(-1);
      above = { x: frame.centre, y: frame.y + BOX.height };
      top += rows * (BOX.height + BOX.gap);
    }
    this.picture.style.height = `${top}px`;
    lines.setAttribute("viewBox", `0 0 ${width} ${top}`);
    this.picture.replaceChildren(lines, ...nodes);
    this.mark();
  }

  // Boxes of one row stand below what they read where that leaves them apart, else side by side.
  frames(boxes, rows, width, stream, top) {
    const left = stream ? width * 0.24 + BOX.between : 0;
    const lanes = Math.max(1, ...boxes.map(({ lane }) => lane));
    const wide = Math.min(BOX.most, (width - left - BOX.between * (lanes - 1)) / lanes);
    for (let depth = 0; depth < rows; depth++) {
      const row = boxes.filter((box) => box.depth === depth);
      const beside = row.filter(({ lane }) => lane);
      const even = (i) => left + ((i + 0.5) * (width - left)) / beside.length;
      const above = beside.map(({ inputs }) => {
        const parents = inputs.filter(({ from }) => boxes.includes(from) && from.lane && from.depth < depth)
          .map(({ from }) => from.frame.centre);
        return parents.length ? parents.reduce((sum, x) => sum + x, 0) / parents.length : NaN;
      });
      const apart = above.every((x, i) => x >= left + wide / 2 && x <= width - wide / 2
        && (i === 0 || x - above[i - 1] >= wide + 2));
      const y = top + BOX.gap / 2 + depth * (BOX.height + BOX.gap);
      for (const box of row) {
        const own = box.lane ? wide : Math.min(BOX.most, width * 0.24);
        const centre = box.lane ? (apart ? above[box.lane - 1] : even(box.lane - 1)) : width * 0.12;
        box.frame = { x: centre - own / 2, y, width: own, centre };
        this.shown.push(box);
      }
    }
  }

  button(box) {
    const shape = box.shape.slice(1).join(" × ");
    const own = /[NSM]/.test(shape) ? "" : shape;
    const { x, y, width } = box.frame;
    const content = [box.title, el("small", {}, /scores|softmax/.test(box.part) ? "a row of keys" : own)];
    const one = button(content, null, () => this.open(box), {
      class: `box ${box.lane ? "" : "stream"} ${width < BOX.narrow ? "narrow" : ""}`,
      style: { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${BOX.height}px` } });
    this.buttons.set(box, one);
    return one;
  }

  curve(start, end) {
    const bend = Math.min(40, (end.y - start.y) / 2);
    return `M${start.x} ${start.y}C${start.x} ${start.y + bend} ${end.x} ${end.y - bend} ${end.x} ${end.y}`;
  }

  // What comes from outside the band enters on the stream's lane, or from the encoder.
  arrow(lines, box, { key, from }, own, top, entry) {
    if (["ids", "mask"].includes(key) || (key && !from && box.entry === "cross_kv" && key !== "x")) return;
    const to = box.frame;
    const encoder = box.entry === "cross_kv" && !own.has(from);
    let start = encoder ? { x: to.centre, y: to.y - 22 } : { x: entry, y: top - 4 };
    if (own.has(from)) start = { x: from.frame.centre, y: from.frame.y + BOX.height };
    const end = { x: box.lane ? to.centre : clamp(start.x, to.x + 8, to.x + to.width - 8), y: to.y - 2 };
    const d = this.curve(start, end);
    const tip = `M${end.x - 4} ${end.y - 5}L${end.x} ${end.y}L${end.x + 4} ${end.y - 5}`;
    const cut = key && arrowName(box.entry, box.step, key);
    const group = svg("g", {}, svg("path", { d, class: "line" }), svg("path", { d: tip, class: "line" }),
      cut && svg("path", { d, class: "hit", onclick: () => this.view.board.press(cut) },
        svg("title", {}, "Cut this arrow, or put it back")),
      encoder && svg("text", { x: to.centre, y: to.y - 25, "text-anchor": "middle" }, "encoder"));
    lines.append(group);
    this.arrows.push({ cut, group });
  }

  mark() {
    for (const { cut, group } of this.arrows ?? []) group.classList.toggle("cut", this.view.board.cuts.has(cut));
    for (const [box, one] of this.buttons ?? []) {
      one.setAttribute("aria-pressed", box === this.box);
      one.tabIndex = box === (this.box ?? this.shown[0]) ? 0 : -1;
      one.classList.toggle("cut", this.partCuts(box).some(({ cut }) => this.view.board.cuts.has(cut)));
    }
  }

  // The place of the box above or below another in the order of the program, or of the one beside it.
  next(from, across, down) {
    const order = [...this.buttons.keys()];
    const { depth, lane, layer } = order[from];
    return across ? order.findIndex((box) => box.layer === layer && box.depth === depth && box.lane === lane + across)
      : from + down;
  }
}
