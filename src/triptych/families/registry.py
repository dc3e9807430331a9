"""Which family file answers to a name.

Files whose names are like the one asked for are looked into first, and the search ends at the one that has it: reading
one config costs the import of one family or a few, not of all.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module
from types import ModuleType

from triptych.errors import CheckpointError, ConfigError, nearest, shown
from triptych.spec import Model


def modules() -> tuple[ModuleType, ...]:
    """Every family file of this package."""
    return tuple(_nearest_first(""))


def find(model_type: str, where: str = "config.json") -> ModuleType:
    """The family that reads HF configs of this `model_type`.  Raises ConfigError with the nearest name."""
    return _find(model_type, "hf_types", f"{where}: model_type")


def find_gguf(arch: str, where: str = "GGUF") -> ModuleType:
    """The family that reads GGUF files of this architecture.  Raises ConfigError with the nearest name."""
    return _find(arch, "gguf_archs", f"{where}: architecture")


def gguf_name(model: Model) -> str:
    """What GGUF calls the architecture of `model`.  Raises CheckpointError where it has no name for it."""
    family = find(model.family)
    if hasattr(family, "gguf_arch"):
        return str(family.gguf_arch(model))
    names: dict[str, str] = getattr(family, "gguf_names", {})
    if model.family not in names and model.family not in getattr(family, "gguf_archs", ()):
        raise CheckpointError(f"GGUF has no names for models of family {model.family!r}; convert it to hf")
    return names.get(model.family, model.family)


def _find(name: str, attribute: str, what: str) -> ModuleType:
    for module in _nearest_first(name):
        if name in getattr(module, attribute, ()):
            return module
    known = {key for module in modules() for key in getattr(module, attribute, ())}
    raise ConfigError(f"{what} {shown(name)} is not one of {', '.join(sorted(known))}{nearest(name, known)}")


def _nearest_first(name: str) -> Iterator[ModuleType]:
    for file in sorted(_files(), key=lambda file: -SequenceMatcher(None, file, name).ratio()):
        module = import_module(f"triptych.families.{file}")
        if hasattr(module, "hf_types"):  # the others are what families share
            yield module


@cache
def _files() -> tuple[str, ...]:
    package = import_module("triptych.families")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))
