// A matrix of short texts: the chosen cell opens beside it.  Lenses, patching grids, roles and contributions are such.

const written = (text) => (text === "" ? "" : shown(text)); // an empty cell has no value

class MatrixView {
  constructor(section, place) {
    this.section = section;
    const { rows, columns, cells, shade, chosen } = section;
    this.detail = el("aside", { class: "reading", "aria-live": "polite" });
    this.tds = cells.map((row, r) => row.map((text, c) => {
      const press = () => this.choose(r, c, true);
      return el("td", { class: `tint-${shade[r][c]}`, tabindex: -1, title: text, onclick: press }, written(text));
    }));
    const name = (scope, text) => el("th", { scope, title: text }, el("bdi", {}, shown(text)));
    const table = el("table", { class: "cells", role: "grid", "aria-label": section.title },
      el("thead", {}, el("tr", {}, el("td"), columns.map((text) => name("col", text)))),
      el("tbody", {}, rows.map((text, r) => el("tr", {}, name("row", text), this.tds[r]))));
    this.wide = div("wide", table);
    onkeys(table, moves((down, right) => this.choose(
      clamp(this.at[0] + down, 0, rows.length - 1), clamp(this.at[1] + right, 0, columns.length - 1), true)));
    place.append(div("controls", exportButtons(this)),
      section.details ? div("matrix-and-cell", this.wide, this.detail) : div("", this.wide));
    if (rows.length && columns.length) this.choose(...chosen, false);
  }

  choose(r, c, focus) {
    const { rows, columns, about } = this.section;
    const [before, cell] = [this.cell, this.tds[r][c]];
    for (const one of [before, cell]) {
      if (one) one.tabIndex = one === cell ? 0 : -1;
      one?.classList.toggle("on", one === cell);
    }
    [this.at, this.cell] = [[r, c], cell];
    if (focus) cell.focus();
    this.uncover(cell);
    const most = Math.max(...this.opened(r, c).map(([, value]) => Math.abs(value)), 1e-9);
    refill(this.detail, el("h4", {}, rows[r], " · ", bdi(columns[c])),
      el("ol", {}, this.opened(r, c).map(([name, value]) => el("li", {}, bdi(name), el("b", {}, value),
        el("i", { style: { width: `${(Math.abs(value) / most) * 100}%` } })))),
      quiet(about));
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

  file() {
    return fileName(this.section.title);
  }

  values() {
    const { title, rows, columns, cells } = this.section;
    const opened = cells.map((row, r) => row.map((_, c) => Object.fromEntries(this.opened(r, c))));
    return { title, rows, columns, cells, ...(this.section.details ? { details: opened } : {}) };
  }

  drawing() {
    const { title, rows, columns, cells, shade } = this.section;
    const letters = (text) => [...shown(text)].length;
    const widths = columns.map((name, c) =>
      8 * Math.min(16, Math.max(letters(name), ...cells.map((row) => letters(row[c])))) + 14);
    const lefts = widths.map((_, c) => widths.slice(0, c).reduce((sum, width) => sum + width, 190));
    const [ink, pale, gold] = ["--ink", "--quiet", "--gold"].map(colourOf);
    const line = 20;
    const top = (r) => 90 + r * line;
    const word = (text, x, y, colour) => svg("text", { x, y, fill: colour }, shortened(written(text), 16));
    const body = cells.map((row, r) => row.map((text, c) => [
      shade[r][c] > 0 && svg("rect", { x: lefts[c] - 5, y: top(r) - 14, width: widths[c], height: line, fill: gold,
        "fill-opacity": 0.08 * shade[r][c] }),
      word(text, lefts[c], top(r), ink)]));
    const names = [columns.map((name, c) => word(name, lefts[c], 66, pale)),
      rows.map((name, r) => word(name, 24, top(r), pale))];
    const width = 214 + widths.reduce((sum, one) => sum + one, 0);
    return sheet(Math.max(width, 400), 100 + rows.length * line, title,
      svg("g", { "font-family": "monospace" }, names, body));
  }
}

mounts.matrix = (section, place) => new MatrixView(section, place);
