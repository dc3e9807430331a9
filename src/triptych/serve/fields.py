"""Reads the body of a request by the table of its route (`fields.toml`): each field is honored, read as advice without
effect, or refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import gt, le, lt
from time import monotonic
from typing import Any

from triptych.errors import nearest, shown
from triptych.files import tables_of

KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float), "integer": (int,), "boolean": (bool,), "string": (str,), "strings": (str, list),
    "prompt": (str, list), "array": (list,), "object": (dict,), "choice": (str, dict),
    "selection": (int, list), "rows": (str, list), "ids": (list,), "prefix": (str, list), "duration": (str, int, float),
    "schema": (str, dict), "level": (bool, str),
}  # fmt: skip
MOST_ROWS = 2048  # texts, or lists of token ids, of one request


class ApiError(Exception):
    """A response that is an error: its HTTP status, what was wrong and what to do, and the field that it is about."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code


@dataclass(frozen=True)
class Fields:
    """The fields of one object of a request, which were read at `read_at` (`monotonic`); `advice` names those without
    effect, in all objects of the request."""

    values: Mapping[str, Any]
    advice: list[str] = field(default_factory=list)
    read_at: float = field(default_factory=monotonic)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def rows(self, name: str) -> list[str | list[int]]:
        """The texts and lists of token ids of a field of type `rows`, also where it is a single one."""
        value = self.values[name]
        return [value] if isinstance(value, str) or _ids(value) else list(value)

    def texts(self, name: str) -> list[str]:
        """The texts of a field of type `strings`, none where it is missing."""
        value = self.values.get(name, [])
        return [value] if isinstance(value, str) else list(value)

    @property
    def due(self) -> float | None:
        """When its `timeout` ends (`monotonic`)."""
        timeout = self.values.get("timeout")
        return None if timeout is None else self.read_at + float(timeout)

    def inner(self, value: object, *parts: str, at: str) -> Fields:
        """The fields of an object in this one, at the path `at`; its advice is this one's too.  Raises as `read`."""
        inside = read(value, *parts, at=at)
        for name in inside.advice:
            self.note(name)
        return inside

    def note(self, name: str) -> None:
        """Remember a field without effect."""
        if name not in self.advice:
            self.advice.append(name)

    def changed(self, **values: object) -> Fields:
        """The same with other values."""
        return replace(self, values={**self.values, **values})


@cache
def table(*parts: str) -> dict[str, Mapping[str, Any]]:
    """The fields of a route, which are those of several tables together."""
    tables = tables_of(__file__)
    return {name: dict(entry) for part in parts for name, entry in tables[part].items()}


def read(body: object, *parts: str, at: str = "") -> Fields:
    """The fields of a body, or of an object at the path `at` in one, by the tables `parts`; null counts as left out.

    Raises ApiError for what is no object, a field that the table does not have or refuses, one of another type or out
    of its bounds, and a required one that is missing.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"{at or 'the body'} must be a JSON object", at or None)
    known, present = table(*parts), {name: value for name, value in body.items() if value is not None}
    before = f"{at}." if at else ""
    for name, value in present.items():
        path = before + name
        if name not in known:
            raise ApiError(400, f"{shown_name(path)} is not supported here{nearest(name, known)}; leave it out", path)
        why = known[name].get("refused", known[name].get("only_empty") if value else None)
        if why is not None:
            raise ApiError(400, f"{path} is not supported: {why}", path, "unsupported_parameter")
        _check(path, value, known[name])
    for name, entry in known.items():
        if entry.get("required") and name not in present:
            raise ApiError(400, f"{before}{name} is missing", before + name)
    general = re.sub(r"\[\d+\]", "", before)
    fields = Fields(
        {name: value for name, value in present.items() if not known[name].get("advice")},
        [general + name for name in present if known[name].get("advice")],
    )
    inner = {name: known[name]["fields"] for name in fields.values if "fields" in known[name]}
    return fields.changed(
        **{name: dict(fields.inner(present[name], part, at=before + name).values) for name, part in inner.items()}
    )


def shown_name(name: str) -> str:
    """The name of a field that a client chose, short enough for an error of one line."""
    return name if len(name) <= 80 and name.isprintable() else shown(name)


def _check(name: str, value: Any, entry: Mapping[str, Any]) -> None:
    kind: str = entry["type"]
    if not issubclass(type(value), KINDS[kind]) or (isinstance(value, bool) and bool not in KINDS[kind]):
        raise ApiError(400, f"{name} must be of type {kind}, not {shown(value)}", name)
    _check_size(name, value, entry)
    if "one_of" in entry and value not in entry["one_of"]:
        values = ", ".join(json.dumps(one) for one in entry["one_of"])
        raise ApiError(400, f"{name} must be one of {values}, not {shown(value)}", name)
    if kind == "strings" and isinstance(value, list) and not all(isinstance(one, str) for one in value):
        raise ApiError(400, f"{name} must be a text or a list of texts", name)
    if kind == "ids" and value and not _ids(value):
        raise ApiError(400, f"{name} must be a list of token ids", name)
    if entry.get("no_empty") and "" in (value, *value):
        raise ApiError(400, f"{name} has an empty string, which is in every text; leave it out", name)
    if kind == "prefix" and (not value or (isinstance(value, list) and not _ids(value))):
        raise ApiError(400, f"{name} must be a text or a list of token ids, not empty", name)
    if kind == "rows" and (isinstance(value, str) or not _ids(value)):
        _check_rows(name, [value] if isinstance(value, str) else list(value))


def _check_rows(name: str, rows: list[Any]) -> None:
    """Raise ApiError for anything but texts and lists of token ids, at least one and not too many."""
    if not rows or not all(isinstance(one, str) or _ids(one) for one in rows):
        raise ApiError(400, f"{name} must be a text, a list of token ids, or a list of either", name)
    if "" in rows:
        raise ApiError(400, f"a text of {name} is empty; give at least one token", name)
    if len(rows) > MOST_ROWS:
        raise ApiError(400, f"{name} has {len(rows):,} rows, and {MOST_ROWS:,} are the limit; send several", name)


def _check_size(name: str, value: Any, entry: Mapping[str, Any]) -> None:
    """Raise ApiError for a number, or the length of anything else, out of the bounds of its field."""
    number = isinstance(value, int | float)
    single = entry["type"] == "strings" and isinstance(value, str)  # a list of one
    size = value if number else 1 if single else len(value)
    for key, word, wrong in (("least", "at least", lt), ("above", "above", le), ("most", "at most", gt)):
        if key in entry and wrong(size, entry[key]):
            what = name if number else f"the length of {name}"
            raise ApiError(400, f"{what} must be {word} {entry[key]}, not {shown(size)}", name)


def _ids(value: object) -> bool:
    """Whether this is a list of integers, at least one."""
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
