"""Does a pattern of attention explain the output?  (Lectures L0 1.3 and L4 12.8; Jain and Wallace 2019, "Attention is
not Explanation"; Wiegreffe and Pinter 2019, "Attention is not not Explanation")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.pretrained import decoder
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve, TableSection
from triptych.probe import Edit, Read, Where, put

TEXT = "When Mary and John went to the store, John gave a drink to"  # Wang et al. 2022: it ends in "Mary"
FALSIFIED_BY = (
    "The claim is false if no other pattern, set in all layers at once, leaves the output as it was, or if any pattern"
    " does: a shuffled pattern that is as far from the original must change it. The second claim, that weights do not"
    " rank importance, is false if hiding the token with the most attention changes the output most."
)


@dataclass(frozen=True)
class Sizes:
    text: str = size(TEXT, "text whose next word is predicted")
    steps: int = size(12, "steps of the search for other patterns")
    rate: float = size(0.6, "learning rate of the search")
    faithful: float = size(5.0, "weight of the output in the loss of the search")
    sensitive: int = size(5, "layers where a shuffle alone moves the output most, compared one by one")


FULL = Sizes(steps=30, rate=0.3)

Path = list[tuple[float, float]]  # (distance of the patterns, distance of the output) after each step of the search


@dataclass(frozen=True)
class Replacement:
    """Other patterns `[L, H, T]` for the last token, and the total variation, 0 to 1, of patterns and output from the
    original ones."""

    patterns: Tensor
    attention: float
    output: float


def run(setup: Setup) -> LabResult:
    """The last token's attention in all layers: replaced by an optimized alternative, shuffled, cut token by token."""
    sizes = setup.sized(Sizes(), FULL)
    last = LastToken(decoder(setup), sizes.text)
    random = torch.Generator().manual_seed(setup.seed)
    setup.progress(f"searching for other patterns in all {len(last.patterns)} layers, {sizes.steps} steps")
    other, path = _search(last, sizes, random)
    setup.progress("shuffling the patterns")
    shuffled = _shuffled(last, other.attention, random)
    alone = [last.moved([last.put(layer, shuffled.patterns[layer])]) for layer in range(len(last.patterns))]
    sensitive = sorted(range(len(alone)), key=lambda layer: -alone[layer])[: sizes.sensitive]
    apart = [distance(other.patterns[layer], last.patterns[layer]) for layer in sensitive]
    setup.progress("hiding one token after the other")
    hidden = [last.moved([last.edit("blocks.*.attn.scores", _without(key))]) for key in range(len(last.ids))]
    weights = last.patterns.mean((0, 1)).tolist()
    most_read, most_needed = weights.index(max(weights)), hidden.index(max(hidden))
    drop = hidden[most_needed]
    checks = (
        Check(
            "distance of the alternative patterns, mean over all layers and heads (0 to 1)", other.attention, least=0.4
        ),
        Check(
            f"the same in the {len(sensitive)} layers where a shuffle alone moves the output most",
            sum(apart) / len(sensitive),
            least=0.3,
        ),
        Check("output change under the alternative in all layers (0 to 1)", other.output, most=0.05),
        Check(
            "control: distance of the shuffled patterns over that of the alternative",
            shuffled.attention / other.attention,
            0.95,
            1.05,
        ),
        Check("control: output change under the shuffled patterns in all layers", shuffled.output, least=0.5),
        Check("output change when the token that matters most is hidden", drop, least=0.3),
        Check("that over the change when the most attended one is", drop / (hidden[most_read] or math.nan), least=3.0),
    )
    meaning = (
        "In all layers and heads at once the last token's attention can be exchanged for weights that look elsewhere,"
        " and the next word keeps its probability: the picture of the weights is one of many that give this output."
        f" Not every one does. A shuffle of the same distance changes the output by {shuffled.output:.2f} of 1."
        f" Weights do not rank importance either: {last.tokens[most_read]} gets {weights[most_read]:.0%} of all"
        f" attention, and hiding it changes the output by {hidden[most_read]:.2f}; {last.tokens[most_needed]} gets"
        f" {weights[most_needed]:.0%}, and hiding it changes the output by {drop:.2f}. The alternative was searched"
        " for one sentence with the model's weights held fixed. That a model could be trained to use such patterns is"
        " not shown (Wiegreffe and Pinter)."
    )
    sections = (
        _replacements(other, shuffled),
        _by_layer(last, other, alone, sensitive),
        _by_token(last, weights, hidden),
        _curve(path),
        _maps(last, other, sensitive),
    )
    return LabResult("Does a pattern of attention explain the output?", meaning, checks, sections)


