"""What is written into a GGUF file: the type of each tensor, the metadata, and notes on what llama.cpp would refuse."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from triptych import families, text
from triptych.mapping import Values
from triptych.mapping.gguf_types import TYPES
from triptych.mapping.tensor_plan import TensorLoad
from triptych.spec import ModelSpec as Spec
from triptych.spec import PoolingSpec
from triptych.text import Tokenizer
from triptych.text.gguf_tokenizer import OWN_KEYS
from .gguf_blocks import FORMATS, WRITABLE
from .gguf_writer import GGUFTensor, write_gguf
from .header import KEY, SentenceSettings
from .load_weights import ModelParameters

#: Values of `dtype` -> GGUF's name of a packed type.
QUANTIZED = {name.lower(): name for name in WRITABLE}
#: Tensors that stay fp32 whatever the others become, as llama.cpp does: norms, routers and tables of positions.
_ALWAYS_FP32 = (
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "attn_rel_b.weight"
)  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The source of a GGUF file, beside the numbers."""

    spec: Spec
    hf: Mapping[str, Any]
    tokenizer: Tokenizer | None
    path: Path


def export_gguf(
    path: Path, origin: Origin, numbers: ModelParameters, dtype: str | None, plain: str
) -> tuple[int, dict[str, int], tuple[str, ...]]:
    """Write a GGUF file with matrices of type `dtype`; when None, packed ones stay in their type and the others become
    `plain`.  Blocks that have the wanted type already are copied.  -> bytes, tensors of each type, notes."""
    wanted = QUANTIZED.get(dtype or plain, (dtype or plain).upper())
    spec, notes = without_idle_pooler(origin.spec)
    metadata, extra = families.write_gguf(spec)
    plan = families.save_plan(spec, "gguf")
    entries = [_entry(step, numbers, wanted, keep=dtype is None) for step in plan]
    notes += _merged(zip(plan, entries, strict=True), numbers)
    most = Counter(entry.kind for entry in entries if entry.kind in FORMATS).most_common(1)
    file_type = TYPES[most[0][0] if most else wanted].file_type
    entries += [GGUFTensor(name, "F32", (len(v),), partial(torch.tensor, v)) for name, v in extra.items()]
    metadata |= {"general.name": origin.path.stem, "general.file_type": file_type}
    metadata |= {"general.quantization_version": 2} if most else {}
    metadata |= SentenceSettings.of(origin.hf.get(KEY, {}), str(origin.path)).to_gguf()
    tokenizer = _tokenizer(origin.tokenizer, spec)
    if any(f"tokenizer.ggml.{key}" in tokenizer for key in OWN_KEYS):
        notes += (
            "the tokenizer needs keys that only triptych reads; other readers split some texts differently, mostly "
            "around spaces",
        )
    notes += tuple(refusals(str(metadata["general.architecture"]), [entry.name for entry in entries]))
    nbytes = write_gguf(path, metadata | tokenizer, entries)
    return nbytes, dict(Counter(entry.kind for entry in entries)), notes


def packed_type(step: TensorLoad, numbers: ModelParameters) -> str | None:
    """The packed type that all parameters of a tensor have; None where they differ, or where their rows are changed."""
    types = {numbers.stored_as(name) for name in step.ours}
    (packed,) = types if len(types) == 1 and step.rows_only else (None,)
    return packed


def _merged(written: Iterable[tuple[TensorLoad, GGUFTensor]], numbers: ModelParameters) -> tuple[str, ...]:
    """What became of the packed matrices that an adapter changes, a line for each type."""
    kinds = Counter(
        entry.kind for step, entry in written
        if not numbers.changed.isdisjoint(step.ours) and packed_type(step, numbers) is not None
    )  # fmt: skip
    how = {kind: "rounded again to" if kind in FORMATS else "written as" for kind in kinds}
    more = "; --dtype q8_0 (dtype='q8_0') keeps more of a small adapter"
    return tuple(
        f"{count} packed matrices with the adapter were {how[kind]} {kind}{more if kind.startswith('Q4') else ''}"
        for kind, count in kinds.items()
    )


def _entry(step: TensorLoad, numbers: ModelParameters, wanted: str, *, keep: bool) -> GGUFTensor:
    """One tensor in the type `wanted`, or with `keep` in the packed type that all its parameters have."""
    shape = step.source_shape
    whole_blocks = shape[-1] % TYPES[wanted].elements == 0
    kind = wanted if len(shape) > 1 and whole_blocks and not step.source.endswith(_ALWAYS_FP32) else "F32"
    packed = packed_type(step, numbers)
    if not numbers.changed.isdisjoint(step.ours):
        kind, packed = (packed if keep and packed in WRITABLE else kind), None
    if packed is None or not (keep or packed == kind):
        return GGUFTensor(step.source, kind, shape, partial(step.to_source, numbers))
    ours = step.ours
    return GGUFTensor(step.source, packed, shape, lambda: step.to_source({one: numbers.blocks(one) for one in ours}))


def without_idle_pooler(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """The spec without a pooler that its pooling does not use: GGUF has no place for one."""
    head = spec.head
    if not isinstance(head, PoolingSpec) or head.dense is None or head.mode == "dense":
        return spec, ()
    return replace(spec, head=replace(head, dense=None)), ("left out head.dense, which its pooling does not read",)


def _tokenizer(tokenizer: Tokenizer | None, spec: Spec) -> Values:
    """The tokenizer's metadata; without a tokenizer, the special ids that the config names."""
    metadata = text.to_gguf(tokenizer, spec.vocab)
    if spec.encoder is not None and spec.encoder.words.token_types:
        metadata["tokenizer.ggml.token_type_count"] = spec.encoder.words.token_types
    ids = {"bos": spec.ids.bos, "eos": next(iter(spec.ids.eos), None), "padding": spec.ids.pad}
    named = {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    return named | metadata


_BLOCK = re.compile(r"^blk\.\d+\.")
_UNKNOWN_ARCHITECTURES = ("gptj",)
#: Tensors that an architecture must have, and what a model without them has.
_NEEDED = {
    "phi2": {"output.weight": "tied embeddings"},
    "gptneox": {"output.weight": "tied embeddings", "attn_qkv.bias": "no biases"},
    "starcoder2": {"attn_output.bias": "no biases"},
}
#: Tensors that an architecture must not have, and what a model with them has.
_REFUSED = {
    "gemma": {"attn_q.bias": "biases in its attention", "output.weight": "an untied head"},
    "gemma2": {"attn_q.bias": "biases in its attention", "output.weight": "an untied head"},
    "gemma3": {"attn_q.bias": "biases in its attention"},
    "qwen3moe": {"attn_output.bias": "a bias in the output projection of its attention"},
}
_FREQUENCIES = "rope_freqs.weight"
_READ_FREQUENCIES = ("llama", "granite")


def refusals(architecture: str, tensors: Collection[str]) -> Iterator[str]:
    """A note for each reason why llama.cpp does not open a file of this architecture with these tensors."""
    names = {_BLOCK.sub("", name) for name in tensors}
    problems = []
    if architecture in _UNKNOWN_ARCHITECTURES:
        problems.append("is of an architecture that it does not have")
    problems += [f"has {what}" for name, what in _NEEDED.get(architecture, {}).items() if name not in names]
    problems += [f"has {what}" for name, what in _REFUSED.get(architecture, {}).items() if name in names]
    if _FREQUENCIES in names and architecture not in _READ_FREQUENCIES:
        problems.append("has frequencies of rotation of its own (rope_type llama3)")
    for problem in problems:
        yield f"llama.cpp does not open this file: the {architecture} model {problem}"
