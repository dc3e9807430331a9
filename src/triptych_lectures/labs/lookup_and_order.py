"""Two properties of attention: it is a soft dictionary lookup, and without positions it is permutation-equivariant.

`soft-vs-hard`: is it a dictionary lookup, and why a soft one?  (Lectures L0 2.1, L4 exercise 1; Graves et al. 2014)
softmax(β q·k) v: at β = 0 the mean of all values, as β grows the value of the best key and of no other.  Between the
two, the answer has a gradient in the query, and so a network can learn the query.

`permutation`: does it know the order of its input?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import attend
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import TableSection
from triptych.spec import AlibiSpec, LearnedSpec, Mask, RopeSpec, SinusoidalSpec, T5BucketsSpec, causal, full
from triptych.spec.positions import Absolute, PositionSpec
from .lab import Check, Clauses, Lab, LabResult, Setup, clause, size
from .small_models import block, curve, decoder


class SoftVsHardLab(Lab):
    name = "soft-vs-hard"

    entries: int = size(16, "entries of the dictionary, two or more", least=2)
    questions: int = size(32, "questions to it")
    width: int = size(24, "width of keys and questions")
    values: int = size(20, "width of the values")
    sharpness: tuple[float, ...] = size(tuple(2.0**i for i in range(-2, 13, 2)), "β of the table, the last one hard")
    soft: float = size(4.0, "β at which a question is learned")
    steps: int = size(400, "steps of gradient descent")
    rate: float = size(0.3, "learning rate, times 1/β")

    @property
    def hard(self) -> float:
        return self.sharpness[-1]

    def run(self, setup: Setup) -> LabResult:
        book = _Dictionary(self, setup.seed)
        rows = [book.measure(beta) for beta in self.sharpness]
        learned = {beta: book.learn(beta) for beta in (self.soft, self.hard)}
        remaining = {beta: losses[-1] / losses[0] for beta, losses in learned.items()}
        table = TableSection(
            f"{self.questions} questions to a dictionary of {self.entries} entries",
            ("β", "weight of the best key", "error against dict[key]", "bound", "|d answer / d question|"),
            [[f"{beta:g}", *(f"{x:.3g}" for x in row)] for beta, row in zip(self.sharpness, rows, strict=True)],
        )
        columns = {"error against dict[key]": 1, "gradient in the query": 3}
        lines = {name: [max(row[column], 1e-16) for row in rows] for name, column in columns.items()}
        losses, unit = {f"β = {beta:g}": of for beta, of in learned.items()}, "squared distance from the wanted value"
        steps = range(len(learned[self.soft]))
        curves = (
            curve(
                "From the mean of all values to one of them", "sharpness β", "distance, size of gradient",
                self.sharpness, lines, log="xy",
            ),
            curve("Learning what to ask", "step of gradient descent", unit, steps, losses, log="y"),
        )  # fmt: skip
        return self.result(self._conclusion(book, rows, remaining), (table, *curves))

    def _conclusion(
        self, book: _Dictionary, rows: Sequence[tuple[float, float, float, float]], remaining: Mapping[float, float]
    ) -> Clauses:
        over_bound = max(error / bound for _, error, bound, _ in rows)
        from_mean = (book.ask(book.questions, 0.0) - book.values.mean(0)).abs().max().item()
        yield clause(
            f"Every entry answers, in proportion to exp(β q·k): at β 0 with the mean of all values, at β"
            f" {self.hard:g} with what a dictionary returns; in between the error stays below a bound that falls"
            " exponentially.",
            Check("at β 0, distance from the mean of all values", from_mean, most=1e-12),
            Check(f"at β {self.hard:g}, distance from dict[key]", rows[-1][1], most=1e-9),
            Check("largest error over its bound 2 max|v| (S-1) exp(-β gap)", over_bound, most=1),
            Check(f"at β {self.sharpness[0]:g}, the control, distance from dict[key]", rows[0][1], least=0.1),
            instead="The answers are not those of a lookup",
        )
        yield clause(
            f"A soft answer has a gradient in the query: at β {self.soft:g} descent finds what to ask, and"
            f" the loss falls to {remaining[self.soft]:.1g} of what it was.",
            Check("gradient against finite differences, relative", book.gradient_error(), most=1e-6),
            Check(f"at β {self.soft:g}, loss after learning over before", remaining[self.soft], most=0.05),
            instead="The soft lookup does not learn, or not by its gradient",
        )
        yield clause(
            f"A dictionary's answer does not change when the question changes a little: at β {self.hard:g} the"
            " gradient is 0, and the same descent, the control, stands still.",
            Check(f"at β {self.hard:g}, largest gradient of an answer", rows[-1][3], most=1e-9),
            Check(f"at β {self.hard:g}, loss after learning over before", remaining[self.hard], 0.95, 1.05),
            instead="The hard lookup does not stand still",
        )


class _Dictionary:
    """Keys of unit length, values, and questions that are keys plus noise, each with the key it came from.  fp64."""

    def __init__(self, sizes: SoftVsHardLab, seed: int) -> None:
        self.sizes = sizes
        noise = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise, dtype=torch.float64)

        self.keys = torch.nn.functional.normalize(draw(sizes.entries, sizes.width), dim=-1)
        self.values = draw(sizes.entries, sizes.values)
        self.wanted = torch.randint(sizes.entries, (sizes.questions,), generator=noise)
        self.questions = self.keys[self.wanted] + 0.05 * draw(sizes.questions, sizes.width)
        self.start = self.keys[0]  # learning begins with the question for another entry, the furthest from its goal
        self.goal = int((self.keys @ self.start).argmin())
        # A Python dictionary with the same entries.
        self.plain = dict(enumerate(self.values))
        self.answers = torch.stack([self.plain[int(name)] for name in self.wanted])

    def ask(self, questions: Tensor, beta: float) -> Tensor:
        """[T, K] -> [T, Kv]"""
        return attend(questions, self.keys, self.values, scale=beta)

    def measure(self, beta: float) -> tuple[float, float, float, float]:
        """(mean weight of the best key, largest error, its bound, largest |gradient| in a question)"""
        pattern = attend(self.questions, self.keys, torch.eye(len(self.keys), dtype=torch.float64), scale=beta)
        best = pattern.gather(1, self.wanted[:, None])
        error = (self.ask(self.questions, beta) - self.answers).abs().max().item()
        top = (self.questions @ self.keys.T).topk(2).values
        gap = (top[:, 0] - top[:, 1]).min().item()
        bound = 2 * self.values.abs().max().item() * (len(self.keys) - 1) * math.exp(-beta * gap)
        return best.mean().item(), error, bound + 1e-15, self.gradient(beta).abs().max().item()

    def gradient(self, beta: float) -> Tensor:
        """[T, K]: of the first number of each answer in its question."""
        questions = self.questions.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.ask(questions, beta)[:, 0].sum(), questions)
        return slope

    def gradient_error(self, step: float = 1e-5) -> float:
        """Largest difference from central differences along one direction, over the largest gradient."""
        slope, along = self.gradient(self.sizes.soft), torch.linspace(-1, 1, self.sizes.width, dtype=torch.float64)
        ahead, behind = (self.ask(self.questions + sign * step * along, self.sizes.soft)[:, 0] for sign in (1, -1))
        return (((ahead - behind) / (2 * step) - slope @ along).abs().max() / slope.abs().max()).item()

    def learn(self, beta: float) -> list[float]:
        """Squared distance from one entry's value while a question is moved down its gradient, step by step."""
        question, losses = self.start[None].clone().requires_grad_(), []
        for _ in range(self.sizes.steps):
            loss = (self.ask(question, beta) - self.values[self.goal]).square().sum()
            (slope,) = torch.autograd.grad(loss, question)
            losses.append(loss.item())
            question = (question - self.sizes.rate / beta * slope).detach().requires_grad_()
        return losses


