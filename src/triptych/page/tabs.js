// The tabs of a page: one is shown, and its sections are built when it is shown first.  Arrow keys move between them.

function mountTabs(sections) {
  const bar = document.querySelector("nav[aria-label=Sections]");
  const links = [...bar.querySelectorAll("a")];
  const panels = links.map((link) => document.querySelector(link.hash));
  const built = new Set();
  bar.setAttribute("role", "tablist");
  root.classList.add("tabbed");

  function open(index, focus) {
    links.forEach((link, i) => {
      link.setAttribute("aria-selected", i === index);
      link.tabIndex = i === index ? 0 : -1;
      panels[i].classList.toggle("shown", i === index);
    });
    if (!built.has(index)) {
      built.add(index);
      mounts[sections[index].kind]?.(sections[index], panels[index]);
    }
    if (focus) links[index].focus();
  }

  links.forEach((link, index) => {
    const press = (event) => {
      event.preventDefault();
      open(index, true);
    };
    fill(link, { role: "tab", id: `tab-${index}`, "aria-controls": panels[index].id, onclick: press });
    fill(panels[index], { role: "tabpanel", "aria-labelledby": link.id });
  });
  const step = (by) => () =>
    open((links.findIndex((link) => link.tabIndex === 0) + by + links.length) % links.length, true);
  const last = () => open(links.length - 1, true);
  onkeys(bar, { ArrowRight: step(1), ArrowLeft: step(-1), Home: () => open(0, true), End: last, " ": step(0) });
  open(Math.max(0, links.findIndex((link) => link.hash === location.hash)), false);
  addEventListener("beforeprint", () => sections.forEach((_, index) => built.has(index) || open(index, false)));
}
