"""Does a pattern of attention explain the output? (lectures L0 7 and L4 12.6; Jain and Wallace 2019, "Attention is not
Explanation"; Wiegreffe and Pinter 2019, "Attention is not not Explanation")"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.pretrained import decoder
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve, TableSection
from triptych.probe import Edit, Read, Where, put

TEXT = "When Mary and John went to the store, John gave a drink to"  # Wang et al. 2022: it ends in "Mary"
STEPS, RATE, FAITHFUL = 20, 0.6, 20.0  # of the search for another pattern, and what the output weighs in it
SHUFFLES = 3


@dataclass(frozen=True)
class Other:
    """Another pattern `[H, T]` for the last token in one layer; how far it, and the output under it, are from what was
    there, 0 to 1."""

    layer: int
    pattern: Tensor
    attention: float
    output: float
    path: list[tuple[float, float]]  # both after every step of the search


def run(setup: Setup) -> Finding:
    """The last token's attention, shuffled, replaced by an optimised alternative, and cut; the next word each time."""
    subject = Subject(decoder(setup))
    layers = [subject.layers * i // 4 for i in (1, 2, 3)]
    random = torch.Generator().manual_seed(setup.seed)
    setup.say(f"searching for other patterns in layers {', '.join(map(str, layers))}")
    others = [_search(subject, layer, random) for layer in layers]
    shuffled = [_shuffled(subject, layer, random) for layer in layers]
    setup.say("hiding one token after the other")
    hidden = [subject.output_change("blocks.*.attn.scores", _without(key)) for key in range(len(subject.ids))]
    uniform = subject.output_change(
        "blocks.*.attn.pattern", lambda value, _: torch.full_like(value, 1 / value.shape[-1])
    )
    weights = torch.stack(subject.patterns).mean((0, 1)).tolist()
    most_read, most_needed = weights.index(max(weights)), hidden.index(max(hidden))
    drop = hidden[most_needed]
    checks = (
        Check("least distance of an alternative pattern (0 to 1)", min(o.attention for o in others), least=0.3),
        Check("most that the output moves under one (0 to 1)", max(o.output for o in others), most=0.02),
        Check("output change when the token that matters most is hidden", drop, least=0.3),
        Check("that over the change when the most attended one is", drop / (hidden[most_read] or math.nan), least=3.0),
        Check("output change under uniform attention in every layer", uniform, least=0.5),
    )
    meaning = (
        "In one layer the last token's attention can be exchanged for one that looks elsewhere, and the next word stays"
        " what it was: a picture of weights is one of many that would have done. Weights do not rank importance either:"
        f" {subject.tokens[most_read]} gets {weights[most_read]:.0%} of all attention, and hiding it does little;"
        f" {subject.tokens[most_needed]} gets {weights[most_needed]:.0%}, and without it the answer is gone. That does"
        " not make attention idle: made uniform in every layer, it loses the output. And the alternatives were searched"
        " for one sentence with the weights held fixed; that a model could be trained to use them is not shown"
        " (Wiegreffe and Pinter). To know what matters, take it away and look."
    )
    sections = (*_tables(subject, others, shuffled, weights, hidden), _curve(others), _maps(subject, others))
    return Finding("Does a pattern of attention explain the output?", meaning, checks, sections)


class Subject:
    """One model before one text: the last token's patterns and what it predicts."""

    def __init__(self, model: Model) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab asks for the next word: give a decoder, not an {model.spec.layout}")
        self.model, (self.ids,) = model, model.ids([TEXT])
        self.tokens = [str(i) for i in self.ids] if model.tokenizer is None else model.tokenizer.tokens(self.ids)
        trace = model.trace([self.ids], read=[Read("blocks.*.attn.pattern", at=len(self.ids) - 1)])
        self.patterns = [trace[site][0][:, 0] for site in trace]  # [H, T] a layer
        self.output = trace.logits[0][-1].softmax(-1)
        self.layers = len(self.patterns)

    def logits(self, edit: Edit, grad: bool = False) -> Tensor:
        last = Read("logits", at=len(self.ids) - 1, grad=grad)
        return self.model.trace([self.ids], read=[last], edit=[edit])["logits"][0][0]

    def output_change(self, site: str, fn: Callable[[Tensor, Where], Tensor]) -> float:
        """Total variation between the next word's distributions with and without an edit of the last token's row."""
        return distance(self.logits(Edit(site, fn, at=len(self.ids) - 1)).softmax(-1), self.output)

    def put(self, layer: int, pattern: Tensor) -> Edit:
        return put(f"blocks.{layer}.attn.pattern", pattern[:, None], at=len(self.ids) - 1)


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation, 0 to 1; the mean over heads where there are any."""
    return float((a - b).detach().abs().sum(-1).mean() / 2)


def _search(subject: Subject, layer: int, random: torch.Generator) -> Other:
    """Away from the pattern and not from the output, by gradient on the pattern's logits."""
    old, target = subject.patterns[layer], subject.output
    logits = (old.clamp_min(1e-4).log() + 0.5 * torch.randn(old.shape, generator=random)).requires_grad_()
    optimizer, path = torch.optim.Adam([logits], RATE), []
    for _ in range(STEPS):
        pattern = logits.softmax(-1)
        said = subject.logits(subject.put(layer, pattern), grad=True).log_softmax(-1)
        strayed = torch.nn.functional.kl_div(said, target, reduction="sum")
        apart = ((pattern - old).square() + 1e-6).sqrt().sum(-1).mean() / 2  # total variation, smooth at 0
        path.append((distance(pattern, old), distance(said.exp(), target)))
        (logits.grad,) = torch.autograd.grad(FAITHFUL * strayed - apart, [logits])
        optimizer.step()
    pattern = logits.detach().softmax(-1)
    moved = distance(subject.logits(subject.put(layer, pattern)).softmax(-1), target)
    return Other(layer, pattern, distance(pattern, old), moved, path)


def _shuffled(subject: Subject, layer: int, random: torch.Generator) -> tuple[float, float]:
    """(attention change, output change), means over shuffles of every head's weights among the tokens."""
    old, found = subject.patterns[layer], []
    for _ in range(SHUFFLES):
        pattern = torch.stack([row[torch.randperm(len(row), generator=random)] for row in old])
        said = subject.logits(subject.put(layer, pattern)).softmax(-1)
        found.append((distance(pattern, old), distance(said, subject.output)))
    attention, output = torch.tensor(found).mean(0).tolist()
    return attention, output


def _without(key: int) -> Callable[[Tensor, Where], Tensor]:
    return lambda scores, where: scores.index_fill(-1, torch.tensor([key]), -torch.inf)


def _tables(
    subject: Subject,
    others: list[Other],
    shuffled: list[tuple[float, float]],
    weights: list[float],
    hidden: list[float],
) -> tuple[TableSection, TableSection]:
    by_layer = [
        [str(o.layer), f"{a:.2f}", f"{out:.3f}", f"{o.attention:.2f}", f"{o.output:.4f}"]
        for o, (a, out) in zip(others, shuffled, strict=True)
    ]
    header = ("layer", "shuffled: attention", "output", "optimised: attention", "output")
    by_token = [
        [token, f"{weight:.1%}", f"{change:.3f}"]
        for token, weight, change in zip(subject.tokens, weights, hidden, strict=True)
    ]
    return (
        TableSection("How far attention and output move, 0 to 1", header, by_layer),
        TableSection(
            "From the last token, all layers", ("token", "share of attention", "output change if hidden"), by_token
        ),
    )


def _curve(others: list[Other]) -> Curve:
    series = {}
    for other in others:
        for name, which in (("attention", 0), ("output", 1)):
            series[f"layer {other.layer}, {name}"] = [(float(i), step[which]) for i, step in enumerate(other.path)]
    return Curve("The search for another pattern", "step", "distance from the original, 0 to 1", series, {})


def _maps(subject: Subject, others: list[Other]) -> AttentionSection:
    maps = [
        AttentionMap(
            "decoder",
            other.layer,
            ["as it is", "another"],
            subject.tokens,
            torch.stack([subject.patterns[other.layer], other.pattern], 1).clamp(0, 1).float().numpy(),
        )
        for other in others
    ]
    return AttentionSection("Two patterns, one output", "The last token's attention, and one that does as well.", maps)
