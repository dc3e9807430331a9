// Ten short chapters beside the model.  Each is text with numbers of this model on this text, buttons that set up what
// the text speaks of, and a question whose answer opens.
//
// `text(about)` gives pieces: strings, nodes, and `about.number(name, value)`; `steps` are [label, act, state, fits]:
// `state` says whether the page is as the button makes it, `fits` whether the model has what the button acts on.

const RESTORE = ["Put the text back", (about) => about.view.restoreText(), (about) => about.view.before === null];

const CHAPTERS = [
  {
    title: "Tokens and embeddings",
    text(about) {
      const { reading, view } = about;
      const ids = about.ids(reading);
      const { id, rows, columns, first, closest, cosine } = view.now.token;
      return ["A model computes with numbers. Your text is ", about.count("tokens", ids.length),
        ids.length === 1 ? " token from a vocabulary of " : " tokens from a vocabulary of ",
        about.count("vocabulary", rows), "; ", about.piece(reading), " is number ", about.count("id", id),
          ". The embedding table has one row for each token: ",
        about.count("width", columns), " numbers, the first of them ", about.number("first", first),
          ". Training makes the rows of tokens with similar uses similar: nearest to that of ",
        about.piece(reading), " is the row of ", bdi(view.tokenizer.pieces([closest])[0]), " (cosine ",
          about.number("cosine", cosine), ")."];
    },
    steps: [
      ["Open the embedding", (about) => about.open(about.reading, (box) => box === about.tokenBox, null),
        (about) => about.opened(about.reading, (box) => box === about.tokenBox)],
      ["Write one token twice", (about) => {
        const id = about.ids(about.reading)[about.flow.position(about.reading)];
        about.view.setText(about.view.tokenizer.decode([id, id]) || `${about.section.text} ${about.section.text}`);
      }, (about) => {
        const ids = about.ids(about.reading);
        return about.view.before !== null && new Set(ids).size < ids.length;
      }],
      RESTORE,
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
      const start = ["Attention by itself does not depend on the order of the tokens. "];
      if (!box) {
        return [...start, "This model has no operation for positions; only its mask depends on the order."];
      }
      const run = about.flow.runOf(box.entry);
      if (box.kind === "rotate") {
        const { spec } = about.section.program.entries[box.entry].instructions
          .find(({ op }) => op === "rotation_cos").attributes;
        return [...start, "This model rotates each pair of numbers of a query or a key by an angle that grows with " +
          "the position (RoPE). At position ", about.count("position", at), ", that of ",
          about.piece(about.reading), ", the first pair is rotated by ",
            about.number("fast", at * spec.frequencies[0]),
            " radians, the last by ", about.number("slow", at * spec.frequencies.at(-1)),
          ". The dot product of two rotated vectors depends on the distance of their tokens, and not on their " +
            "positions."];
      }
      if (box.kind === "embedding") {
        return [...start, "This model adds to each token the row of its position from a second table. At position ",
          about.count("position", at), ", that of ", about.piece(about.reading),
          ", the root mean square of that row is ",
            about.number("place", rootMeanSquare(about.numbers(box))), ", and that of the token's own row is ",
            about.number("token", rootMeanSquare(about.numbers(about.tokenBox))), "."];
      }
      if (box.kind === "t5_bias" || box.kind === "alibi_bias") {
        const { shape, data } = run.values.get(box.step.out[0]);
        const from = Math.min(Math.max(at, 1), shape[1] - 1); // a token that has one before it
        const bias = (back) => data[from * shape[2] + Math.max(0, from - back)];
        return [...start, "This model adds a number to every score, which depends only on the distance and the " +
          "head. Head 0 of layer 0 adds ", about.number("here", bias(0)), " to the score of ",
          about.piece(about.reading, from), " with itself, and ", about.number("before", bias(1)),
            " to its score with the previous token. ",
          box.kind === "t5_bias" ? "These numbers are learned." : "They decrease linearly with the distance."];
      }
      return [...start, "This model's operation for positions is ", box.title, "; open it to see its numbers."];
    },
    steps: [
      ["Open the step", (about) => about.open(about.reading, isPosition, null),
        (about) => about.opened(about.reading, isPosition), (about) => about.box(about.reading, isPosition, null)],
      ["Follow the first token", (about) => about.flow.follow(0, about.reading),
        (about) => about.flow.position(about.reading) === 0],
      ["Follow the last token", (about) => about.flow.follow(about.ids(about.reading).length - 1, about.reading),
        (about) => about.flow.position(about.reading) === about.ids(about.reading).length - 1],
    ],
    ask: "Without positions and without a mask: what would a permutation of the tokens change?",
    answer: "Each token would have the same result as before, at its new position. Attention is equivariant to the " +
      "order; only positions or a mask make its results depend on it.",
  },
  {
    title: "Queries, keys and values",
    text(about) {
      const box = about.attention();
      const { dots, scores, seen, t } = about.row(box);
      const best = argmaxOf(dots ?? scores, (j) => seen[j]);
      return ["In head 0 of layer 0, ", about.piece(about.main, t), " has a query of ",
        about.count("head width", about.size(box)[2]),
        " numbers, and every token has a key of the same size. Their dot product is large where both have a similar " +
          "direction: the largest is ", about.number("dot", (dots ?? scores)[best]),
        ", with the key of ", about.piece(about.main, best), " at position ", about.count("best", best),
          ". What is averaged then is not the keys but third vectors, the values. Cut the arrow of the values: the " +
          "weights stay the same, and the head averages zeros.", ...about.effect("It is cut")];
    },
    steps: [
      ["Open the queries", (about) => about.open(about.main, ({ site }) => /attn\.q$/.test(site)),
        (about) => about.opened(about.main, ({ site }) => /attn\.q$/.test(site))],
      ["Open the scores", (about) => about.open(about.main, ({ kind }) => kind === "scores"),
        (about) => about.opened(about.main, ({ kind }) => kind === "scores")],
      ["Cut the arrow of the values", (about) => about.view.cutOnly(arrowName(about.main, about.attention().step,
        "v")), (about) => about.view.cutsAre(arrowName(about.main, about.attention().step, "v"))],
    ],
    ask: "Why are there two matrices, one for queries and one for keys?",
    answer: "With a single one, the score of A with B would be that of B with A, and that of a token with itself " +
      "would be a square, usually the largest. With two, a token can attend to tokens unlike itself.",
  },
  {
    title: "The scale and softmax",
    text(about) {
      const box = about.attention();
      const { scores, seen, weights, trained } = about.row(box);
      const width = about.size(box)[2];
      const count = seen.filter((one) => one).length;
      const many = (factor) => entropyOf(softmax(Float64Array.from(scores.filter((_, j) => seen[j]),
        (x) => x * factor)));
      const own = ["Softmax turns the scores of a row into weights that sum to 1. In head 0 of layer 0, ",
        about.piece(), " distributes its weight over ", about.count("keys", count), " keys with an entropy of ",
        about.number("entropy", entropyOf(weights)),
        " nats; even weights would have ", about.number("even", Math.log(count)), ". "];
      if (trained === 1) {
        return [...own, "Most models divide scores by √", String(width), "; this one does not: its query matrix has " +
          "smaller numbers instead. Multiplied by √", String(width), ", its scores would give an entropy of ",
          about.number("sharp", many(Math.sqrt(width))), "."];
      }
      if (about.view.off.scale) return [...own, "The division by √d is off.", ...about.effect("It is off")];
      return [...own, "The dot product of two random vectors of ", about.count("head width", width),
        " numbers has a standard deviation of √", String(width), " = ", about.number("root", Math.sqrt(width)),
        ", so scores are divided by it. Undivided, this row would have an entropy of ",
        about.number("sharp", many(1 / trained)), "."];
    },
    steps: [
      ["Open softmax", (about) => about.open(about.main, ({ kind }) => kind === "softmax"),
        (about) => about.opened(about.main, ({ kind }) => kind === "softmax")],
      ["Turn 1/√d off", (about) => about.view.switch("scale", true), (about) => about.view.off.scale,
        (about) => about.view.scales],
      ["Turn it on", (about) => about.view.switch("scale", false), (about) => !about.view.off.scale,
        (about) => about.view.scales],
    ],
    ask: "How do the weights change when all scores are multiplied by a large number?",
    answer: "The largest approaches 1 and all others 0. Then the gradient of the weights is almost 0, so training " +
      "hardly changes the queries and keys.",
  },
  {
    title: "Who sees whom",
    text(about) {
      const box = about.attention();
      const { weights, t } = about.row(box);
      if (!about.decodes) {
        const sum = (test) => weights.reduce((total, w, j) => total + (test(j) ? w : 0), 0);
        return ["An encoder reads the whole text at once: each of its ", about.count("tokens", weights.length),
          " tokens attends to earlier and to later tokens. Head 0 of layer 0 gives, at ", about.piece(), ", ",
          about.number("before", sum((j) => j < t)), " of its weight to earlier tokens, ",
            about.number("self", weights[t]), " to the token itself and ", about.number("behind", sum((j) => j > t)),
          " to later ones. In training some tokens are replaced by [MASK], and the model predicts them."];
      }
      const n = about.ids("decode").length;
      const sees = visible(box.step.attributes.mask);
      let open = 0;
      for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) open += sees(q, k);
      return ["In training every token had to predict the next one, so it must not see it. The mask sets the scores " +
        "of later tokens to −∞, and softmax gives them a weight of exactly 0: of ", about.count("pairs", n * n),
        " pairs of your ", about.count("tokens", n),
        " tokens, ", about.count("open", open), " are visible. ", ...(about.both
          ? ["The source has no such mask: it is known from the beginning. "] : []),
        ...(about.view.off.mask
          ? ["Now the mask is off: tokens attend to later ones, which did not occur in training.",
          ...about.effect("It is off"), ...(about.moved < 1e-6 ? [" In a model of one layer the last token saw " +
          "all tokens with the mask, too."] : [])] : ["Turn it off and see what changes."])];
    },
    steps: [
      ["Turn the mask off", (about) => about.view.switch("mask", true), (about) => about.view.off.mask,
        (about) => about.decodes],
      ["Turn it on", (about) => about.view.switch("mask", false), (about) => !about.view.off.mask,
        (about) => about.decodes],
      ["Mask the third token", (about) => about.view.masked.has(2) || about.view.maskToken(2),
        (about) => about.view.masked.has(2), (about) => about.view.masks && about.tokens.ids.length > 2],
      ["Open softmax", (about) => about.open(about.main, ({ kind }) => kind === "softmax"),
        (about) => about.opened(about.main, ({ kind }) => kind === "softmax")],
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
      const keys = about.both ? "encode" : about.main;
      const best = [...Array(heads).keys()].map((h) => {
        const { weights } = about.row(box, h);
        const at = argmaxOf(weights);
        return { h, at, weight: weights[at] };
      });
      const list = best.slice(0, 6).flatMap(({ h, at, weight }) =>
        [`${h ? ", " : ""}head ${h} `, about.piece(keys, at), " (", about.number(`head ${h}`, weight), ")"]);
      return ["One softmax gives one set of weights. A layer has several heads, each with queries, keys and values " +
        "of its own: here ", about.count("heads", heads), ". For ", about.piece(),
        ...(about.both ? [", the cross-attention heads give most weight to: "]
          : [", those of layer 0 give most weight to: "]), ...list, ". ",
        ...(about.both ? ["Over a whole output these maxima are an alignment: which source token belongs to which " +
          "output token. "] : []), "Their results are concatenated and multiplied by one matrix.",
          ...about.effect("A part is cut")];
    },
    steps: [
      ["Cut head 0", (about) => about.view.cutOnly(`${attendPart(about.attention(about.both).step)}:0`),
        (about) => about.view.cutsAre(`${attendPart(about.attention(about.both).step)}:0`)],
      ["Cut all heads of the layer", (about) => about.view.cutOnly(...about.headCuts),
        (about) => about.view.cutsAre(...about.headCuts)],
      ["Put all back", (about) => about.view.cutOnly(), (about) => about.view.cutsAre()],
    ],
    ask: "Do eight heads of width 16 cost more than one head of width 128?",
    answer: "Hardly: the matrices have the same size and take the same multiplications. But there are eight " +
      "attention maps instead of one, with a softmax for each.",
  },
  {
    title: "The stream and its norms",
    text(about) {
      const adds = about.flow.stacks[about.main].filter((box) => box.layer === 0 && box.kind === "add"
        && box.lane === 0);
      const norm = about.box(about.main, ({ kind }) => /_norm$/.test(kind));
      const run = about.flow.runOf(about.main);
      const of = (name) => rootMeanSquare(about.flow.numbers(run, name, adds[0]));
      const inputs = adds[0].inputs;
      const stream = inputs.find(({ from }) => !from || from.layer !== 0) ?? inputs[0];
      const branch = inputs.find((one) => one !== stream);
      return ["No layer replaces a token's vector; each part adds to it. Its root mean square: ", about.piece(),
        " enters layer 0 with ", about.number("enters", of(stream.value)), ", attention adds ",
        about.number("attention", of(branch.value)),
        ", and after the addition it is ", about.number("sum", of(adds[0].step.out[0])), ". ",
          ...(norm ? [norm.title, " makes it ", about.number("norm", rootMeanSquare(about.numbers(norm))),
          about.prenorm ? " for the part that reads it, so that the inputs of all parts have a similar size. "
          : " after the addition, so that the inputs of all layers have a similar size. "] : []),
        "Cut the arrow of the residual stream: the embeddings can then pass only through the attention of this layer.",
          ...about.effect("It is cut")];
    },
    steps: [
      ["Cut the stream", (about) => about.view.cutOnly(about.streamArrow),
        (about) => about.view.cutsAre(about.streamArrow)],
      ["Put it back", (about) => about.view.cutOnly(), (about) => about.view.cutsAre()],
      ["Open the norm", (about) => about.open(about.main, ({ kind }) => /_norm$/.test(kind)),
        (about) => about.opened(about.main, ({ kind }) => /_norm$/.test(kind)),
        (about) => about.box(about.main, ({ kind }) => /_norm$/.test(kind))],
    ],
    ask: "Why does training a deep model need these additions?",
    answer: "Through an addition the gradient passes unchanged. Without it, the gradient of the first layer is a " +
      "product through all later ones, and grows or vanishes with the depth.",
  },
  {
    title: "The MLP",
    text(about) {
      const box = about.neurons;
      const numbers = box ? about.numbers(box) : new Float32Array(1);
      const most = argmaxOf(numbers.map(Math.abs));
      const sizes = Object.entries(about.section.tensors)
        .map(([name, { shape }]) => [/\.(mlp|moe)\./.test(name), shape.reduce((a, b) => a * b, 1)]);
      const [own, all] = [sizes.filter(([mlp]) => mlp), sizes]
        .map((list) => list.reduce((sum, [, size]) => sum + size, 0));
      return ["Attention moves information between tokens; the MLP works on each token alone. It maps the vector to ",
        about.count("neurons", numbers.length), " neurons, applies a nonlinear function to each, and maps the result " +
        "back to the width of the vector. At ", about.piece(),
        " in layer 0, ", about.count("active", numbers.filter((x) => Math.abs(x) > 0.1).length),
          " neurons are beyond ±0.1; the strongest is number ", about.count("strongest", most), " with ",
          about.number("strength", numbers[most]),
        ". The MLPs have ", about.number("share", own / all, percent(own / all)), " of this model's weights.",
          ...about.effect("A part is cut")];
    },
    steps: [
      ["Open the neurons", (about) => about.open(about.main, (box) => box === about.neurons),
        (about) => about.opened(about.main, (box) => box === about.neurons), (about) => about.neurons],
      ["Cut the MLP of layer 0", (about) => about.view.cutOnly(about.mlp), (about) => about.view.cutsAre(about.mlp),
        (about) => about.mlp],
      ["Put it back", (about) => about.view.cutOnly(), (about) => about.view.cutsAre(), (about) => about.mlp],
    ],
    ask: "What would two matrices without the nonlinear function between them be?",
    answer: "One matrix: a product of matrices is a matrix. Only with the nonlinear function can an MLP compute what " +
      "a single matrix cannot.",
  },
  {
    title: "From vectors to a prediction",
    text(about) {
      const { view } = about;
      const chances = probabilities([...view.now.logits[0]]);
      const best = argmaxOf(chances);
      const spread = entropyOf(chances);
      const start = ["The dot product of the last vector with a row for each possible answer gives ",
        about.count("answers", chances.length), " logits. Softmax makes probabilities of them. The likeliest at " +
        "temperature 1 is ", bdi(view.nameOf(best)), " with ",
        about.number("likeliest", chances[best], percent(chances[best])),
        "; the entropy is ", about.number("entropy", spread), " nats, as if ",
          about.number("choices", Math.exp(spread), Math.exp(spread).toFixed(1)), " answers were equally likely. "];
      if (!view.generates) {
        return [...start, view.masks ? "Mask another token, and the bars show the prediction there."
          : "Change the text and see how the prediction changes."];
      }
      const [temperature, top] = [Number(view.temperature.input.value), Number(view.top.input.value)];
      const kept = nucleus(probabilities([...view.now.logits[0]], temperature), top).length;
      return [...start, "Generation draws a token. First the logits are divided by the temperature: below 1 likely " +
        "tokens become likelier, above 1 less likely. Then top-p keeps the fewest tokens that together have ",
        about.number("top", top), ": at temperature ",
        about.number("temperature", temperature, temperature.toFixed(2)), " these are ",
        about.count("kept", kept), "."];
    },
    steps: [
      ["Temperature 0", (about) => about.view.heat(0), (about) => Number(about.view.temperature.input.value) === 0,
        (about) => about.view.generates],
      ["Temperature 1", (about) => about.view.heat(1), (about) => Number(about.view.temperature.input.value) === 1,
        (about) => about.view.generates],
      ["Temperature 2", (about) => about.view.heat(2), (about) => Number(about.view.temperature.input.value) === 2,
        (about) => about.view.generates],
      ["Open the unembedding", (about) => about.open(about.main, isLogits, null),
        (about) => about.opened(about.main, isLogits), (about) => about.box(about.main, isLogits, null)],
    ],
    ask: "What does a model generate at temperature 0?",
    answer: "Always the likeliest token, so the same text every time; small models often repeat themselves. The " +
      "likeliest token in each step does not always give the likeliest text.",
  },
  {
    title: "The cache",
    text(about) {
      const { view } = about;
      const n = about.tokens.ids.length;
      if (!about.decodes) {
        return ["A decoder stores the keys and values of earlier tokens, because these never change. An encoder " +
          "cannot: each token attends to later ones, so one more token changes every vector. Your ",
          about.count("tokens", n), " tokens have ", about.count("scores", n * n),
          " scores in every head; a text of twice the length has ", about.count("doubled", 4 * n * n),
            ". The matrix products of all other parts only double: attention is what makes long texts costly."];
      }
      const numbers = view.numbersPerPosition();
      return ["For one more token, the model needs the keys and values of all earlier tokens. Because of the causal " +
        "mask these no longer change, so they are stored: ", about.count("numbers", numbers),
        " numbers a token, for your ", about.count("tokens", n), " tokens ",
        about.number("kib", (4 * numbers * n) / 1024, ((4 * numbers * n) / 1024).toFixed(1)),
        " KiB in fp32. A step then computes 1 token instead of ", about.count("all", n + 1), ". ",
          ...(about.both ? ["Keys and values of the source, ", about.count("source", about.tokens.source.length),
          " tokens, are computed once and read in every step. "] : []), "Write some tokens and watch the cache grow."];
    },
    steps: [
      ["Write 20 tokens", (about) => about.view.generate(20), (about) => !about.view.cachePicture.node.hidden,
        (about) => about.view.generates],
      ["Double the text", (about) =>
        about.view.setText(`${about.view.source.input.value} ${about.view.source.input.value}`),
        (about) => about.view.source.input.value.length > about.section.text.length, (about) => !about.decodes],
      [...RESTORE, (about) => !about.decodes],
    ],
    ask: "Keys and values are stored. Why not the queries?",
    answer: "A query is used once, in the step of its own token. Later tokens have queries of their own and do not " +
      "use the earlier ones.",
  },
];
