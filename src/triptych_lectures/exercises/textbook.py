"""The textbook chapter's exercises: those to think about (L4.1 to L4.10), and those to program (L4.11 to L4.20), as
questions that can be answered on paper."""

from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from triptych.attention import attend, attention_pattern
from triptych.spec import causal
from .exercise import Draft, Random, exercise, matrix, pick, row, small, tensor, weights_of

NEARER = 0.1  # of values of 10 to 80; three equal values differ by rounding alone
HARDLY = 0.1  # of the scaled gradient: what the text of L4.3 calls hardly any
WORDS = ("the", "mill", "old", "turns")
ROLES = ("previous", "first", "itself", "uniform")


@exercise("L4.1")
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
    weights = attention_pattern(tensor(query), tensor(keys), scale=1.0)
    texts = {"keys": keys, "values": values, "query": query, "scores": scores, "best": best + 1, "weights": weights}
    return texts | {"beta": beta, "sharper": beta * scores}, (values[best], soft, sharp)


@exercise("L4.2")
def variance(random: Random) -> Draft:
    d, q, k = pick(random, 32, 64, 128, 256), pick(random, 0.5, 1.0, 2.0), pick(random, 0.5, 1.5, 3.0)
    spread = d * q**2 * k**2
    return {"d": d, "q": q, "k": k, "product": q**2 * k**2, "spread": spread}, (spread, q * k)


@exercise("L4.3")
def without_root(random: Random) -> Draft:
    steep = gentle = 0.0
    while steep >= HARDLY * gentle:
        d = pick(random, 16, 64)
        scores = sqrt(d) * np.array([1.0, 0.0, -0.5])[random.permutation(3)] + random.integers(-1, 2, 3)
        unscaled = weights_of(scores[None])[0]
        scaled = weights_of(scores[None], d**-0.5)[0]
        top = int(scores.argmax())
        steep, gentle = (float(p[top] * (1 - p[top])) for p in (unscaled, scaled))
    return {"d": d, "scores": scores, "divided": scores / sqrt(d), "steep": steep}, (unscaled, scaled, gentle)


@exercise("L4.4")
def best_match_and_content(random: Random) -> Draft:
    q = small(random, 2, low=1, high=4)
    keys = small(random, 3, 2, low=0, high=2)
    best = int(random.integers(3))
    keys[best] = 2
    values = 10.0 * random.permutation(np.arange(1, 4))
    values = np.roll(values, 1) if values.argmax() == best else values
    weights = attention_pattern(tensor(q), tensor(keys))
    shown = matrix("k", keys, ["token 1:", "token 2:", "token 3:"])
    texts = {"q": q, "keys": shown, "values": values, "scores": keys @ q / sqrt(2), "weights": weights}
    return texts, (best + 1, int(values.argmax()) + 1, weights @ tensor(values))


@exercise("L4.5")
def mask_of_a_row(random: Random) -> Draft:
    tokens, padding = pick(random, 5, 6, 7, 8), pick(random, 1, 2, 3)
    words = tokens - padding
    asked = int(random.integers(1, words + 1))
    allowed = [min(i, words) for i in range(1, tokens + 1)]
    texts = {"tokens": tokens, "padding": padding, "verb": "is" if padding == 1 else "are", "words": words}
    texts |= {"asked": asked, "sum": " + ".join(map(str, allowed))}
    return texts, (tuple(range(1, asked + 1)), sum(allowed), 0)


@exercise("L4.6")
def score_shapes(random: Random) -> Draft:
    tokens, source, heads = pick(random, 7, 9, 10, 12), pick(random, 14, 15, 18, 21), pick(random, 4, 6, 8, 12)
    shapes = (heads, tokens, tokens), (heads, tokens, source), (heads, source, source)
    return {"tokens": tokens, "source": source, "heads": heads}, shapes


@exercise("L4.7")
def heads_and_one(random: Random) -> Draft:
    heads, width, tokens = pick(random, 4, 8, 16), 64 * pick(random, 4, 8, 12, 16), pick(random, 10, 20, 30, 50)
    square = tokens**2
    texts = {"heads": heads, "width": width, "tokens": tokens, "scores": heads * square, "square": square}
    return texts, (4 * width * width, 2 * square * width, (heads * square, square))


@exercise("L4.8")
def induction(random: Random) -> Draft:
    letters = [chr(ord("A") + int(i)) for i in random.choice(26, 5, replace=False)]
    again = int(random.integers(4))
    sequence = " ".join([*letters, letters[again]])
    texts = {"sequence": sequence, "letter": letters[again], "place": again + 1, "next": letters[again + 1]}
    return texts, (again + 1, again + 2, letters[again + 1])


@exercise("L4.9")
def flops_over_length(random: Random) -> Draft:
    short = pick(random, 512, 1024, 2048)
    times, window = pick(random, 4, 8, 16, 32), pick(random, 64, 96, 128, 192, 256, 384)
    long = short * times
    return {"short": short, "long": long, "times": times, "window": window}, (times**2, times, long * window)


