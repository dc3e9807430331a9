// Bars of the likeliest tokens, and the settings that a choice among them has.

// Bars for the likeliest; a mark on each shows where it was in the whole model.
class Bars {
  constructor(count, pick) {
    Object.assign(this, { count, pick });
    this.title = el("h4");
    this.list = el("ol", { class: "bars" });
    this.node = div("prediction", this.title, this.list);
    this.rows = [];
  }

  // `chances` of all tokens, `before` of the whole model or null, `kept` the indices that may be chosen or null.
  show(chances, before, kept, nameOf) {
    const order = nucleus(chances, 1).slice(0, this.count);
    while (this.rows.length < order.length) this.add();
    this.rows.forEach((row, place) => {
      const index = order[place];
      row.node.hidden = index === undefined;
      if (row.node.hidden) return;
      row.index = index;
      row.name.replaceChildren(bdi(nameOf(index)));
      row.bar.style.width = `${100 * chances[index]}%`;
      row.ghost.hidden = !before;
      if (before) row.ghost.style.left = `${100 * before[index]}%`;
      row.number.textContent = percent(chances[index]);
      row.node.classList.toggle("out", Boolean(kept) && !kept.includes(index));
    });
  }

  add() {
    const row = { name: el("span"), bar: el("i"), ghost: el("s", { title: "in the whole model" }), number: el("b") };
    const content = [row.name, el("span", { class: "track" }, row.bar, row.ghost), row.number];
    row.node = el("li", {}, this.pick ? button(content, null, () => this.pick(row.index)) : el("div", {}, content));
    this.rows.push(row);
    this.list.append(row.node);
  }
}

// A number that a reader chooses by moving it; `changed` is called with each change.
const slider = (name, attributes, changed) => {
  const value = el("output");
  const tell = () => (value.textContent = Number(input.value).toFixed(2));
  const input = el("input", { type: "range", "aria-label": name, oninput: tell, ...attributes });
  input.addEventListener("input", changed);
  tell();
  return { input, node: el("label", { class: "slider" }, name, input, value) };
};
