"""Reading and editing values inside a model while it runs.

The names of a model's sites follow from its spec alone, so listing them needs no torch: the modules that read and edit
are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from triptych.probe.sites import Site, sites

if TYPE_CHECKING:
    from triptych.probe.links import LinkScore, LinkTable
    from triptych.probe.reads_and_edits import Edit, Edits, Plan, Read, Reads, Where, add, put, zero
    from triptych.probe.role_table import ROLES, HeadRole, HeadTable, RoleEffect
    from triptych.probe.session import Session
    from triptych.probe.trace import Trace

__all__ = [
    "ROLES", "Edit", "Edits", "HeadRole", "HeadTable", "LinkScore", "LinkTable", "Plan", "Read", "Reads", "RoleEffect",
    "Session", "Site", "Trace", "Where", "add", "put", "sites", "zero",
]  # fmt: skip

_NAMES = {
    "session": ("Session",),
    "trace": ("Trace",),
    "role_table": ("ROLES", "HeadRole", "HeadTable", "RoleEffect"),
    "links": ("LinkScore", "LinkTable"),
    "reads_and_edits": ("Edit", "Edits", "Plan", "Read", "Reads", "Where", "add", "put", "zero"),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # found without this function from now on
    return value
