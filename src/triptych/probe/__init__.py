"""Looking inside and changing things while a model runs.

What a model's sites are called follows from its spec alone, so that listing them does not wait for torch: what reads
and edits is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from triptych.probe.sites import Site, sites

if TYPE_CHECKING:
    from triptych.probe.plan import Edit, Plan, Read, Where, add, put, zero
    from triptych.probe.session import Session
    from triptych.probe.trace import Trace

__all__ = ["Edit", "Plan", "Read", "Session", "Site", "Trace", "Where", "add", "put", "sites", "zero"]

_HOME = {"session": ("Session",), "trace": ("Trace",), "plan": ("Edit", "Plan", "Read", "Where", "add", "put", "zero")}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value
