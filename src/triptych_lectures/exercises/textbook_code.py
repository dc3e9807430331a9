"""The textbook chapter's programming exercises (L4.11 to L4.20), as questions that can be answered on paper."""

from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from triptych.attention import attend, attention_pattern
from triptych.spec import causal
from .exercise import Draft, Random, exercise, listed, matrix, number, pick, row, small, tensor, weights_of

WORDS = ("the", "mill", "old", "turns")
ROLES = ("previous", "first", "itself", "uniform")


@exercise("L4.11", "Rows of weights and their entropy")
def entropy_of_rows(random: Random) -> Draft:
    d = 64
    scores = np.zeros(4)
    while np.ptp(scores) == 0:  # four equal scores have the same entropy with any scale
        scores = 8 * small(random, 4, low=-1, high=3)
        scores[int(random.integers(4))] += 8
    sharp = weights_of(scores[None])[0]
    soft = weights_of(scores[None], d**-0.5)[0]
    return f"One query of width {d} and four keys; q·k = {listed(scores)}.", [
        ("What are the weights with 1/√d?", soft, f"softmax of {listed(scores / sqrt(d))}; they add up to 1."),
        (
            "What is their entropy in nats?",
            _entropy(soft),
            f"−Σ p ln p; of equal weights it would be ln 4 = {number(log(4))}.",
        ),
        (
            "Is the entropy without 1/√d larger or smaller?",
            "smaller" if _entropy(sharp) < _entropy(soft) else "larger",
            f"It is {number(_entropy(sharp))}: larger differences make a sharper choice.",
        ),
    ]


def _entropy(p: Tensor) -> float:
    return float(-(p * p.clamp_min(1e-300).log()).sum())


@exercise("L4.12", "Equal tokens in one sequence")
def equal_tokens(random: Random) -> Draft:
    words, more = pick(random, 2, 3, 4), pick(random, 1, 2, 3)
    sequence = [int(i) for i in random.permutation([*range(words), 0, *random.integers(words, size=more)])]
    vectors = tensor(np.random.default_rng(0).standard_normal((words, 4)))
    x = vectors[torch.tensor(sequence)]
    both = _distinct(attend(x, x, x))
    masked = _distinct(attend(x, x, x, mask=causal()))
    return f"Self-attention without positions reads: {' '.join(WORDS[i] for i in sequence)}", [
        (
            "How many different output vectors are there without a mask?",
            both,
            "Equal tokens ask the same of the same keys, so each word has one output, wherever it stands.",
        ),
        (
            "How many are there under a causal mask?",
            masked,
            "Now each place sees another set of tokens. Two places of one word agree only if the words before them are "
            "there in the same proportions.",
        ),
        (
            "How many are there, without a mask, once each place has a position of its own added to its input?",
            len(sequence),
            "All inputs differ, and with them the queries.",
        ),
    ]


def _distinct(vectors: Tensor) -> int:
    """How many of the rows differ from all before them by more than rounding."""
    kept: list[Tensor] = []
    for vector in vectors:
        if all(float((vector - other).abs().max()) > 1e-9 for other in kept):
            kept.append(vector)
    return len(kept)


@exercise("L4.13", "A causal map")
def causal_map(random: Random) -> Draft:
    tokens = int(random.integers(5, 13))
    asked = int(random.integers(2, tokens + 1))
    pattern = attention_pattern(tensor(np.zeros((tokens, 2))), tensor(np.zeros((tokens, 2))), mask=causal())
    return f"{tokens} tokens whose scores are all equal, under a causal mask.", [
        ("What is the weight of the first token on itself?", pattern[0, 0], "It sees nothing else."),
        (
            f"What is each weight of token {asked} that is not 0?",
            pattern[asked - 1, 0],
            f"It shares its attention equally among {asked} tokens.",
        ),
        (
            "How many weights of the map are exactly 0?",
            (pattern == 0).sum(),
            f"Those above the diagonal: {tokens}·{tokens - 1}/2.",
        ),
    ]


@exercise("L4.14", "Shapes through a layer")
def shapes_through(random: Random) -> Draft:
    heads, each, tokens = pick(random, 4, 8, 12, 16), pick(random, 32, 64, 80, 128), pick(random, 10, 16, 24)
    width = heads * each
    return f"D = {width}, {heads} heads, T = {tokens}; the batch is left out.", [
        ("What is the shape of q before it is split?", (tokens, width), "x W_Qᵀ: [T, D]."),
        (
            "What is it after, with the heads first?",
            (heads, tokens, each),
            f"[T, H, D/H], then the first two axes change places; D/H = {each}.",
        ),
        ("What is the shape of the scores?", (heads, tokens, tokens), "q times k with its last axes swapped."),
        (
            "What is that of the heads' outputs, joined?",
            (tokens, width),
            "[H, T, D/H] back to [T, H, D/H], then the last two axes become one.",
        ),
    ]


@exercise("L4.15", "A cross-attention map")
def alignment(random: Random) -> Draft:
    source, target = ("le", "chat", "noir", "dort"), ("the", "black", "cat")
    scores = small(random, 3, 4, low=-1, high=2)
    true = (0, 2, 1)
    scores[np.arange(3), true] += 3
    pattern = weights_of(scores)
    asked = int(random.integers(3))
    statement = (
        f"Three target tokens ({', '.join(target)}) read four source tokens ({', '.join(source)}).",
        matrix("scores", scores, list(target)),
    )  # fmt: skip
    return statement, [
        ("What is the shape of the map?", (3, 4), "Target by source."),
        (
            f"What are the weights of {target[asked]}?",
            pattern[asked],
            f"softmax of {listed(scores[asked])}; no mask, since the whole source is there.",
        ),
        (
            "Which source place is each target token aligned with, in order?",
            tuple(int(i) + 1 for i in pattern.argmax(-1)),
            "The largest weight of each row.",
        ),
    ]


