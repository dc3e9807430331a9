"""The textbook chapter's exercises to think about (L4.1 to L4.10)."""

from math import sqrt

import numpy as np

from triptych.attention import attend, attention_pattern
from .exercise import Draft, Random, exercise, listed, matrix, number, pick, row, small, tensor, weights_of

NEARER = 0.1  # of values of 10 to 80; three equal values differ by rounding alone
HARDLY = 0.1  # of the scaled gradient: what the text of L4.3 calls hardly any


@exercise("L4.1", "A soft dictionary")
def soft_dictionary(random: Random) -> Draft:
    while True:  # until one key is the best, and the sharper answer plainly the nearer to its value
        keys = np.eye(3)[random.permutation(3)]
        values = 10 * small(random, 3, low=1, high=9)
        query = small(random, 3, low=0, high=3) + np.array([0.0, 0.5, 1.5])
        beta = pick(random, 2, 3)
        asked = tensor(query), tensor(keys), tensor(values[:, None])
        soft, sharp = (float(attend(*asked, scale=scale)[0]) for scale in (1.0, float(beta)))
        scores = keys @ query
        best = int(scores.argmax())
        alone = int((scores == scores.max()).sum()) == 1
        if alone and abs(sharp - values[best]) < abs(soft - values[best]) - NEARER:
            break
    statement = (
        "A dictionary of three keys and values, asked with one query; scores are q·k times β.",
        matrix("keys", keys), f"  values = {listed(values)}   query = {listed(query)}",
    )  # fmt: skip
    return statement, [
        (
            "What would a dictionary return, that takes the value of the best key alone?",
            values[best],
            f"The scores are {listed(scores)}; the best is key {best + 1}.",
        ),
        (
            "What does attention return at β = 1?",
            soft,
            f"The weights are softmax({listed(scores)}) = "
            f"{listed(row(attention_pattern(tensor(query), tensor(keys), scale=1.0)))}.",
        ),
        (
            f"And at β = {beta}?",
            sharp,
            f"softmax({listed(beta * scores)}): nearer to the dictionary's answer, and still a smooth function of the "
            "query, so that a gradient can say how to ask better.",
        ),
    ]


@exercise("L4.2", "The variance of q·k")
def variance(random: Random) -> Draft:
    d, q, k = pick(random, 32, 64, 128, 256), pick(random, 0.5, 1.0, 2.0), pick(random, 0.5, 1.5, 3.0)
    statement = (
        f"q and k have d = {d} independent entries with mean 0; those of q have standard deviation {number(q)}, those "
        f"of k {number(k)}."
    )
    spread = d * q**2 * k**2
    return statement, [
        (
            "What is the variance of q·k?",
            spread,
            f"A product of two such entries has mean 0 and variance {number(q)}²·{number(k)}²; variances of d "
            f"independent products add up: {d}·{number(q**2 * k**2)}.",
        ),
        (
            "What is its standard deviation after division by √d?",
            q * k,
            f"√({number(spread)}/{d}) = {number(q)}·{number(k)}, whatever d is.",
        ),
    ]


@exercise("L4.3", "Large d without √d")
def without_root(random: Random) -> Draft:
    steep = gentle = 0.0
    while steep >= HARDLY * gentle:
        d = pick(random, 16, 64)
        scores = sqrt(d) * np.array([1.0, 0.0, -0.5])[random.permutation(3)] + random.integers(-1, 2, 3)
        unscaled = weights_of(scores[None])[0]
        scaled = weights_of(scores[None], d**-0.5)[0]
        top = int(scores.argmax())
        steep, gentle = (float(p[top] * (1 - p[top])) for p in (unscaled, scaled))
    return f"A query of width d = {d} has the scores q·k = {listed(scores)} with three keys.", [
        ("What are its weights without a scale?", unscaled, f"softmax({listed(scores)})."),
        ("What are they with 1/√d?", scaled, f"softmax({listed(scores / sqrt(d))})."),
        (
            "What is the derivative of the largest of these scaled weights with respect to its scaled score?",
            gentle,
            f"p(1−p); without the scale it is {number(steep)}: a choice that is made already "
            "passes on hardly any gradient.",
        ),
    ]


@exercise("L4.4", "Why keys and values are separate")
def best_match_and_content(random: Random) -> Draft:
    q = small(random, 2, low=1, high=4)
    keys = small(random, 3, 2, low=0, high=2)
    best = int(random.integers(3))
    keys[best] = 2
    values = 10.0 * random.permutation(np.arange(1, 4))
    values = np.roll(values, 1) if values.argmax() == best else values
    weights = attention_pattern(tensor(q), tensor(keys))
    statement = (
        "A query and three tokens, each with a key and a value of one number.",
        f"  q = {listed(q)}", matrix("k", keys, ["token 1:", "token 2:", "token 3:"]), f"  v = {listed(values)}",
    )  # fmt: skip
    scores = keys @ q / sqrt(2)
    return statement, [
        ("Which token matches the query best?", best + 1, f"q·k/√2 is {listed(scores)}."),
        ("Which token has the largest value?", int(values.argmax()) + 1, f"The values are {listed(values)}."),
        (
            "What is the output?",
            weights @ tensor(values),
            f"The weights {listed(row(weights))} are made by query and keys, and average the values: with one vector "
            "for key and value, a token could not be easy to find and say something else.",
        ),
    ]


