// A matrix of short texts: the chosen cell opens beside it.  Lenses, patching grids, roles and contributions are such.

const written = (text) => (text === "" ? "" : shown(text)); // an empty cell has no value

class MatrixView {
  constructor(section, place) {
    this.section = section;
    const { rows, columns, cells, shade, chosen } = section;
    this.detail = el("aside", { class: "reading", "aria-live": "polite" });
    this.tds = cells.map((row, r) =>
      row.map((text, c) =>
        el(
          "td",
          { class: `tint-${shade[r][c]}`, tabindex: -1, title: text, onclick: () => this.choose(r, c, true) },
          written(text),
        ),
      ),
    );
    const head = el(
      "tr",
      {},
      el("td"),
      ...columns.map((name) => el("th", { scope: "col", title: name }, el("bdi", {}, shown(name)))),
    );
    const lines = rows.map((name, r) =>
      el("tr", {}, el("th", { scope: "row", title: name }, el("bdi", {}, shown(name))), ...this.tds[r]),
    );
    const table = el(
      "table",
      { class: "cells", role: "grid", "aria-label": section.title },
      el("thead", {}, head),
      el("tbody", {}, ...lines),
    );
    this.wide = el("div", { class: "wide" }, table);
    onkeys(table, {
      ArrowUp: () => this.move(-1, 0),
      ArrowDown: () => this.move(1, 0),
      ArrowLeft: () => this.move(0, -1),
      ArrowRight: () => this.move(0, 1),
      Home: () => this.move(0, -Infinity),
      End: () => this.move(0, Infinity),
      PageUp: () => this.move(-10, 0),
      PageDown: () => this.move(10, 0),
    });
    const save = exportButtons(
      () => fileName(section.title),
      () => this.drawing(),
      () => this.values(),
    );
    place.append(
      el("div", { class: "controls" }, save),
      el(
        "div",
        { class: section.details ? "matrix-and-cell" : "" },
        this.wide,
        ...(section.details ? [this.detail] : []),
      ),
    );
    if (rows.length && columns.length) this.choose(...chosen, false);
  }

  move(down, right) {
    const { rows, columns } = this.section;
    this.choose(clamp(this.at[0] + down, 0, rows.length - 1), clamp(this.at[1] + right, 0, columns.length - 1), true);
  }

  choose(r, c, focus) {
    const { rows, columns, about } = this.section;
    if (this.at) {
      const before = this.tds[this.at[0]][this.at[1]];
      before.tabIndex = -1;
      before.classList.remove("on");
    }
    this.at = [r, c];
    const cell = this.tds[r][c];
    cell.tabIndex = 0;
    cell.classList.add("on");
    if (focus) cell.focus();
    this.uncover(cell);
    const most = Math.max(...this.opened(r, c).map(([, value]) => Math.abs(value)), 1e-9);
    const items = this.opened(r, c).map(([name, value]) => {
      const bar = el("i");
      bar.style.width = `${(Math.abs(value) / most) * 100}%`;
      return el("li", {}, bdi(name), el("b", {}, String(value)), bar);
    });
    this.detail.replaceChildren(
      el("h4", {}, rows[r], " · ", bdi(columns[c])),
      el("ol", {}, ...items),
      el("p", { class: "quiet" }, about),
    );
  }

  // Scrolls to a cell, beside the name of its row and below that of its column, which stay where they are.
  uncover(cell) {
    const { wide } = this;
    const [name, top] = [cell.parentNode.firstChild.offsetWidth, this.tds[0][0].offsetTop];
    const { offsetLeft: x, offsetTop: y, offsetWidth: width, offsetHeight: height } = cell;
    wide.scrollLeft = clamp(wide.scrollLeft, x + width - wide.clientWidth, x - name);
    wide.scrollTop = clamp(wide.scrollTop, y + height - wide.clientHeight, y - top);
  }

  opened(r, c) {
    const { details, names } = this.section;
    const flat = details?.[r][c] ?? [];
    return Array.from({ length: flat.length / 2 }, (_, i) => [names[flat[2 * i]], flat[2 * i + 1]]);
  }

  values() {
    const { title, rows, columns, cells } = this.section;
    const opened = cells.map((row, r) => row.map((_, c) => Object.fromEntries(this.opened(r, c))));
    return { title, rows, columns, cells, ...(this.section.details ? { details: opened } : {}) };
  }

  drawing() {
    const { title, rows, columns, cells, shade } = this.section;
    const cut = (text, most) =>
      [...written(text)].length > most ? [...written(text)].slice(0, most - 1).join("") + "…" : written(text);
    const widths = columns.map(
      (name, c) =>
        8 * Math.min(16, Math.max([...shown(name)].length, ...cells.map((row) => [...shown(row[c])].length))) + 14,
    );
    const lefts = widths.map((_, c) => widths.slice(0, c).reduce((sum, width) => sum + width, 190));
    const [ink, quiet, gold] = ["--ink", "--quiet", "--gold"].map(colourOf);
    const word = (text, x, y, fill) => svg("text", { x, y, fill }, cut(text, 16));
    const line = 20;
    const body = cells.flatMap((row, r) =>
      row.flatMap((text, c) => {
        const y = 90 + r * line;
        const tint = shade[r][c]
          ? [
              svg("rect", {
                x: lefts[c] - 5,
                y: y - 14,
                width: widths[c],
                height: line,
                fill: gold,
                "fill-opacity": 0.08 * shade[r][c],
              }),
            ]
          : [];
        return [...tint, word(text, lefts[c], y, ink)];
      }),
    );
    const names = [
      ...columns.map((name, c) => word(name, lefts[c], 66, quiet)),
      ...rows.map((name, r) => word(name, 24, 90 + r * line, quiet)),
    ];
    const width = 214 + widths.reduce((sum, one) => sum + one, 0);
    return sheet(
      Math.max(width, 400),
      100 + rows.length * line,
      title,
      svg("g", { "font-family": "monospace" }, ...names, ...body),
    );
  }
}

mounts.matrix = (section, place) => new MatrixView(section, place);
