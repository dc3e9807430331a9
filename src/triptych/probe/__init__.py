"""Reading and editing values inside a model while it runs.

The names of a model's sites follow from its spec alone, so listing them needs no torch: the modules that read and edit
are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.errors import MissingNameError
from triptych.migration_hints import of_package
from triptych.probe.sites import Site, sites

if TYPE_CHECKING:
    from triptych.probe.ablation import AblatedUnit, Ablations, ablate
    from triptych.probe.apply_plan import Session
    from triptych.probe.lenses import Lens, lens, rollout, value_weighted
    from triptych.probe.links import LinkScore, LinkTable, link
    from triptych.probe.logit_attribution import LogitAttribution, attribute_logit
    from triptych.probe.metric import Metric
    from triptych.probe.patching import PatchGrid, patch, steer
    from triptych.probe.path_patching import path_patch
    from triptych.probe.reads_and_edits import Edit, Edits, Plan, Read, Reads, Where, add, put, zero
    from triptych.probe.roles import ROLES, HeadRole, HeadTable, RoleEffect, heads
    from triptych.probe.trace import Trace
    from triptych.probe.trace_size import TraceSize
    from triptych.probe.trace_values import Statistics

__all__ = [
    "ROLES", "AblatedUnit", "Ablations", "Edit", "Edits", "HeadRole", "HeadTable", "Lens", "LinkScore",
    "LinkTable", "LogitAttribution", "Metric", "PatchGrid", "Plan", "Read", "Reads", "RoleEffect", "Session",
    "Site", "Statistics", "Trace", "TraceSize", "Where", "ablate", "add", "attribute_logit", "heads", "lens", "link",
    "patch", "path_patch", "put", "rollout", "sites", "steer", "value_weighted", "zero",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise MissingNameError(f"module {__name__!r} has no attribute {name!r}{of_package(name, __all__)}")
    from triptych.probe import (
        ablation,
        apply_plan,
        lenses,
        links,
        logit_attribution,
        metric,
        patching,
        path_patching,
        reads_and_edits,
        roles,
        trace,
        trace_size,
    )

    modules = (ablation, lenses, links, logit_attribution, metric, patching, path_patching, reads_and_edits,
             roles, apply_plan, trace_size, trace)  # fmt: skip
    value = next(vars(module)[name] for module in modules if name in vars(module))
    globals()[name] = value  # the next use does not come here
    return value
