"""Which roles do the heads of a pretrained model have?  (Lectures L0 5.1 and exercise 5, L4 exercise 17; Clark et al.
2019)

The best of many heads always exceeds their mean, so it is compared with the best of as many heads with random weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionSection, TableSection
from triptych.probe.role_scores import mean_weight
from .lab import Check, Clause, Lab, LabResult, Setup, size
from .pretrained import decoder, head_maps

TEXT = (
    "The old man sat by the river bank, and watched the boats. He had fished there, year after year, since he was a "
    "boy; now the water was low, and the fish were gone."
)
MARKS = {",", ";", "."}
EVEN = "even weights"


class HeadRolesLab(Lab):
    """Score every head for four roles, beside even weights and a model of random weights."""

    name = "head-roles"
    falsified_by = (
        "The claim is false if no head's weight on a role's keys exceeds clearly what even weights would give it. It is"
        " false too if the best of as many heads with random weights scores as high."
    )

    text: str = size(TEXT, "text that the heads read, with punctuation in it")

    def run(self, setup: Setup) -> LabResult:
        """Raises InputError for anything but a decoder with a tokenizer."""
        model = decoder(setup)
        if model.spec.layout != "decoder" or model.tokenizer is None:
            raise InputError("this lab reads the heads of a decoder with a tokenizer")
        ids = model.ids([self.text])[0]
        tokens = model.tokenizer.tokens(ids)
        marks = torch.tensor([token.strip("␣Ġ ") in MARKS for token in tokens])
        if not marks.any():
            raise InputError("size text: it has no comma, semicolon or full stop that is a token of its own; add one")
        ideals = _ideals(marks)
        start = int(marks.nonzero()[0]) + 1  # queries that have a mark to read
        setup.progress("scoring every head")
        patterns = _patterns(model, ids)
        setup.progress("the same with random weights")
        control = _patterns(Model(nn.new(model.spec, setup.seed), model.tokenizer), ids)
        roles, checks = {}, []
        for role, ideal in ideals.items():
            if role == EVEN:
                continue
            scored = (patterns, control, ideals[EVEN][None, None])
            best, random, even = (_best(_scores(of, ideal, start)) for of in scored)
            roles[role] = Role(best, random, even.score)
            highest = f"{role}: weight from {best.name}, the highest, less"
            checks.append(Check(f"{highest} that of even weights", best.score - even.score, 0.3))
            checks.append(Check(f"{highest} the highest with random weights", best.score - random.score, 0.3))
        # [L, H]: mean total variation between a head and the nearest ideal pattern, 0 to 1
        apart = [(patterns - ideal / ideal.sum(-1, keepdim=True)).abs() for ideal in ideals.values()]
        unread = _best(torch.stack([of[:, :, start:].sum(-1).mean(-1) / 2 for of in apart]).amin(0))
        away = f"{unread.name}: distance from the nearest of {len(ideals)} simple patterns"
        checks.append(Check(away, unread.score, least=0.5))
        maps = head_maps(
            list(patterns), [best[:2] for best in (*(role.best for role in roles.values()), unread)], tokens
        )
        explained = "Rows are queries, columns are keys: the head of each role, and the one that no pattern describes."
        sections = (*_tables(roles, unread), AttentionSection("Their maps", explained, maps))
        question = "Which roles do the heads of a pretrained model have?"
        return LabResult(question, (Clause(_meaning(len(tokens), roles, unread), tuple(checks)),), sections)


class BestHead(NamedTuple):
    """The head with the highest score of a role, and its score, 0 to 1."""

    layer: int
    head: int
    score: float

    @property
    def name(self) -> str:
        return f"layer {self.layer} head {self.head}"


class Role(NamedTuple):
    """The best head of a role, that of a model with random weights, and what even weights score."""

    best: BestHead
    random: BestHead
    even: float


def _meaning(tokens: int, roles: dict[str, Role], far: BestHead) -> str:
    before, marks, first = (roles[role].best for role in ("the token before", "punctuation", "the first token"))
    return (
        f"On a text of {tokens} tokens {before.name} gives the token before {before.score:.2f} of its"
        f" weight, {marks.name} gives punctuation {marks.score:.2f}, and {first.name} gives the first token"
        f" {first.score:.2f}, whatever the text: an attention sink (Xiao et al. 2024), where a head puts the weight it"
        f" does not need. These can be read off their maps. Not every head can: {far.name} is at least {far.score:.2f}"
        " of 1 away from every one of these patterns and from even weights. A score describes where a head looks on"
        " this text; what the model uses it for takes an intervention, as in the labs bank and induction."
    )


def _tables(roles: dict[str, Role], unread: BestHead) -> tuple[TableSection, TableSection]:
    rows = [
        [role, *map(str, best[:2]), *(f"{x:.2f}" for x in (best.score, even, random.score))]
        for role, (best, random, even) in roles.items()
    ]
    header = ("role: weight on", "layer", "head", "its weight", EVEN, "best of random weights")
    far = [*map(str, unread[:2]), f"{unread.score:.2f}"]
    distance = ("layer", "head", "distance from the nearest, 0 to 1")
    return (
        TableSection("The best head of each role", header, rows),
        TableSection("The head that no simple pattern describes", distance, [far]),
    )


def _patterns(model: Model, ids: list[int]) -> Tensor:
    """`[L, H, T, T]`"""
    trace = model.trace([ids], read=["blocks.*.attn.pattern"])
    return torch.stack([trace[site][0] for site in trace]).float()


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
