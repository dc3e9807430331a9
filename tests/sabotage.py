"""Ways to get a transformer slightly wrong, one small function each.  None may pass the comparisons it is aimed at.

A sabotage is handed a loaded model and a `MonkeyPatch`, through which alone it breaks things, so that all of it is
undone.  `@parity(variant, slots)` is measured against the reference model of that name in `references`, `@cached(...)`
by cached against uncached.  A slot is named by its part and field, `Rope.pairing`, with the value where the field is a
choice (`MLP.act:relu`), or by the part alone where the arithmetic of the part itself is what breaks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from triptych.model import Model
from triptych.spec.part import Part

Break = Callable[[Model, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Sabotage:
    """`breaks` applied to the model of reference `variant`; `slots` are the parts and fields it gets wrong."""

    name: str
    variant: str
    slots: tuple[str, ...]
    breaks: Break

    @contextmanager
    def applied(self, model: Model) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.breaks(model, patch)
            yield


PARITY: list[Sabotage] = []
CACHED: list[Sabotage] = []


def parity(variant: str, *slots: str) -> Callable[[Break], Break]:
    return _listed(PARITY, variant, slots)


def cached(variant: str, *slots: str) -> Callable[[Break], Break]:
    return _listed(CACHED, variant, slots)


def _listed(into: list[Sabotage], variant: str, slots: tuple[str, ...]) -> Callable[[Break], Break]:
    def add(breaks: Break) -> Break:
        into.append(Sabotage(breaks.__name__, variant, slots, breaks))
        return breaks

    return add


def of(model: Model, *kinds: type[Part]) -> Iterator[Any]:
    """Every module made from such a part."""
    return (module for module in model.module.modules() if isinstance(getattr(module, "spec", None), kinds))


def change(model: Model, patch: pytest.MonkeyPatch, kind: type[Part], **fields: Any) -> None:
    """Other values in the spec that every such module computes by."""
    for module in of(model, kind):
        patch.setattr(module, "spec", replace(module.spec, **fields))


def changed(name: str, kind: type[Part], *variants: str, slot: str | None = None, **fields: Any) -> None:
    """A sabotage measured on these variants: other values in the spec that every such module computes by.

    It gets `slot` wrong, which is its first field where nothing else is said.
    """
    _listed_each(name, kind, slot, variants, fields, lambda model, patch: change(model, patch, kind, **fields))


def filled(name: str, kind: type[Part], *variants: str, slot: str | None = None, **children: Any) -> None:
    """The same with something else, or None, in the slots of every such module."""

    def breaks(model: Model, patch: pytest.MonkeyPatch) -> None:
        for child, value in children.items():
            put(model, patch, kind, child, value)

    _listed_each(name, kind, slot, variants, children, breaks)


def _listed_each(
    name: str, kind: type[Part], slot: str | None, variants: tuple[str, ...], fields: dict[str, Any], breaks: Break
) -> None:
    slot = slot or f"{kind.__name__.removesuffix('Spec')}.{next(iter(fields))}"
    PARITY.extend(Sabotage(name, variant, (slot,), breaks) for variant in variants)


def put(model: Model, patch: pytest.MonkeyPatch, kind: type[Part], slot: str, value: Any) -> None:
    """Something else, or None, in a slot of every such module."""
    for module in of(model, kind):
        fill(module, patch, slot, value)


def fill(module: torch.nn.Module, patch: pytest.MonkeyPatch, slot: str, value: Any) -> None:
    """Modules keep their children and parameters outside `__dict__`, where `setattr` could not be undone."""
    held = module._modules if slot in module._modules else module._parameters
    patch.setitem(held, slot, value)


def regroup(stack: Any, patch: pytest.MonkeyPatch) -> None:
    """Let the layers share their attention state as their specs now say."""
    patch.setattr(stack, "own_groups", stack.own_groups)  # to be put back as they were
    patch.setattr(stack, "cross_groups", stack.cross_groups)
    stack.group()
