"""Finds the family that reads a `model_type` or a GGUF architecture.

Files are imported in the order of how much their names resemble the one that is looked for, and the search ends at the
one that reads it: opening one config costs the import of one family or a few, not of all.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module

from triptych.errors import CheckpointError, ConfigError, nearest, shown
from triptych.families.family import Family
from triptych.spec import ModelSpec

#: Types of models that need a part which is not here, with its name.  Of LLaVA the text model is read (`wrapped`).
MISSING = {
    "blip-2": "a Q-Former, whose learned queries read an image, and an input slot that puts their vectors between the "
    "tokens of a decoder",
}


def all_families() -> tuple[Family, ...]:
    """The family of every family file in this package."""
    return tuple(_by_resemblance(""))


def find(model_type: str, where: str = "config.json") -> Family:
    """The family that reads HF configs of this `model_type`.  Raises ConfigError with the nearest name."""
    return _find(model_type, lambda family: family.hf_types, f"{where}: model_type")


def find_gguf(arch: str, where: str = "GGUF") -> Family:
    """The family that reads GGUF files of this architecture.  Raises ConfigError with the nearest name."""
    return _find(arch, lambda family: family.gguf_archs, f"{where}: architecture")


def gguf_name(model: ModelSpec) -> str:
    """What GGUF calls the architecture of `model`.  Raises CheckpointError where it has no name for it."""
    family = find(model.family)
    if family.gguf_arch is not None:
        return family.gguf_arch(model)
    if model.family not in family.gguf_names and model.family not in family.gguf_archs:
        raise CheckpointError(f"GGUF has no names for models of family {model.family!r}; convert it to hf")
    return family.gguf_names.get(model.family, model.family)


def _find(name: str, names: Callable[[Family], Collection[str]], what: str) -> Family:
    for family in _by_resemblance(name):
        if name in names(family):
            return family
    if name in MISSING:
        raise ConfigError(f"{what} {shown(name)} needs a part that is missing here: {MISSING[name]}")
    known = {one for family in all_families() for one in names(family)}
    raise ConfigError(f"{what} {shown(name)} is not one of {', '.join(sorted(known))}{nearest(name, known)}")


def _by_resemblance(name: str) -> Iterator[Family]:
    for file in sorted(_files(), key=lambda file: -SequenceMatcher(None, file, name).ratio()):
        family = _family(file)
        if family is not None:
            yield family


@cache
def _family(file: str) -> Family | None:
    return Family.of(import_module(f"triptych.families.{file}"))


@cache
def _files() -> tuple[str, ...]:
    package = import_module("triptych.families")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))
