// Attention of matrices that the reader edits: scores, weights and output, of the dot-product and the additive score.

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const times = (matrix, vector) => matrix.map((row) => dot(row, vector));

// Rows of scores -> rows of weights.  Hidden scores are -Infinity; a row without others gets zeros.
function softmaxRows(scores, temperature) {
  return scores.map((row) => {
    const most = Math.max(...row);
    if (most === -Infinity) return row.map(() => 0);
    const shares = row.map((score) => Math.exp((score - most) / temperature));
    const sum = shares.reduce((a, b) => a + b, 0);
    return shares.map((share) => share / sum);
  });
}

// Vaswani et al. 2017, and beside it Bahdanau et al. 2015, of the same queries and keys.
function attentionByHand({ Q, K, V, W_q, W_k, w }, { scaled, causal, temperature }) {
  const ahead = K.length - Q.length; // the queries are the last of the positions, as in `triptych.attend`
  const visible = (t, s) => !causal || s <= t + ahead;
  const results = {};
  const scores = {
    dot: (q, k) => dot(q, k) / (scaled ? Math.sqrt(q.length) : 1),
    additive(q, k) {
      const [query, key] = [times(W_q, q), times(W_k, k)];
      return dot(w[0], key.map((x, i) => Math.tanh(x + query[i])));
    },
  };
  for (const [name, score] of Object.entries(scores)) {
    const rows = Q.map((q, t) => K.map((k, s) => (visible(t, s) ? score(q, k) : -Infinity)));
    const weights = softmaxRows(rows, temperature);
    const output = weights.map((row) => V[0].map((_, i) => row.reduce((sum, share, s) => sum + share * V[s][i], 0)));
    results[name] = { scores: rows, weights, output };
  }
  return results;
}

// What is wrong with a number that the reader wrote; the empty text where it can be used.
function problemOf(text) {
  if (text.trim() === "") return "Write a number.";
  const value = Number(text.trim());
  if (Number.isNaN(value)) return "This is not a number.";
  return Math.abs(value) <= 1e6 ? "" : "Write a number between -1000000 and 1000000.";
}

// An input for one number: calls `use` with each that can be used; beside the others stands what is wrong.  It shows
// four decimals of the first number, which is used with all of them.
function numberInput(name, value, use, problem = problemOf) {
  const id = `problem-${name.replace(/\W+/g, "-")}`;
  const message = el("span", { class: "problem", id, role: "status" });
  const input = el("input", { inputmode: "text", "aria-label": name, "aria-describedby": id, autocomplete: "off" });
  input.value = Number(value.toFixed(4));
  input.dataset.value = value;
  input.addEventListener("input", () => {
    const wrong = problem(input.value);
    message.textContent = wrong && `${wrong} ${Number(value.toFixed(4))} is still used.`;
    if (wrong) {
      input.setAttribute("aria-invalid", "true");
      return;
    }
    input.removeAttribute("aria-invalid");
    value = Number(input.value.trim());
    input.dataset.value = value;
    use(value);
  });
  return [input, message];
}

const shownNumber = (value) =>
  value === -Infinity ? "−∞" : (Math.abs(value) >= 1e5 ? value.toExponential(3) : value.toFixed(4)).replace("-", "−");

// A matrix under its name and what it is; `cell(x, t, i)` makes the cell of a number.
function matrixOf(name, shownName, about, rows, cell) {
  const body = rows.map((row, t) => el("tr", {}, el("th", { scope: "row" }, t), row.map((x, i) => cell(x, t, i))));
  return div("matrix", div("named", el("b", {}, shownName), " ", el("span", {}, about)),
    el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": name },
      el("table", { class: "cells", "data-name": name }, el("tbody", {}, body))));
}

function editableMatrix(name, letters, rows, change) {
  const about = `[${letters[0]} ${rows.length}, ${letters[1]} ${rows[0].length}]`;
  return matrixOf(name, name, about, rows, (x, t, i) =>
    el("td", {}, numberInput(`${name}, row ${t}, column ${i}`, x, (value) => {
      rows[t][i] = value;
      change();
    })));
}

// A matrix of results, named after the score and what it is; each cell carries its exact value beside the rounded one.
const resultMatrix = (score, name, about, rows) => matrixOf(`${score} ${name}`, name, about, rows, (x) => {
  const tint = name === "weights" ? `tint-${Math.min(9, Math.floor(x * 10))}` : "";
  return el("td", { class: tint, title: x, "data-value": x }, shownNumber(x));
});

mounts.playground = (section, place) => {
  const given = div("given");
  const results = div("results");
  const settings = { scaled: true, causal: false, temperature: 1 };
  let matrices = {};

  function set(key, value) {
    settings[key] = value;
    draw();
  }

  function draw() {
    const formulas = { dot: `s = q · k${settings.scaled ? " / √d" : ""}`, additive: "s = w · tanh(W_q q + W_k k)" };
    const headings = { dot: "Dot product", additive: "Additive (Bahdanau)" };
    const softmax = settings.temperature === 1 ? "p = softmax(s)" : "p = softmax(s / temperature)";
    refill(results, Object.entries(attentionByHand(matrices, settings)).map(([name, { scores, weights, output }]) =>
      el("div", {}, el("h3", {}, headings[name]),
        resultMatrix(name, "scores", formulas[name], scores),
        resultMatrix(name, "weights", softmax, weights),
        resultMatrix(name, "output", "z = p V", output))));
  }

  function open({ Q, K, V, scaled }) {
    const identity = () => Q[0].map((_, i) => Q[0].map((_, j) => Number(i === j)));
    matrices = { ...structuredClone({ Q, K, V }), W_q: identity(), W_k: identity(), w: [Q[0].map(() => 1)] };
    settings.scaled = scaled;
    const letters = { Q: "TK", K: "SK", V: "SV", W_q: "AK", W_k: "AK", w: "·A" };
    const all = Object.entries(matrices).map(([name, rows]) => editableMatrix(name, letters[name], rows, draw));
    refill(given, all.slice(0, 3));
    refill(additive, el("summary", {}, "W_q, W_k and w of the additive score"), div("given", all.slice(3)));
    refill(scaling, switches("Scale", [[true, "1/√d"], [false, "no scale"]], "scaled"));
    draw();
  }

  const switches = (name, entries, key) => choice(name, entries, settings[key], (value) => set(key, value));
  const scaling = el("span", {});
  const additive = el("details", {});
  const examples = el("select", { "aria-label": "Example", onchange: () => open(section.examples[examples.value]) },
    section.examples.map((example, i) => el("option", { value: i }, example.about)));
  const warm = numberInput("temperature", 1, (value) => set("temperature", value),
    (text) => problemOf(text) || (Number(text) >= 0.01 ? "" : "Write a number of at least 0.01."));
  place.append(
    div("settings", el("label", {}, "Example", examples),
      switches("Mask", [[false, "no mask"], [true, "causal"]], "causal"),
      scaling, el("label", {}, "Temperature", warm)),
    given, additive, results);
  open(section.examples[0]);
};
