// Short chapters beside the model.  Each is text with numbers of this model on this text, buttons that set up what
// the text speaks of, and a question whose answer opens.
// `text(about)` gives texts and nodes (`prose`); `steps` are [label, act, state, fits]: `state` says whether the page
// is as the button makes it, `fits` whether the model has what the button acts on.

// Opens a box of the prediction's stack, or of another that `About` names.
const opens = (label, test, stack = "main", layer = 0) => [label,
  (about) => about.open(about[stack], test, layer),
  (about) => about.flow.stack === about[stack] && about.flow.box && test(about.flow.box, about),
  (about) => about.box(about[stack], test, layer)];
const cuts = (label, parts, fits) => [label,
  (about) => about.view.board.set(parts(about)), (about) => about.view.board.cutsAre(parts(about)), fits];
const switches = (label, key, off, fits) => [label,
  (about) => about.view.switch(key, off), (about) => about.view.off[key] === off, fits];
const follows = (label, at) => [label,
  (about) => about.flow.follow(at(about), about.reading),
  (about) => about.flow.position(about.reading) === at(about)];
const heats = (value) => [`Temperature ${value}`,
  (about) => about.view.heat(value), (about) => Number(about.view.temperature.input.value) === value,
  (about) => about.view.generates];
const restores = (fits) => ["Put the text back",
  (about) => about.view.restoreText(), (about) => about.view.before === null, fits];

const isToken = (box, about) => box === about.tokenBox;
const isNeurons = (box, about) => box === about.neurons;
const isQueries = ({ site }) => /attn\.q$/.test(site);
const isNorm = ({ kind }) => /_norm$/.test(kind);
const isSoftmax = ({ kind }) => kind === "softmax";

// What the chapter on positions says of an operation: (about, box, position of the followed token) -> pieces.
const biased = (how) => (about, box, at) => {
  const { shape, data } = about.view.now.runs[box.entry].values.get(box.step.out[0]);
  const from = Math.min(Math.max(at, 1), shape[1] - 1); // a token that has one before it
  const bias = (back) => data[from * shape[2] + Math.max(0, from - back)];
  return prose`This model adds a number to every score, which depends only on the distance and the head. Head 0 of layer
    0 adds ${number("here", bias(0))} to the score of ${about.piece(about.reading, from)} with itself, and
    ${number("before", bias(1))} to its score with the previous token. ${how}`;
};
const POSITION_TEXTS = {
  rotate(about, box, at) {
    const { frequencies } = about.section.program.entries[box.entry].instructions
      .find(({ op }) => op === "rotation_cos").attributes.spec;
    return prose`This model rotates each pair of numbers of a query or a key by an angle that grows with the position
      (RoPE). At position ${count("position", at)}, that of ${about.piece(about.reading)}, the first pair is rotated by
      ${number("fast", at * frequencies[0])} radians, the last by ${number("slow", at * frequencies.at(-1))}. The dot
      product of two rotated vectors depends on the distance of their tokens, and not on their positions.`;
  },
  embedding: (about, box, at) => prose`This model adds to each token the row of its position from a second table. At
    position ${count("position", at)}, that of ${about.piece(about.reading)}, the root mean square of that row is
    ${number("place", rootMeanSquare(about.flow.numbers(box)))}, and that of the token's own row is
    ${number("token", rootMeanSquare(about.flow.numbers(about.tokenBox)))}.`,
  t5_bias: biased("These numbers are learned."),
  alibi_bias: biased("They decrease linearly with the distance."),
};

