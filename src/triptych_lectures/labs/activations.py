"""ReLU, GELU and SwiGLU trained at equal parameters (Hendrycks & Gimpel 2016; Shazeer 2020; lectures L0, L1).

A block has to learn a table by heart: the answer at a token is the table's entry for it and the token before.  The
entries are random, so that what counts is how much the MLP can hold and how soon.  F of the gated MLP is 2/3 of that of
the others, which makes three matrices as large as two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from triptych import nn
from triptych.page import Curve, TableSection
from triptych.spec import GLUSpec, LearnedSpec, MLPSpec, RMSNormSpec, glu, mlp
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.small import block, decoder
from triptych_lectures.labs.trained import (
    GeneratedTask,
    LookupTable,
    Places,
    Shuffled,
    TrainedRun,
    TrainingBudget,
    train,
)

FALSIFIED_BY = (
    "A gated MLP that learns less than ReLU at equal parameters, or GELU that learns clearly less, would have shown the"
    " claim false. A difference at a task that needs no MLP, or a table learned as well without one, would mean that"
    " something else than the activation was compared."
)
SEEDS = 5

NONE, RELU, GELU, SWIGLU = "no MLP", "ReLU", "GELU", "SwiGLU"
KINDS = (NONE, RELU, GELU, SWIGLU)
EQUAL = 0.05  # shares of the way from a guess to the best loss that are nearer than this count as equal


@dataclass(frozen=True)
class Sizes:
    """Of the block, of the table and of the training."""

    symbols: int = size(16, "different symbols, two or more; the table has their number squared of entries", least=2)
    length: int = size(12, "symbols of a row, two or more", least=2)
    width: int = size(16, "width of the residual stream")
    hidden: int = size(24, "F of the MLP with ReLU or GELU, a multiple of 3; SwiGLU has 2/3 of it", multiple=3)
    draws: int = size(2, "tables, each with weights drawn anew, over which the mean is taken")
    steps: int = size(250, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")


@dataclass(frozen=True)
class TrainedActivation:
    """One kind of MLP: its runs on the tables, its run on the task that needs none, and its parameters."""

    tables: tuple[TrainedRun, ...]
    copy: TrainedRun
    parameters: int

    @property
    def learned(self) -> float:
        """Mean share of the way from a guess to the best loss, over the tables."""
        return fmean(run.learned for run in self.tables)


def run(setup: Setup) -> LabResult:
    """Each kind of MLP on the same tables, and on copying the token before; then shuffled answers."""
    sizes = setup.sized(Sizes())
    copy = Places(sizes.symbols, sizes.length, (1,))
    trained: dict[str, TrainedActivation] = {}
    for name in KINDS:
        runs = []
        for draw in range(sizes.draws):
            setup.progress(f"{name}, table {draw + 1} of {sizes.draws}: {sizes.steps} steps")
            own = setup.seed * sizes.draws + draw
            runs.append(_train(sizes, name, LookupTable(sizes.symbols, sizes.length, own), own))
        parameters = sum(parameter.numel() for parameter in model(sizes, name, 0).parameters())
        trained[name] = TrainedActivation(tuple(runs), _train(sizes, name, copy, setup.seed), parameters)
    setup.progress("shuffled answers")
    shuffled = _train(sizes, SWIGLU, Shuffled(LookupTable(sizes.symbols, sizes.length, setup.seed)), setup.seed)
    return LabResult(
        "Which activation learns most at equal parameters?",
        _meaning(sizes, trained),
        _checks(trained, shuffled),
        (_table(sizes, trained), _curve(trained)),
    )


def _checks(trained: dict[str, TrainedActivation], shuffled: TrainedRun) -> tuple[Check, ...]:
    learned = {name: kind.learned for name, kind in trained.items()}
    counts = [trained[name].parameters for name in (RELU, GELU, SWIGLU)]
    copies = [kind.copy.learned for kind in trained.values()]
    least = min(learned[name] for name in (RELU, GELU, SWIGLU))
    return (
        Check("parameters of ReLU, GELU and SwiGLU, most less fewest", float(max(counts) - min(counts)), most=0.0),
        Check("control: learned less without an MLP than with the worst", least - learned[NONE], least=EQUAL),
        Check("SwiGLU learned more than ReLU, mean of the tables", learned[SWIGLU] - learned[RELU], least=0.0),
        Check("GELU learned more than ReLU, mean of the tables", learned[GELU] - learned[RELU], least=-EQUAL),
        Check("control: copying needs no MLP: most learned less least", max(copies) - min(copies), most=EQUAL),
        Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
    )


def _meaning(sizes: Sizes, trained: dict[str, TrainedActivation]) -> str:
    shares = ", ".join(f"{name} {trained[name].learned:.0%}" for name in KINDS)
    return (
        f"A random table of {sizes.symbols} times {sizes.symbols} entries has no rule, so a small block can learn"
        f" only as much of it as its weights hold in {sizes.steps} steps. Learned, as a share of the way from the"
        f" loss of a guess to the best one: {shares}. The three have {trained[RELU].parameters:,} parameters each."
        " The product of two linear maps in a gated MLP is of use to a table with two inputs, which is a task that"
        " suits it: on text the published differences are a percent or two of the loss, and this lab does not measure"
        " them. Attention alone learns a part of the table, since what softmax does is not linear either. Where a"
        " task needs no MLP the activation makes no difference."
    )


def model(sizes: Sizes, name: str, seed: int) -> nn.Transformer:
    """One block with one head and an MLP of this kind."""
    width = sizes.width
    inner: dict[str, MLPSpec | GLUSpec | None] = {
        NONE: None,
        RELU: mlp(width, sizes.hidden, "relu"),
        GELU: mlp(width, sizes.hidden, "gelu"),
        SWIGLU: glu(width, 2 * sizes.hidden // 3, "silu"),
    }
    layer = block(width, 1, sizes.hidden)
    if inner[name] is None:
        layer = replace(layer, mlp=None, mlp_norm=None)
    else:
        layer = replace(layer, mlp=inner[name])
    positions = LearnedSpec(length=sizes.length, width=width)
    return nn.new(decoder(sizes.symbols, [layer], embedded=positions, final_norm=RMSNormSpec(width=width)), seed)


def _train(sizes: Sizes, name: str, task: GeneratedTask, seed: int) -> TrainedRun:
    return train(
        model(sizes, name, seed), task, TrainingBudget(sizes.steps, sizes.rows, sizes.rate, shape="linear"), seed
    )


def _table(sizes: Sizes, trained: dict[str, TrainedActivation]) -> TableSection:
    rows = []
    for name, kind in trained.items():
        ends = [run.end for run in kind.tables]
        more = min(own.learned - relu.learned for own, relu in zip(kind.tables, trained[RELU].tables, strict=True))
        spread = f"{min(ends):.2f} to {max(ends):.2f}"
        rows.append([name, f"{kind.parameters:,}", f"{fmean(ends):.2f}", spread, f"{more:.3f}", f"{kind.copy.end:.3f}"])
    guess = trained[RELU].copy.guess
    title = f"{sizes.draws} tables, nats an answer after {sizes.steps} steps; a guess has {guess:.2f}, the best is 0"
    header = ("MLP", "parameters", "mean", "over the tables", "learned more than ReLU, least", "copying")
    return TableSection(title, header, rows)


def _curve(trained: dict[str, TrainedActivation]) -> Curve:
    lines = {name: kind.tables[0].losses for name, kind in trained.items()}
    return Curve("The first table in training", "step", "nats an answer", lines, {"guess": trained[RELU].copy.guess})
