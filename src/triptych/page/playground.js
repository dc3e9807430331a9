// Attention of matrices that the reader edits: scores, weights and output, of the dot product and of the additive
// score.

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const times = (matrix, vector) => matrix.map((row) => dot(row, vector));

// Rows of scores -> rows of weights.  Hidden scores are -Infinity; a row without others gets zeros.
function softmaxRows(scores, temperature) {
  return scores.map((row) => {
    const most = Math.max(...row);
    if (most === -Infinity) return row.map(() => 0);
    const parts = row.map((score) => Math.exp((score - most) / temperature));
    const sum = parts.reduce((a, b) => a + b, 0);
    return parts.map((part) => part / sum);
  });
}

// Vaswani et al. 2017, and beside it Bahdanau et al. 2015, of the same queries and keys.
function attentionByHand({ Q, K, V, W_q, W_k, w }, { scaled, causal, temperature }) {
  const ahead = K.length - Q.length; // the queries are the last of the positions, as in `triptych.attend`
  const visible = (t, s) => !causal || s <= t + ahead;
  const results = {};
  const scores = {
    dot: (q, k) => dot(q, k) / (scaled ? Math.sqrt(q.length) : 1),
    additive: (q, k) =>
      dot(
        w[0],
        times(W_k, k).map((x, i) => Math.tanh(x + times(W_q, q)[i])),
      ),
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
    if (wrong) input.setAttribute("aria-invalid", "true");
    else {
      input.removeAttribute("aria-invalid");
      value = Number(input.value.trim());
      input.dataset.value = value;
      use(value);
    }
  });
  return [input, message];
}

const shownNumber = (value) =>
  value === -Infinity ? "−∞" : (Math.abs(value) >= 1e5 ? value.toExponential(3) : value.toFixed(4)).replace("-", "−");

function matrixFrame(name, about, table) {
  const named = el("div", { class: "named" }, el("b", {}, name), " ", el("span", {}, about));
  return el("div", { class: "matrix" }, named, el("div", { class: "wide", tabindex: "0" }, table));
}

function editableMatrix(name, letters, rows, change) {
  const cell = (row, t, i) => {
    const input = numberInput(`${name}, row ${t}, column ${i}`, row[i], (value) => {
      row[i] = value;
      change();
    });
    return el("td", {}, ...input);
  };
  const body = rows.map((row, t) =>
    el("tr", {}, el("th", { scope: "row" }, String(t)), ...row.map((_, i) => cell(row, t, i))),
  );
  const table = el("table", { class: "cells", "data-name": name }, el("tbody", {}, ...body));
  return matrixFrame(name, `[${letters[0]} ${rows.length}, ${letters[1]} ${rows[0].length}]`, table);
}

// A matrix of results, named after the score and what it is; each cell carries its exact value beside the rounded one.
function resultMatrix(name, about, rows, tinted) {
  const tint = (value) => (tinted ? `tint-${Math.min(9, Math.floor(value * 10))}` : "");
  const body = rows.map((row, t) => {
    const cells = row.map((x) => el("td", { class: tint(x), title: String(x), "data-value": x }, shownNumber(x)));
    return el("tr", {}, el("th", { scope: "row" }, String(t)), ...cells);
  });
  return matrixFrame(
    name.split(" ")[1],
    about,
    el("table", { class: "cells", "data-name": name }, el("tbody", {}, ...body)),
  );
}

mounts.playground = (section, place) => {
  const given = el("div", { class: "given" });
  const results = el("div", { class: "results" });
  const settings = { scaled: true, causal: false, temperature: 1 };
  let matrices = {};

  function draw() {
    const found = attentionByHand(matrices, settings);
    const formula = { dot: `s = q · k${settings.scaled ? " / √d" : ""}`, additive: "s = w · tanh(W_q q + W_k k)" };
    const heading = { dot: "Dot product", additive: "Additive (Bahdanau)" };
    const columns = Object.entries(found).map(([name, { scores, weights, output }]) =>
      el(
        "div",
        {},
        el("h3", {}, heading[name]),
        resultMatrix(`${name} scores`, formula[name], scores, false),
        resultMatrix(
          `${name} weights`,
          settings.temperature === 1 ? "p = softmax(s)" : "p = softmax(s / temperature)",
          weights,
          true,
        ),
        resultMatrix(`${name} output`, "z = p V", output, false),
      ),
    );
    results.replaceChildren(...columns);
  }

  function open(example) {
    const width = example.Q[0].length;
    const identity = () =>
      Array.from({ length: width }, (_, i) => Array.from({ length: width }, (_, j) => Number(i === j)));
    const copy = (rows) => rows.map((row) => [...row]);
    matrices = {
      Q: copy(example.Q), K: copy(example.K), V: copy(example.V),
      W_q: identity(), W_k: identity(), w: [Array(width).fill(1)],
    }; // prettier-ignore
    settings.scaled = example.scaled;
    const letters = { Q: "TK", K: "SK", V: "SV", W_q: "AK", W_k: "AK", w: "·A" };
    const all = Object.entries(matrices).map(([name, rows]) => editableMatrix(name, letters[name], rows, draw));
    given.replaceChildren(...all.slice(0, 3));
    additive.replaceChildren(
      el("summary", {}, "W_q, W_k and w of the additive score"),
      el("div", { class: "given" }, ...all.slice(3)),
    );
    scaling.replaceChildren(
      switches(
        "Scale",
        [
          [true, "1/√d"],
          [false, "no scale"],
        ],
        "scaled",
      ),
    );
    draw();
  }

  const switches = (name, entries, key) =>
    choice(name, entries, settings[key], (value) => {
      settings[key] = value;
      draw();
    });
  const scaling = el("span", {});
  const additive = el("details", {});
  const examples = el("select", { "aria-label": "Example" });
  section.examples.forEach((example, i) => examples.append(el("option", { value: i }, example.about)));
  examples.addEventListener("change", () => open(section.examples[examples.value]));
  const warm = numberInput("temperature", 1, (value) => {
    settings.temperature = value;
    draw();
  }, (text) => problemOf(text) || (Number(text) >= 0.01 ? "" : "Write a number of at least 0.01.")); // prettier-ignore
  place.append(
    el(
      "div",
      { class: "settings" },
      el("label", {}, "Example", examples),
      switches(
        "Mask",
        [
          [false, "no mask"],
          [true, "causal"],
        ],
        "causal",
      ),
      scaling,
      el("label", {}, "Temperature", ...warm),
    ),
    given,
    additive,
    results,
  );
  open(section.examples[0]);
};
