"""What do H heads of width D/H cost beside one head of width D?  (Lecture L4 exercise 7; Vaswani et al. 2017, 3.2.2)"""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych import nn
from triptych.attention import Rows
from triptych.count import count
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import block, decoder
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import full

WIDTH, TOKENS, LONG = 512, 10, 512
HEADS = (1, 2, 4, 8, 16)
VOCAB = 64
COLUMNS = ("parameters", "matmul FLOPs", "score elements")


def run(setup: Setup) -> Finding:
    """One block of width D for H in HEADS: counted from its spec, and measured on the module that runs."""
    setup.say(f"one block of width {WIDTH}, {HEADS[0]} to {HEADS[-1]} heads")
    counted, measured, seconds = {}, {}, {}
    for heads in HEADS:
        made = decoder(VOCAB, [block(WIDTH, heads, WIDTH)], mask=full())
        model = Model(nn.new(made, setup.seed))
        counted[heads], measured[heads], seconds[heads] = _counted(model), _measured(model), _seconds(model)
    table = TableSection(
        f"One block of width {WIDTH} on {TOKENS} tokens, measured; time of a forward on {LONG}",
        ("heads", "head width", *COLUMNS, f"time for {LONG} tokens"),
        [[str(h), str(WIDTH // h), *(f"{x:,}" for x in measured[h]), f"{1000 * seconds[h]:.1f} ms"] for h in HEADS],
    )
    lines = {name: [(float(h), measured[h][i] / measured[1][i]) for h in HEADS] for i, name in enumerate(COLUMNS)}
    lines[f"time for {LONG} tokens"] = [(float(h), seconds[h] / seconds[1]) for h in HEADS]
    curve = Curve("Cost beside that of one head", "heads", "times one head", lines, {}, "xy")
    apart = [abs(a - b) for h in HEADS for a, b in zip(counted[h], measured[h], strict=True)]
    astray = [abs(measured[h][2] / (h * measured[1][2]) - 1) for h in HEADS]
    most = HEADS[-1]
    checks = (
        Check("counted from the spec and measured: largest difference", float(max(apart)), most=0.0),
        Check(f"parameters of {most} heads over one", measured[most][0] / measured[1][0], 1.0, 1.0),
        Check(f"matmul FLOPs of {most} heads over one", measured[most][1] / measured[1][1], 1.0, 1.0),
        Check("score elements beside H times those of one head, furthest off", max(astray), most=0.0),
        Check(f"score elements of 8 heads on {TOKENS} tokens", float(measured[8][2]), 800.0, 800.0),
    )
    return Finding("What do H heads cost beside one?", MEANING, checks, (table, curve))


MEANING = (
    "The projections are D x D whether their output is one head or cut into H, and the H score matrices take D/H"
    " multiplications an entry instead of D: parameters and matmul FLOPs stay exactly as they were. What grows is the"
    " number of scores, H T² instead of T² (800 against 100 for 8 heads on 10 tokens), and with it the work of"
    " softmax and the memory of a pattern that is kept. So a layer gets H patterns for about the price of one; what"
    " they are good for, this lab does not ask. Times are of this machine, and decide nothing."
)


def _counted(model: Model) -> tuple[int, int, int]:
    """Parameters, matmul FLOPs and score elements, from the spec alone."""
    cost = count(model.spec)
    return cost.total, sum(cost.flops(TOKENS).values()), cost.score_elements(TOKENS)


def _measured(model: Model) -> tuple[int, int, int]:
    """The same from the module: its tensors, the matmuls torch sees, and the scores that enter softmax."""
    ids = list(range(TOKENS))
    with FlopCounterMode(display=False) as flops:
        model.logits([ids])
    scores = model.trace([ids], read=["blocks.0.attn.scores"])["blocks.0.attn.scores"][0]
    return sum(p.numel() for p in model.module.parameters()), flops.get_total_flops(), scores.numel()


@torch.inference_mode()
def _seconds(model: Model) -> float:
    """Best of five forwards of a long row: told, and not judged."""
    ids, rows = torch.arange(LONG) % VOCAB, Rows((LONG,))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        model.module.logits(nn.Batch(inputs=ids, rows=rows))
        times.append(time.perf_counter() - began)
    return min(times)
