"""Reads HF configs and GGUF metadata as specs, by the family that they name, and writes GGUF metadata."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from triptych.errors import CheckpointError, ConfigError, shown
from triptych.mapping import ConfigKeys, Values, gguf_metadata
from triptych.spec import ModelSpec, PoolingSpec
from .multimodal_text import text_config
from .registry import find, find_gguf, gguf_name
from .tensor_names import save_plan


def read_config(
    hf: Mapping[str, Any],
    *,
    stored: Collection[str] | None = None,
    ignore: Collection[str] = (),
    where: str = "config.json",
) -> ModelSpec:
    """The spec of an HF config.

    `stored` are the checkpoint's tensor names where there is a checkpoint: some facts (BERT's pooler, T5's untied
    head) are only visible there.  `ignore` are keys that the caller declares irrelevant.  Raises ConfigError for a key
    that is missing, out of range, or not understood.
    """
    if not isinstance(hf, Mapping) or not all(isinstance(key, str) for key in hf):
        raise ConfigError(f"{where}: must be a JSON object, not {shown(hf)}")
    hf = text_config(hf, where, ignore)
    family = find(ConfigKeys(hf, where).str("model_type"), where)
    keys = ConfigKeys({**family.ids, **hf}, where, stored, ignore)
    try:
        spec = family.config(keys)
    except ConfigError as error:  # an error of a part does not name the file
        raise (error if str(error).startswith(where) else keys.error(str(error))) from None
    if isinstance(spec.head, PoolingSpec):
        spec = replace(spec, head=_pooling(keys, spec.head))
    keys.finish(family.ignore)
    return spec


def _pooling(keys: ConfigKeys, head: PoolingSpec) -> PoolingSpec:
    """A bare encoder's pooling.  HF configs have no key for it and preserve unknown ones, so ours is stored there."""
    modes: dict[str, Literal["mean", "first", "dense"]] = {"mean": "mean", "first": "first", "dense": "dense"}
    table = keys.table("triptych_pooling")
    if table is None:
        return head
    mode = table.choice("mode", modes, default="mean")
    if mode == "dense" and head.dense is None:
        raise table.error("mode 'dense' needs the pooler, which this checkpoint lacks")
    normalize = table.flag("normalize")
    table.finish()
    return replace(head, mode=mode, normalize=normalize)


def read_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    read: Callable[[str], Sequence[float]] | None = None,
    ignore: Collection[str] = (),
    where: str = "GGUF",
) -> tuple[Values, ModelSpec]:
    """The HF config a GGUF file would have had, and its spec.

    `shapes` are the tensors of the file, outermost dimension first; `read` gives the values of a small one (Llama 3
    keeps its RoPE divisors in a tensor) and may be left out where only shapes matter.  Raises ConfigError for an
    unknown architecture, and for a key under its prefix that is not understood.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError(f"{where}: general.architecture must be a string, not {shown(arch)}")
    family = find_gguf(arch, where)
    assert family.from_gguf is not None, f"{family.name} names GGUF architectures and has no from_gguf"
    keys = ConfigKeys(gguf_metadata.under(metadata, arch, shapes, read), where, shapes)
    vocab = keys.int("vocab_size")
    config: Values = {"model_type": arch} | dict(family.from_gguf(keys)) | {"vocab_size": vocab}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    keys.finish(ignore, metadata=("model_type", *gguf_metadata.TENSORS))
    return config, read_config(config, stored=shapes, where=where)


def write_gguf(model: ModelSpec) -> tuple[Values, gguf_metadata.Tensors]:
    """The metadata of a GGUF file of `model`, and the small tensors that belong to them: `read_gguf` gives it back.

    Raises CheckpointError where GGUF has no names for the family or no key for something the model computes.
    """
    family = find(model.family)
    arch = gguf_name(model)
    more = {} if family.to_gguf is None else family.to_gguf(model)
    keys, tensors = gguf_metadata.header(model, arch, more)
    metadata = {"general.architecture": arch} | keys
    shapes: dict[str, tuple[int, ...]] = {load.source: load.source_shape for load in save_plan(model, "gguf")}
    shapes |= {name: (len(values),) for name, values in tensors.items()}
    try:
        problem = gguf_metadata.difference(model, read_gguf(metadata, shapes, read=tensors.__getitem__)[1])
    except ConfigError as error:
        problem = str(error).removeprefix("GGUF: ").partition(";")[0].partition(" (did you mean")[0]
    if problem:
        raise CheckpointError(f"GGUF cannot represent this model as {arch!r}: {problem}; convert it to hf")
    return metadata, tensors
