// Shared by the scripts of all sections: the data, functions that make elements, the theme, and saving files.
// Text from the data only ever becomes a text node or an attribute value, never markup.

const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

// kind -> function(section data, <section> element); each interactive kind adds itself.
const mounts = {};

// Sections are numbered where they stand: `section-3`, and those of a chapter `section-3-0`.
function mountAll(sections, under) {
  sections.forEach((section, index) => {
    mounts[section.kind]?.(section, document.getElementById(`${under}-${index}`));
  });
}

mounts.chapter = mounts.tab = ({ sections }, place) => mountAll(sections, place.id);

// `attributes` are also events (`onclick`) and a `style` by its properties; null is left out.  Children are nodes,
// texts, numbers, and lists of these; false and null are left out.
function fill(node, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== false && child !== null && child !== undefined));
  return node;
}

// What `act` puts in place of the buttons of `node` takes over the focus, by the place among them.
function keepFocus(node, act) {
  const held = [...node.querySelectorAll("button")].indexOf(document.activeElement);
  act();
  if (held >= 0) node.querySelectorAll("button")[held]?.focus();
}

function refill(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

const div = (name, ...children) => el("div", { class: name }, ...children);
const quiet = (...children) => el("p", { class: "quiet" }, ...children);

// A template whose values may be nodes and lists, as texts and nodes; its line ends are spaces.
const prose = (texts, ...values) => texts.flatMap((text, i) => [text.replace(/\s+/g, " "), values[i] ?? ""]).flat();

const button = (content, hint, press, attributes = {}) =>
  el("button", { type: "button", title: hint, onclick: press, ...attributes }, content);
const group = (name, label, ...children) =>
  el("div", { class: name, role: "group", "aria-label": label }, ...children);
const statusLine = () => el("p", { class: "quiet", role: "status" });

// A row of exclusive choices: entries are [value, label, hint].  `mark(value)` of the row shows another as chosen.
function choice(name, entries, picked, pick) {
  const buttons = entries.map(([value, label, hint = ""]) => button(label, hint, () => {
    row.mark(value);
    pick(value);
  }));
  const row = group("choice", name, buttons);
  row.mark = (chosen) => entries.forEach(([value], i) => buttons[i].setAttribute("aria-pressed", value === chosen));
  row.mark(picked);
  return row;
}

const COLOURS = 5; // --series-0 .. in the style sheet
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const LONGEST = 160; // letters of a token that are shown

// Tokens as they are read: spaces and line ends that would not show get a sign.
function shown(token) {
  if (token === "") return "∅";
  const start = [...token.slice(0, 2 * LONGEST)].slice(0, LONGEST).join("");
  const letters = token.length > 2 * LONGEST ? `${start}… (${token.length.toLocaleString("en-US")} letters)` : token;
  const signed = letters.replace(/\r\n|\n|\r/g, "↵").replace(/\t/g, "⇥");
  return signed.replace(/^ +| +$/g, (gap) => "·".repeat(gap.length));
}

const percent = (p) => (p > 0 && p < 0.001 ? "<0.1%" : `${(100 * p).toFixed(1)}%`);
const three = (weight) => (weight > 0 && weight < 0.0005 ? "<0.001"
  : weight === -Infinity ? "−∞" : weight.toFixed(3).replace("-", "−"));

const bdi = (token) =>
  el("bdi", { class: "token", title: token.length > 2 * LONGEST ? shown(token) : token }, shown(token));

function readable(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-4 || size >= 1e7)) {
    return Number(value.toPrecision(4)).toExponential().replace("e+", "e").replaceAll("-", "−");
  }
  return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
}

function shortened(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

// Calls `act` now and whenever the width of `node` changes.  Changes of the height are ignored, because `act` itself
// usually causes them.
function onwidth(node, act) {
  let width = node.clientWidth;
  act();
  new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    requestAnimationFrame(act);
  }).observe(node);
}

// Handles keys inside a widget: `keys` maps the name of a key to a function; one that gives false leaves the key.
function onkeys(node, keys) {
  node.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
    if (act && act() !== false) event.preventDefault();
  });
}

// The keys that move over rows and columns: `move(down, right)`.
const moves = (move) => ({
  ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1),
  Home: () => move(0, -Infinity), End: () => move(0, Infinity), PageUp: () => move(-10, 0), PageDown: () => move(10, 0),
});

// Arrow keys inside a group of buttons: `next(from, across, down)` gives the place, among those that `buttons()` lists,
// to which the focus goes from the place `from`; `reach` is called with it.
function onarrows(node, buttons, next, reach) {
  const step = (across, down) => () => {
    const all = buttons();
    const from = all.indexOf(document.activeElement);
    const to = from < 0 ? -1 : next(from, across, down);
    all[to]?.focus();
    return all[to] ? reach(to) : false;
  };
  onkeys(node, { ArrowLeft: step(-1, 0), ArrowRight: step(1, 0), ArrowUp: step(0, -1), ArrowDown: step(0, 1) });
}

// Theme: the system's, until the reader chooses; paper is always light.

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const repaints = []; // what is drawn on canvases, and so does not follow the style sheet by itself
const repaint = () => repaints.forEach((paint) => paint());
const isDark = () => (root.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";

// Some browsers give a local file no storage; the choice then lasts as long as the page.
function stored(act) {
  try {
    return act(localStorage);
  } catch {
    return null;
  }
}

function mountTheme(tools) {
  const wear = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    repaint();
  };
  const toggle = button("", "", () => {
    wear(isDark() ? "light" : "dark");
    stored((storage) => storage.setItem("triptych-theme", root.dataset.theme));
  });
  repaints.push(() => {
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.title = isDark() ? "Use the light theme" : "Use the dark theme";
  });
  tools.append(toggle);
  const saved = stored((storage) => storage.getItem("triptych-theme"));
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
  systemDark.addEventListener("change", repaint);

  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    wear("light");
  });
  addEventListener("afterprint", () => wear(before));
}

function save(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const jsonBlob = (value) => new Blob([JSON.stringify(value, null, 1)], { type: "application/json" });

const fileName = (...parts) =>
  parts.join("-").normalize("NFKD").replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "").toLowerCase();