@exercise("L4.10")
def one_line_apart(random: Random) -> Draft:
    tokens = int(random.integers(6, 60))
    return {"tokens": tokens, "before": tokens - 1}, (tokens**2, tokens * (tokens + 1) // 2, 0)


@exercise("L4.11")
def entropy_of_rows(random: Random) -> Draft:
    d = 64
    scores = np.zeros(4)
    while np.ptp(scores) == 0:  # four equal scores have the same entropy with any scale
        scores = 8 * small(random, 4, low=-1, high=3)
        scores[int(random.integers(4))] += 8
    weights = weights_of(scores[None], d**-0.5)[0]
    sharp, soft = _entropy(weights_of(scores[None])[0]), _entropy(weights)
    texts = {"d": d, "scores": scores, "divided": scores / sqrt(d), "most": log(4), "sharp": sharp}
    return texts, (weights, soft, "smaller" if sharp < soft else "larger")


def _entropy(p: Tensor) -> float:
    return float(-(p * p.clamp_min(1e-300).log()).sum())


@exercise("L4.12")
def equal_tokens(random: Random) -> Draft:
    words, more = pick(random, 2, 3, 4), pick(random, 1, 2, 3)
    sequence = [int(i) for i in random.permutation([*range(words), 0, *random.integers(words, size=more)])]
    vectors = tensor(np.random.default_rng(0).standard_normal((words, 4)))
    x = vectors[torch.tensor(sequence)]
    outputs = attend(x, x, x), attend(x, x, x, mask=causal())
    return {"sequence": " ".join(WORDS[i] for i in sequence)}, (*map(_distinct, outputs), len(sequence))


def _distinct(vectors: Tensor) -> int:
    """How many of the rows differ from all before them by more than rounding."""
    kept: list[Tensor] = []
    for vector in vectors:
        if all(float((vector - other).abs().max()) > 1e-9 for other in kept):
            kept.append(vector)
    return len(kept)


@exercise("L4.13")
def causal_map(random: Random) -> Draft:
    tokens = int(random.integers(5, 13))
    asked = int(random.integers(2, tokens + 1))
    pattern = weights_of(np.zeros((tokens, tokens)), mask=causal())
    texts = {"tokens": tokens, "asked": asked, "before": tokens - 1}
    return texts, (pattern[0, 0], pattern[asked - 1, 0], (pattern == 0).sum())


@exercise("L4.14")
def shapes_through(random: Random) -> Draft:
    heads, each, tokens = pick(random, 4, 8, 12, 16), pick(random, 32, 64, 80, 128), pick(random, 10, 16, 24)
    width = heads * each
    texts = {"width": width, "heads": heads, "each": each, "tokens": tokens}
    return texts, ((tokens, width), (heads, tokens, each), (heads, tokens, tokens), (tokens, width))


@exercise("L4.15")
def alignment(random: Random) -> Draft:
    target = ["the", "black", "cat"]
    scores = small(random, 3, 4, low=-1, high=2)
    scores[np.arange(3), (0, 2, 1)] += 3  # le, noir and chat
    pattern = weights_of(scores)
    asked = int(random.integers(3))
    texts = {"map": matrix("scores", scores, target), "word": target[asked], "scores": scores[asked]}
    return texts, ((3, 4), pattern[asked], tuple(int(i) + 1 for i in pattern.argmax(-1)))


@exercise("L4.16")
def largest_difference(random: Random) -> Draft:
    ours = random.uniform(-2, 2, 4).round(5)
    apart = np.zeros(4)
    apart[int(random.integers(4))] = pick(random, 2, 3, 4) * 10.0 ** -pick(random, 4, 5, 6)
    theirs = (ours + apart).round(6)
    largest = float(np.abs(ours - theirs).max())
    shown = {name: f"[{', '.join(f'{x:.6f}' for x in of)}]" for name, of in (("ours", ours), ("theirs", theirs))}
    return {"largest": largest} | shown, (largest, "yes" if largest <= 1e-5 else "no", 1e-7)


@exercise("L4.17")
def role_of_a_head(random: Random) -> Draft:
    tokens, role = 5, str(pick(random, *ROLES))
    places = {
        "previous": np.maximum(np.arange(tokens) - 1, 0),
        "first": np.zeros(tokens, int),
        "itself": np.arange(tokens),
    }
    scores = random.uniform(-0.2, 0.2, (tokens, tokens))
    if role != "uniform":
        scores[np.arange(tokens), places[role]] += 4
    pattern = weights_of(scores, mask=causal()).numpy().round(2)
    before = [pattern[i, i - 1] for i in range(1, tokens)]
    equal = float(np.mean([1 / (i + 1) for i in range(1, tokens)]))
    return {"pattern": pattern, "before": before, "equal": equal}, (role, float(np.mean(before)))


@exercise("L4.18")
def cache_bytes(random: Random) -> Draft:
    layers, heads, width = pick(random, 12, 24, 36), pick(random, 16, 32), pick(random, 64, 128)
    groups, tokens = heads // pick(random, 2, 4), 1024 * pick(random, 2, 4, 8)
    texts = {"layers": layers, "heads": heads, "groups": groups, "width": width, "tokens": tokens}
    return texts, (2 * layers * groups * width * tokens * 2, heads // groups, 1)


@exercise("L4.19")
def time_over_length(random: Random) -> Draft:
    linear = square = 0
    while square >= linear:  # from 256 tokens to 512 the factor is below 3: nearer to 2 than to 4
        linear, square = pick(random, 1, 2, 3, 4, 5, 6, 8), pick(random, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
    one, two, eight = (linear * n + square * n**2 for n in (1, 2, 8))
    return {"one": one, "two": two, "linear": linear, "square": square}, (square, eight, 4)


@exercise("L4.20")
def backward(random: Random) -> Draft:
    scores, v = small(random, 3, low=-1, high=3), 2 * small(random, 3, low=0, high=4)
    gradient = float(pick(random, 1, 2, -1))
    s, values = tensor(scores).requires_grad_(), tensor(v).requires_grad_()
    p = s.softmax(-1)
    (p @ values).backward(torch.tensor(gradient, dtype=torch.float64))
    texts = {"scores": scores, "v": v, "gradient": gradient, "weights": row(p.detach())}
    return texts, (values.grad, gradient * v, s.grad)
