// Line plots: SVG at the width it is shown, a legend that reads out the values under the pointer.

const COLOURS = 5; // --series-0 .. in the style sheet

// About `count` round numbers that cover [low, high].
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

const readable = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 5 });

function extent(values, pad) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}

// Points as an SVG path; a null y lifts the pen.
function trail(points, x, y) {
  let pen = "M";
  let path = "";
  for (const [px, py] of points) {
    if (py === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(px).toFixed(1)},${y(py).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function nearest(points, at) {
  let best = null;
  for (const point of points) {
    if (point[1] !== null && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at))) best = point;
  }
  return best;
}

// The axes, grid and reference lines of a plot that fits `box`.
function frame(section, box, x, y, xRange, yRange) {
  const parts = [];
  for (const value of ticks(...yRange, box.height / 60)) {
    parts.push(svg("path", { class: "grid", d: `M${box.left},${y(value)}H${box.right}` }));
    parts.push(svg("text", { x: box.left - 8, y: y(value), dy: "0.32em", "text-anchor": "end" }, readable(value)));
  }
  for (const value of ticks(...xRange, (box.right - box.left) / 90)) {
    parts.push(svg("path", { class: "axis", d: `M${x(value)},${box.bottom}v5` }));
    parts.push(svg("text", { x: x(value), y: box.bottom + 19, "text-anchor": "middle" }, readable(value)));
  }
  parts.push(svg("path", { class: "axis", d: `M${box.left},${box.bottom}H${box.right}` }));
  parts.push(svg("text", { class: "name", x: box.right, y: box.bottom + 40, "text-anchor": "end" }, section.x_label));
  parts.push(svg("text", { class: "name", x: 0, y: 12 }, section.y_label));
  for (const [name, value] of Object.entries(section.lines)) {
    parts.push(svg("path", { class: "reference", d: `M${box.left},${y(value)}H${box.right}` }));
    parts.push(svg("text", { class: "reference", x: box.right, y: y(value) - 6, "text-anchor": "end" }, `${name} · ${readable(value)}`));
  }
  return parts;
}

mounts.curve = (section, place) => {
  const series = Object.entries(section.series);
  const points = series.flatMap(([, line]) => line).filter(([, y]) => y !== null);
  if (!points.length) return place.append(el("p", { class: "quiet" }, "No points yet."));
  const stops = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const xRange = extent(stops, 0);
  const yRange = extent([...points.map(([, y]) => y), ...Object.values(section.lines)], 0.06);

  const legend = el("div", { class: "legend", "aria-live": "polite" });
  const picture = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": `${section.title}: ${series.map(([name]) => name).join(", ")} by ${section.x_label}; arrow keys read out values` });
  place.append(legend, picture);

  let stop = stops.length - 1;
  let drawn; // the geometry of the last drawing
  const cursor = svg("g", { class: "cursor" });

  function readOut() {
    const at = stops[stop];
    const { x, y, box } = drawn;
    cursor.replaceChildren(svg("path", { d: `M${x(at)},${box.top}V${box.bottom}` }));
    legend.replaceChildren(el("span", {}, section.x_label, " ", el("b", {}, readable(at))));
    series.forEach(([name, line], index) => {
      const point = nearest(line, at);
      if (!point) return;
      cursor.append(svg("circle", { class: `fill-${index % COLOURS}`, cx: x(point[0]), cy: y(point[1]), r: 4 }));
      const label = point[0] === at ? "" : ` at ${readable(point[0])}`;
      legend.append(el("span", {}, el("i", { class: `key-${index % COLOURS}` }), name, " ", el("b", {}, readable(point[1])), label));
    });
  }

  function draw() {
    const width = picture.clientWidth;
    if (!width) return;
    const height = clamp(width * 0.42, 230, 400);
    const box = { left: 46, right: width - 14, top: 26, bottom: height - 50, height };
    const x = (value) => box.left + ((value - xRange[0]) / (xRange[1] - xRange[0] || 1)) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - yRange[0]) / (yRange[1] - yRange[0])) * (box.bottom - box.top);
    drawn = { x, y, box };
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren(...frame(section, box, x, y, xRange, yRange));
    series.forEach(([, line], index) => {
      picture.append(svg("path", { class: `line stroke-${index % COLOURS}`, d: trail(line, x, y) }));
      if (line.length > 40) return;
      for (const [px, py] of line) {
        if (py !== null) picture.append(svg("circle", { class: `fill-${index % COLOURS}`, cx: x(px), cy: y(py), r: 2.6 }));
      }
    });
    picture.append(cursor);
    readOut();
  }

  function move(to) {
    stop = clamp(to, 0, stops.length - 1);
    readOut();
  }

  picture.addEventListener("pointermove", (event) => {
    const { box } = drawn;
    const share = (event.clientX - picture.getBoundingClientRect().left - box.left) / (box.right - box.left);
    const at = xRange[0] + share * (xRange[1] - xRange[0]);
    move(stops.reduce((best, value, index) => (Math.abs(value - at) < Math.abs(stops[best] - at) ? index : best), 0));
  });
  const leap = Math.max(1, Math.round(stops.length / 20));
  onkeys(picture, {
    ArrowLeft: () => move(stop - 1),
    ArrowRight: () => move(stop + 1),
    PageDown: () => move(stop - leap),
    PageUp: () => move(stop + leap),
    Home: () => move(0),
    End: () => move(stops.length - 1),
  });
  onwidth(place, draw);
};
