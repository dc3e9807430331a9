"""Triptych: encoders, decoders and encoder-decoders from one definition, to train, run, inspect and count.

The names below are the public API.  Each is imported when it is first used, so `import triptych` loads no torch.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from triptych import injected_functions
from triptych.errors import (
    CheckpointError,
    ConfigError,
    FetchError,
    InputError,
    MissingNameError,
    ProbeError,
    TextError,
    TriptychError,
)

if TYPE_CHECKING:
    from triptych import train
    from triptych.attention import attend, attend_reference
    from triptych.generate import Generation
    from triptych.model import Model, create, load
    from triptych.probe import Edit, Read, Trace
    from triptych.spec.masks import Mask, block_sparse, causal, dense, full, keys, prefix, same_document, window

__version__ = "0.1.0"

# Read by GNU OpenMP when torch loads, so it acts where this package is imported before torch.  The threads otherwise
# spin for milliseconds at every barrier, and one other busy process on two cores then makes a small matmul a hundred
# times slower; a few microseconds of spinning keep small operations fast on a quiet machine.  Where other processes
# keep all cores busy, threads that sleep at once make training about three times as fast (docs/log.md).
try:
    _busy = os.getloadavg()[0] >= (os.cpu_count() or 1)
except (AttributeError, OSError):  # Windows has no load average, and a container may hide it
    _busy = False
os.environ.setdefault("GOMP_SPINCOUNT", "0" if _busy else "10000")

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


def __getattr__(name: str) -> Any:
    module: ModuleType
    match name:
        case "train":  # a package, which is a function as well
            import triptych.train as module

            return module
        case "load" | "create" | "Model":
            import triptych.model as module
        case "Generation":
            import triptych.generate as module
        case "attend" | "attend_reference":
            import triptych.attention as module
        case "Read" | "Edit" | "Trace":
            import triptych.probe as module
        case _ if name in __all__:
            import triptych.spec.masks as module
        case _:
            from triptych.migration_hints import of_package

            raise MissingNameError(f"module 'triptych' has no attribute {name!r}{of_package(name, __all__)}")
    value = globals()[name] = getattr(module, name)  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _html_of(result: object) -> str:
    from triptych.page.notebook import display

    return display(result)


def _train(recipe: Any, **options: Any) -> Model:
    from triptych.model import Model

    return Model.trained(recipe, **options)


injected_functions.html_of, injected_functions.train = _html_of, _train
