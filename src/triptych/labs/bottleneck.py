"""A recurrent state against looking back (Bengio et al. 1994; Bahdanau et al. 2015; lectures L0 and L1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import block, decoder, fit, growth, power
from triptych.page import Curve, TableSection
from triptych.spec import RMSNorm
from triptych.train import Example, OptimizerSettings, Pairs, collate
from triptych.train.objectives import final

STEPS_BACK = (16, 32, 64, 128, 256, 512)
FAR = 3  # of these, the last: where one key among T is small beside the rest
SYMBOLS = 8  # 0 to 7 are to be kept, 8 is a blank, 9 asks
WIDTH, STEPS = 48, 120
RATES = {"GRU": 1e-2, "attention": 5e-3}  # what each learns best at, of a few that were tried


class Recurrent(torch.nn.Module):
    """A gated recurrent unit (Cho et al. 2014) where a block would stand: rows of one length, [N, D] -> [N, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        states: Tensor = self.gru(x.unflatten(0, (len(ctx.rows), -1)))[0]
        return states.flatten(0, 1)


@dataclass(frozen=True)
class Reach:
    """One model at one distance: the gradient of its answer before and after training, and the share answered right."""

    before: float
    after: float
    recall: float


def run(setup: Setup) -> Finding:
    """One symbol, T - 1 blanks, a question: a GRU and an attention block of as many parameters, trained for each T."""
    found: dict[str, list[Reach]] = {name: [] for name in RATES}
    for back in STEPS_BACK:
        for name in found:
            setup.say(f"{name}, {back} steps back: training {STEPS} steps")
            found[name].append(_measure(name, back, setup.seed))
    recurrent, looking = found.values()
    sizes = [
        sum(p.numel() for p in _made(name, setup.seed).get_submodule("decoder.blocks").parameters()) for name in found
    ]
    each = math.exp(growth(STEPS_BACK, [reach.before for reach in recurrent]))
    far = power(STEPS_BACK[-FAR:], [reach.before for reach in looking[-FAR:]])
    checks = (
        Check("parameters of the GRU over those of the attention block", sizes[0] / sizes[1], 0.95, 1.05),
        Check("GRU, untrained: what is left of the gradient after each further step", each, most=0.9),
        Check(
            f"attention, untrained: the gradient from T {STEPS_BACK[-FAR]} on goes as T to the power", far, -1.2, -0.8
        ),
        Check(f"GRU: recall after {STEPS_BACK[0]} steps", recurrent[0].recall, least=0.9),
        Check(f"GRU: recall after {STEPS_BACK[-1]} steps", recurrent[-1].recall, most=0.5),
        Check("attention: recall, the worst over all T", min(reach.recall for reach in looking), least=0.9),
    )
    meaning = (
        "What the GRU knows of the first symbol has to pass through its state at every step, and every step multiplies"
        f" the gradient by about {each:.2f}: from far away nothing is left to learn from, and in {STEPS} training steps"
        " it learns nothing. Attention reaches back in one step: its gradient is the weight of one place among T, about"
        " 1/T before training, and learning raises it. A GRU is not unable: its gates can hold a symbol for as long as"
        " it likes, and with more training it reaches further than here. It has to find that out with a gradient that"
        " shrinks exponentially."
    )
    return Finding("What does a recurrent state remember?", meaning, checks, (_table(found), *_curves(found)))


def _made(name: str, seed: int) -> nn.Transformer:
    """One block between embedding and head.  Attention has no positions: the symbol is known by what it is."""
    spec = decoder(SYMBOLS + 2, [block(WIDTH, 1, WIDTH)], final_norm=RMSNorm(width=WIDTH))
    module = nn.new(spec, seed)
    if name == "GRU":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module.get_submodule("decoder.blocks").register_module("0", Recurrent(WIDTH))
    return module


def _measure(name: str, back: int, seed: int) -> Reach:
    module = _made(name, seed)
    rows = [_row(symbol, back) for symbol in range(SYMBOLS)]  # all there are: a step trains on each of them
    before, settings = _gradient(module, rows), OptimizerSettings(name="adamw", lr=RATES[name], weight_decay=0.0)
    fit(module, Pairs(tuple(rows)), rows=SYMBOLS, length=back + 1, steps=STEPS, seed=seed, optimizer=settings)
    batch = collate(rows)
    with torch.no_grad():
        answers = module.unembed(final(module, batch), batch.rows).argmax(-1)
    return Reach(before, _gradient(module, rows), float((answers == batch.targets).float().mean()))


def _row(symbol: int, back: int) -> Example:
    """`symbol`, blanks, and at place `back` the question, where alone something is predicted."""
    ids = np.full(back + 1, SYMBOLS, dtype=np.int32)
    ids[0], ids[-1] = symbol, SYMBOLS + 1
    return Example(ids, np.full_like(ids, symbol), np.arange(back + 1) == back)


def _gradient(module: nn.Transformer, rows: list[Example]) -> float:
    """Mean norm of the gradient of the right answer's logit with respect to the first token's embedding."""
    exact, batch = copy.deepcopy(module).double(), collate(rows)  # fp32 would round the smallest to 0
    logits = exact.unembed(final(exact, batch), batch.rows)
    answers = logits.gather(1, batch.targets[:, None]).sum()
    # A symbol comes in one row and there once: its row of the table is that row's first embedding.
    (table,) = torch.autograd.grad(answers, exact.get_parameter("decoder.embed.tokens.weight"))
    return float(table[:SYMBOLS].norm(dim=1).mean())


def _table(found: dict[str, list[Reach]]) -> TableSection:
    header = ("T", *(f"{name}, {what}" for name in found for what in ("recall", "gradient before", "after")))
    rows = []
    for back, *both in zip(STEPS_BACK, *found.values(), strict=True):
        told = [(f"{reach.recall:.0%}", f"{reach.before:.1g}", f"{reach.after:.1g}") for reach in both]
        rows.append([str(back), *(cell for cells in told for cell in cells)])
    return TableSection(f"The first of T + 1 tokens, asked for after T steps ({SYMBOLS} symbols)", header, rows)


def _curves(found: dict[str, list[Reach]]) -> tuple[Curve, Curve]:
    def lines(of: Callable[[Reach], float]) -> dict[str, list[tuple[float, float]]]:
        return {n: [(float(t), of(r)) for t, r in zip(STEPS_BACK, rs, strict=True)] for n, rs in found.items()}

    recall = Curve(
        "Recall of the first token", "T", "share right", lines(lambda r: r.recall), {"chance": 1 / SYMBOLS}, "x"
    )
    title = "Gradient of the answer at the first token, before training"
    return recall, Curve(title, "T", "norm", lines(lambda r: r.before), {}, "xy")