Case = tuple[str, str]  # positions and mask
NONE = "none"
MASKS = {"bidirectional": full(), "causal": causal()}


class PermutationLab(Lab):
    name = "permutation"

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
        errors, twins, moved = dict[Case, list[float]](), dict[Case, float](), dict[Case, float]()
        for mask in MASKS:
            for name, parts in self._parts(causal=mask == "causal").items():
                model = self._model(*parts, MASKS[mask], setup.seed)
                errors[name, mask], moved[name, mask] = self._permuted(model, setup.seed)
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
        # 1e-17 stands for an exact 0, which a logarithm cannot show
        lines = {f"{name}, {mask}": [max(error, 1e-17) for error in errors[name, mask]] for name, mask in shown}
        rounding = {"fp64 rounding": torch.finfo(torch.float64).eps}
        after = curve(
            "Permutation error after each block", "blocks passed", "relative error of permutation",
            range(len(self.sites)), lines, rounding, "y",
        )  # fmt: skip
        return self.result(self._conclusion(errors, twins, moved[NONE, "bidirectional"]), (table, after))

    def _conclusion(self, errors: Mapping[Case, list[float]], twins: Mapping[Case, float], moved: float) -> Clauses:
        set_, others = (NONE, "bidirectional"), [key for key in errors if key[0] != NONE]
        error, apart = min(errors[key][-1] for key in others), min(twins[key] for key in others)
        yield clause(
            "Without positions and without a mask a transformer reads a set: shuffled tokens give the same vectors,"
            f" shuffled alike, up to rounding ({errors[set_][-1]:.1g}). The outputs move, so this is equivariance,"
            " not invariance. Two equal tokens in one row get equal vectors.",
            Check("no positions, bidirectional: error of permutation", errors[set_][-1], most=1e-12),
            Check("no positions, bidirectional: distance of outputs left in place", moved, least=0.1),
            Check("no positions, bidirectional: distance between two equal tokens", twins[set_], most=1e-12),
            instead="It does not read its input as a set, vector by vector",
        )
        yield clause(
            "A causal mask alone makes the order count, since the t-th token sees t tokens.",
            Check("no positions, causal: error of permutation", errors[NONE, "causal"][-1], least=0.1),
            Check("no positions, causal: distance between two equal tokens", twins[NONE, "causal"], least=0.01),
            instead="Under a causal mask the order does not count",
        )
        yield clause(
            f"So does each of {', '.join(dict.fromkeys(name for name, _ in others))}, with either mask.",
            Check("the smallest error with a position part, either mask", error, least=0.02),
            Check("the smallest distance between two equal tokens with a position part", apart, least=0.01),
            instead="A position part leaves the order unseen",
        )

    def _parts(self, *, causal: bool) -> dict[str, tuple[Absolute | None, PositionSpec | None]]:
        """Positions that are added to the embedding, or those inside attention."""
        return {
            NONE: (None, None),
            "sinusoidal": (SinusoidalSpec(width=self.width), None),
            "learned": (LearnedSpec(length=self.tokens, width=self.width), None),
            "RoPE": (None, RopeSpec(width=self.width // self.heads)),
            "ALiBi": (None, AlibiSpec(heads=self.heads)),
            "T5 buckets": (None, T5BucketsSpec(heads=self.heads, bidirectional=not causal)),
        }

    def _model(self, embedded: Absolute | None, inside: PositionSpec | None, mask: Mask, seed: int) -> Model:
        blocks = [block(self.width, self.heads, 2 * self.width)] * self.blocks
        spec = decoder(self.tokens, blocks, embedded=embedded, inside=inside, mask=mask)
        return Model(nn.new(spec, seed, torch.float64))

    def _permuted(self, model: Model, seed: int) -> tuple[list[float], float]:
        """After the embedding and each block, the largest |f(x[order]) - f(x)[order]|; and after the last block, the
        largest |f(x[order]) - f(x)|.  Both are over the spread of f(x)."""
        order = torch.randperm(self.tokens, generator=torch.Generator().manual_seed(seed))
        # Every token occurs once, so that a permutation of tokens is one of places.
        ways = [model.trace([ids.tolist()], read=self.sites) for ids in (torch.arange(self.tokens), order)]
        outputs = [[way[site][0] for way in ways] for site in self.sites]
        out, moved = outputs[-1]
        errors = [_over_spread(after - before[order], before) for before, after in outputs]
        return errors, _over_spread(moved - out, out)

    def _twins(self, model: Model, seed: int) -> float:
        """How far apart the last block leaves one token that stands at two places of a row, over the spread."""
        ids = torch.randperm(self.tokens, generator=torch.Generator().manual_seed(seed))
        first, second = self.twins
        ids[second] = ids[first]
        last = self.sites[-1]
        out = model.trace([ids.tolist()], read=[last])[last][0]
        return _over_spread(out[first] - out[second], out)


def _over_spread(change: Tensor, out: Tensor) -> float:
    return (change.abs().max() / out.std()).item()
