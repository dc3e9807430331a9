"""Finds the family that reads a `model_type` or a GGUF architecture, among those of all family files."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from pathlib import Path

from triptych.errors import CheckpointError, ConfigError, nearest, shown
from triptych.families.family import Family
from triptych.spec import ModelSpec

#: Types of models that need a part which is not here, with its name.  Of LLaVA the text model is read (`wrapped`).
MISSING = {
    "blip-2": "a Q-Former, whose learned queries read an image, and an input slot that puts their vectors between the "
    "tokens of a decoder",
}


@cache
def all_families() -> tuple[Family, ...]:
    """The family of every family file in this folder."""
    files = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = (import_module(f"triptych.families.{file}") for file in files)
    return tuple(family for family in map(Family.of, modules) if family is not None)


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
    by_name = {other: family for family in all_families() for other in names(family)}
    if name in by_name:
        return by_name[name]
    if name in MISSING:
        raise ConfigError(f"{what} {shown(name)} needs a part that is missing here: {MISSING[name]}")
    raise ConfigError(f"{what} {shown(name)} is not one of {', '.join(sorted(by_name))}{nearest(name, by_name)}")
