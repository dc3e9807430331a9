// Line plots: SVG at the width it is shown, a legend that reads out the values under the pointer.

const DASHES = 4; // .dash-0 .. there
const LABEL = 16; // pixels between the names of reference lines
// A line that has a colour again is dashed, or dotted.
const again = (index) => ["", " again-1", " again-2"][Math.floor(index / COLOURS) % 3];
const MARKED = 12; // measured places that a logarithmic axis marks each by its own value

// About `count` round numbers that cover [low, high].
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
  return values.map((value) => Number(value.toPrecision(12)));
}

// The same on a logarithmic axis: every so many powers of ten, 1-2-5 within few of them, even steps within one.
function powers(low, high, count) {
  const decades = Math.log10(high / low);
  const factors = decades * 3 <= count ? [1, 2, 5] : [1];
  const step = Math.max(1, Math.ceil(decades / count));
  const values = [];
  for (let power = step * Math.floor(Math.log10(low) / step); power <= Math.log10(high) + 1e-9; power += step) {
    values.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  }
  const within = values.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
  return within.length > 1 ? within : ticks(low, high, count);
}

// One axis: where between its ends, 0 to 1, a value stands; and the round values to mark.
function axis(values, logarithmic, pad) {
  const into = logarithmic ? Math.log10 : (value) => value;
  const places = values.map(into);
  const least = places.reduce((low, place) => Math.min(low, place));
  const most = places.reduce((high, place) => Math.max(high, place));
  const room = (most - least || Math.abs(most) || 1) * pad;
  const [low, high] = [least - room, most + room];
  const out = logarithmic ? (value) => 10 ** value : (value) => value;
  return {
    share: (value) => (into(value) - low) / (high - low || 1),
    ticks: (count) => (logarithmic ? powers : ticks)(out(low), out(high), count),
  };
}

// Those of `values` whose labels keep `room` pixels between them.
function spaced(values, place, room) {
  let last = -Infinity;
  return values.filter((value) => {
    if (place(value) - last < room) return false;
    last = place(value);
    return true;
  });
}

// Points as an SVG path; a null y lifts the pen.
function trail(points, x, y) {
  let pen = "M";
  let path = "";
  for (const [px, py] of points) {
    if (py !== null) path += `${pen}${x(px).toFixed(1)},${y(py).toFixed(1)}`;
    pen = py === null ? "M" : "L";
  }
  return path;
}

function nearest(points, at) {
  const apart = (point) => (point ? Math.abs(point[0] - at) : Infinity);
  return points.reduce((best, point) => (point[1] !== null && apart(point) < apart(best) ? point : best), null);
}

const dashed = (index, d) => svg("path", { class: `reference dash-${index % DASHES}`, d });

// The axes, grid and unnamed reference lines of a plot that fits `box`.
function frame(section, box, x, y, marks, lines) {
  const path = (name, d) => svg("path", { class: name, d });
  const text = (name, at, anchor, words) => svg("text", { class: name, ...at, "text-anchor": anchor }, words);
  return [
    marks.y.map((value) => [path("grid", `M${box.left},${y(value)}H${box.right}`),
      text(null, { x: box.left - 8, y: y(value), dy: "0.32em" }, "end", readable(value))]),
    marks.x.map((value) => [path("axis", `M${x(value)},${box.bottom}v5`),
      text("tick", { x: x(value), y: box.bottom + 19 }, "middle", readable(value))]),
    path("axis", `M${box.left},${box.bottom}H${box.right}`),
    text("name", { x: box.right, y: box.bottom + 40 }, "end", section.x_label),
    text("name", { x: 0, y: 12 }, null, section.y_label),
    lines.map(([, value], index) => dashed(index, `M${box.left},${y(value)}H${box.right}`)),
  ];
}

// The names of reference lines at their right ends: each above its line, or as near to there as the name over it
// allows, behind a piece of the line it belongs to.
function nameLines(picture, box, y, lines) {
  const labels = lines.map(([title, value], index) =>
    ({ name: `${title} · ${readable(value)}`, index, at: y(value) - 6 }));
  labels.sort((a, b) => a.at - b.at);
  labels.forEach((label, i) => (label.at = Math.max(label.at, i ? labels[i - 1].at + LABEL : box.top)));
  const over = labels.length ? Math.max(0, labels.at(-1).at - (box.bottom - 6)) : 0;
  for (const { name, index, at } of labels) {
    const text = svg("text", { class: "reference", x: box.right, y: at - over, "text-anchor": "end" }, name);
    picture.append(text);
    const end = box.right - text.getComputedTextLength() - 7;
    if (lines.length === 1) continue;
    picture.append(svg("path", { class: "behind", d: `M${end - 30},${at - over - 4}h30` }),
      dashed(index, `M${end - 28},${at - over - 4}h26`));
  }
}

