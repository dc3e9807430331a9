"""The base of every part: a frozen dataclass that knows its tensors and its children by name.

The spec tree, the module tree and probe names share one dotted name: the field `q` of the attention in block 3 of
the decoder is `decoder.blocks.3.attn.q` in all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import dataclass_transform

Shapes = dict[str, tuple[int, ...]]


def part_name(part: object) -> str:
    """The name of a part in files and messages: its class without `Spec`."""
    return type(part).__name__.removesuffix("Spec")


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a model as data.  Sub-parts are fields: a part, a tuple of parts, or a dict of them.

    Each subclass is a frozen dataclass whose fields are keywords, without a decorator of its own.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

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
