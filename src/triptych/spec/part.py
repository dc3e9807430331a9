"""The base of every part: a frozen dataclass that knows its tensors and its children by name.

The spec tree, the module tree and probe names share one dotted name: the field `q` of the attention in block 3 of
the decoder is `decoder.blocks.3.attn.q` in all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from math import inf
from typing import Any, dataclass_transform, get_args

from triptych.arguments import alternatives
from triptych.errors import ConfigError, shown

Shapes = dict[str, tuple[int, ...]]


def part_name(part: object) -> str:
    """The name of a part in files and messages: its class without `Spec`."""
    return type(part).__name__.removesuffix("Spec")


def check_fields(part: Any) -> None:
    """Raise ConfigError for a field of another type than its annotation, or out of its range: numbers are at least 0,
    integers at least 1 where the default is neither 0 nor None, and a dropout at most 1."""
    for name, kinds, low in _rules(part.__class__):
        value, high = getattr(part, name), 1 if name == "dropout" else inf
        fits = not kinds or any(fits(value) for _, fits in kinds)
        if not fits or (isinstance(value, int | float) and not low <= value <= high):
            wanted = f"from {low} to {high}" if fits else " or ".join(filter(None, dict(kinds)))
            raise ConfigError(f"{part_name(part)}: {name}={shown(value)} must be {wanted}")


@cache
def _rules(part: type) -> list[tuple[str, Any, int]]:
    """The fields of a class: the name and checks of each, and the least number that it takes."""
    rules = []
    for field in fields(part):
        text = re.sub("<class '|'>", "", str(field.type))
        known = {getattr(kind, "__name__", ""): kind for kind in get_args(field.type) or [field.type]}
        kinds = alternatives(text, known) or [("a tuple", tuple.__instancecheck__)] * text.startswith("tuple")
        rules.append((field.name, kinds, text.startswith("int") * bool(field.default)))
    return rules


def check_widths(where: str, width: int | None, *parts: Any) -> None:
    """Raise ConfigError for a part in a row of them that reads another width than the one before it gives, the first
    `width`; what is None, or has no width, passes its input on."""
    for part in parts:
        reads = getattr(part, "inputs", getattr(part, "width", width))
        if width not in (None, reads):
            raise ConfigError(f"{where}: {part_name(part)} reads {reads} numbers a token, where there are {width}")
        width = getattr(part, "outputs", reads)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a model as data.  Sub-parts are fields: a part, a tuple of parts, or a dict of them.

    Each subclass is a frozen dataclass whose fields are keywords, without a decorator of its own.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        self._agree()

    def _agree(self) -> None:
        """Raise ConfigError for fields that do not fit each other."""

    def tensors(self) -> Shapes:
        """The parameters this part owns itself, without its children's."""
        return {}

    def children(self) -> Iterator[tuple[str, Part]]:
        """Sub-parts with their dotted names relative to this one, in field order."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Part):
                yield field.name, value
            elif isinstance(value, tuple):
                yield from ((f"{field.name}.{i}", part) for i, part in enumerate(value) if isinstance(part, Part))
            elif isinstance(value, dict):
                yield from ((f"{field.name}.{key}", part) for key, part in value.items() if isinstance(part, Part))

    def shapes(self) -> Shapes:
        """Every parameter under this part: dotted name -> shape."""
        shapes = dict(self.tensors())
        for name, part in self.children():
            shapes |= {f"{name}.{key}": shape for key, shape in part.shapes().items()}
        return shapes

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Part]]:
        """This part and all below it, with dotted names."""
        yield prefix, self
        for name, part in self.children():
            yield from part.walk(f"{prefix}.{name}" if prefix else name)