@exercise("L4.5", "The causal mask, with padding")
def mask_of_a_row(random: Random) -> Draft:
    tokens, padding = pick(random, 5, 6, 7, 8), pick(random, 1, 2, 3)
    words = tokens - padding
    asked = int(random.integers(1, words + 1))
    verb = "is" if padding == 1 else "are"
    statement = f"A row of {tokens} places under a causal mask, the last {padding} of which {verb} padding."
    allowed = sum(min(i, words) for i in range(1, tokens + 1))
    return statement, [
        (
            f"Which places may query {asked} see?",
            tuple(range(1, asked + 1)),
            "Itself and all before it; padding comes later.",
        ),
        (
            "How many of all pairs are allowed, those of the queries on padding included?",
            allowed,
            f"Query i sees the first min(i, {words}) places: "
            f"{' + '.join(str(min(i, words)) for i in range(1, tokens + 1))}.",
        ),
        (
            "What weight has a pair whose score is −∞, if its query sees anything at all?",
            0,
            "exp(−∞) is exactly 0, and so is its share of the sum.",
        ),
    ]


@exercise("L4.6", "Shapes of scores")
def score_shapes(random: Random) -> Draft:
    tokens, source, heads = pick(random, 7, 9, 10, 12), pick(random, 14, 15, 18, 21), pick(random, 4, 6, 8, 12)
    return f"A decoder reads {tokens} tokens, its encoder {source}; attention has {heads} heads.", [
        (
            "What is the shape of the scores of self-attention in the decoder, as heads, queries, keys?",
            (heads, tokens, tokens),
            "Every token asks every token of its own sequence; the mask removes some and changes no shape.",
        ),
        (
            "What is that of cross-attention?",
            (heads, tokens, source),
            "Queries come from the decoder, keys from the encoder.",
        ),
        ("What is that of self-attention in the encoder?", (heads, source, source), "Both come from the source."),
    ]


@exercise("L4.7", "H heads and one")
def heads_and_one(random: Random) -> Draft:
    heads, width, tokens = pick(random, 4, 8, 16), 64 * pick(random, 4, 8, 12, 16), pick(random, 10, 20, 30, 50)
    statement = (
        f"Attention of width D = {width} over {tokens} tokens, with {heads} heads of width D/H or one of width D."
    )
    flops = 2 * tokens * tokens * width
    return statement, [
        (
            "How many weights do the four projections have, with either?",
            4 * width * width,
            f"4·{width}²: heads cut the same matrices into pieces.",
        ),
        (
            "How many FLOPs do the scores of all heads take together?",
            flops,
            f"{heads}·2·T²·(D/H) = 2·{tokens}²·{width}, as many as one head takes.",
        ),
        (
            "How many scores have all heads, and how many has one?",
            (heads * tokens**2, tokens**2),
            f"H·T² = {heads * tokens**2:,} against T² = {tokens**2:,}: this is what the softmax and the memory "
            "grow with.",
        ),
    ]


@exercise("L4.8", "An induction head")
def induction(random: Random) -> Draft:
    letters = [chr(ord("A") + int(i)) for i in random.choice(26, 5, replace=False)]
    again = int(random.integers(4))
    sequence = [*letters, letters[again]]
    return f"A model reads {' '.join(sequence)}.", [
        ("At which place was the last token seen before?", again + 1, f"{letters[again]} stands at place {again + 1}."),
        (
            "To which place does an induction head attend from the last token?",
            again + 2,
            "To the token after the earlier one. The layer below wrote, at each place, which token stands before it; "
            "the head looks for the place that says its own token.",
        ),
        (
            "Which token does it make likelier next?",
            letters[again + 1],
            f"It copies what it attends to: {letters[again]} was followed by {letters[again + 1]}.",
        ),
    ]


@exercise("L4.9", "FLOPs over the length")
def flops_over_length(random: Random) -> Draft:
    short = pick(random, 512, 1024, 2048)
    times, window = pick(random, 4, 8, 16, 32), pick(random, 64, 96, 128, 192, 256, 384)
    long = short * times
    return f"Attention over {short:,} tokens, and over {long:,}.", [
        (
            "By what factor do the FLOPs of scores and weighted sums grow?",
            times**2,
            f"They are proportional to T²: {times}².",
        ),
        ("By what factor do those of the projections grow?", times, "They are proportional to T."),
        (
            f"How many scores has the longer row, at most, where each token sees the {window} last ones only?",
            long * window,
            f"T·{window}; the first tokens see fewer. That is linear in T.",
        ),
    ]


@exercise("L4.10", "Encoder and decoder")
def one_line_apart(random: Random) -> Draft:
    tokens = int(random.integers(6, 60))
    return f"The same attention layer reads {tokens} tokens once as an encoder and once as a decoder.", [
        ("How many pairs of tokens does the encoder's mask allow?", tokens**2, f"All {tokens}²."),
        (
            "How many does the decoder's?",
            tokens * (tokens + 1) // 2,
            "T(T+1)/2: those on the diagonal and below it. The one line is the mask.",
        ),
        (
            f"The last token is replaced by another. How many of the decoder's {tokens - 1} outputs before it change?",
            0,
            "None: no earlier place sees the last one. So what was computed stays valid while the text grows, and can "
            "be kept in a cache; an encoder would have to begin anew.",
        ),
    ]
