"""The keys of a recipe with values, defaults and meaning, read from the settings that check them: for the recipes that
`triptych train --new` writes, and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from triptych.train.recipe import FINE_TUNING, Recipe, sections
from triptych.train.settings import Section


@dataclass(frozen=True)
class Key:
    """One key of a recipe: which values it takes, its default as TOML ("" for none, None where it must be set), what an
    existing model has instead, and its meaning."""

    name: str
    values: str
    default: str | None
    fine_tuning: str | None
    meaning: str

    @property
    def defaults(self) -> str:
        """The defaults in words."""
        if self.default is None:
            return "must be set"
        if self.fine_tuning is None:
            return self.default or "not set"
        return f"{self.default}; {self.fine_tuning} with model.path"


def keys(name: str) -> list[Key]:
    """The keys of the table `name`; those of `model` are for an existing model."""
    return [_key(field, info, FINE_TUNING.get(name, {})) for field, info in sections()[name].model_fields.items()]


def single_keys() -> list[Key]:
    """The keys outside any table."""
    return [_key(name, info, {}) for name, info in Recipe.model_fields.items() if name not in sections()]


def meaning(name: str) -> str:
    """What the table `name` is for."""
    described = Recipe.model_fields[name].description or sections()[name].__doc__ or ""
    return _one_line(described.partition("\n\n")[0])


def details(name: str) -> str:
    """What the settings of a table say beyond `meaning`."""
    return _one_line((sections()[name].__doc__ or "").partition("\n\n")[2])


def in_markdown() -> str:
    """All keys as tables in Markdown."""
    parts = ["\n".join(_rows(single_keys()))]
    for name in sections():
        about = [text for text in (meaning(name), details(name)) if text]
        parts += [f"## `[{name}]`", *about, "\n".join(_rows(keys(name)))]
    return "\n\n".join(parts) + "\n"


def toml(value: Any) -> str:
    """A value as TOML writes it.  Raises TypeError for one that TOML has not."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_bare(key)} = {toml(inner)}' for key, inner in value.items())}}}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _bare(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _rows(shown: Sequence[Key]) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for key in shown:
        yield f"| `{key.name}` | {key.values} | {key.defaults} | {key.meaning} |"


def _key(name: str, info: FieldInfo, fine_tuning: Mapping[str, object]) -> Key:
    value = None if info.is_required() else info.get_default(call_default_factory=True)
    default = None if info.is_required() else "" if value is None else toml(value)
    instead = toml(fine_tuning[name]) if name in fine_tuning else None
    return Key(name, _values(info.annotation, info.metadata), default, instead, _one_line(info.description or ""))


def _values(annotation: Any, metadata: Sequence[object]) -> str:
    """Which values an annotation allows, in words."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_values(one, metadata) for one in get_args(annotation) if one is not NoneType)
    if hasattr(annotation, "__metadata__"):  # typing.Annotated
        annotation, *metadata = get_args(annotation)
    limits = [limit for one in metadata for limit in (one.metadata if isinstance(one, FieldInfo) else [one])]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(annotation))
    if get_origin(annotation) is list:
        return "a list of names"
    if get_origin(annotation) is tuple:
        return f"{len(get_args(annotation))} numbers in [0, 1]"
    kinds = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return " ".join([kinds.get(annotation, "table"), *_bounds(limits)])


def _bounds(limits: Sequence[object]) -> Iterator[str]:
    for limit in limits:
        match limit:
            case Gt(bound):
                yield f"above {bound:g}"
            case Ge(bound):
                yield f"from {bound:g}"
            case Lt(bound) if bound < 2**32:
                yield f"below {bound:g}"
            case Le(bound):
                yield f"to {bound:g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def described(kind: type[Section]) -> bool:
    """Whether every key of a table has a meaning."""
    return all(info.description for info in kind.model_fields.values())