const CHAPTERS = [
  {
    title: "Tokens and embeddings",
    text(about) {
      const { view } = about;
      const { id, rows, columns, first, closest, cosine } = view.now.token;
      const tokens = about.flow.idsOf(about.reading).length;
      const piece = () => about.piece(about.reading);
      return prose`A model computes with numbers. Your text is ${count("tokens", tokens)}
        ${tokens === 1 ? "token" : "tokens"} from a vocabulary of ${count("vocabulary", rows)}; ${piece()} is number
        ${count("id", id)}. The embedding table has one row for each token: ${count("width", columns)} numbers, the
        first of them ${number("first", first)}. Training makes the rows of tokens with similar uses similar: nearest
        to that of ${piece()} is the row of ${bdi(view.tokenizer.pieces([closest])[0])} (cosine
        ${number("cosine", cosine)}).`;
    },
    steps: [
      opens("Open the embedding", isToken, "reading", null),
      ["Write one token twice", (about) => {
        const id = about.flow.idsOf(about.reading)[about.flow.position(about.reading)];
        about.view.setText(about.view.tokenizer.decode([id, id]) || `${about.section.text} ${about.section.text}`);
      }, (about) => {
        const ids = about.flow.idsOf(about.reading);
        return about.view.before !== null && new Set(ids).size < ids.length;
      }],
      restores(),
    ],
    ask: "A token occurs twice in your text. Does it get the same row both times?",
    answer: "Yes. The row depends on the token alone. The two differ later: by their positions, and by the tokens " +
      "that attention averages for them.",
  },
  {
    title: "Positions",
    text(about) {
      const box = about.box(about.reading, isPosition, null);
      const at = about.flow.position(about.reading);
      const what = POSITION_TEXTS[box?.kind] ?? (() =>
        prose`This model's operation for positions is ${box.title}; open it to see its numbers.`);
      return prose`Attention by itself does not know the order of the tokens. ${
        box ? what(about, box, at) : "This model has no operation for positions; only its mask depends on the order."}`;
    },
    steps: [
      opens("Open the step", isPosition, "reading", null),
      follows("Follow the first token", () => 0),
      follows("Follow the last token", (about) => about.flow.idsOf(about.reading).length - 1),
    ],
    ask: "Without positions and without a mask: what would a permutation of the tokens change?",
    answer: "Each token would have the same result as before, at its new position. Attention is equivariant to the " +
      "order; only positions or a mask make its results depend on it.",
  },
  {
    title: "Queries, keys and values",
    text(about) {
      const box = about.attention();
      const { dots, scores, seen, t } = about.flow.row(box, 0);
      const best = argmax((dots ?? scores).map((score, j) => (seen[j] ? score : -Infinity)));
      return prose`In head 0 of layer 0, ${about.piece(about.main, t)} has a query of
        ${count("head width", box.shape[2])} numbers, and every token has a key of the same size. Their dot
        product is large where both have a similar direction: the largest is ${number("dot", (dots ?? scores)[best])},
        with the key of ${about.piece(about.main, best)} at position ${count("best", best)}. What is averaged then is
        not the keys but third vectors, the values. Cut the arrow of the values: the weights stay the same, and the
        head averages zeros.${about.effect("It is cut")}`;
    },
    steps: [
      opens("Open the queries", isQueries),
      opens("Open the scores", ({ kind }) => kind === "scores"),
      cuts("Cut the arrow of the values", (about) => [arrowName(about.main, about.attention().step, "v")]),
    ],
    ask: "Why are there two matrices, one for queries and one for keys?",
    answer: "With a single one, the score of A with B would be that of B with A, and that of a token with itself " +
      "would be a square, usually the largest. With two, a token can attend to tokens unlike itself.",
  },
  {
    title: "The scale and softmax",
    text(about) {
      const box = about.attention();
      const { scores, seen, weights, trained } = about.flow.row(box, 0);
      const width = box.shape[2];
      const visibleScores = scores.filter((_, j) => seen[j]);
      const sharp = (factor) =>
        number("sharp", entropyOf(softmax(Float64Array.from(visibleScores, (x) => x * factor))));
      const own = prose`Softmax turns the scores of a row into weights that sum to 1. In head 0 of layer 0,
        ${about.piece()} distributes its weight over ${count("keys", visibleScores.length)} keys with an entropy of
        ${number("entropy", entropyOf(weights))} nats; even weights would have
        ${number("even", Math.log(visibleScores.length))}. `;
      if (trained === 1) {
        return prose`${own}Most models divide scores by √${width}; this one does not: its query matrix has smaller
          numbers instead. Multiplied by √${width}, its scores would give an entropy of ${sharp(Math.sqrt(width))}.`;
      }
      if (about.view.off.scale) return prose`${own}The division by √d is off.${about.effect("It is off")}`;
      return prose`${own}The dot product of two random vectors of ${count("head width", width)} numbers has a standard
        deviation of √${width} = ${number("root", Math.sqrt(width))}, so scores are divided by it. Undivided, this row
        would have an entropy of ${sharp(1 / trained)}.`;
    },
    steps: [
      opens("Open softmax", isSoftmax),
      switches("Turn 1/√d off", "scale", true, (about) => about.view.scales),
      switches("Turn it on", "scale", false, (about) => about.view.scales),
    ],
    ask: "How do the weights change when all scores are multiplied by a large number?",
    answer: "The largest approaches 1 and all others 0. Then the gradient of the weights is almost 0, so training " +
      "hardly changes the queries and keys.",
  },
  {
    title: "Who sees whom",
    text(about) {
      const box = about.attention();
      const { weights, t } = about.flow.row(box, 0);
      if (!about.decodes) {
        const sum = (test) => weights.reduce((total, w, j) => total + (test(j) ? w : 0), 0);
        return prose`An encoder reads the whole text at once: each of its ${count("tokens", weights.length)} tokens
          attends to earlier and to later tokens. Head 0 of layer 0 gives, at ${about.piece()},
          ${number("before", sum((j) => j < t))} of its weight to earlier tokens, ${number("self", weights[t])} to the
          token itself and ${number("behind", sum((j) => j > t))} to later ones. In training some tokens are replaced
          by [MASK], and the model predicts them.`;
      }
      const n = about.flow.idsOf("decode").length;
      const sees = visible(box.step.attributes.mask);
      let open = 0;
      for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) open += sees(q, k);
      const known = about.both ? "The source has no such mask: it is known from the beginning. " : "";
      const earlier = () => {
        const at = about.view.middle(about.tokens.ids);
        return prose` The last token saw all others anyway: its prediction changes only through their vectors. The
          prediction at ${about.piece("decode", at)}, position ${count("earlier", at)}, has changed by
          ${number("earlier moved", about.movedAt(1), three(about.movedAt(1)))} nats.`;
      };
      return prose`In training every token had to predict the next one, so it must not see it. The mask sets the scores
        of later tokens to −∞, and softmax gives them a weight of exactly 0: of ${count("pairs", n * n)} pairs of your
        ${count("tokens", n)} tokens, ${count("open", open)} are visible. ${known}${about.view.off.mask
          ? prose`Now the mask is off: tokens attend to later ones, which did not occur in training.${
            about.effect("It is off")}${about.view.now.logits.length > 1 ? earlier() : ""}`
          : "Turn it off and see what changes."}`;
    },
    steps: [
      switches("Turn the mask off", "mask", true, (about) => about.decodes),
      switches("Turn it on", "mask", false, (about) => about.decodes),
      ["Mask the third token", (about) => about.view.masked.has(2) || about.view.maskToken(2),
        (about) => about.view.masked.has(2), (about) => about.view.masks && about.tokens.ids.length > 2],
      opens("Open softmax", isSoftmax),
    ],
    ask: "Could a model that sees both sides generate a text from left to right?",
    answer: "Not well. It learned to use the tokens after each position, and at the end of a text there are none. " +
      "And every new token would change the vectors of all earlier ones.",
  },
  {
    title: "Several heads",
    text(about) {
      const box = about.attention(about.both);
      const heads = about.flow.heads(box);
      const list = Array.from({ length: Math.min(heads, 6) }, (_, h) => {
        const { weights } = about.flow.row(box, h);
        const at = argmax(weights);
        const piece = about.piece(about.both ? "encode" : about.main, at);
        return prose`${h ? ", " : ""}head ${h} ${piece} (${number(`head ${h}`, weights[at])})`;
      });
      const whose = about.both ? "the cross-attention heads" : "those of layer 0";
      const alignment = about.both ? "Over a whole output these maxima are an alignment: which source token belongs " +
        "to which output token. " : "";
      return prose`One softmax gives one set of weights. A layer has several heads, each with queries, keys and values
        of its own: here ${count("heads", heads)}. For ${about.piece()}, ${whose} give most weight to: ${list}.
        ${alignment}Their results are concatenated and multiplied by one matrix.${about.effect("A part is cut")}`;
    },
    steps: [
      cuts("Cut head 0", (about) => about.headCuts.slice(0, 1)),
      cuts("Cut all heads of the layer", (about) => about.headCuts),
      cuts("Put all back", () => []),
    ],
    ask: "Do eight heads of width 16 cost more than one head of width 128?",
    answer: "Hardly: the matrices have the same size and take the same multiplications. But there are eight " +
      "attention maps instead of one, with a softmax for each.",
  },
  {
    title: "The stream and its norms",
    text(about) {
      const add = about.streamAdd;
      const norm = about.box(about.main, isNorm);
      const of = (name) => rootMeanSquare(about.flow.numbers(add, name));
      const stream = about.streamInput;
      const branch = add.inputs.find((one) => one !== stream);
      const after = about.prenorm ? "for the part that reads it, so that the inputs of all parts have a similar size."
        : "after the addition, so that the inputs of all layers have a similar size.";
      return prose`No layer replaces a token's vector; each part adds to it. Its root mean square: ${about.piece()}
        enters layer 0 with ${number("enters", of(stream.value))}, attention adds
        ${number("attention", of(branch.value))}, and after the addition it is ${number("sum", of(add.step.out[0]))}.
        ${norm ? prose`${norm.title} makes it ${number("norm", rootMeanSquare(about.flow.numbers(norm)))}
        ${after} ` : ""}Cut the arrow of the residual stream: the embeddings can then pass only through the attention of
        this layer.${about.effect("It is cut")}`;
    },
    steps: [
      cuts("Cut the stream", (about) => [arrowName(about.main, about.streamAdd.step, about.streamInput.key)]),
      cuts("Put it back", () => []),
      opens("Open the norm", isNorm),
    ],
    ask: "Why does training a deep model need these additions?",
    answer: "Through an addition the gradient passes unchanged. Without additions and norms, the gradient of the " +
      "first layer is a product through all later ones, and grows or vanishes with the depth.",
  },
  {
    title: "The MLP",
    text(about) {
      const box = about.neurons;
      const numbers = box ? about.flow.numbers(box) : new Float32Array(1);
      const most = argmax(numbers.map(Math.abs));
      const [own, all] = [/\.(mlp|moe)\./, /./].map((names) => Object.entries(about.section.tensors)
        .reduce((sum, [name, { shape }]) => sum + (names.test(name) ? shape.reduce((a, b) => a * b, 1) : 0), 0));
      return prose`Attention moves information between tokens; the MLP works on each token alone. It maps the vector to
        ${count("neurons", numbers.length)} neurons, applies a nonlinear function to each, and maps the result back to
        the width of the vector. At ${about.piece()} in layer 0,
        ${count("active", numbers.filter((x) => Math.abs(x) > 0.1).length)} neurons are beyond ±0.1; the strongest is
        number ${count("strongest", most)} with ${number("strength", numbers[most])}. The MLPs have
        ${number("share", own / all, percent(own / all))} of this model's weights.${about.effect("A part is cut")}`;
    },
    steps: [
      opens("Open the neurons", isNeurons),
      cuts("Cut the MLP of layer 0", (about) => [about.mlp], (about) => about.mlp),
      cuts("Put it back", () => [], (about) => about.mlp),
    ],
    ask: "What would two matrices without the nonlinear function between them be?",
    answer: "One matrix: a product of matrices is a matrix. Only with the nonlinear function can an MLP compute what " +
      "a single matrix cannot.",
  },
  {
    title: "One word, two meanings",
    picture: (about) => wordPlane(about.section.word_states),
    text: (about) => wordText(about.section.word_states),
    steps: [],
    ask: "The deciding word is cut, and the two topics are still apart. Why?",
    answer: "Other words carry the topic as well, and words between have already read the deciding word: what they " +
      "pass on is not cut.",
  },
  {
    title: "From vectors to a prediction",
    text(about) {
      const { view } = about;
      const chances = probabilities([...view.now.logits[0]]);
      const best = argmax(chances);
      const spread = entropyOf(chances);
      const start = prose`The dot product of the last vector with a row for each possible answer gives
        ${count("answers", chances.length)} logits. Softmax makes probabilities of them. The likeliest at temperature 1
        is ${bdi(view.nameOf(best))} with ${number("likeliest", chances[best], percent(chances[best]))}; the entropy is
        ${number("entropy", spread)} nats, as if ${number("choices", Math.exp(spread), Math.exp(spread).toFixed(1))}
        answers were equally likely. `;
      if (!view.generates) {
        return prose`${start}${view.masks ? "Mask another token, and the bars show the prediction there."
          : "Change the text and see how the prediction changes."}`;
      }
      const [temperature, top] = [Number(view.temperature.input.value), Number(view.top.input.value)];
      const drawn = probabilities([...view.now.logits[0]], temperature);
      const kept = nucleus(drawn, top).length;
      return prose`${start}Generation draws a token. First the logits are divided by the temperature: below 1 likely
        tokens become likelier, above 1 less likely. Then top-p keeps the fewest tokens that together have
        ${number("top", top)}: at temperature ${number("temperature", temperature, temperature.toFixed(2))}, that of the
        bars, these are ${count("kept", kept)}, and the likeliest has
        ${number("drawn", drawn[best], percent(drawn[best]))}.`;
    },
    steps: [heats(0), heats(1), heats(2), opens("Open the unembedding", isLogits, "main", null)],
    ask: "What does a model generate at temperature 0?",
    answer: "Always the likeliest token, so the same text every time; small models often repeat themselves. The " +
      "likeliest token in each step does not always give the likeliest text.",
  },
  {
    title: "The cache",
    text(about) {
      const n = about.tokens.ids.length;
      if (!about.decodes) {
        return prose`A decoder stores the keys and values of earlier tokens, because these never change. An encoder
          cannot: each token attends to later ones, so one more token changes every vector. Your ${count("tokens", n)}
          tokens have ${count("scores", n * n)} scores in every head; a text of twice the length has
          ${count("doubled", 4 * n * n)}. The matrix products of all other parts only double: attention is what makes
          long texts costly.`;
      }
      const numbers = about.view.numbersPerPosition;
      const kib = (4 * numbers * n) / 1024;
      const source = about.both ? prose`Keys and values of the source, ${count("source", about.tokens.source.length)}
        tokens, are computed once and read in every step. ` : "";
      return prose`For one more token, the model needs the keys and values of all earlier tokens. Because of the causal
        mask these no longer change, so they are stored: ${count("numbers", numbers)} numbers a token, for your
        ${count("tokens", n)} tokens ${number("kib", kib, kib.toFixed(1))} KiB in fp32. A step then computes 1 token
        instead of ${count("all", n + 1)}. ${source}Write some tokens and watch the cache grow.`;
    },
    steps: [
      ["Write 20 tokens", (about) => about.view.generate(20), (about) => !about.view.cachePicture.node.hidden,
        (about) => about.view.generates],
      ["Double the text", (about) =>
        about.view.setText(`${about.view.source.input.value} ${about.view.source.input.value}`),
        (about) => about.view.source.input.value.length > about.section.text.length, (about) => !about.decodes],
      restores((about) => !about.decodes),
    ],
    ask: "Keys and values are stored. Why not the queries?",
    answer: "A query is used once, in the step of its own token. Later tokens have queries of their own and do not " +
      "use the earlier ones.",
  },
];
