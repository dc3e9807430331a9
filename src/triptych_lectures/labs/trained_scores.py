"""Additive and dot-product scores trained side by side, over d (Vaswani et al. 2017, section 3.2.1; lecture L4).

The lab `additive-vs-dot` compares their cost and their sharpness before training.  Here one head must find the
symbol that stands some places back.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.page import Curve, TableSection
from triptych.spec import AdditiveSpec, AttentionSpec, attention
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.trained import GeneratedTask, ReadingSizes, Shuffled, TrainedHead, attention_alone

FALSIFIED_BY = (
    "That the additive score learns no more than the dot product without the division at the largest d would have shown"
    " the claim false, and so would a difference at the smallest d. If the dot product with the division stayed behind"
    " the additive score, the division would not be what makes up for the difference."
)
SEEDS = 5

DOT, PLAIN, ADDITIVE = "dot product, 1/√d", "dot product, no scale", "additive"
NAMES = (DOT, PLAIN, ADDITIVE)


@dataclass(frozen=True)
class Sizes(ReadingSizes):
    """Of the attention layer and of its training."""

    widths: tuple[int, ...] = size(
        (16, 2048), "d, the widths of queries and keys, in ascending order", values=2, ascending=True
    )


FULL = Sizes(widths=(16, 512, 2048), tested=200)


Heads = dict[tuple[str, int], TrainedHead]


def run(setup: Setup) -> LabResult:
    """One head for each score and each d; shuffled answers."""
    sizes = setup.sized(Sizes(), FULL)
    heads: Heads = {}
    for d in sizes.widths:
        for name in NAMES:
            setup.progress(f"d {d}, {name}: {sizes.steps} steps")
            heads[name, d] = _trained(sizes, name, d, sizes.task, setup.seed)
    setup.progress("shuffled answers")
    shuffled = _trained(sizes, ADDITIVE, sizes.widths[0], Shuffled(sizes.task), setup.seed)
    return LabResult(
        "Does the additive score learn where the dot product does not?",
        _meaning(sizes, heads),
        _checks(sizes, heads, shuffled),
        (_table(sizes, heads), _curve(sizes, heads)),
    )


def _checks(sizes: Sizes, heads: Heads, shuffled: TrainedHead) -> tuple[Check, ...]:
    """A head has learned if three quarters of its answers are right; a quarter of them is a difference."""
    narrow, wide = sizes.widths[0], sizes.widths[-1]
    small = abs(heads[ADDITIVE, narrow].right - heads[PLAIN, narrow].right)
    apart = [abs(heads[ADDITIVE, d].right - heads[DOT, d].right) for d in sizes.widths]
    return (
        Check(
            "additive: answers right, the worst over all d", min(heads[ADDITIVE, d].right for d in sizes.widths), 0.75
        ),
        Check(
            f"d {wide}: answers right with the additive score, less with the dot product without scale",
            heads[ADDITIVE, wide].right - heads[PLAIN, wide].right,
            least=0.25,
        ),
        Check(
            f"control: d {narrow}: difference of answers right, additive and dot product without scale",
            small,
            most=0.25,
        ),
        Check("additive and 1/√d: difference of answers right, the largest over all d", max(apart), most=0.25),
        Check("control: answers right, trained on shuffled ones", shuffled.right, most=1 / sizes.symbols + 0.1),
    )


def _meaning(sizes: Sizes, heads: Heads) -> str:
    narrow, wide = sizes.widths[0], sizes.widths[-1]
    shares = {name: f"{heads[name, wide].right:.0%}" for name in NAMES}
    return (
        f"At d {narrow} both scores learn to read the symbol {sizes.back} places back, and the dot product needs no"
        f" scale. At d {wide} it does: without one {shares[PLAIN]} of the answers are right after {sizes.steps}"
        f" steps, with it {shares[DOT]}. The additive score has no scale ({shares[ADDITIVE]} right): each hidden unit"
        " adds at most its weight, whatever the size of queries and keys, so that the first scores do not saturate"
        " softmax. At widths in between, the dot product without a scale may only learn later: AdamW gets out of a"
        " softmax that is not wholly saturated. What the additive score had ahead the division makes up for, and it"
        " costs nothing; lab `additive-vs-dot` has the price of the other. One task and one learning rate; that one"
        " score is better than the other where both learn, as comparisons in translation found, is not decided here."
    )


def scorer(sizes: Sizes, name: str, d: int) -> AttentionSpec:
    """One head whose queries and keys have width d and whose values that of the stream."""
    mechanism = AdditiveSpec(width=d) if name == ADDITIVE else None
    scale = None if name == DOT else 1.0
    return attention(sizes.width, 1, head_width=d, value_width=sizes.width, mechanism=mechanism, scale=scale)


def _trained(sizes: Sizes, name: str, d: int, task: GeneratedTask, seed: int) -> TrainedHead:
    module = attention_alone(scorer(sizes, name, d), sizes.symbols, sizes.length, seed)
    return sizes.trained(module, task, seed)


def _table(sizes: Sizes, heads: Heads) -> TableSection:
    header = ("d", *(f"right, {name}" for name in NAMES), *(f"nats, {name}" for name in NAMES))
    rows = [
        [str(d), *(f"{heads[name, d].right:.0%}" for name in NAMES)]
        + [f"{heads[name, d].run.end:.2f}" for name in NAMES]
        for d in sizes.widths
    ]
    chance = f"{1 / sizes.symbols:.0%} are right by chance"
    return TableSection(f"One head after {sizes.steps} steps; {chance}", header, rows)


def _curve(sizes: Sizes, heads: Heads) -> Curve:
    wide = sizes.widths[-1]
    lines = {name: heads[name, wide].run.losses for name in NAMES}
    guess = {"guess": heads[DOT, wide].run.guess}
    return Curve(f"In training, d {wide}", "step", "nats a token", lines, guess)
