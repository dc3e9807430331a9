"""The practice problems of the page of worked examples (L2)."""

from __future__ import annotations

import numpy as np

from triptych.attention import attend, attention_pattern
from triptych.spec import causal
from triptych_lectures.exercises.exercise import (
    Draft,
    ExerciseQuestion,
    exercise,
    listed,
    matrix,
    number,
    pick,
    row,
    small,
    tensor,
)


@exercise("L2.1", "Attention with one number a token")
def one_number_a_token(random: np.random.Generator) -> Draft:
    tokens = 3
    q, k = small(random, tokens, 1, low=-1, high=3), small(random, tokens, 1)
    v = 10 * small(random, tokens, 1, low=1, high=6)
    asked = int(random.integers(tokens))
    weights = attention_pattern(tensor(q), tensor(k), scale=1.0)[asked]
    scores = q[asked, 0] * k[:, 0]
    out = attend(tensor(q), tensor(k), tensor(v), scale=1.0)[asked, 0]
    given = "\n".join((
        "Three tokens have a query, a key and a value of one number each; scores are not scaled.",
        f"  q = {listed(q[:, 0])}   k = {listed(k[:, 0])}   v = {listed(v[:, 0])}",
    ))  # fmt: skip
    return given, [
        ExerciseQuestion(
            f"What are the scores of token {asked + 1} against the three tokens?",
            row(scores),
            f"Its query {number(q[asked, 0])} times each key: {listed(scores)}.",
        ),
        ExerciseQuestion(
            "What are its three attention weights?",
            row(weights),
            f"softmax({listed(scores)}): each exp(score) over their sum {number(float(np.exp(scores).sum()))}.",
        ),
        ExerciseQuestion(
            "What is its output?",
            float(out),
            f"The weights {listed(row(weights))} times the values {listed(v[:, 0])}, added up.",
        ),
    ]


@exercise("L2.2", "Shapes of the heads")
def shapes_of_heads(random: np.random.Generator) -> Draft:
    heads, width, tokens = pick(random, 4, 8, 12, 16), pick(random, 32, 64, 80), pick(random, 48, 100, 128, 200)
    model = heads * width
    given = f"A layer has width D = {model:,} and {heads} heads that share it evenly. It reads {tokens} tokens."
    return given, [
        ExerciseQuestion("How wide is each head?", width, f"D / H = {model:,} / {heads} = {width}."),
        ExerciseQuestion(
            "What is the shape of all heads' scores, as heads, queries, keys?",
            (heads, tokens, tokens),
            f"Each of the {heads} heads compares {tokens} queries with {tokens} keys.",
        ),
        ExerciseQuestion(
            "What is the shape of the concatenated heads, and so of the output?",
            (tokens, model),
            f"{heads} vectors of {width} numbers side by side are {model:,} numbers for each of {tokens} tokens.",
        ),
    ]


@exercise("L2.3", "Where the causal mask enters")
def where_the_mask_enters(random: np.random.Generator) -> Draft:
    tokens = 4
    at = int(random.integers(1, tokens - 1))
    scores = small(random, tokens, tokens, low=-1, high=4)
    identity = np.eye(tokens)
    with_mask = attention_pattern(tensor(scores), tensor(identity), scale=1.0, mask=causal())[at]
    without = attention_pattern(tensor(scores), tensor(identity), scale=1.0)[at]
    given = matrix("scores q·kᵀ/√d of 4 tokens", scores) + "\nThe mask adds 0 or −∞ to them before softmax."
    later = float(without[at + 1 :].sum())
    return given, [
        ExerciseQuestion(
            f"What are the four weights of token {at + 1} under the causal mask?",
            row(with_mask),
            f"Only the first {at + 1} scores of its row are left; softmax over {listed(scores[at, : at + 1])}, "
            "then zeros.",
        ),
        ExerciseQuestion(
            "Without the mask, how much of its weight would go to later tokens?",
            later,
            f"softmax over the whole row {listed(scores[at])} is {listed(row(without))}; the last "
            f"{tokens - at - 1} add "
            f"up to {number(later)}. In training they hold the answer, in generation they do not exist.",
        ),
        ExerciseQuestion(
            "How many of the 16 scores does the mask remove?",
            tokens * (tokens - 1) // 2,
            "Those above the diagonal: T(T−1)/2 = 6.",
        ),
    ]
