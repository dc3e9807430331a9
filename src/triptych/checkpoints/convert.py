"""Checkpoints converted between formats, and models saved from memory: an HF directory or one GGUF file.

`convert` copies tensors from file to file one at a time and builds no model.  `refusals` lists why llama.cpp would not
open a GGUF file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triptych import families, text
from triptych.arguments import checked
from triptych.checkpoints import Source, open_source, recover, write_directory
from triptych.checkpoints.adapter_files import read_adapter
from triptych.checkpoints.adapters import with_base
from triptych.checkpoints.gguf_blocks import FORMATS, WRITABLE
from triptych.checkpoints.gguf_writer import GGUFTensor, write_gguf
from triptych.checkpoints.header import BESIDE, KEY, Header, SentenceSettings, read_header
from triptych.checkpoints.load_weights import DetachedWeights, ModelParameters, StoredParameters, to_checkpoint
from triptych.checkpoints.locate import PICKLES
from triptych.checkpoints.packed_safetensors import plain_dtype
from triptych.errors import CheckpointError, InputError, shown
from triptych.mapping import Values
from triptych.mapping.gguf_types import TYPES
from triptych.mapping.tensor_plan import TensorLoad
from triptych.nn import Transformer
from triptych.nn.weights import PackedWeight
from triptych.spec import ModelSpec as Spec
from triptych.spec import PoolingSpec
from triptych.text import Tokenizer
from triptych.text.gguf_tokenizer import OWN_KEYS

Format = Literal["hf", "gguf"]
#: Endings of the files in an HF directory.
_WEIGHTS = (".safetensors", *PICKLES)
#: Values of `dtype` -> torch's plain dtype.
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
#: Values of `dtype` -> GGUF's name of a packed type.
QUANTIZED = {name.lower(): name for name in WRITABLE}
#: Tensors that stay fp32 whatever the others become, as llama.cpp does: norms, routers and tables of positions.
_ALWAYS_FP32 = (
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "attn_rel_b.weight"
)  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """The files that were written: how many tensors in which dtype, and notes on what was lost or grew."""

    path: str
    format: Format
    family: str
    nbytes: int
    tensors: dict[str, int]  # dtype, as the format spells it -> how many
    notes: tuple[str, ...] = ()

    def to_dict(self) -> Values:
        return asdict(self)


@checked
def convert(
    model: str | Path,
    out: str | Path,
    *,
    to: Format | None = None,
    dtype: str | None = None,
    force: bool = False,
    offline: bool = False,
    ignore: Sequence[str] = (),
    adapter: str | Path | None = None,
) -> Conversion:
    """Write the checkpoint `model` to `out`: `to` a "gguf" file or an "hf" directory; when None, a file where the name
    ends in .gguf and a directory where it has no ending or a slash at its end.

    `dtype` is "f32", "f16" or "bf16", for GGUF also "q8_0", "q4_0" or "q4_1"; when None, that of most of the plain
    numbers of the checkpoint, and from GGUF to GGUF packed tensors keep their type.  Blocks that have the type already
    are copied byte for byte.  In GGUF vectors, norms, tables of positions and rows that are not whole blocks stay
    f32.  An existing `out` is replaced only with `force`, and then completely or not at all.

    The matrices that an `adapter` (a directory) changes are written with what it adds; so are those of a `model` that
    is an adapter's directory or the run that trained one.  From GGUF to GGUF packed ones are rounded again to their
    type where it can be written, which a note says.

    Raises InputError for an existing `out`, an ending of no format or a dtype the format lacks, CheckpointError or
    TextError for a model or a tokenizer that GGUF cannot represent, and what reading raises.
    """
    path = Path(out)
    if to not in (None, *get_args(Format)):
        raise InputError(f"to={shown(to)} must be one of {', '.join(get_args(Format))}")
    to = to or _format_of(str(out))
    _check(path, to, dtype, force)
    model, adapter = with_base(model, adapter)
    header = read_header(model, ignore=ignore, offline=offline)
    factors = {} if adapter is None else read_adapter(adapter, header.spec).factors
    recover(path)
    source = header.source or open_source(header.path)
    stored = StoredParameters(header.spec, source, ignore, torch.float32, factors)  # operations must not round twice
    stored.check_duplicates()
    plain: torch.dtype = getattr(torch, plain_dtype(source.infos))
    if to == "gguf":
        origin = _Origin(header.spec, header.hf, header.tokenizer(), header.path)
        done = _write_gguf(path, origin, stored, dtype, _name(plain))
    else:
        done = _to_hf(header, stored, path, PLAIN[dtype] if dtype else plain)
    return done if dtype else replace(done, notes=(*done.notes, *_growth(done.nbytes, source, plain)))


def _format_of(out: str) -> Format:
    """The format that the ending of `out` names.  What follows the last dot of "Llama-3.2-1B" is no ending: it does not
    begin with a letter."""
    suffix = Path(out).suffix
    if suffix.lower() == ".gguf" and not out.endswith("/"):
        return "gguf"
    if suffix[1:2].isalpha() and suffix.lower() not in _WEIGHTS and not out.endswith("/") and not Path(out).is_dir():
        raise InputError(
            f"{out}: {suffix} is the ending of no format; write {Path(out).stem}.gguf for a GGUF file, or "
            f"{Path(out).stem}/ for a directory"
        )
    return "hf"


def save(
    path: str | Path,
    module: Transformer,
    hf: Values | None,
    tokenizer: Tokenizer | None,
    files: Mapping[str, bytes],
    origin: Path | None = None,
) -> Conversion:
    """Write a model from memory: one GGUF file where `path` ends in .gguf, else an HF directory with `files` beside it.

    Packed matrices go into a GGUF file in the type they came from, byte for byte, or in the one that holds the same
    numbers (what was rounded to int4 as Q4_1, to int8 as Q8_0); of Q4_K and Q5_K the blocks are read from `origin`
    again.  A directory gets plain numbers, which a note says.  Raises InputError for an ending of no format, and
    CheckpointError for what cannot be written.
    """
    to = _format_of(str(path))
    path = Path(path)
    _check(path, to, None, force=True)
    packed = {name: p for name, p in module.named_parameters() if isinstance(p, PackedWeight)}
    if to == "gguf":
        numbers = DetachedWeights(module, lambda: _read_again(module.spec, origin))
        plain = _name(module.dtype if module.dtype in PLAIN.values() else torch.float32)
        done = _write_gguf(path, _Origin(module.spec, hf or {}, tokenizer, origin or path), numbers, None, plain)
        plan = families.save_plan(_without_idle_pooler(module.spec)[0], "gguf")
        lost = [name for step in plan if _packed_type(step, numbers) is None for name in step.ours if name in packed]
    else:
        tensors, config = to_checkpoint(module, hf)
        done = _write_hf(path, module.spec, tensors, config, files)
        lost = list(packed)
    if not lost:
        return done
    note = f"{len(lost)} packed matrices were written as plain numbers in {str(module.dtype).removeprefix('torch.')}"
    return replace(done, notes=(*done.notes, note))


def _read_again(spec: Spec, origin: Path | None) -> StoredParameters | None:
    """The parameters in the file that a model came from; None where there is none of them any more."""
    try:
        return None if origin is None else StoredParameters(spec, open_source(origin))
    except CheckpointError:
        return None


def _check(path: Path, to: Format, dtype: str | None, force: bool) -> None:
    known = [*PLAIN, *(QUANTIZED if to == "gguf" else ())]
    if dtype is not None and dtype not in known:
        what = "an HF directory" if to == "hf" else "a GGUF file"
        raise InputError(f"{what} cannot store {dtype!r}; use one of {', '.join(known)}")
    if to == "hf" and path.suffix.lower() in (*_WEIGHTS, ".gguf"):
        problem = f"{path}: an HF checkpoint is a directory, not a {path.suffix} file"
        raise InputError(f"{problem}; name a directory, for example {path.with_suffix('')}")
    if path.exists() and (to == "gguf") == path.is_dir():
        raise InputError(
            f"{path} is a {'directory' if path.is_dir() else 'file'}, and {to} is not; choose another name"
        )
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or replace it with --force (force=True)")


def _to_hf(header: Header, stored: StoredParameters, path: Path, dtype: torch.dtype) -> Conversion:
    tensors = ((step.source, step.to_source(stored).to(dtype)) for step in families.save_plan(header.spec))
    config = {**header.hf, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)  # its old name
    return _write_hf(path, header.spec, tensors, config, files_beside(header))


def _write_hf(
    path: Path, spec: Spec, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], files: Mapping[str, bytes]
) -> Conversion:
    """Write an HF directory, and count its tensors."""
    written: Counter[str] = Counter()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            written[str(value.dtype).removeprefix("torch.")] += 1
            yield name, value

    write_directory(path, counted(), config, files)
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Conversion(str(path), "hf", spec.family, nbytes, dict(written))


def _growth(nbytes: int, source: Source, written: torch.dtype) -> tuple[str, ...]:
    """A note where unpacking made the files much larger than the source and no dtype was chosen."""
    stored = sum(info.nbytes for info in source.infos.values())
    if nbytes <= 1.5 * stored:
        return ()
    name = str(written).removeprefix("torch.")
    smaller = "; --dtype bf16 (dtype='bf16') writes half of it" if written == torch.float32 else ""
    return (f"{stored / 2**20:,.0f} MiB of packed weights became {nbytes / 2**20:,.0f} MiB of {name}{smaller}",)


def files_beside(header: Header) -> dict[str, bytes]:
    """The files written beside the weights: the tokenizer's, the side files, and a GGUF's additional end tokens."""
    files = {file.name: file.read_bytes() for name in BESIDE if (file := header.path / name).is_file()}
    tokenizer = header.tokenizer()
    if tokenizer is None:
        return files
    if tokenizer.stop_ids - {tokenizer.eos_id}:
        files = {BESIDE[0]: json.dumps({"eos_token_id": sorted(tokenizer.stop_ids)}).encode()} | files
    return tokenizer.files() | files


@dataclass(frozen=True)
class _Origin:
    """The source of a GGUF file, beside the numbers."""

    spec: Spec
    hf: Mapping[str, Any]
    tokenizer: Tokenizer | None
    path: Path


def _name(plain: torch.dtype) -> str:
    """The name of a plain dtype, as in `dtype`."""
    return next(name for name, one in PLAIN.items() if one == plain)


def _write_gguf(path: Path, origin: _Origin, numbers: ModelParameters, dtype: str | None, plain: str) -> Conversion:
    """Write a GGUF file with matrices of type `dtype`; when None, packed ones stay in their type and the others become
    `plain`.  Blocks that have the wanted type already are copied."""
    wanted = QUANTIZED.get(dtype or plain, (dtype or plain).upper())
    spec, notes = _without_idle_pooler(origin.spec)
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
    return Conversion(str(path), "gguf", spec.family, nbytes, dict(Counter(entry.kind for entry in entries)), notes)


def _packed_type(step: TensorLoad, numbers: ModelParameters) -> str | None:
    """The packed type that all parameters of a tensor have; None where they differ, or where their rows are changed."""
    types = {numbers.stored_as(name) for name in step.ours}
    (packed,) = types if len(types) == 1 and step.rows_only else (None,)
    return packed


def _merged(written: Iterable[tuple[TensorLoad, GGUFTensor]], numbers: ModelParameters) -> tuple[str, ...]:
    """What became of the packed matrices that an adapter changes, a line for each type."""
    kinds = Counter(
        entry.kind for step, entry in written
        if not numbers.changed.isdisjoint(step.ours) and _packed_type(step, numbers) is not None
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
    packed = _packed_type(step, numbers)
    if not numbers.changed.isdisjoint(step.ours):
        kind, packed = (packed if keep and packed in WRITABLE else kind), None
    if packed is None or not (keep or packed == kind):
        return GGUFTensor(step.source, kind, shape, partial(step.to_source, numbers))
    ours = step.ours
    return GGUFTensor(step.source, packed, shape, lambda: step.to_source({one: numbers.blocks(one) for one in ours}))


def _without_idle_pooler(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
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
