// Thumbnails of all heads: layers down and heads across, or in groups.

const SIDES = [36, 26]; // pixels of a thumbnail; of many layers, and on a narrow page, the second
const MANY = 16; // layers

class Gallery {
  constructor(open, roles = []) {
    this.open = open;
    this.roles = roles;
    this.node = group("gallery", "Every layer and head");
    // The tab key reaches only the open head; arrow keys move over the grid and open the head they reach.
    onarrows(this.node, () => this.thumbs.map(({ thumb }) => thumb),
      (from, across, down) => (across ? from + across : this.nextRow(from, down)),
      (to) => this.open(this.thumbs[to].head));
  }

  thumb(head, label = "") {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const name = `layer ${head.layer}, head ${head.head}${head.role ? `: ${head.role}` : ""}${label}`;
    const role = this.roles.length ? `role ${roleClass(this.roles, head.role)}` : null;
    const one = { head, canvas };
    one.thumb = button(canvas, name, () => this.open(one.head), { class: role, "aria-label": name });
    this.thumbs.push(one);
    return one.thumb;
  }

  show(heads) {
    const columns = [...new Set(heads.map((head) => head.head))].sort((a, b) => a - b);
    this.begin(columns.length, new Set(heads.map((head) => head.layer)).size > MANY);
    this.end(el("span", { class: "corner" }, "layer ╲ head"), columns.map((name) => el("span", {}, name)),
      heads.map((head, index) => [
        head.layer !== heads[index - 1]?.layer && el("span", { class: "layer" }, head.layer),
        fill(this.thumb(head), { style: { gridColumn: columns.indexOf(head.head) + 2 } })]));
  }

  begin(columns, many = false) {
    this.columns = columns;
    this.side = SIDES[Number(many || innerWidth < 520)];
    this.thumbs = [];
    this.node.classList.toggle("grouped", !columns);
    this.node.style.setProperty("--side", `${this.side}px`);
    this.node.style.setProperty("--columns", columns);
  }

  end(...cells) {
    refill(this.node, cells);
    this.paint();
  }

  // Other weights of the heads that are shown.
  update(heads) {
    this.thumbs.forEach((one) => {
      one.head = heads.find((head) => head.layer === one.head.layer && head.head === one.head.head) ?? one.head;
    });
    this.paint();
  }

  // Pixels of the canvas are pixels of the screen, so that nothing is blurred.
  paint() {
    const density = Math.max(1, Math.round(devicePixelRatio));
    for (const { head, canvas } of this.thumbs) {
      head.thumbnail(canvas, this.side * density);
      canvas.style.width = `${canvas.width / density}px`;
      canvas.style.height = `${canvas.height / density}px`;
    }
  }

  mark(head) {
    for (const one of this.thumbs) {
      one.thumb.setAttribute("aria-pressed", one.head === head);
      one.thumb.tabIndex = one.head === head ? 0 : -1;
    }
  }

  // Of the thumbnails in the next row, the place of the one nearest in line.
  nextRow(from, down) {
    const boxes = this.thumbs.map(({ thumb }) => thumb.getBoundingClientRect());
    const below = ({ top }) => (top - boxes[from].top) * down;
    const aside = ({ left }) => Math.abs(left - boxes[from].left);
    const row = Math.min(...boxes.map(below).filter((distance) => distance > 4));
    const line = boxes.filter((box) => below(box) > 4 && below(box) < row + 4);
    return boxes.indexOf(line.sort((a, b) => aside(a) - aside(b))[0]);
  }
}