@exercise("L4.16", "Agreement to 1e-5")
def largest_difference(random: Random) -> Draft:
    ours = random.uniform(-2, 2, 4).round(5)
    apart = np.zeros(4)
    apart[int(random.integers(4))] = pick(random, 2, 3, 4) * 10.0 ** -pick(random, 4, 5, 6)
    theirs = (ours + apart).round(6)
    largest = float(np.abs(ours - theirs).max())
    both = (
        f"  {name} = [{', '.join(f'{x:.6f}' for x in values)}]"
        for name, values in (("ours  ", ours), ("theirs", theirs))
    )
    statement = ("Two implementations give", *both)
    return statement, [
        ("What is the largest absolute difference?", largest, "Of the four, one differs."),
        (
            "Do they agree to 1e-5, yes or no?",
            "yes" if largest <= 1e-5 else "no",
            f"{number(largest)} against 0.00001.",
        ),
        (
            "fp32 keeps about 7 digits. Which difference would it allow for a value near 1: 1e-7, 1e-4 or 1e-2?",
            1e-7,
            "2⁻²³ is 1.2e-7; sums of many products add a few of these. A larger difference has another cause.",
        ),
    ]


@exercise("L4.17", "What a head does, from its map")
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
    statement = matrix("pattern of a causal head", pattern)
    mass = float(np.mean([pattern[i, i - 1] for i in range(1, tokens)]))
    return statement, [
        (
            f"Which does it read: {', '.join(ROLES[:-1])} or {ROLES[-1]}?",
            role,
            "Look down the columns and along the diagonals: where every row has its largest weight, the head "
            "has a habit.",
        ),
        (
            "How much of its weight do tokens 2 to 5 give to the token before them, on average?",
            mass,
            f"The mean of {listed([pattern[i, i - 1] for i in range(1, tokens)])}; equal weights would give "
            f"{number(float(np.mean([1 / (i + 1) for i in range(1, tokens)])))}.",
        ),
    ]


@exercise("L4.18", "A cache of keys and values")
def cache_bytes(random: Random) -> Draft:
    layers, heads, width = pick(random, 12, 24, 36), pick(random, 16, 32), pick(random, 64, 128)
    groups, tokens = heads // pick(random, 2, 4), 1024 * pick(random, 2, 4, 8)
    size = 2 * layers * groups * width * tokens * 2
    return (
        f"{layers} layers, {heads} query heads and {groups} key/value heads of width {width}, fp16, {tokens:,} tokens.",
        [
            (
                "How many bytes has the cache?",
                size,
                f"Keys and values: 2·{layers}·{groups}·{width}·{tokens:,} numbers of 2 bytes.",
            ),
            (
                "How many times as many would it have without grouping?",
                heads // groups,
                f"One key/value head for each of {heads}.",
            ),
            (
                "How many tokens does each layer project to write the next one, with the cache?",
                1,
                f"The newest alone; without the cache it would be all {tokens:,} and one, again for each token.",
            ),
        ],
    )


@exercise("L4.19", "Time over the length")
def time_over_length(random: Random) -> Draft:
    linear = square = 0
    while square >= linear:  # from 256 tokens to 512 the factor is below 3: nearer to 2 than to 4
        linear, square = pick(random, 1, 2, 3, 4, 5, 6, 8), pick(random, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
    times = [linear * n + square * n**2 for n in (1, 2, 8)]
    statement = (
        f"A forward takes {number(times[0])} ms for 256 tokens and {number(times[1])} ms for 512. Its time is a·n + "
        "b·n², with n = T/256."
    )
    return statement, [
        ("What is b, in ms?", square, f"t(2) − 2·t(1) = 2b: ({number(times[1])} − 2·{number(times[0])})/2."),
        ("How long will 2,048 tokens take, in ms?", times[2], f"n = 8: 8·{number(linear)} + 64·{number(square)}."),
        (
            "By what factor does the time grow with each doubling, for very long rows?",
            4,
            "The square outgrows the rest; at short lengths projections and MLPs hide it, and the factor is "
            "nearer to 2.",
        ),
    ]


@exercise("L4.20", "Backward through the weights")
def backward(random: Random) -> Draft:
    scores, v = small(random, 3, low=-1, high=3), 2 * small(random, 3, low=0, high=4)
    gradient = float(pick(random, 1, 2, -1))
    s, values = tensor(scores).requires_grad_(), tensor(v).requires_grad_()
    p = s.softmax(-1)
    (p @ values).backward(torch.tensor(gradient, dtype=torch.float64))
    assert s.grad is not None
    assert values.grad is not None
    weights = row(p.detach())
    statement = (
        f"One query: scores s = {listed(scores)}, p = softmax(s), values v = {listed(v)} of one number each, output "
        f"z = Σ p v. The loss has the gradient {number(gradient)} at z."
    )
    return statement, [
        (
            "What are the gradients at the three values?",
            values.grad,
            f"p times the gradient at z, with p = {listed(weights)}.",
        ),
        ("What are those at the weights p?", gradient * v, "v times the gradient at z."),
        ("What are those at the scores?", s.grad, "p·(g − Σ p g) with g from the question before; they add up to 0."),
    ]
