"""Reads the body of a request by the table of its route (`fields.toml`): each field is honored, read as advice without
effect, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from operator import gt, le, lt
from typing import Any

from triptych.errors import nearest, shown
from triptych.files import tables_of

KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float), "integer": (int,), "boolean": (bool,), "string": (str,), "strings": (str, list),
    "prompt": (str, list), "array": (list,), "object": (dict,),
}  # fmt: skip


class ApiError(Exception):
    """A response that is an error: its HTTP status, what was wrong and what to do, and the field that it is about."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code


@dataclass(frozen=True)
class Fields:
    """The fields of one request; `advice` are the names of those without effect."""

    values: Mapping[str, Any]
    advice: tuple[str, ...]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


@cache
def table(*parts: str) -> dict[str, Mapping[str, Any]]:
    """The fields of a route, which are those of several tables together."""
    tables = tables_of(__file__)
    return {name: dict(field) for part in parts for name, field in tables[part].items()}


def read(body: object, *parts: str) -> Fields:
    """The fields of a body by the tables `parts`; null counts as left out.

    Raises ApiError for a body that is no object, a field that the route does not have, one of another type or out of
    its bounds, and a required one that is missing.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    known, given = table(*parts), {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ApiError(400, f"{name} is not supported here{nearest(name, known)}; leave it out", name)
        _check(name, value, known[name])
    for name, field in known.items():
        if field.get("required") and name not in given:
            raise ApiError(400, f"{name} is missing", name)
    advice = tuple(name for name in given if known[name].get("advice"))
    return Fields({name: value for name, value in given.items() if name not in advice}, advice)


def _check(name: str, value: object, field: Mapping[str, Any]) -> None:
    kind = field["type"]
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise ApiError(400, f"{name} must be of type {kind}, not {shown(value)}", name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ApiError(400, f"{name} must be finite", name)
    size = value if isinstance(value, int | float) else len(value)  # type: ignore[arg-type]
    for key, word, wrong in (("least", "at least", lt), ("above", "above", le), ("most", "at most", gt)):
        if key in field and wrong(size, field[key]):
            raise ApiError(400, f"{name} must be {word} {field[key]}, not {shown(value)}", name)
    if kind == "strings" and isinstance(value, list) and not all(isinstance(one, str) for one in value):
        raise ApiError(400, f"{name} must be a text or a list of texts", name)
