// The steps of one attention: its matrices, and in words how each number of a result comes about.

// The largest products of a row and a column, and their sum in words.
function sumOfProducts(row, column, sum, name, bias = 0) {
  const products = Float64Array.from(row, (x, i) => x * column[i]);
  const order = [...products.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a])).slice(0, 3);
  const signed = (x) => (x < 0 ? `(${decimal(x)})` : decimal(x));
  const rest = products.length - order.length;
  return [order.map((i) => `${signed(row[i])}·${signed(column[i])}`).join(" + "),
    rest > 0 ? ` + … (${rest} smaller ${rest === 1 ? "product" : "products"})` : "",
    bias ? ` + ${signed(bias)} (bias)` : "", " = ", number(name, sum)];
}

// The steps of an attention `a`.  Each has a `title`, a sentence (`text`), the `figure`: matrices, each with what of it
// belongs to the chosen number, and signs between them; the `result` with the `axes` of the chosen number; its
// explanation (`cell`), and the strips of numbers whose products it sums.
// Axes: t a query, s a key, c a number of the head, m one of all heads together, o one of the result.
function attentionSteps(a) {
  const { X, Y, WQ, WK, WV, Q, K, V, QR, KR, dots, scaled, masked, weights, z, concat, WO, out } = a;
  const [query, key] = [(t) => bdi(a.queries[t]), (s) => bdi(a.keys[s])];
  const [d, width] = [X.columns, Q.columns];
  const projection = (title, from, W, result, axis, role, use, bias) => ({
    title, figure: [[from, "row"], "×", [W, "column"], "=", [result, "cell"]], result, axes: [axis, "c"],
    text: `Each row of ${from.name} times ${W.name} gives the ${role} of that token: ${use}.`,
    cell: (i, c) => [`Number ${c} of the ${role} of `, (axis === "t" ? query : key)(i), `: its row of ${from.name} times
      column ${c} of ${W.name}: `, sumOfProducts(from.row(i), W.column(c), result.at(i, c), "sum", bias?.[c]), "."],
    strips: (i, c) => [["row", from.row(i)], ["column", W.column(c)]],
  });
  const before = (what, t, s) => prose`${what} of ${query(t)} and ${key(s)}: `;
  const divided = (a.scale === 1 ? "not divided" : `divided by √${width}`)
    + (a.temperature === 1 ? "" : `, divided by the temperature ${a.temperature}`);
  const dotWords = (t, s) => ["The query of ", query(t), " times the key of ", key(s), ": ",
    sumOfProducts(QR.row(t), KR.row(s), dots.at(t, s), "dot")];
  const scaleWords = (t, s) => [divided, a.softcap ? `, capped at ±${a.softcap}` : "",
    a.bias ? [" plus ", number("bias", a.bias.at(t, s)), " for the distance"] : "", ": ",
    number("score", scaled.at(t, s))];
  // Of a weight: its product, what softmax makes of it, in words and numbers.
  a.words = (t, s) => {
    const start = [dotWords(t, s), "; ", scaleWords(t, s), "; "];
    const hidden = masked.at(t, s) === -Infinity;
    if (hidden) return [start, "hidden by the mask, so the weight is ", number("weight", 0), "."];
    const sum = masked.row(t).reduce((all, x) => all + Math.exp(x), a.sink === null ? 0 : Math.exp(a.sink));
    const power = (name, x) => number(name, x, readable(x));
    return [start, `softmax: e^${decimal(masked.at(t, s))} = `, power("power", Math.exp(masked.at(t, s))), " of ",
      power("powers", sum), " in this row gives ", number("weight", weights.at(t, s)), "."];
  };
  const square = { axes: ["t", "s"], square: true };
  const shift = a.head * z.columns;
  return [
    { title: "X", figure: [[X, "row"], Y !== X && "and", Y !== X && [Y, null]], result: X, axes: ["t", "x"],
      text: `Each row of X is the vector of one token as it enters this attention: ${X.rows} tokens, ${d} numbers each.
        ${Y === X ? "" : `${Y.name} has those of the text that is read.`}`,
      cell: (t, x) => [`Number ${x} of the vector of `, query(t), " is ", number("value", X.at(t, x)), "."] },
    { title: "W", figure: [[WQ, "cell"], "and", [WK, null], "and", [WV, null]], result: WQ, axes: ["x", "c"],
      text: `Three ${a.learned} matrices, the same for every token, make its query, its key and its value: each has a
        column of ${d} weights for every one of the head's ${width} numbers.`,
      cell: (x, c) => [`The weight with which number ${x} of a vector adds to number ${c} of its query is `,
        number("value", WQ.at(x, c)), "."] },
    projection("Q", X, WQ, Q, "t", "query", "what it compares with the keys", a.biases.q),
    projection("K", Y, WK, K, "s", "key", "what the queries are compared with", a.biases.k),
    projection("V", Y, WV, V, "s", "value", "what is averaged", a.biases.v),
    a.moved && { title: a.moved.title, figure: [[Q, "cell"], "→", [QR, "cell"], "and", [K, null], "→", [KR, null]],
      result: QR, axes: ["t", "c"], text: a.moved.text,
      cell: (t, c) => [`Number ${c} of the query of `, query(t), " was ", number("before", Q.at(t, c)), " and is now ",
        number("value", QR.at(t, c)), "."] },
    { ...square, title: "QKᵀ", figure: [[QR, "row"], "×", [a.KT, "column"], "=", [dots, "cell"]], result: dots,
      text: `Every query times every key is one number for each pair of tokens: large where both have a similar
        direction.`,
      cell: (t, s) => [dotWords(t, s), "."], strips: (t, s) => [["query", QR.row(t)], ["key", KR.row(s)]] },
    { ...square, title: "scaled", figure: [[dots, "cell"], "→", [scaled, "cell"]], result: scaled,
      text: `${a.trained === 1 ? "This model does not divide its scores by √d; it was trained so"
        : `A sum of ${width} products grows with √${width} = ${decimal(Math.sqrt(width))}, so it is divided by that`}${
        a.scale === 1 && a.trained !== 1 ? "; here that is switched off" : ""}${
        a.bias ? "; what the model adds for the distance of two tokens is part of the score" : ""}.`,
      cell: (t, s) => [before("The score", t, s), number("dot", dots.at(t, s)), ", ", scaleWords(t, s), "."] },
    { ...square, title: "masked", figure: [[scaled, "cell"], "→", [masked, "cell"]], result: masked, paints: true,
      text: `The mask sets the scores of hidden keys to −∞. Paint it: click a cell, or press Space on it, to hide that
        key from that query or to show it.`,
      cell: (t, s) => (masked.at(t, s) === -Infinity ? [query(t), " does not see ", key(s), ": the score ",
        number("score", scaled.at(t, s)), " becomes −∞."]
        : [query(t), " sees ", key(s), ": the score stays ", number("score", scaled.at(t, s)), "."]) },
    { ...square, title: "softmax", figure: [[masked, "cell"], "→", [weights, "cell"]], result: weights,
      text: "Softmax makes positive weights of every row, which sum to 1; a hidden key gets exactly 0.",
      cell: a.words },
    { title: "A·V", figure: [[weights, "row"], "×", [V, "column"], "=", [z, "cell"]], result: z, axes: ["t", "v"],
      text: "Each row of weights averages the values: this is what the head brings to that token from the others.",
      cell: (t, c) => [`Number ${c} of the head's result for `, query(t),
        ": its weights times that number of all values: ",
        sumOfProducts(weights.row(t), V.column(c), z.at(t, c), "sum"), "."],
      strips: (t, c) => [["weights", weights.row(t)], ["values", V.column(c)]] },
    { title: "concat", figure: [[z, null], "→", [concat, "cell"]], result: concat, axes: ["t", "m"],
      text: `The results of all ${a.heads} heads stand side by side: ${a.heads} × ${z.columns} = ${concat.columns}
        numbers for each token. Those of head ${a.head} are numbers ${shift} to ${shift + z.columns - 1}.`,
      cell: (t, m) => [`Number ${m} of `, query(t), ` is number ${m % z.columns} of head
        ${Math.floor(m / z.columns)}: `, number("value", concat.at(t, m)), "."] },
    { title: "W_O", figure: [[concat, "row"], "×", [WO, "column"], "=", [out, "cell"]], result: out, axes: ["t", "o"],
      text: `One more matrix mixes the heads and maps them to ${out.columns} numbers, which are added to the token's
        vector.`,
      cell: (t, o) => [`Number ${o} of the result for `, query(t), ": ",
        sumOfProducts(concat.row(t), WO.column(o), out.at(t, o), "sum", a.biases.o?.[o]), "."],
      strips: (t, o) => [["row", concat.row(t)], ["column", WO.column(o)]] },
  ].filter((step) => step);
}

// What follows from queries, keys and values: completes an attention `a` for `attentionSteps`.
function completed(a) {
  const factor = a.scale / a.temperature;
  a.KT = a.KR.transposed("Kᵀ");
  a.dots = a.QR.times(a.KT, "QKᵀ");
  a.scaled = a.dots.map("scores", (x, t, s) => {
    const capped = a.softcap ? a.softcap * Math.tanh((x * factor) / a.softcap) : x * factor;
    return a.bias ? capped + a.bias.at(t, s) : capped;
  });
  a.masked = a.scaled.map("masked", (x, t, s) => (a.visible(t, s) ? x : -Infinity));
  a.weights = a.masked.softmax("A", a.sink);
  return a;
}
