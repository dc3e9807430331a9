"""Reading and editing values inside a model while it runs.

The names of a model's sites follow from its spec alone, so listing them needs no torch: the modules that read and edit
are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.errors import MissingNameError
from triptych.migration_hints import of_package
from .sites import Site, sites

if TYPE_CHECKING:
    from .ablation import AblatedUnit, Ablations, ablate
    from .apply_plan import Session
    from .lenses import Lens, lens, rollout, value_weighted
    from .links import LinkScore, LinkTable, link
    from .logit_attribution import LogitAttribution, attribute_logit
    from .metric import Metric
    from .patching import PatchGrid, patch, steer
    from .path_patching import path_patch
    from .reads_and_edits import Edit, Edits, Plan, Read, Reads, Where, add, put, zero
    from .roles import ROLES, HeadRole, HeadTable, RoleEffect, heads
    from .trace import Trace
    from .trace_size import TraceSize
    from .trace_values import Statistics

__all__ = [
    "ROLES", "AblatedUnit", "Ablations", "Edit", "Edits", "HeadRole", "HeadTable", "Lens", "LinkScore",
    "LinkTable", "LogitAttribution", "Metric", "PatchGrid", "Plan", "Read", "Reads", "RoleEffect", "Session",
    "Site", "Statistics", "Trace", "TraceSize", "Where", "ablate", "add", "attribute_logit", "heads", "lens", "link",
    "patch", "path_patch", "put", "rollout", "sites", "steer", "value_weighted", "zero",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise MissingNameError(f"module {__name__!r} has no attribute {name!r}{of_package(name, __all__)}")
    from . import (
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
