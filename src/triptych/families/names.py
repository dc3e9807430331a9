"""The names of a model's tensors in a file, by its family's table."""

from __future__ import annotations

from collections.abc import Collection

from triptych.families.catalogue import find
from triptych.mapping import plan as plans
from triptych.mapping.from_gguf import TENSORS
from triptych.mapping.plan import Load, Plan
from triptych.mapping.table import Kind, table
from triptych.spec import Model

_DIVISORS = table("".join(f"- - {name}.weight # in the config\n" for name in TENSORS))


def plan(
    spec: Model,
    kind: Kind,
    stored: Collection[str],
    *,
    ignore: Collection[str] = (),
    where: str = "checkpoint",
) -> Plan:
    """How the tensors of a checkpoint of `kind` fill `spec`; see `triptych.mapping.plan.plan`.

    `ignore` may name config keys too, as in `load(..., ignore=[...])`; they match no tensor.
    """
    family = find(spec.family)
    return plans.plan(
        spec,
        family.weights + (_DIVISORS if kind == "gguf" else ()),
        kind,
        stored,
        prefix=getattr(family, "prefix", "") if kind == "hf" else "",
        renames=getattr(family, "renames", {}),
        ignore=ignore,
        where=where,
    )


def save_plan(spec: Model, kind: Kind = "hf") -> tuple[Load, ...]:
    """Under which names, and how, the parameters of `spec` are written; see `triptych.mapping.plan.save_plan`."""
    family = find(spec.family)
    prefix = getattr(family, "prefix", "") if kind == "hf" else ""
    return plans.save_plan(spec, family.weights, kind, prefix=prefix, unprefixed=getattr(family, "unprefixed", ()))
