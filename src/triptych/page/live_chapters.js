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
        ids.length === 1 ? " token, one of " : " tokens, each one of ", about.count("vocabulary", rows),
        " that it knows; ", about.piece(reading), " is number ", about.count("id", id),
          ". For each token it looks up one row of a table: ",
        about.count("width", columns), " numbers, the first of them ", about.number("first", first),
          ". Training moves the rows of tokens that are used alike towards each other: nearest to that of ",
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
    ask: "A token stands twice in your text. Does it get the same row both times?",
    answer: "Yes. The table knows tokens and no places. What tells the two apart comes later: their positions, and " +
      "what attention brings in from around them.",
  },
  {
    title: "Positions",
    text(about) {
      const box = about.box(about.reading, isPosition, null);
      const at = about.flow.position(about.reading);
      const start = ["Attention by itself does not know in which order the tokens stand. "];
      if (!box) {
        return [...start, "This model has no step of its own for positions; only its mask tells earlier from later."];
      }
      const run = about.flow.runOf(box.entry);
      if (box.kind === "rotate") {
        const { spec } = about.section.program.entries[box.entry].instructions
          .find(({ op }) => op === "rotation_cos").attributes;
        return [...start, "So this model turns each pair of numbers of a query or a key by an angle that grows with " +
          "the position. At position ", about.count("position", at), ", where ", about.piece(about.reading),
          " stands, the first pair is turned by ", about.number("fast", at * spec.frequencies[0]),
            " radians, the last by ", about.number("slow", at * spec.frequencies.at(-1)),
          ". The dot product of two turned vectors depends on how far apart their tokens are, and not on where they " +
            "stand."];
      }
      if (box.kind === "embedding") {
        return [...start, "So this model adds to each token the row of its position from a second table. At position ",
          about.count("position", at), ", where ", about.piece(about.reading),
          " stands, the root of the mean square of that row is ",
            about.number("place", rootMeanSquare(about.numbers(box))), ", and that of the token's own row is ",
            about.number("token", rootMeanSquare(about.numbers(about.tokenBox))), "."];
      }
      if (box.kind === "t5_bias" || box.kind === "alibi_bias") {
        const { shape, data } = run.values.get(box.step.out[0]);
        const from = Math.min(Math.max(at, 1), shape[1] - 1); // a token that has one before it
        const bias = (back) => data[from * shape[2] + Math.max(0, from - back)];
        return [...start, "So this model adds a number to every score, which depends on the distance alone and on " +
          "the head. Head 0 of layer 0 adds ", about.number("here", bias(0)), " where ",
          about.piece(about.reading, from), " looks at itself, and ", about.number("before", bias(1)),
            " where it looks at the token before. ",
          box.kind === "t5_bias" ? "These numbers are learned." : "They fall by a fixed slope with every step."];
      }
      return [...start, "This model's step for that is called ", wordsOf(box)[0], "; open it to see its numbers."];
    },
    steps: [
      ["Open the step", (about) => about.open(about.reading, isPosition, null),
        (about) => about.opened(about.reading, isPosition), (about) => about.box(about.reading, isPosition, null)],
      ["Follow the first token", (about) => about.flow.follow(0, about.reading),
        (about) => about.flow.position(about.reading) === 0],
      ["Follow the last token", (about) => about.flow.follow(about.ids(about.reading).length - 1, about.reading),
        (about) => about.flow.position(about.reading) === about.ids(about.reading).length - 1],
    ],
    ask: "Without positions and without a mask: what would shuffling the tokens change?",
    answer: "Each token would get the same result as before, at its new place. Attention is equivariant to the " +
      "order; only positions or a mask tell two orders apart.",
  },
  {
    title: "Queries, keys and values",
    text(about) {
      const box = about.attention();
      const { dots, scores, seen, t } = about.row(box);
      const best = argmaxOf(dots ?? scores, (j) => seen[j]);
      return ["In head 0 of layer 0, ", about.piece(about.main, t), " asks with a query of ",
        about.count("head width", about.size(box)[2]),
        " numbers, and every token offers a key of the same size. Their dot product is large where both point the " +
          "same way: the largest is ", about.number("dot", (dots ?? scores)[best]),
        ", with the key of ", about.piece(about.main, best), " at position ", about.count("best", best),
          ". What is handed over then is not the key but a third vector, the value. Cut the arrow of the values: the " +
          "head finds the same tokens and reads zeros from them.", ...about.effect("It is cut")];
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
    answer: "With a single one, A would score B as B scores A, and every token would score itself highest. With two, " +
      "a token can look for something other than what it is.",
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
        about.piece(), " shares its weight over ", about.count("keys", count), " keys with an entropy of ",
        about.number("entropy", entropyOf(weights)),
        " nats; even shares would have ", about.number("even", Math.log(count)), ". "];
      if (trained === 1) {
        return [...own, "This model does not divide by √", String(width), ", as most do: its query matrix learned " +
          "smaller numbers. Multiplied by √", String(width), ", its scores would leave an entropy of ",
          about.number("sharp", many(Math.sqrt(width))), "."];
      }
      if (about.view.off.scale) return [...own, "The division by √d is off.", ...about.effect("It is off")];
      return [...own, "The dot product of two random vectors of ", about.count("head width", width),
        " numbers spreads as √", String(width), " = ", about.number("root", Math.sqrt(width)),
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
    ask: "What becomes of the weights when all scores are multiplied by a large number?",
    answer: "The largest goes to 1 and all others to 0. Around such a choice the gradient is almost 0, so training " +
      "hardly moves the queries and keys.",
  },
  {
    title: "Who sees whom",
    text(about) {
      const box = about.attention();
      const { weights, t } = about.row(box);
      if (!about.decodes) {
        const sum = (test) => weights.reduce((total, w, j) => total + (test(j) ? w : 0), 0);
        return ["An encoder reads the whole text at once: each of its ", about.count("tokens", weights.length),
          " tokens sees those before it and those behind. Head 0 of layer 0 gives, at ", about.piece(), ", ",
          about.number("before", sum((j) => j < t)), " of its weight to tokens before, ",
            about.number("self", weights[t]), " to the token itself and ", about.number("behind", sum((j) => j > t)),
          " to those behind. To learn from that, training hides some tokens behind [MASK] and asks for them."];
      }
      const n = about.ids("decode").length;
      const sees = visible(box.step.attributes.mask);
      let open = 0;
      for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) open += sees(q, k);
      return ["In training every token had to predict the next one, so it must not see it. The mask sets the scores " +
        "of later tokens to −∞, and softmax makes of that a weight of exactly 0: of ", about.count("pairs", n * n),
        " pairs of your ", about.count("tokens", n),
        " tokens, ", about.count("open", open), " stay open. ", ...(about.both
          ? ["The source has no such mask: it is known from the beginning. "] : []),
        ...(about.view.off.mask
          ? ["Now the mask is off: earlier tokens read later ones, as they never did in training.",
          ...about.effect("It is off"), ...(about.moved < 1e-6 ? [" With a single layer the last token saw " +
          "everything before, too."] : [])] : ["Turn it off and see what changes."])];
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
    ask: "Could a model that sees both sides write a text from left to right?",
    answer: "Not well. It learned to use the tokens behind, and at the end of a text there are none. And every new " +
      "token would change the vectors of all earlier ones.",
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
      return ["One softmax has one peak. So a layer has several heads, each with queries, keys and values of its " +
        "own: here ", about.count("heads", heads), ". For ", about.piece(),
        ...(about.both ? [", the heads that read the source find most in: "]
          : [", those of layer 0 give most weight to: "]), ...list, ". ",
        ...(about.both ? ["Over a whole output these maxima are an alignment: which source token stands behind which " +
          "output token. "] : []), "Their results are put side by side and mixed by one matrix.",
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
    answer: "No: the matrices have the same size and take the same multiplications. Only the maps are more, one for " +
      "each head.",
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
      return ["No layer replaces a token's vector; each part adds to it. As root of the mean square: ", about.piece(),
        " enters layer 0 with ", about.number("enters", of(stream.value)), ", attention adds ",
        about.number("attention", of(branch.value)),
        ", and after the addition it is ", about.number("sum", of(adds[0].step.out[0])), ". ",
          ...(norm ? [wordsOf(norm)[0], " makes it ", about.number("norm", rootMeanSquare(about.numbers(norm))),
          about.prenorm ? " for the part that reads it, so that all layers see numbers of one size. "
          : " after the addition, so that all layers see numbers of one size. "] : []),
        "Cut the stream's arrow, and everything before this layer can pass only through its attention.",
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
      return ["Attention moves things between tokens; the MLP then works on each token alone. It widens the vector to ",
        about.count("neurons", numbers.length), " neurons, bends each number by a function that is not linear, and " +
        "narrows it again. At ", about.piece(),
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
    ask: "What would two matrices without the bend between them be?",
    answer: "One matrix: a product of matrices is a matrix. Only because of the bend can an MLP compute what a " +
      "single matrix cannot.",
  },
  {
    title: "From vectors to a prediction",
    text(about) {
      const { view } = about;
      const chances = probabilities([...view.now.logits[0]]);
      const best = argmaxOf(chances);
      const spread = entropyOf(chances);
      const start = ["The last vector is multiplied by one row for each answer: ",
        about.count("answers", chances.length), " logits. Softmax makes probabilities of them. Likeliest at " +
        "temperature 1 is ", bdi(view.nameOf(best)), " with ",
        about.number("likeliest", chances[best], percent(chances[best])),
        "; the entropy is ", about.number("entropy", spread), " nats, as if ",
          about.number("choices", Math.exp(spread), Math.exp(spread).toFixed(1)), " answers were equally likely. "];
      if (!view.generates) {
        return [...start, view.masks ? "Mask another token, and the bars show what the model would put there."
          : "Change the text and see it move."];
      }
      const [temperature, top] = [Number(view.temperature.input.value), Number(view.top.input.value)];
      const kept = nucleus(probabilities([...view.now.logits[0]], temperature), top).length;
      return [...start, "To write, a token is drawn. The temperature divides the logits first: below 1 likely tokens " +
        "gain, above 1 they lose. Top-p then keeps the likeliest that have ", about.number("top", top),
        " together: at temperature ", about.number("temperature", temperature, temperature.toFixed(2)), " these are ",
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
    ask: "What does a model write at temperature 0?",
    answer: "Always the likeliest token, so the same text every time; small models soon go round in circles. Likely " +
      "step by step is not the same as likely as a whole.",
  },
  {
    title: "The cache",
    text(about) {
      const { view } = about;
      const n = about.tokens.ids.length;
      if (!about.decodes) {
        return ["A model that writes keeps the keys and values of earlier tokens, because these never change. An " +
          "encoder cannot: each token sees those behind it, so one more token changes every vector. Your ",
          about.count("tokens", n), " tokens have ", about.count("scores", n * n),
          " scores in every head; twice the text has ", about.count("doubled", 4 * n * n),
            ". The work of the matrices only doubles. Long texts are costly because of the square."];
      }
      const numbers = view.numbersPerPosition();
      return ["To write one more token, the model needs the keys and values of all tokens before. The mask sees to " +
        "it that these no longer change, so they are kept: ", about.count("numbers", numbers),
        " numbers a token, for your ", about.count("tokens", n), " tokens ",
        about.number("kib", (4 * numbers * n) / 1024, ((4 * numbers * n) / 1024).toFixed(1)),
        " KiB in fp32. A step then computes 1 token instead of ", about.count("all", n + 1), ". ",
          ...(about.both ? ["Keys and values of the source, ", about.count("source", about.tokens.source.length),
          " tokens, are computed once and read in every step. "] : []), "Let it write, and watch the cache fill."];
    },
    steps: [
      ["Write 20 tokens", (about) => about.view.generate(20), (about) => !about.view.cachePicture.node.hidden,
        (about) => about.view.generates],
      ["Double the text", (about) =>
        about.view.setText(`${about.view.source.input.value} ${about.view.source.input.value}`),
        (about) => about.view.source.input.value.length > about.section.text.length, (about) => !about.decodes],
      [...RESTORE, (about) => !about.decodes],
    ],
    ask: "Keys and values are kept. Why not the queries?",
    answer: "A query is used once, in the step of its own token. Later tokens bring queries of their own and never " +
      "ask for the earlier ones.",
  },
];
