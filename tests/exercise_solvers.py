"""A second solution of every exercise: from the printed text alone, with NumPy, without the code that drew it.

A solver reads the numbers of the statement and of the questions, and returns for each question the right answer and the
other figures that its solution may quote.  It asserts what the sentences of the solution say beside their figures:
which of two is nearer, larger or alone.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Array = np.ndarray
FIGURE = re.compile(r"(?<![\w.√²_])[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class Solved(NamedTuple):
    """`answer` is right; `also` are the figures beside it and those of the text that the solution may quote."""

    answer: object
    also: Sequence[float | Array] = ()


Solver = Callable[[str, Sequence[str]], list[Solved]]


def figures(text: str) -> list[float]:
    """The numbers of a text in order, separators of thousands left out."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [float(one.replace("−", "-").rstrip(",")) for one in FIGURE.findall(plain)]


def listed(text: str, name: str) -> Array:
    """The numbers of `name = [...]`."""
    found = re.search(rf"{re.escape(name)}\s*= \[(.*?)\]", text)
    assert found, f"no list {name} in {text!r}"
    return np.array(figures(found[1]))


def rows(text: str, name: str, *, labels: bool = False) -> Array:
    """The rows printed below `name =`; with `labels`, the first word of each is none of the numbers."""
    lines = text.partition(f"{name} =\n")[2].splitlines()
    cells = []
    for line in lines:
        if not re.match(r" {4}", line):
            break
        printed = re.split(r" {2,}", line.strip(), maxsplit=1)[1] if labels else line
        cells.append([float(one.replace(",", "")) for one in printed.split()])
    assert cells, f"no matrix {name} in {text!r}"
    return np.array(cells)


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def causal(scores: Array) -> Array:
    """The weights under a causal mask."""
    return softmax(np.where(np.tri(len(scores), dtype=bool), scores, -np.inf))


def entropy(p: Array) -> float:
    return float(-sum(one * math.log(one) for one in p if one > 0))


def alone(values: Array) -> int:
    """Which one is the largest; no second may equal it."""
    order = np.sort(values)
    assert order[-1] - order[-2] > 1e-6, f"a tie of {values}"
    return int(values.argmax())


def within(word: str, words: Sequence[str]) -> int:
    return list(words).index(word)


# ---------------------------------------------------------------- L0


def l0_1(text: str, asks: Sequence[str]) -> list[Solved]:
    x, w_q, w_k, w_v = (rows(text, name) for name in ("X", "W_Q", "W_K", "W_V"))
    token = int(figures(asks[0])[0]) - 1
    q, k, v = x @ w_q.T, x @ w_k.T, x @ w_v.T
    scores = q[token] @ k.T / math.sqrt(2)
    p = softmax(scores)
    return [Solved(q[token]), Solved(p, [k, scores, 1]), Solved(p @ v, [v])]


