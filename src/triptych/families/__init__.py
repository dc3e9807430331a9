"""Model families: one file each, found by what it says it reads.  Nothing here imports torch.

A family file gives

    hf_types, gguf_archs        the `model_type`s and GGUF architectures it answers to
    config(keys) -> Model       an HF config as a spec; every key it reads is recorded
    weights                     the reversible table of names (`triptych.families.weights`)
    prefix                      the base model's prefix in HF names, which a file may have or lack
    ignore                      HF keys it need not read, each with a reason beside it
    renames                     old endings of tensor names
    from_gguf(keys) -> dict     GGUF metadata as an HF config
    overflows_fp16              True where real checkpoints leave the range of fp16
    gguf_names                  GGUF architecture of a `model_type` that has another name there
    to_gguf(model) -> dict      GGUF keys that say more than, or other than, `triptych.families.to_gguf`

of which only `hf_types`, `config` and `weights` are needed.
"""

from __future__ import annotations

import pkgutil
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from triptych.errors import CheckpointError, ConfigError, nearest
from triptych.families import gguf, to_gguf, weights
from triptych.families.keys import Keys, shown
from triptych.families.triptych import to_config
from triptych.families.weights import Load, Plan
from triptych.spec import Model, Pooling

__all__ = [
    "Keys",
    "Load",
    "Plan",
    "find",
    "find_gguf",
    "plan",
    "read_config",
    "read_gguf",
    "save_plan",
    "to_config",
    "write_gguf",
]

_DIVISORS = weights.table("".join(f"- - {name}.weight # in the config\n" for name in gguf.TENSORS))


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every family file of this package."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [import_module(f"{__name__}.{name}") for name in names]
    return tuple(module for module in modules if hasattr(module, "hf_types"))


def find(model_type: str, where: str = "config.json") -> ModuleType:
    """The family that reads HF configs of this `model_type`.  Raises ConfigError with the nearest name."""
    return _find(model_type, "hf_types", f"{where}: model_type")


def find_gguf(arch: str, where: str = "GGUF") -> ModuleType:
    """The family that reads GGUF files of this architecture.  Raises ConfigError with the nearest name."""
    return _find(arch, "gguf_archs", f"{where}: architecture")


def _find(name: str, attribute: str, what: str) -> ModuleType:
    known = {key: module for module in modules() for key in getattr(module, attribute, ())}
    if name not in known:
        raise ConfigError(f"{what} {shown(name)} is not one of {', '.join(sorted(known))}{nearest(name, known)}")
    return known[name]


def read_config(
    hf: Mapping[str, Any],
    *,
    stored: Collection[str] | None = None,
    ignore: Collection[str] = (),
    where: str = "config.json",
) -> Model:
    """The spec of an HF config.

    `stored` are the checkpoint's tensor names where there is a checkpoint: some facts (BERT's pooler, T5's untied
    head) are written nowhere else.  `ignore` are keys the caller knows cannot matter.  Raises ConfigError for a key
    that is missing, out of range, or not understood.
    """
    if not isinstance(hf, Mapping):
        raise ConfigError(f"{where}: must be a JSON object")
    keys = Keys(hf, where, stored)
    family = find(keys.str("model_type"), where)
    try:
        spec: Model = family.config(keys)
    except ConfigError as error:  # a part's own complaint does not know the file
        raise (error if str(error).startswith(where) else keys.error(str(error))) from None
    if isinstance(spec.head, Pooling):
        spec = replace(spec, head=_pooling(keys, spec.head))
    keys.finish({*ignore, *getattr(family, "ignore", ())})
    return spec


def _pooling(keys: Keys, head: Pooling) -> Pooling:
    """How a bare encoder pools.  HF has no key for it and keeps unknown ones, so ours travels in its config."""
    given = keys.table("triptych_pooling")
    if given is None:
        return head
    modes: dict[str, Literal["mean", "first", "dense"]] = {"mean": "mean", "first": "first", "dense": "dense"}
    mode = given.choice("mode", modes, default="mean")
    if mode == "dense" and head.dense is None:
        raise given.error("mode 'dense' needs the pooler, which this checkpoint lacks")
    normalize = given.bool("normalize", default=False)
    given.finish()
    return replace(head, mode=mode, normalize=normalize)


