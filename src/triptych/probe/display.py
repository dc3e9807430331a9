"""Base classes of results: plain values for JSON, and the page that a notebook shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from triptych import injected_functions
from triptych.arguments import integer
from triptych.migration_hints import Explained


class Displayed(Explained):
    """A result that a notebook shows as a page: attention, tables and grids that can be pointed at, offline."""

    def _repr_html_(self) -> str:
        return injected_functions.html_of(self)


class JsonResult(Explained):
    """The result of an analysis, of which the attributes in `in_json` are written as JSON."""

    in_json: ClassVar[tuple[str, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; None where there is no value."""
        return {name: plain(getattr(self, name)) for name in self.in_json}


def plain(value: object) -> object:
    """Tensors and tuples as lists; None for a number that is not finite."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def largest(names: Sequence[str], values: Tensor, count: int) -> list[tuple[str, float]]:
    """The `count` largest values by magnitude, with their names."""
    count = integer("count", count, 0)
    order = values.abs().nan_to_num(-1.0).argsort(descending=True).tolist()
    return [(names[i], float(values[i])) for i in order[:count]]
