"""What H heads of width D/H cost beside one head of width D, and what they are for (lecture L4 exercise 7; Vaswani et
al. 2017, 3.2.2).

That the costs are equal is arithmetic: it is false here only if the library counts or computes something else than
the formula.  What can turn out otherwise is the use: the claim is false if one head reads four places as well as four
heads do, or if it cannot even read one place, so that its failure at four says nothing about heads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych import nn
from triptych.count import count
from triptych.labs.lab import Check, LabResult, Setup
from triptych.labs.small import block, decoder, fit
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import LearnedSpec, RMSNormSpec, full
from triptych.train import Example, OptimizerSettings, Pairs

WIDTH, TOKENS, LONG = 512, 10, 512
HEADS = (1, 2, 4, 8, 16)
VOCAB = 64
COLUMNS = ("parameters", "matmul FLOPs", "score elements")

# The trained task: name the symbols that stand so many places back, all of them in one answer.
PLACES: dict[str, tuple[int, ...]] = {"one place": (3,), "four places": (1, 2, 3, 4)}
SYMBOLS, LENGTH, NARROW = 4, 12, 32
STEPS, ROWS, TESTED = 250, 64, 64


def run(setup: Setup) -> LabResult:
    """One block of width D for H in HEADS, counted and measured; then one head and four trained to read places."""
    setup.progress(f"one block of width {WIDTH}, {HEADS[0]} to {HEADS[-1]} heads")
    counted, measured, seconds = {}, {}, {}
    for heads in HEADS:
        model = Model(nn.new(decoder(VOCAB, [block(WIDTH, heads, WIDTH)], mask=full()), setup.seed))
        counted[heads], measured[heads], seconds[heads] = _counted(model), _measured(model), _seconds(model)
    right: dict[tuple[str, int], float] = {}
    for name, places in PLACES.items():
        for heads in (1, 4):
            setup.progress(f"training {heads} head{'s' * (heads > 1)} to read {name}: {STEPS} steps")
            right[name, heads] = _read_places(heads, places, setup.seed)
    differences = [abs(a - b) for h in HEADS for a, b in zip(counted[h], measured[h], strict=True)]
    scores_off = [abs(measured[h][2] / (h * measured[1][2]) - 1) for h in HEADS]
    most = HEADS[-1]
    checks = (
        Check("counted from the spec and measured: largest difference", float(max(differences)), most=0.0),
        Check(f"parameters of {most} heads over one", measured[most][0] / measured[1][0], 1.0, 1.0),
        Check(f"matmul FLOPs of {most} heads over one", measured[most][1] / measured[1][1], 1.0, 1.0),
        Check("score elements over H times those of one head, largest difference from 1", max(scores_off), most=0.0),
        Check(f"score elements of 8 heads on {TOKENS} tokens", float(measured[8][2]), 800.0, 800.0),
        Check("control: one place read right by one head", right["one place", 1], least=0.95),
        Check("four places read right by four heads", right["four places", 4], least=0.9),
        Check(
            "four places read right by four heads, less by one", right["four places", 4] - right["four places", 1], 0.2
        ),
    )
    meaning = (
        "The projections are D x D whether their output is one head or cut into H, and the H score matrices take D/H"
        " multiplications an entry instead of D: parameters and matmul FLOPs are equal. What grows is the number of"
        " scores, H T² instead of T² (800 against 100 for 8 heads on 10 tokens), and with it the work of softmax and"
        " the memory of a stored pattern. What is gained are H patterns. A single head returns one average: trained to"
        f" name the symbols at four places it is right {right['four places', 1]:.0%} of the time, four heads of a"
        f" quarter of its width {right['four places', 4]:.0%}, with the same parameters and steps. At a single place"
        f" one head is enough ({right['one place', 1]:.0%}). Times depend on the machine and decide nothing."
    )
    sections = (_cost_table(measured, seconds), _places_table(right), _curve(measured, seconds))
    return LabResult("What do H heads cost beside one, and what are they for?", meaning, checks, sections)


Costs = dict[int, tuple[int, int, int]]  # by number of heads: parameters, matmul FLOPs, score elements


def _counted(model: Model) -> tuple[int, int, int]:
    """Parameters, matmul FLOPs and score elements, from the spec alone."""
    cost = count(model.spec)
    return cost.total, sum(cost.flops(TOKENS).values()), cost.score_elements(TOKENS)


def _measured(model: Model) -> tuple[int, int, int]:
    """The same from the module: its tensors, the matmuls that torch counts, and the scores that enter softmax."""
    ids = list(range(TOKENS))
    with FlopCounterMode(display=False) as flops:
        model.logits([ids])
    scores = model.trace([ids], read=["blocks.0.attn.scores"])["blocks.0.attn.scores"][0]
    return sum(p.numel() for p in model.module.parameters()), flops.get_total_flops(), scores.numel()


@torch.inference_mode()
def _seconds(model: Model) -> float:
    """Best of five forwards of a long row: printed, and in no criterion."""
    ids = [i % VOCAB for i in range(LONG)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        model.logits([ids])
        times.append(time.perf_counter() - start)
    return min(times)


def _read_places(heads: int, places: Sequence[int], seed: int) -> float:
    """Share of held-out answers right of one layer of attention without an MLP, trained on the places task."""
    noise = np.random.default_rng(seed)
    data = Pairs(tuple(_row(noise, places) for _ in range(STEPS * ROWS)))
    spec = decoder(
        SYMBOLS ** len(places),
        [block(NARROW, heads, hidden=None)],
        embedded=LearnedSpec(length=LENGTH, width=NARROW),
        final_norm=RMSNormSpec(width=NARROW),
    )
    module = nn.new(spec, seed)
    settings = OptimizerSettings(name="adamw", lr=1e-2, weight_decay=0.0)
    fit(module, data, rows=ROWS, length=LENGTH, steps=STEPS, seed=seed, optimizer=settings)
    tests = [_row(noise, places) for _ in range(TESTED)]
    logits = Model(module).logits([test.ids.tolist() for test in tests])
    right = [(own.argmax(-1).numpy() == test.targets)[test.trained] for own, test in zip(logits, tests, strict=True)]
    return float(np.concatenate(right).mean())


def _row(noise: np.random.Generator, places: Sequence[int]) -> Example:
    """Random symbols; the target is the number whose digits, base SYMBOLS, are the symbols `places` back."""
    ids = noise.integers(SYMBOLS, size=LENGTH).astype(np.int32)
    targets, first = np.zeros_like(ids), max(places)
    for place in places:
        targets[first:] = targets[first:] * SYMBOLS + ids[first - place : LENGTH - place]
    return Example(ids, targets, np.arange(LENGTH) >= first)


def _cost_table(measured: Costs, seconds: dict[int, float]) -> TableSection:
    title = f"One block of width {WIDTH} on {TOKENS} tokens, measured; time of a forward on {LONG}"
    header = ("heads", "head width", *COLUMNS, f"time for {LONG} tokens")
    rows = [[str(h), str(WIDTH // h), *(f"{x:,}" for x in measured[h]), f"{1000 * seconds[h]:.1f} ms"] for h in HEADS]
    return TableSection(title, header, rows)


def _places_table(right: dict[tuple[str, int], float]) -> TableSection:
    rows = [[name, *(f"{right[name, heads]:.0%}" for heads in (1, 4))] for name in PLACES]
    title = f"Symbols named right after {STEPS} steps, by one layer of width {NARROW}"
    return TableSection(title, ("the task reads", "one head", "four heads"), rows)


def _curve(measured: Costs, seconds: dict[int, float]) -> Curve:
    lines = {name: [(float(h), measured[h][i] / measured[1][i]) for h in HEADS] for i, name in enumerate(COLUMNS)}
    lines[f"time for {LONG} tokens"] = [(float(h), seconds[h] / seconds[1]) for h in HEADS]
    return Curve("Cost beside that of one head", "heads", "times one head", lines, {}, "xy")
