// Saves a picture as SVG or PNG, and its numbers as JSON.

// The value of a colour of the style sheet, for pictures that leave the page.
const colourOf = (name) => {
  const probe = el("span");
  probe.style.color = `var(${name})`;
  root.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};

// A picture of `width` by `height` with a title, on the paper of the theme.
function sheet(width, height, title, ...children) {
  const paper = svg("rect", { width, height, fill: colourOf("--paper") });
  const heading = svg("text", { x: 24, y: 34, "font-size": 18, "font-weight": 600, fill: colourOf("--ink") }, title);
  return svg("svg", { xmlns: SVG_NAMESPACE, width, height, viewBox: `0 0 ${width} ${height}`,
    "font-family": "sans-serif", "font-size": 13 }, paper, heading, ...children);
}

// A copy of a picture in which the elements of each selector have attributes in place of the style sheet's.
function inked(picture, styles) {
  const copy = picture.cloneNode(true);
  for (const [selector, attributes] of Object.entries(styles)) {
    copy.querySelectorAll(selector).forEach((one) => fill(one, attributes));
  }
  return copy;
}

// XML has no place for most control characters and for halves of a surrogate pair, which tokens may contain.
const xmlText = (text) => text.toWellFormed?.().replace(/[^\t\n\r\x20-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd") ?? text;

function serialized(picture) {
  for (const node of picture.querySelectorAll("text")) node.textContent = xmlText(node.textContent);
  return new XMLSerializer().serializeToString(picture);
}

const MOST_PIXELS = 24e6; // of a picture; browsers refuse larger canvases, the first of them above 16,384 pixels a side

// Waits for events that come in a background tab too, where nothing is drawn.
async function rasterized(picture) {
  const [width, height] = [picture.getAttribute("width"), picture.getAttribute("height")].map(Number);
  const scale = Math.min(2, 8000 / Math.max(width, height), Math.sqrt(MOST_PIXELS / width / height));
  const image = new Image();
  await new Promise((done, fail) => {
    image.onload = done;
    image.onerror = () => fail(new Error("the browser cannot draw it"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(serialized(picture))}`;
  });
  const canvas = el("canvas", { width: Math.round(width * scale), height: Math.round(height * scale) });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done));
  if (!blob) throw new Error("the browser has no memory for it");
  return blob;
}

// Buttons that save what a view shows: its `drawing()` is an <svg>, `file()` the file's name, `values()` the numbers.
function exportButtons(view) {
  const status = el("span", { class: "quiet", role: "status" });
  const one = (kind, hint, make) => button(kind.toUpperCase(), hint, async () => {
    status.textContent = "";
    try {
      save(`${view.file()}.${kind}`, await make());
    } catch (error) {
      status.textContent = `The ${kind.toUpperCase()} could not be made: ${error.message}.`;
    }
  });
  return group("choice", "Save",
    one("png", "Save as a picture of pixels", () => rasterized(view.drawing())),
    one("svg", "Save as a drawing", () => new Blob([serialized(view.drawing())], { type: "image/svg+xml" })),
    one("json", "Save the numbers", () => jsonBlob(view.values())), status);
}
