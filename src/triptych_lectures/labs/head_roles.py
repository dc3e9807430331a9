"""Which roles do the heads of a pretrained model have?  (Lectures L0 5.1 and exercise 5, L4 exercise 17; Clark et al.
2019)

The best of many heads always exceeds their mean, so it is compared with the best of as many heads with random weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionSection, TableSection
from triptych.probe.role_scores import mean_weight
from .bounds import rounded_down, rounded_up
from .lab import Check, Clause, Findings, Lab, Sections, Setup, clause, size
from .pretrained import decoder, head_maps

TEXT = (
    "The old man sat by the river bank, and watched the boats. He had fished there, year after year, since he was a "
    "boy; now the water was low, and the fish were gone."
)
OTHER_TEXT = (
    "When the train came in, nobody was on the platform; the rain fell on the roof, and the lights went out. She took "
    "her bag, her coat and a small lamp, and walked home alone."
)
MARKS = {",", ";", "."}
EVEN = "even weights"


class HeadRolesLab(Lab):
    name = "head-roles"

    text: str = size(TEXT, "text on which the head of each role is found, with punctuation in it")
    other_text: str = size(OTHER_TEXT, "text on which these heads are scored, with punctuation in it")

    def findings(self, setup: Setup) -> Findings:
        """Raises InputError for anything but a decoder with a tokenizer."""
        model = decoder(setup)
        if model.spec.layout != "decoder" or model.tokenizer is None:
            raise InputError("this lab reads the heads of a decoder with a tokenizer")
        setup.progress("scoring every head on both texts")
        chosen, other = (ReadText(model, name, getattr(self, name)) for name in ("text", "other_text"))
        setup.progress("the same with random weights")
        untrained = Model(nn.new(model.spec, setup.seed), model.tokenizer)
        random = [ReadText(untrained, name, getattr(self, name)) for name in ("text", "other_text")]
        roles = {role: Role.of(role, chosen, other, random) for role in chosen.ideals if role != EVEN}
        unread = _best(torch.minimum(chosen.apart(), other.apart()))
        yield _with_roles(chosen, other, roles)
        yield _without(unread, len(chosen.ideals))
        best = [*(role.best for role in roles.values()), unread]
        named = {one.best[:2]: role for role, one in roles.items()} | {unread[:2]: "no pattern describes it"}
        maps = [
            replace(one, roles=[named[one.layer, head] for head in one.head_names])
            for one in head_maps(list(chosen.patterns), [one[:2] for one in best], chosen.tokens)
        ]
        explained = "Rows are queries, columns are keys: the head of each role, and the one that no pattern describes."
        yield from _tables(roles, unread)
        yield AttentionSection("Their maps", explained, maps)


class ReadText:
    """One text, the patterns `[L, H, T, T]` of a model on it, and the ideal pattern of each role.

    Raises InputError for a text without punctuation, and names the size that it is the value of.
    """

    def __init__(self, model: Model, name: str, text: str) -> None:
        assert model.tokenizer is not None
        [ids] = model.ids([text])
        self.tokens = model.tokenizer.tokens(ids)
        marks = torch.tensor([token.strip("␣Ġ ") in MARKS for token in self.tokens])
        if not marks[:-1].any():
            raise InputError(f"size {name}: no comma, semicolon or full stop is a token with text after it; add one")
        self.ideals = _ideals(marks)
        self.start = int(marks.nonzero()[0]) + 1  # the first query that has a mark to read
        trace = model.trace([ids], read=["blocks.*.attn.pattern"])
        self.patterns = torch.stack([trace[site][0] for site in trace]).float()

    def scores(self, role: str) -> Tensor:
        """`[L, H]`: the weight of each head on the keys of a role."""
        return _scores(self.patterns, self.ideals[role], self.start)

    def even(self, role: str) -> float:
        """The same of even weights."""
        return float(_scores(self.ideals[EVEN][None, None], self.ideals[role], self.start))

    def apart(self) -> Tensor:
        """`[L, H]`: mean total variation between a head and the nearest ideal pattern, 0 to 1."""
        apart = [(self.patterns - ideal / ideal.sum(-1, keepdim=True)).abs() for ideal in self.ideals.values()]
        return torch.stack([of[:, :, self.start :].sum(-1).mean(-1) / 2 for of in apart]).amin(0)


class BestHead(NamedTuple):
    """The head with the highest score of a role, and its score, 0 to 1."""

    layer: int
    head: int
    score: float

    @property
    def name(self) -> str:
        return f"layer {self.layer} head {self.head}"


class Role(NamedTuple):
    """The best head of a role on one text, its score on another, and there that of even weights and the best of random
    ones."""

    best: BestHead
    other: float
    even: float
    random: float

    @property
    def ahead(self) -> float:
        """How far its score on the other text is above both."""
        return self.other - max(self.even, self.random)

    @classmethod
    def of(cls, role: str, chosen: ReadText, other: ReadText, random: Sequence[ReadText]) -> Role:
        best = _best(chosen.scores(role))
        of_random = max(float(text.scores(role).max()) for text in random)
        return cls(best, float(other.scores(role)[best[:2]]), other.even(role), of_random)


def _with_roles(chosen: ReadText, other: ReadText, roles: Mapping[str, Role]) -> Clause:
    weights = "; ".join(
        f"{role.best.name} gives {name} {role.other:.2f} of its weight (evenly: {role.even:.2f})"
        for name, role in roles.items()
    )
    less = "on another text, less the most of even and of random weights"
    return clause(
        f"Heads that were found on a text of {len(chosen.tokens)} tokens have the same roles on another of"
        f" {len(other.tokens)}: {weights}. Control: the best of as many heads with random weights gives at most"
        f" {rounded_up(max(role.random for role in roles.values()), '.2f')}.",
        *(Check(f"{name}: weight from {role.best.name} {less}", role.ahead, 0.3) for name, role in roles.items()),
        instead="Not every role has a head that keeps it on another text",
    )


def _without(unread: BestHead, patterns: int) -> Clause:
    return clause(
        f"Not every head has such a role: {unread.name} is on both texts at least"
        f" {rounded_down(unread.score, '.2f')} of 1 away from every one of these patterns and from even weights.",
        Check(f"{unread.name}: distance from the nearest of {patterns} simple patterns", unread.score, least=0.5),
        instead="Every head is near to one of these patterns",
    )


def _tables(roles: Mapping[str, Role], unread: BestHead) -> Sections:
    rows = [
        [name, *map(str, role.best[:2]), *(f"{x:.2f}" for x in (role.best.score, role.other, role.even, role.random))]
        for name, role in roles.items()
    ]
    header = ("role: weight on", "layer", "head", "its weight", "on another text", EVEN, "best of random weights")
    far = [*map(str, unread[:2]), f"{unread.score:.2f}"]
    distance = ("layer", "head", "distance from the nearest, 0 to 1")
    yield TableSection("The best head of each role", header, rows)
    yield TableSection("The head that no simple pattern describes", distance, [far])


def _ideals(marks: Tensor) -> dict[str, Tensor]:
    """For each role the pattern `[T, T]` of a head that does nothing else, and the pattern of even weights."""
    n = len(marks)
    causal = torch.ones(n, n).tril()
    visible = marks.float() * causal
    first = torch.eye(n)[:1].expand(n, -1)
    return {
        "the token before": torch.eye(n)[torch.arange(n).sub(1).clamp(min=0)],
        "punctuation": torch.where(visible.any(-1, keepdim=True), visible, first),
        "the first token": first,
        "the token itself": torch.eye(n),
        EVEN: causal / causal.sum(-1, keepdim=True),
    }


def _scores(patterns: Tensor, ideal: Tensor, start: int) -> Tensor:
    """`[L, H]`: the mean weight of the queries from `start` on the keys that the ideal pattern reads."""
    return mean_weight(patterns[:, :, start:], ideal[start:] > 0)


def _best(scores: Tensor) -> BestHead:
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return BestHead(layer, head, float(scores[layer, head]))
