"""Triptych: one transformer, three panels.

The names below are the public face of the package.  Each is imported when it is first used, so `import triptych`
costs nothing and what needs no torch does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.attention import attend, attend_reference
    from triptych.errors import (
        CheckpointError,
        ConfigError,
        FetchError,
        InputError,
        ProbeError,
        TextError,
        TriptychError,
    )
    from triptych.generate import Generation
    from triptych.model import Model, create, load
    from triptych.probe import Edit, Read, Trace
    from triptych.spec.masks import (
        Mask,
        block_sparse,
        causal,
        dense,
        full,
        keys,
        prefix,
        same_document,
        window,
    )

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Edit",
    "FetchError",
    "Generation",
    "InputError",
    "Mask",
    "Model",
    "ProbeError",
    "Read",
    "TextError",
    "Trace",
    "TriptychError",
    "__version__",
    "attend",
    "attend_reference",
    "block_sparse",
    "causal",
    "create",
    "dense",
    "full",
    "keys",
    "load",
    "prefix",
    "same_document",
    "train",
    "window",
]

_HOME = {
    "triptych.model": ("load", "create", "Model"),
    "triptych.generate": ("Generation",),
    "triptych.attention": ("attend", "attend_reference"),
    "triptych.probe": ("Read", "Edit", "Trace"),
    "triptych.errors": (
        "TriptychError",
        "InputError",
        "ConfigError",
        "CheckpointError",
        "TextError",
        "ProbeError",
        "FetchError",
    ),
    "triptych.spec.masks": (
        "Mask",
        "full",
        "causal",
        "window",
        "prefix",
        "same_document",
        "block_sparse",
        "keys",
        "dense",
    ),
}
_CALLABLE_PACKAGES = ("train",)  # subpackages that are functions as well
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return import_module(f"triptych.{name}")
    if name not in _MODULE_OF:
        of_package = import_module("triptych.other_libraries").of_package
        raise AttributeError(f"module 'triptych' has no attribute {name!r}{of_package(name, __all__)}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