def read_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    read: Callable[[str], Sequence[float]] | None = None,
    ignore: Collection[str] = (),
    where: str = "GGUF",
) -> tuple[dict[str, Any], Model]:
    """The HF config a GGUF file would have had, and its spec.

    `shapes` are the tensors of the file, outermost dimension first; `read` gives the values of a small one (Llama 3
    keeps its RoPE divisors in a tensor) and may be left out where only shapes matter.  Raises ConfigError for an
    unknown architecture, and for a key under its prefix that is not understood.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError(f"{where}: general.architecture must be a string, not {shown(arch)}")
    family = find_gguf(arch, where)
    keys = Keys(_gguf_keys(metadata, arch, shapes, read), where, shapes)
    vocab = keys.int("vocab_size")
    config: dict[str, Any] = {"model_type": arch} | dict(family.from_gguf(keys)) | {"vocab_size": vocab}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    keys.finish(ignore, metadata=("model_type", *gguf.TENSORS))
    return config, read_config(config, stored=shapes, where=where)


def write_gguf(model: Model) -> tuple[dict[str, Any], to_gguf.Tensors]:
    """The metadata of a GGUF file of `model`, and the small tensors that belong to them: `read_gguf` gives it back.

    Raises CheckpointError where GGUF has no names for the family or no words for something the model computes.
    """
    family = find(model.family)
    arch = to_gguf.architecture(family, model.family)
    keys, tensors = to_gguf.header(model, arch, family)
    metadata = {"general.architecture": arch} | keys
    shapes: dict[str, tuple[int, ...]] = {load.source: load.source_shape for load in save_plan(model, "gguf")}
    shapes |= {name: (len(values),) for name, values in tensors.items()}
    try:
        problem = to_gguf.lost(model, read_gguf(metadata, shapes, read=tensors.__getitem__)[1])
    except ConfigError as error:
        problem = str(error).removeprefix("GGUF: ").partition(";")[0]
    if problem:
        raise CheckpointError(f"GGUF's {arch!r} cannot tell this model: {problem}; convert it to hf")
    return metadata, tensors


def _gguf_keys(
    metadata: Mapping[str, Any],
    arch: str,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Sequence[float]] | None,
) -> dict[str, Any]:
    """The keys under the architecture's prefix, without it, and what only the tensors tell."""
    start = f"{arch}."
    found: dict[str, Any] = {
        name.removeprefix(start): _decimal(value) if isinstance(value, float) else value
        for name, value in metadata.items()
        if name.startswith(start)
    }
    for key, tensor in {"vocab_size": "token_embd.weight", "token_types": "token_types.weight"}.items():
        if tensor in shapes:
            found[key] = shapes[tensor][0]
    for name in gguf.TENSORS:
        if (tensor := f"{name}.weight") in shapes:
            found[name] = [float(x) for x in (read(tensor) if read else [1.0] * shapes[tensor][0])]
    return found | {"model_type": arch}


def _decimal(value: float) -> float:
    """The shortest decimal that is stored as the same float32: 1e-5 for 0.0000099999997473787516."""
    single = struct.pack("<f", value)
    return next(short for n in range(1, 18) if struct.pack("<f", short := float(f"{value:.{n}g}")) == single)


def plan(
    spec: Model,
    kind: weights.Kind,
    stored: Collection[str],
    *,
    ignore: Collection[str] = (),
    where: str = "checkpoint",
) -> Plan:
    """How the tensors of a checkpoint of `kind` fill `spec`; see `triptych.families.weights.plan`.

    `ignore` may name config keys too, as in `load(..., ignore=[...])`; they match no tensor.
    """
    family = find(spec.family)
    return weights.plan(
        spec,
        family.weights + (_DIVISORS if kind == "gguf" else ()),
        kind,
        stored,
        prefix=getattr(family, "prefix", "") if kind == "hf" else "",
        renames=getattr(family, "renames", {}),
        ignore=ignore,
        where=where,
    )


def save_plan(spec: Model, kind: weights.Kind = "hf") -> tuple[Load, ...]:
    """Under which names, and how, the parameters of `spec` are written; see `triptych.families.weights.save_plan`."""
    family = find(spec.family)
    prefix = getattr(family, "prefix", "") if kind == "hf" else ""
    return weights.save_plan(spec, family.weights, kind, prefix=prefix)
