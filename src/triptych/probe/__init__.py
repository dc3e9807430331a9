"""Reading and editing values inside a model while it runs.

The names of a model's sites follow from its spec alone, so listing them needs no torch: the modules that read and edit
are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from triptych.probe.sites import Site, sites

if TYPE_CHECKING:
    from triptych.probe.ablation import Ablations, ablate
    from triptych.probe.attention_flow import rollout, value_weighted
    from triptych.probe.lenses import Lens, lens
    from triptych.probe.links import LinkScore, LinkTable, link
    from triptych.probe.logit_attribution import LogitAttribution, attribute_logit
    from triptych.probe.metric import Metric
    from triptych.probe.patching import PatchGrid, patch
    from triptych.probe.path_patching import path_patch
    from triptych.probe.reads_and_edits import Edit, Edits, Plan, Read, Reads, Where, add, put, zero
    from triptych.probe.reductions import Statistics
    from triptych.probe.replacements import AblatedUnit
    from triptych.probe.role_table import ROLES, HeadRole, HeadTable, RoleEffect
    from triptych.probe.roles import heads
    from triptych.probe.session import Session
    from triptych.probe.size import TraceSize
    from triptych.probe.steering import steer
    from triptych.probe.trace import Trace

__all__ = [
    "ROLES", "AblatedUnit", "Ablations", "Edit", "Edits", "HeadRole", "HeadTable", "Lens", "LinkScore",
    "LinkTable", "LogitAttribution", "Metric", "PatchGrid", "Plan", "Read", "Reads", "RoleEffect", "Session",
    "Site", "Statistics", "Trace", "TraceSize", "Where", "ablate", "add", "attribute_logit", "heads", "lens", "link",
    "patch", "path_patch", "put", "rollout", "sites", "steer", "value_weighted", "zero",
]  # fmt: skip

_NAMES = {
    "ablation": ("Ablations", "ablate"),
    "attention_flow": ("rollout", "value_weighted"),
    "lenses": ("Lens", "lens"),
    "logit_attribution": ("LogitAttribution", "attribute_logit"),
    "metric": ("Metric",),
    "patching": ("PatchGrid", "patch"),
    "replacements": ("AblatedUnit",),
    "path_patching": ("path_patch",),
    "steering": ("steer",),
    "session": ("Session",),
    "trace": ("Trace",),
    "reductions": ("Statistics",),
    "size": ("TraceSize",),
    "roles": ("heads",),
    "role_table": ("ROLES", "HeadRole", "HeadTable", "RoleEffect"),
    "links": ("LinkScore", "LinkTable", "link"),
    "reads_and_edits": ("Edit", "Edits", "Plan", "Read", "Reads", "Where", "add", "put", "zero"),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # found without this function from now on
    return value
