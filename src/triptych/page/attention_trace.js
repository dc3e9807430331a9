// The attention of a trace: its heads are unpacked when their stack is first shown, may have roles, and can be drawn as
// lines.

// Heads of one role have one colour, in the order in which the section names the roles.
const ROLE_COLOURS = 15;
const roleClass = (roles, role) => (role ? `role-${roles.indexOf(role) % ROLE_COLOURS}` : "role-none");

// Thumbnails in groups: [title, class of its colour, heads, function(head) -> what stands under a head].
function showGroups(gallery, groups) {
  gallery.begin(0);
  gallery.end(groups.map(([title, colour, heads, under]) => {
    const ones = heads.map((head) =>
      el("div", {}, gallery.thumb(head, `, ${under(head)}`), el("span", {}, under(head))));
    return div("group", el("h4", {}, el("i", { class: colour }), title, el("sub", {}, heads.length)), div("row", ones));
  }));
}

class TraceView extends AttentionView {
  constructor(section, place) {
    super({
      heads: {},
      stacks: [...new Set(section.maps.map((map) => map.stack))],
      shade: section.maps.some((map) => map.top) ? "root" : "head", // the small weights of a long text show
      roles: [...new Set(section.maps.flatMap((map) => map.roles ?? []))].filter((role) => role),
      note: ` Weights are kept in steps of 1/${section.steps}, those of long texts to within 0.004.`,
    }, place);
    this.section = section;
    this.pick(this.stacks[0]);
  }

  build() {
    const view = super.build();
    this.order = "layer";
    this.status = el("p", { class: "quiet", role: "status" });
    this.content.before(this.status);
    this.content.hidden = true;
    this.as = "map";
    this.lines = new Lines((t, s) => this.choose(t, s, false));
    this.lines.node.hidden = true;
    this.plot.node.after(this.lines.node);
    const ways = [["map", "Map", "Queries by keys"], ["lines", "Lines", "From each token to those it reads"]];
    this.controls.prepend(choice("Drawn as", ways, this.as, (as) => this.draw(as)));
    if (!this.roles.length) return view;
    const orders = [["layer", "By layer", "Layers down, heads across"],
      ["role", "By role", "Heads of one role together"]];
    view.firstChild.append(choice("Order of the heads", orders, this.order, (order) => {
      this.order = order;
      this.arrange();
    }), this.legend());
    return view;
  }

  // The enlarged head as a map or as lines.
  draw(as) {
    this.as = as;
    this.plot.node.hidden = as !== "map";
    this.lines.node.hidden = as !== "lines";
    this.linesOf = null;
    this.plot.mark(...this.chosen, false);
    this.showLines();
  }

  // Lines are drawn anew for another head or other rows, else only marked.
  showLines() {
    if (this.as !== "lines") return;
    const { head, from } = this.plot;
    if (this.linesOf?.[0] === head && this.linesOf[1] === from) return this.lines.mark(...this.chosen);
    this.linesOf = [head, from];
    this.lines.show(this.plot, this.chosen);
  }

  choose(t, s, scroll) {
    super.choose(t, s, scroll);
    this.showLines();
  }

  keyboard() {
    const { ArrowDown, ArrowUp, "[": before, "]": after } = super.keyboard();
    onkeys(this.lines.node, { ArrowDown, ArrowUp, "[": before, "]": after });
  }

  file() {
    return this.as === "lines" ? `${super.file()}-lines` : super.file();
  }

  drawing() {
    return this.as === "lines" ? this.lines.drawing(this.head) : super.drawing();
  }

  // The roles with their colours; choosing one shows its heads alone, and opens the first of them.
  legend() {
    this.role = null;
    const buttons = [...this.roles, ""].map((role) => {
      const attributes = { type: "button", "aria-pressed": "false", "data-role": role, onclick: () => pick(role) };
      return el("button", attributes, el("i", { class: roleClass(this.roles, role) }), role || NO_ROLE);
    });
    const pick = (role) => {
      this.role = this.role === role ? null : role;
      buttons.forEach((one) => one.setAttribute("aria-pressed", one.dataset.role === this.role));
      this.dim();
      const first = this.heads[this.stack]?.find((head) => (head.role ?? "") === this.role);
      if (this.role !== null && first) this.open(first);
    };
    return el("div", { class: "roles", role: "group", "aria-label": "Roles" }, buttons);
  }

  // The thumbnails in the order of layers, or in groups of one role.
  arrange() {
    if (this.order === "layer") super.arrange();
    else {
      const of = (role) => this.heads[this.stack].filter((head) => head.role === role);
      const under = (head) => `${head.layer}.${head.head}`;
      const groups = [...this.roles, ""].map((role) => [role || NO_ROLE, roleClass(this.roles, role), of(role), under]);
      showGroups(this.gallery, groups.filter(([, , members]) => members.length));
      this.content.classList.remove("above");
    }
    this.dim();
    if (this.head) this.gallery.mark(this.head);
  }

  dim() {
    for (const { head, thumb } of this.gallery.thumbs) {
      thumb.classList.toggle("dim", typeof this.role === "string" && (head.role ?? "") !== this.role);
    }
  }

  async pick(stack) {
    this.stack = stack;
    if (!this.heads[stack]) {
      showUnpacking(this);
      try {
        this.heads[stack] = await unpackedHeads(this.section, stack);
      } catch (error) {
        if (this.stack === stack) showProblem(this, error);
        return;
      }
    }
    if (this.stack !== stack) return; // another stack was picked in the meantime
    showStatus(this, "");
    super.pick(stack);
  }
}

const NO_ROLE = "no role";

mounts.attention = (section, place) => {
  if (section.maps.length) new TraceView(section, place);
  else place.append(quiet("No maps."));
};
