"""How results show themselves: as plain values for JSON, and in a notebook as the page that the command line writes."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from triptych import hooks


class Displayed:
    """What a notebook shows as a page: attention, tables and grids that can be pointed at, offline."""

    def _repr_html_(self) -> str:
        return hooks.html_of(self)


class Result:
    """The result of an analysis, of which the attributes in `in_json` are written as JSON."""

    in_json: ClassVar[tuple[str, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; None where there is no value."""
        return {name: plain(getattr(self, name)) for name in self.in_json}


def plain(value: object) -> object:
    """Tensors and tuples as lists; None for a number of a tensor that is not finite."""
    if isinstance(value, Tensor):
        numbers = value.tolist()
        return numbers if bool(value.isfinite().all()) else _finite(numbers)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _finite(numbers: object) -> object:
    if isinstance(numbers, list):
        return [_finite(one) for one in numbers]
    return numbers if isinstance(numbers, float) and math.isfinite(numbers) else None
