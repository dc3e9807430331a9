"""What labs of many short statements share: random tensors, norms with weights of 1, comparisons, and the result."""

from collections.abc import Mapping

import torch
from torch import Tensor

from triptych import nn
from triptych.page import TableSection
from triptych.spec.norms import Norm
from .lab import Check, Clause, Lab, LabResult, clause


class Statements:
    """What decides the statements of a lab, on random tensors and small models with random weights."""

    def __init__(self, seed: int) -> None:
        self.seed, self.noise = seed, torch.Generator().manual_seed(seed)

    def drawn(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Tensors of independent normal numbers, fp64."""
        return [torch.randn(shape, generator=self.noise, dtype=torch.float64) for shape in shapes]


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two entries."""
    return float((a - b).abs().max())


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """`x` [D], fp64, through the library's norm with weights of 1 and biases of 0."""
    part = nn.build(norm).double()
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.fill_(float(name == "weight"))
        return part(x[None])[0]


def result_of(
    lab: Lab,
    statements: Statements,
    table: str,
    columns: tuple[str, str],
    texts: Mapping[str, tuple[str, str, str]],
    instead: str = "",
) -> LabResult:
    """The result of statements, each decided by the method of its name.  Its texts are what stands in the two `columns`
    of the table of all criteria, and what it says where it holds; `instead` is a form of the first two."""
    rows: list[list[str]] = []
    clauses: list[Clause] = []
    for name, (where, what, finding) in texts.items():
        checks = tuple[Check, ...](getattr(statements, name)())
        beside = [(where, what), *[("", "")] * (len(checks) - 1)]
        rows += [[*labels, one.claim, one.shown] for labels, one in zip(beside, checks, strict=True)]
        clauses.append(clause(finding, *checks, instead=instead.format(where, what)))
    return lab.result(tuple(clauses), (TableSection(table, (*columns, "computed here", "value"), rows),))
