"""Does attention know the order of its input?  (Lectures L0 exercise 7, L4 exercise 12; Vaswani et al. 2017, 3.5)

Without positions and without a mask, attention is equivariant: shuffle the input and the outputs are shuffled alike.
It is not invariant, as is often stated, and under a causal mask it is neither.
"""

from __future__ import annotations

import torch

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import AlibiSpec, LearnedSpec, RopeSpec, SinusoidalSpec, T5BucketsSpec, causal, full
from triptych.spec.positions import Absolute, Position
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import block, decoder

NONE = "none"
MASKS = {"bidirectional": full(), "causal": causal()}


class PermutationLab(Lab):
    """Models of random weights in fp64: f(shuffled x) beside shuffled f(x), for every position part and both masks."""

    name = "permutation"
    falsified_by = (
        "The claim is false if, without positions and without a mask, the outputs of permuted tokens differ from the"
        " permuted outputs by more than rounding. It is false too if they do not differ with a causal mask or with a"
        " position part, which are the controls."
    )
    seeds = 5

    width: int = size(48, "model width D, a multiple of 2 x heads")
    heads: int = size(4, "heads of each block")
    blocks: int = size(4, "blocks of each model")
    tokens: int = size(24, "tokens of the row, at least 2")

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.tokens < 2:
            raise InputError("sizes width, heads, tokens: the width must be a multiple of 2 x heads, tokens 2 or more")

    @property
    def sites(self) -> tuple[str, ...]:
        return ("embed", *(f"blocks.{i}.resid_post" for i in range(self.blocks)))

    @property
    def twins(self) -> tuple[int, int]:
        """Places that hold the same token."""
        return self.tokens * 5 // 24, self.tokens * 17 // 24

    def run(self, setup: Setup) -> LabResult:
        errors, twins = {}, {}
        for name in self._parts(causal=False):
            for mask in MASKS:
                model = self._model(name, mask, setup.seed)
                errors[name, mask] = self._errors(model, setup.seed)
                twins[name, mask] = self._twins(model, setup.seed)
        table = TableSection(
            f"{self.blocks} blocks on {self.tokens} tokens, fp64: how far f(shuffled x) is from shuffled f(x), relative"
            " to f(x)",
            ("positions", "bidirectional", "causal", "same token at two places, bidirectional"),
            [
                [name, *(f"{errors[name, mask][-1]:.2g}" for mask in MASKS), f"{twins[name, 'bidirectional']:.2g}"]
                for name in self._parts(causal=False)
            ],
        )
        shown = [(NONE, "bidirectional"), (NONE, "causal"), ("sinusoidal", "bidirectional"), ("RoPE", "bidirectional")]
        curve = Curve(
            "Permutation error after each block",
            "blocks passed",
            "relative error of permutation",
            # 1e-17 stands for an exact 0, which a logarithm cannot show
            {f"{n}, {m}": [(float(i), max(e, 1e-17)) for i, e in enumerate(errors[n, m])] for n, m in shown},
            {"fp64 rounding": torch.finfo(torch.float64).eps},
            "y",
        )
        return LabResult("Does attention know the order of its input?", MEANING, _checks(errors, twins), (table, curve))

    def _parts(self, *, causal: bool) -> dict[str, Absolute | Position | None]:
        return {
            NONE: None,
            "sinusoidal": SinusoidalSpec(width=self.width),
            "learned": LearnedSpec(length=self.tokens, width=self.width),
            "RoPE": RopeSpec(width=self.width // self.heads),
            "ALiBi": AlibiSpec(heads=self.heads),
            "T5 buckets": T5BucketsSpec(heads=self.heads, bidirectional=not causal),
        }

    def _model(self, name: str, mask: str, seed: int) -> Model:
        part = self._parts(causal=mask == "causal")[name]
        absolute = part if isinstance(part, LearnedSpec | SinusoidalSpec) else None
        inside = None if isinstance(part, LearnedSpec | SinusoidalSpec) else part
        blocks = [block(self.width, self.heads, 2 * self.width)] * self.blocks
        spec = decoder(self.tokens, blocks, embedded=absolute, inside=inside, mask=MASKS[mask])
        return Model(nn.new(spec, seed, torch.float64))

    def _errors(self, model: Model, seed: int) -> list[float]:
        """After the embedding and each block: the largest |f(x[order]) - f(x)[order]|, over the spread of f(x)."""
        order = torch.randperm(self.tokens, generator=torch.Generator().manual_seed(seed))
        # Every token occurs once, so that a permutation of tokens is one of places.
        straight, shuffled = (
            model.trace([ids.tolist()], read=self.sites) for ids in (torch.arange(self.tokens), order)
        )
        errors = []
        for site in self.sites:
            out = straight[site][0]
            errors.append(((shuffled[site][0] - out[order]).abs().max() / out.std()).item())
        return errors

    def _twins(self, model: Model, seed: int) -> float:
        """How far apart the last block leaves one token that stands at two places of a row, over the spread."""
        ids = torch.randperm(self.tokens, generator=torch.Generator().manual_seed(seed))
        first, second = self.twins
        ids[second] = ids[first]
        last = self.sites[-1]
        out = model.trace([ids.tolist()], read=[last])[last][0]
        return ((out[first] - out[second]).abs().max() / out.std()).item()


MEANING = (
    "Without positions a bidirectional transformer treats its input as a set: shuffle the tokens and the same vectors"
    " come out, shuffled alike, up to rounding. The outputs move, so this is equivariance, not invariance. Two equal"
    " tokens in one row then get equal vectors. Any position part makes them differ - sinusoids and tables already at"
    " the input, RoPE, ALiBi and T5's buckets from the first attention on. So does a causal mask alone, since the t-th"
    " token sees t tokens: a decoder without positions depends on order. Random weights show what can be"
    " distinguished, not what a trained model does with it."
)


def _checks(errors: dict[tuple[str, str], list[float]], twins: dict[tuple[str, str], float]) -> tuple[Check, ...]:
    with_positions = [key for key in errors if key[0] != NONE]
    return (
        Check("no positions, bidirectional: error of permutation", errors[NONE, "bidirectional"][-1], most=1e-12),
        Check("no positions, causal: error of permutation", errors[NONE, "causal"][-1], least=0.1),
        Check(
            "the smallest error with a position part, either mask",
            min(errors[key][-1] for key in with_positions),
            least=0.02,
        ),
        Check(
            "no positions, bidirectional: distance between two equal tokens", twins[NONE, "bidirectional"], most=1e-12
        ),
        Check(
            "the smallest distance between two equal tokens with a position part, or a causal mask",
            min(distance for key, distance in twins.items() if key != (NONE, "bidirectional")),
            least=0.01,
        ),
    )
