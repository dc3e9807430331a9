"""Pre-norm and post-norm, trained with and without a warm-up, over depth (Xiong et al. 2020; lectures L0, L1).

Each stack has to carry the symbol it reads to its head.  An own symbol needs no attention, so that a stack fails at it
for one reason: it cannot be trained at this learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych import nn
from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.small import block, decoder
from triptych.labs.trained import GeneratedTask, Places, Shuffled, TrainedRun, TrainingBudget, redraw, train
from triptych.page import Curve, TableSection
from triptych.spec import LayerNormSpec, NormsSpec, SinusoidalSpec

FALSIFIED_BY = (
    "Post-norm that learns without a warm-up at every depth, or that a warm-up helps at none of them, would have shown"
    " the claim false. So would pre-norm that needs a warm-up too, for then the place of the norm is not the reason."
)
SEEDS = 5

PRE, POST = "pre-norm", "post-norm"
WITHOUT, WITH = "no warm-up", "warm-up"
HEADS = 4
LEARNED = 0.5  # a stack was trained if its loss went at least half the way from a guess to the best one


@dataclass(frozen=True)
class Sizes:
    """Of the stacks and of their training."""

    depths: tuple[int, ...] = size((4, 6), "layers of the stacks, in ascending order")
    width: int = size(32, "width of the residual stream, a multiple of 4")
    symbols: int = size(16, "different symbols")
    length: int = size(16, "symbols of a row")
    steps: int = size(140, "training steps")
    rows: int = size(8, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")
    warmup: float = size(0.5, "share of the steps over which the learning rate rises, where there is a warm-up")


FULL = Sizes(depths=(4, 6, 8, 10, 12, 16, 64))  # how deep a stack a warm-up saves differs from seed to seed
Runs = dict[tuple[str, str, int], TrainedRun]


def run(setup: Setup) -> LabResult:
    """Each placement of the norm, with and without a warm-up, at each depth; then shuffled answers."""
    sizes = setup.sized(Sizes(), FULL)
    task = Places(sizes.symbols, sizes.length, (0,))
    runs: Runs = {}
    for depth in sizes.depths:
        for name in (PRE, POST):
            for how in (WITHOUT, WITH):
                setup.progress(f"{name}, {how}, {depth} layers: {sizes.steps} steps")
                runs[name, how, depth] = _train(sizes, name, how, depth, task, setup.seed)
    setup.progress("shuffled answers")
    shuffled = _train(sizes, PRE, WITHOUT, sizes.depths[0], Shuffled(task), setup.seed)
    return LabResult(
        "Which placement of the norm needs a warm-up?",
        _meaning(sizes, runs),
        _checks(sizes, runs, shuffled),
        (_table(sizes, runs), _curve(sizes, runs)),
    )


def _checks(sizes: Sizes, runs: Runs, shuffled: TrainedRun) -> tuple[Check, ...]:
    shallow, deep = sizes.depths[0], sizes.depths[-1]
    learned = {key: run.learned for key, run in runs.items()}
    gain = {
        name: [learned[name, WITH, depth] - learned[name, WITHOUT, depth] for depth in sizes.depths]
        for name in (PRE, POST)
    }
    worst = min(value for (name, _, _), value in learned.items() if name == PRE)
    return (
        Check("pre-norm, the worst of all depths, with and without a warm-up: learned", worst, least=LEARNED),
        Check(f"post-norm, {shallow} layers, warm-up: learned", learned[POST, WITH, shallow], least=LEARNED),
        Check(f"post-norm, {deep} layers, no warm-up: learned", learned[POST, WITHOUT, deep], most=LEARNED),
        Check("post-norm: learned more with a warm-up, at the depth where it is most", max(gain[POST]), least=LEARNED),
        Check("control: the same of pre-norm, at any depth", max(map(abs, gain[PRE])), most=LEARNED / 2),
        Check(f"post-norm, {deep} layers, warm-up: learned", learned[POST, WITH, deep]),
        Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
    )


def _meaning(sizes: Sizes, runs: Runs) -> str:
    lost = [depth for depth in sizes.depths if runs[POST, WITH, depth].learned < LEARNED]
    most = (
        f"At {', '.join(map(str, lost))} layers a warm-up of {sizes.warmup:.0%} of {sizes.steps} steps is not enough:"
        " what the claim says of moderate depth is not true of every depth"
        if lost
        else "With it, post-norm learns at each of these depths"
    )
    return (
        "Under post-norm every sublayer's sum is normalized, and before training the gradients of the last layers are"
        f" large at any depth; full-sized steps of {sizes.rate:g} from the beginning then move the stack to where it"
        " gives nearly the same for every input, and it stays there. A learning rate that rises slowly avoids this at"
        f" a moderate depth. {most}. Pre-norm leaves the residual stream alone and learns at every depth either way;"
        " a warm-up only delays it. Learned is the way from the loss of a guess, 0, to the best one, 1. One learning"
        " rate, one optimizer and an easy task: the depths at which post-norm fails are theirs."
    )


def stack(sizes: Sizes, name: str, depth: int, seed: int) -> nn.Transformer:
    """A decoder of `depth` blocks with norms placed as `name` says, without scaling of what writes to the stream."""
    norm = LayerNormSpec(width=sizes.width)
    norms = NormsSpec(pre=norm) if name == PRE else NormsSpec(post=norm)
    blocks = [block(sizes.width, HEADS, 2 * sizes.width, norms=norms)] * depth
    positions = SinusoidalSpec(width=sizes.width)
    module = nn.new(decoder(sizes.symbols, blocks, embedded=positions, final_norm=norms.pre), seed)
    redraw(module, seed, sizes.width**-0.5)
    return module


def _train(sizes: Sizes, name: str, how: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
    warmup = sizes.warmup if how == WITH else 0.0
    return train(
        stack(sizes, name, depth, seed), task, TrainingBudget(sizes.steps, sizes.rows, sizes.rate, warmup), seed
    )


def _table(sizes: Sizes, runs: Runs) -> TableSection:
    columns = [(name, how) for name in (PRE, POST) for how in (WITHOUT, WITH)]
    rows = [[str(depth), *(f"{runs[name, how, depth].end:.2f}" for name, how in columns)] for depth in sizes.depths]
    guess = runs[PRE, WITHOUT, sizes.depths[0]].guess
    title = f"Nats a symbol after {sizes.steps} steps; a guess has {guess:.2f}, the best is 0"
    return TableSection(title, ("layers", *(f"{name}, {how}" for name, how in columns)), rows)


def _curve(sizes: Sizes, runs: Runs) -> Curve:
    depth = max(sizes.depths, key=lambda d: runs[POST, WITH, d].learned - runs[POST, WITHOUT, d].learned)
    lines = {f"{name}, {how}": run.losses for (name, how, at), run in runs.items() if at == depth}
    return Curve(f"{depth} layers in training", "step", "nats a symbol", lines, {"guess": runs[PRE, WITH, depth].guess})