def l0_2(text: str, asks: Sequence[str]) -> list[Solved]:
    heads, hidden, batch, tokens, width = map(int, figures(text))
    parts = 4 * width * width, 3 * width * hidden, 2 * width
    assert width % heads == 0
    return [
        Solved((batch, tokens, width)),
        Solved((batch, heads, tokens, width // heads)),
        Solved((batch, tokens, hidden)),
        Solved(sum(parts), [*parts, 4, 3, 2]),
    ]


def l0_3(text: str, asks: Sequence[str]) -> list[Solved]:
    width = int(figures(text)[0])
    q, k, v = rows(text, "q"), rows(text, "k"), listed(text, "v")
    assert q.shape == k.shape == (2, width)
    p, unscaled = softmax(q @ k.T / math.sqrt(width)), softmax(q @ k.T) @ v
    apart = np.abs(p @ v - unscaled).max()
    assert apart > 0.01, "the scale must make a difference"
    return [Solved(p @ v, [p, width]), Solved(apart, [unscaled]), Solved(1, [1])]


def l0_4(text: str, asks: Sequence[str]) -> list[Solved]:
    vocab, tokens, _, loss = figures(text)
    assert loss < math.log(vocab), "a trained decoder is better than one that knows nothing"
    pairs = sum(1 for i in range(int(tokens)) for j in range(int(tokens)) if j > i)
    return [Solved(math.log(vocab), [1]), Solved(math.exp(loss)), Solved(pairs, [1, 2, 0])]


def l0_5(text: str, asks: Sequence[str]) -> list[Solved]:
    weights, usual = rows(text, "pattern, row of bank", labels=True), np.array(figures(text.rpartition(":")[2]))
    assert np.abs(weights.sum(1) - 1).max() < 0.035, "the weights of a row, rounded, add up to about 1"
    river = weights[:, ["She", "sat", "by", "the", "river", "bank"].index("river")]
    ratio = river / usual
    most, linked = alone(river), alone(ratio)
    assert most != linked
    assert ratio[linked] > 2 * np.sort(ratio)[-2], "the link must be plain"
    return [Solved(most + 1, [river]), Solved(linked + 1, [ratio])]


def l0_6(text: str, asks: Sequence[str]) -> list[Solved]:
    width, heads, each, layers, hidden, vocab = map(int, figures(text))
    assert heads * each == width
    attention, mlp, norms = 4 * width**2, 3 * width * hidden, 2 * width
    layer = attention + mlp + norms
    return [
        Solved(attention, [4]),
        Solved(mlp, [3]),
        Solved(layers * layer + vocab * width + width, [layer, vocab * width]),
    ]


def l0_7(text: str, asks: Sequence[str]) -> list[Solved]:
    outputs = rows(text, "Z", labels=True)
    order = re.search(r"Now it reads (.*)\.", text)[1].split()  # type: ignore[index]
    place = int(figures(asks[0])[0])
    assert order[0] != "A", "A must see more than before"
    assert all(one != other for one, other in zip(order, "ABCD", strict=True))
    return [Solved(outputs["ABCD".index(order[place - 1])]), Solved(outputs.mean(0)), Solved("no")]


def l0_8(text: str, asks: Sequence[str]) -> list[Solved]:
    config = {key: int(value) for key, value in re.findall(r'"(\w+)": (\d+)', text)}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width, head, hidden = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    return [
        Solved((heads * head, width)),
        Solved((groups * head, width), [heads / groups]),
        Solved((width, hidden)),
    ]


# ---------------------------------------------------------------- L2


def l2_1(text: str, asks: Sequence[str]) -> list[Solved]:
    q, k, v = (listed(text, name) for name in "qkv")
    scores = q[int(figures(asks[0])[0]) - 1] * k
    p = softmax(scores)
    return [Solved(scores), Solved(p, [np.exp(scores).sum(), scores]), Solved(p @ v, [p])]


def l2_2(text: str, asks: Sequence[str]) -> list[Solved]:
    width, heads, tokens = map(int, figures(text))
    each = width // heads
    return [
        Solved(each),
        Solved((width, each)),
        Solved((heads, tokens, tokens)),
        Solved((tokens, width), [heads, each]),
    ]


def l2_3(text: str, asks: Sequence[str]) -> list[Solved]:
    scores = rows(text, "scores q·kᵀ/√d of 4 tokens")
    token = int(figures(asks[0])[0]) - 1
    later = softmax(scores[token])[token + 1 :].sum()
    return [
        Solved(causal(scores)[token], [token + 1]),
        Solved(later, [softmax(scores[token]), 3 - token]),
        Solved(6, [1, 2]),
    ]


# ---------------------------------------------------------------- L4, to think about


def l4_1(text: str, asks: Sequence[str]) -> list[Solved]:
    keys, values, query = rows(text, "keys"), listed(text, "values"), listed(text, "query")
    one, beta = figures(asks[1])[0], figures(asks[2])[0]
    scores = keys @ query
    best = alone(scores)
    soft, sharp = (float(softmax(scale * scores) @ values) for scale in (one, beta))
    assert abs(sharp - values[best]) < abs(soft - values[best]), "nearer to the dictionary's answer"
    return [
        Solved(values[best], [best + 1, scores]),
        Solved(soft, [scores, softmax(scores)]),
        Solved(sharp, [beta * scores]),
    ]


def l4_2(text: str, asks: Sequence[str]) -> list[Solved]:
    d, mean, q, k = figures(text)
    variance = d * q**2 * k**2
    return [Solved(variance, [q**2 * k**2, mean]), Solved(q * k, [variance])]


def l4_3(text: str, asks: Sequence[str]) -> list[Solved]:
    d, scores = figures(text)[0], listed(text, "q·k")
    top, unscaled, scaled = alone(scores), softmax(scores), softmax(scores / math.sqrt(d))
    steep, gentle = (p[top] * (1 - p[top]) for p in (unscaled, scaled))
    assert steep < gentle / 10, "hardly any gradient is left without the scale"
    return [Solved(unscaled), Solved(scaled, [scores / math.sqrt(d)]), Solved(gentle, [steep, 1])]


def l4_4(text: str, asks: Sequence[str]) -> list[Solved]:
    q, keys, values = listed(text, "q"), rows(text, "k", labels=True), listed(text, "v")
    scores = keys @ q / math.sqrt(2)
    best, largest = alone(scores), alone(values)
    assert best != largest, "the best match and the best content must differ"
    p = softmax(scores)
    return [Solved(best + 1, [scores]), Solved(largest + 1), Solved(p @ values, [p])]


def l4_5(text: str, asks: Sequence[str]) -> list[Solved]:
    places, padding = map(int, figures(text))
    query, words = int(figures(asks[0])[0]), places - padding
    assert query <= words
    seen = [sum(key <= i and key <= words for key in range(1, places + 1)) for i in range(1, places + 1)]
    return [Solved(tuple(range(1, query + 1))), Solved(sum(seen), [*seen, words]), Solved(0)]


def l4_6(text: str, asks: Sequence[str]) -> list[Solved]:
    tokens, source, heads = map(int, figures(text))
    assert tokens < source
    return [Solved((heads, tokens, tokens)), Solved((heads, tokens, source)), Solved((heads, source, source))]


def l4_7(text: str, asks: Sequence[str]) -> list[Solved]:
    width, tokens, heads = map(int, figures(text))
    assert width % heads == 0
    each = width // heads
    flops = sum(2 * tokens * tokens * each for _ in range(heads))
    return [
        Solved(4 * width * width, [4]),
        Solved(flops, [2]),
        Solved((heads * tokens * tokens, tokens * tokens)),
    ]


def l4_8(text: str, asks: Sequence[str]) -> list[Solved]:
    tokens = re.search(r"reads (.*)\.", text)[1].split()  # type: ignore[index]
    *before, last = tokens
    assert before.count(last) == 1, "the token must have come before, once"
    place = before.index(last)
    assert before[place + 1] != last
    return [Solved(place + 1), Solved(place + 2), Solved(before[place + 1])]


def l4_9(text: str, asks: Sequence[str]) -> list[Solved]:
    short, long = figures(text)
    window = figures(asks[2])[0]
    assert window < long
    return [Solved((long / short) ** 2, [long / short]), Solved(long / short), Solved(long * window)]


def l4_10(text: str, asks: Sequence[str]) -> list[Solved]:
    tokens = int(figures(text)[0])
    seen = np.tri(tokens)
    before = int(figures(asks[2])[0])
    assert before == tokens - 1
    return [Solved(tokens * tokens), Solved(int(seen.sum()), [1, 2]), Solved(int(seen[:-1, -1].sum()))]


# ---------------------------------------------------------------- L4, to program


def l4_11(text: str, asks: Sequence[str]) -> list[Solved]:
    width, scores = figures(text)[0], listed(text, "q·k")
    soft, sharp = entropy(softmax(scores / math.sqrt(width))), entropy(softmax(scores))
    assert abs(soft - sharp) > 1e-3, "neither is larger"
    return [
        Solved(softmax(scores / math.sqrt(width)), [scores / math.sqrt(width), 1]),
        Solved(soft, [math.log(4), 4]),
        Solved("smaller" if sharp < soft else "larger", [sharp]),
    ]


def l4_12(text: str, asks: Sequence[str]) -> list[Solved]:
    """An output is a mean with weights that depend on the word that asks and on how often each word is there."""
    words = text.partition(": ")[2].split()
    seen = set()
    for place, word in enumerate(words, 1):
        shares = sorted((one, words[:place].count(one) / place) for one in set(words[:place]))
        seen.add((word, tuple(shares)))
    assert len(set(words)) < len(words), "a word must stand there twice"
    return [Solved(len(set(words))), Solved(len(seen)), Solved(len(words))]


def l4_13(text: str, asks: Sequence[str]) -> list[Solved]:
    tokens, query = int(figures(text)[0]), int(figures(asks[1])[0])
    p = causal(np.zeros((tokens, tokens)))
    return [Solved(p[0, 0]), Solved(p[query - 1, 0]), Solved(int((p == 0).sum()), [tokens - 1, 2])]


def l4_14(text: str, asks: Sequence[str]) -> list[Solved]:
    width, heads, tokens = map(int, figures(text))
    each = width // heads
    return [
        Solved((tokens, width)),
        Solved((heads, tokens, each)),
        Solved((heads, tokens, tokens)),
        Solved((tokens, width)),
    ]


def l4_15(text: str, asks: Sequence[str]) -> list[Solved]:
    scores = rows(text, "scores", labels=True)
    targets = re.search(r"target tokens \((.*?)\)", text)[1].split(", ")  # type: ignore[index]
    asked = within(asks[1].rpartition(" ")[2].strip("?"), targets)
    p = softmax(scores)
    return [Solved(p.shape), Solved(p[asked], [scores[asked]]), Solved(tuple(alone(line) + 1 for line in p))]


def l4_16(text: str, asks: Sequence[str]) -> list[Solved]:
    apart = np.abs(listed(text, "ours") - listed(text, "theirs"))
    largest = apart[alone(apart)]
    assert (apart > 0).sum() == 1, "of the four, one differs"
    bound = 1e-5
    assert abs(largest / bound - 1) > 0.5, "not on the bound itself"
    return [Solved(largest), Solved("yes" if largest <= bound else "no", [largest, bound]), Solved(1e-7, [1.2e-7, 2])]


def l4_17(text: str, asks: Sequence[str]) -> list[Solved]:
    p = rows(text, "pattern of a causal head")
    n = len(p)
    assert np.abs(p.sum(1) - 1).max() < 0.026
    habits = {
        "previous": [p[i, i - 1] for i in range(1, n)],
        "first": [p[i, 0] for i in range(1, n)],
        "itself": [p[i, i] for i in range(1, n)],
    }
    strong = [name for name, weights in habits.items() if np.mean(weights[1:]) > 0.5]
    assert len(strong) <= 1
    return [
        Solved(strong[0] if strong else "uniform"),
        Solved(np.mean(habits["previous"]), [np.array(habits["previous"]), np.mean([1 / i for i in range(2, n + 1)])]),
    ]


def l4_18(text: str, asks: Sequence[str]) -> list[Solved]:
    layers, heads, groups, width, tokens = map(int, figures(text))
    assert heads % groups == 0
    return [
        Solved(2 * layers * groups * width * tokens * 2, [2]),
        Solved(heads // groups),
        Solved(1),
    ]


def l4_19(text: str, asks: Sequence[str]) -> list[Solved]:
    one, _, two = figures(text)[:3]
    linear, square = np.linalg.solve([[1, 1], [2, 4]], [one, two])
    long = 8 * linear + 64 * square
    ratios = [after / before for before, after in pairwise(linear * n + square * n * n for n in 2.0 ** np.arange(30))]
    assert ratios == sorted(ratios)
    assert two / one < 3, "at these short lengths the factor is nearer to 2"
    return [Solved(square, [1, 2, one, two]), Solved(long, [8, 64, linear, square]), Solved(round(ratios[-1], 6), [2])]


def l4_20(text: str, asks: Sequence[str]) -> list[Solved]:
    s, v = listed(text, "scores s"), listed(text, "values v")
    upstream = figures(text)[-1]
    p, h = softmax(s), 1e-20
    each = np.exp(s + 1j * h * np.eye(3))  # a row for each score that moves by an imaginary step
    moved = (each / each.sum(1, keepdims=True) @ v).imag / h
    assert abs(moved.sum()) < 1e-9, "they add up to 0"
    return [Solved(upstream * p, [p]), Solved(upstream * v), Solved(upstream * moved, [0])]


SOLVERS: dict[str, Solver] = {
    f"L{lecture}.{place}": globals()[f"l{lecture}_{place}"]
    for lecture, most in ((0, 8), (2, 3), (4, 20))
    for place in range(1, most + 1)
}
