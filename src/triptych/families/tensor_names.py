"""The names of a model's tensors in HF and GGUF files, from its family's table."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from triptych.mapping import tensor_plan as plans
from triptych.mapping.gguf_metadata import TENSORS
from triptych.mapping.tensor_plan import TensorLoad, TensorPlan
from triptych.mapping.weight_table import FileFormat, table
from triptych.spec import ModelSpec
from .multimodal_text import reasons_left_out, text_name
from .registry import find

_DIVISORS = table("".join(f"- - {name}.weight # in the config\n" for name in TENSORS))


def plan(
    spec: ModelSpec,
    kind: FileFormat,
    stored: Collection[str],
    *,
    ignore: Collection[str] = (),
    where: str = "checkpoint",
) -> TensorPlan:
    """The plan of filling `spec` from a checkpoint of `kind`; see `triptych.mapping.tensor_plan.plan`.

    `ignore` are patterns (`*.inv_freq`) of tensors to leave out.  They may name config keys too, as in
    `load(..., ignore=[...])`; those match no tensor.
    """
    family = find(spec.family)
    endings = family.renames

    def rename(name: str) -> str:
        name = text_name(name) if kind == "hf" else name
        old = next((old for old in endings if name.endswith(old)), "")
        return name.removesuffix(old) + endings.get(old, "")

    ignored = {name: "as asked" for name in stored if any(fnmatchcase(name, pattern) for pattern in ignore)}
    return plans.plan(
        spec,
        family.weights + (_DIVISORS if kind == "gguf" else ()),
        kind,
        stored,
        prefix=family.prefix if kind == "hf" else "",
        rename=rename,
        ignored=reasons_left_out(stored) | ignored,
        where=where,
    )


def save_plan(spec: ModelSpec, kind: FileFormat = "hf") -> tuple[TensorLoad, ...]:
    """The name and the operations under which each parameter of `spec` is written; see `mapping.tensor_plan`."""
    family = find(spec.family)
    prefix = family.prefix if kind == "hf" else ""
    return plans.save_plan(spec, family.weights, kind, prefix=prefix, unprefixed=family.unprefixed)
