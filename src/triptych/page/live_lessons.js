// The chapters as the reader sees them: one at a time, with its buttons and its question.

class Lessons {
  constructor(view) {
    this.view = view;
    this.at = 0;
    this.card = el("div", { class: "lesson" });
    const numbers = CHAPTERS.map(({ title }, i) => [i, String(i + 1), title]);
    this.chooser = choice("Chapter", numbers, 0, (i) => this.open(i));
    [...this.chooser.children].forEach((one, i) => one.setAttribute("aria-label", `Chapter ${i + 1}: ${CHAPTERS[i].title}`));
    this.chooser.classList.add("layers");
    this.node = el("div", { class: "lessons" }, this.chooser, this.card);
  }

  open(at) {
    this.at = at;
    [...this.chooser.children].forEach((one, i) => one.setAttribute("aria-pressed", i === at));
    this.build();
    this.show();
  }

  build() {
    const { title, steps, ask, answer } = CHAPTERS[this.at];
    const about = new About(this.view);
    this.text = el("p");
    this.steps = steps.filter(([, , , fits]) => !fits || fits(about)).map(([label, act, state]) => {
      const one = button(label, "", () => {
        act(new About(this.view));
        this.show();
      });
      return { one, state };
    });
    const next = button("Next chapter", "", () => {
      this.open(this.at + 1);
      this.chooser.children[this.at].focus();
    });
    next.disabled = this.at === CHAPTERS.length - 1;
    this.card.replaceChildren(el("h4", {}, `${this.at + 1}. ${title}`), this.text,
      el("div", { class: "lesson-steps" }, ...this.steps.map(({ one }) => one)),
      el("details", {}, el("summary", {}, ask), el("p", {}, answer)), next);
  }

  // The numbers of the model as it is now.
  show() {
    if (!this.text) this.build();
    const about = new About(this.view);
    this.text.replaceChildren(...CHAPTERS[this.at].text(about));
    for (const { one, state } of this.steps) one.setAttribute("aria-pressed", Boolean(state(about)));
  }
}