// The points of a line that its axes can show: a logarithmic axis has no zero and no negative values.
function plottable(line, logs) {
  const shown = logs.x ? line.filter(([x]) => x > 0) : line;
  return logs.y ? shown.map(([x, y]) => [x, y > 0 ? y : null]) : shown;
}

mounts.curve = (section, place) => {
  const logs = { x: section.log.includes("x"), y: section.log.includes("y") };
  const series = Object.entries(section.series).map(([name, line]) => [name, plottable(line, logs)]);
  const lines = Object.entries(section.lines).filter(([, value]) => value > 0 || !logs.y);
  const points = series.flatMap(([, line]) => line).filter(([, y]) => y !== null);
  if (!points.length) return place.append(quiet("No points yet."));
  const stops = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const whole = stops.every(Number.isInteger); // as layers are, of which there are no halves
  const across = axis(stops, logs.x, 0);
  const heights = [...points, ...lines].map(([, y]) => y);
  const up = axis(heights, logs.y, 0.06);

  const legend = el("div", { class: "legend", "aria-live": "polite" });
  const names = series.map(([name]) => name).join(", ");
  const about = `${section.title}: ${names} by ${section.x_label}; arrow keys read out values`;
  const picture = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": about });
  place.append(legend, picture);

  let stop = stops.length - 1;
  let drawn; // the geometry of the last drawing
  const cursor = svg("g", { class: "cursor" });

  const dot = (index, [px, py], r) =>
    svg("circle", { class: `fill-${index % COLOURS}`, cx: drawn.x(px), cy: drawn.y(py), r });

  function readOut() {
    const at = stops[stop];
    const { x, box } = drawn;
    cursor.replaceChildren(svg("path", { d: `M${x(at)},${box.top}V${box.bottom}` }));
    legend.replaceChildren(el("span", {}, section.x_label, " ", el("b", {}, readable(at))));
    series.forEach(([name, line], index) => {
      const point = nearest(line, at);
      if (!point) return;
      cursor.append(dot(index, point, 4));
      legend.append(el("span", {}, el("i", { class: `key-${index % COLOURS}${again(index)}` }), name, " ",
        el("b", {}, readable(point[1])), point[0] !== at && ` at ${readable(point[0])}`));
    });
  }

  function draw() {
    const width = picture.clientWidth;
    if (!width) return;
    const height = clamp(width * 0.42, 230, 400);
    const levels = up.ticks(height / 60);
    const widest = Math.max(...levels.map((value) => readable(value).length));
    const box = { left: Math.max(46, 7 * widest + 12), right: width - 14, top: 26, bottom: height - 50 };
    const x = (value) => box.left + across.share(value) * (box.right - box.left);
    const y = (value) => box.bottom - up.share(value) * (box.bottom - box.top);
    // On a logarithmic axis with few measured values, mark those instead of round numbers.
    const measured = logs.x && stops.length <= MARKED ? stops
      : across.ticks((box.right - box.left) / 90).filter((value) => Number.isInteger(value) || !whole);
    const marks = { x: spaced(measured, x, 44), y: levels };
    drawn = { x, y, box };
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    refill(picture, frame(section, box, x, y, marks, lines), series.map(([, line], index) => [
      svg("path", { class: `line stroke-${index % COLOURS}${again(index)}`, d: trail(line, x, y) }),
      line.length <= 40 && line.filter(([, py]) => py !== null).map((point) => dot(index, point, 2.6)),
    ]));
    nameLines(picture, box, y, lines); // over the series, where they can be read
    picture.append(cursor);
    readOut();
  }

  function move(to) {
    stop = clamp(to, 0, stops.length - 1);
    readOut();
  }

  picture.addEventListener("pointermove", (event) => {
    const { x } = drawn;
    const at = event.clientX - picture.getBoundingClientRect().left;
    const apart = (index) => Math.abs(x(stops[index]) - at);
    move(stops.reduce((best, _, index) => (apart(index) < apart(best) ? index : best), 0));
  });
  const leap = Math.max(1, Math.round(stops.length / 20));
  onkeys(picture, {
    ArrowLeft: () => move(stop - 1), ArrowRight: () => move(stop + 1),
    PageDown: () => move(stop - leap), PageUp: () => move(stop + leap),
    Home: () => move(0), End: () => move(stops.length - 1),
  });
  onwidth(place, draw);
};
