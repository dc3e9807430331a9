// The chapters as the reader sees them: one at a time, with its buttons and its question.

class Lessons {
  constructor(view) {
    this.view = view;
    this.at = 0;
    this.acted = false; // whether a button of the open chapter was pressed
    this.card = div("lesson");
    this.chooser = choice("Chapter", CHAPTERS.map((_, i) => [i, i + 1]), 0, (i) => this.open(i));
    [...this.chooser.children].forEach((one, i) => {
      const { title } = CHAPTERS[i];
      fill(one, { "aria-label": `Chapter ${i + 1}: ${title}` }, [el("span", {}, ` ${title}`)]);
    });
    this.chooser.classList.add("layers");
    this.node = div("lessons", this.chooser, this.card);
  }

  // The row of the token table that chapter 1 speaks of.
  lookup(tokens) {
    const { tokenBox, reading, flow } = new About(this.view);
    return tokenBox
      && { table: tokenBox.weight, id: flow.idsOf(reading, tokens)[flow.position(reading, tokens)] };
  }

  // What the buttons of one chapter changed is undone in the next.
  open(at) {
    if (this.acted) this.view.asTrained();
    this.acted = false;
    this.at = at;
    this.chooser.mark(at);
    if (this.view.now) this.build();
    this.show();
  }

  build() {
    const { title, steps, ask, answer } = CHAPTERS[this.at];
    const about = new About(this.view);
    this.text = el("p");
    const press = (act) => {
      this.acted = true;
      act(new About(this.view));
      if (!this.view.refreshing) this.show(); // else with the new numbers
    };
    this.steps = steps.filter(([, , , fits]) => !fits || fits(about))
      .map(([label, act, state]) => ({ one: button(label, "", () => press(act)), state }));
    const next = button("Next chapter", "", () => {
      this.open(this.at + 1);
      this.chooser.children[this.at].focus();
    });
    next.disabled = this.at === CHAPTERS.length - 1;
    this.card.replaceChildren(el("h4", {}, `${this.at + 1}. ${title}`), this.text,
      div("lesson-steps", this.steps.map(({ one }) => one)),
      el("details", {}, el("summary", {}, ask), el("p", {}, answer)), next);
  }

  // The numbers of the model as it is now.
  show() {
    if (!this.view.now) return;
    if (!this.text) this.build();
    const about = new About(this.view);
    refill(this.text, CHAPTERS[this.at].text(about));
    for (const { one, state } of this.steps) one.setAttribute("aria-pressed", Boolean(state(about)));
  }
}
