"""Reading and editing values inside a model while it runs.

The names of a model's sites follow from its spec alone, so listing them needs no torch: the modules that read and edit
are imported on first use.
"""

from __future__ import annotations

from types import ModuleType
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


def __getattr__(name: str) -> object:
    home: ModuleType
    match name:
        case "Ablations" | "ablate":
            import triptych.probe.ablation as home
        case "AblatedUnit":
            import triptych.probe.replacements as home
        case "rollout" | "value_weighted":
            import triptych.probe.attention_flow as home
        case "Lens" | "lens":
            import triptych.probe.lenses as home
        case "LogitAttribution" | "attribute_logit":
            import triptych.probe.logit_attribution as home
        case "Metric":
            import triptych.probe.metric as home
        case "PatchGrid" | "patch":
            import triptych.probe.patching as home
        case "path_patch":
            import triptych.probe.path_patching as home
        case "steer":
            import triptych.probe.steering as home
        case "Session":
            import triptych.probe.session as home
        case "Trace":
            import triptych.probe.trace as home
        case "Statistics":
            import triptych.probe.reductions as home
        case "TraceSize":
            import triptych.probe.size as home
        case "heads":
            import triptych.probe.roles as home
        case "ROLES" | "HeadRole" | "HeadTable" | "RoleEffect":
            import triptych.probe.role_table as home
        case "LinkScore" | "LinkTable" | "link":
            import triptych.probe.links as home
        case "Edit" | "Edits" | "Plan" | "Read" | "Reads" | "Where" | "add" | "put" | "zero":
            import triptych.probe.reads_and_edits as home
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(home, name)  # the next use does not come here
    return value