class LastToken:
    """The last token of a text in one model: its attention in every layer, and the next word's distribution."""

    def __init__(self, model: Model, text: str) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab predicts the next word; it needs a decoder, not an {model.spec.layout}")
        self.model, (self.ids,) = model, model.ids([text])
        self.tokens = [str(i) for i in self.ids] if model.tokenizer is None else model.tokenizer.tokens(self.ids)
        trace = model.trace([self.ids], read=[Read("blocks.*.attn.pattern", at=self.at)])
        self.patterns = torch.stack([trace[site][0][:, 0] for site in trace])  # [L, H, T]
        self.output = trace.logits[0][-1].softmax(-1)

    @property
    def at(self) -> int:
        return len(self.ids) - 1

    def edit(self, site: str, fn: Callable[[Tensor, Where], Tensor]) -> Edit:
        return Edit(site, fn, at=self.at)

    def put(self, layer: int, pattern: Tensor) -> Edit:
        """Use `pattern` [H, T] as the last token's attention in this layer."""
        return put(f"blocks.{layer}.attn.pattern", pattern[:, None], at=self.at)

    def put_all(self, patterns: Tensor) -> list[Edit]:
        return [self.put(layer, pattern) for layer, pattern in enumerate(patterns)]

    def logits(self, edits: Sequence[Edit], grad: bool = False) -> Tensor:
        """`[V]`, of the next word."""
        return self.model.trace([self.ids], read=[Read("logits", at=self.at, grad=grad)], edit=edits)["logits"][0][0]

    def moved(self, edits: Sequence[Edit]) -> float:
        """Total variation between the next word's distributions with and without the edits, 0 to 1."""
        return distance(self.logits(edits).softmax(-1), self.output)

    def replaced(self, patterns: Tensor) -> Replacement:
        return Replacement(patterns, distance(patterns, self.patterns), self.moved(self.put_all(patterns)))


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation of distributions in the last axis, 0 to 1; the mean over the other axes."""
    return float((a - b).detach().abs().sum(-1).mean() / 2)


def _search(last: LastToken, sizes: Sizes, random: torch.Generator) -> tuple[Replacement, Path]:
    """Gradient descent on the logits of all patterns: far from the original patterns, near the original output."""
    old = last.patterns
    logits = (old.clamp_min(1e-4).log() + 0.1 * torch.randn(old.shape, generator=random)).requires_grad_()
    optimizer, path = torch.optim.Adam([logits], sizes.rate), []
    for _ in range(sizes.steps):
        pattern = logits.softmax(-1)
        log_p = last.logits(last.put_all(pattern), grad=True).log_softmax(-1)
        divergence = torch.nn.functional.kl_div(log_p, last.output, reduction="sum")
        apart = ((pattern - old).square() + 1e-6).sqrt().sum(-1).mean() / 2  # total variation, smooth at 0
        path.append((distance(pattern, old), distance(log_p.exp(), last.output)))
        (logits.grad,) = torch.autograd.grad(sizes.faithful * divergence - apart, [logits])
        optimizer.step()
    return last.replaced(logits.detach().softmax(-1)), path


def _shuffled(last: LastToken, attention: float, random: torch.Generator) -> Replacement:
    """Every head's weights in another order, mixed with the original ones so that the distance is `attention`."""
    old = last.patterns
    order = torch.rand(old.shape, generator=random).argsort(-1)
    shuffled = old.gather(-1, order)
    share = min(1.0, attention / distance(shuffled, old))  # the total variation of a mixture is linear in its share
    return last.replaced((1 - share) * old + share * shuffled)


def _without(key: int) -> Callable[[Tensor, Where], Tensor]:
    return lambda scores, where: scores.index_fill(-1, torch.tensor([key]), -torch.inf)


def _replacements(other: Replacement, shuffled: Replacement) -> TableSection:
    rows = [
        [name, f"{one.attention:.2f}", f"{one.output:.4f}"]
        for name, one in (("optimized", other), ("shuffled", shuffled))
    ]
    return TableSection(
        "All layers replaced at once: total variation, 0 to 1", ("patterns", "attention", "output"), rows
    )


def _by_layer(last: LastToken, other: Replacement, alone: list[float], layers: list[int]) -> TableSection:
    rows = [
        [str(layer), f"{alone[layer]:.3f}", f"{distance(other.patterns[layer], last.patterns[layer]):.2f}"]
        for layer in layers
    ]
    header = ("layer", "output change, this layer shuffled", "distance of the alternative here")
    return TableSection("Layers where a shuffle moves the output most", header, rows)


def _by_token(last: LastToken, weights: list[float], hidden: list[float]) -> TableSection:
    rows = [[token, f"{w:.1%}", f"{change:.3f}"] for token, w, change in zip(last.tokens, weights, hidden, strict=True)]
    return TableSection(
        "From the last token, all layers", ("token", "share of attention", "output change if hidden"), rows
    )


def _curve(path: Path) -> Curve:
    series = {
        name: [(float(i), step[which]) for i, step in enumerate(path)]
        for which, name in enumerate(("attention", "output"))
    }
    return Curve("The search for other patterns", "step", "distance from the original, 0 to 1", series, {})


def _maps(last: LastToken, other: Replacement, layers: list[int]) -> AttentionSection:
    maps = [
        AttentionMap(
            "decoder",
            layer,
            ["original", "alternative"],
            last.tokens,
            torch.stack([last.patterns[layer], other.patterns[layer]], 1).clamp(0, 1).float().numpy(),
        )
        for layer in sorted(layers)
    ]
    return AttentionSection("Two patterns, one output", "The last token's attention, original and alternative.", maps)
