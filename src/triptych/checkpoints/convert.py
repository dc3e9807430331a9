"""A checkpoint in another format: an HF directory from whatever can be read, or one GGUF file.

Tensors go from file to file one at a time; no model is built.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from triptych import families, text
from triptych.checkpoints import Source, open_source, recover, write_directory
from triptych.checkpoints.gguf_blocks import WRITABLE
from triptych.checkpoints.gguf_writer import GGUFTensor, write_gguf
from triptych.checkpoints.header import BESIDE, Header, read_header
from triptych.checkpoints.load_weights import StoredParameters
from triptych.checkpoints.locate import PICKLES
from triptych.checkpoints.packed_safetensors import plain_dtype
from triptych.checkpoints.sentence_settings import KEY, SentenceSettings
from triptych.errors import InputError
from triptych.mapping.gguf_types import TYPES
from triptych.spec import ModelSpec as Spec
from triptych.spec import PoolingSpec
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
    """What was written: how many tensors in which dtype, and notes on what was lost or grew."""

    path: str
    format: Format
    family: str
    nbytes: int
    tensors: dict[str, int]  # dtype, as the format spells it -> how many
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    model: str | Path,
    out: str | Path,
    *,
    to: Format | None = None,
    dtype: str | None = None,
    force: bool = False,
    offline: bool = False,
    ignore: Sequence[str] = (),
) -> Conversion:
    """Write the checkpoint `model` to `out`: `to` a "gguf" file or an "hf" directory; when None, a file where the name
    ends in .gguf and a directory where it has no ending or a slash at its end.

    `dtype` is "f32", "f16" or "bf16", for GGUF also "q8_0", "q4_0" or "q4_1"; when None, that of most of the plain
    numbers of the checkpoint.  In GGUF vectors, norms, tables of positions and rows that are not whole blocks stay
    f32.  An existing `out` is replaced only with `force`, and then completely or not at all.

    Raises InputError for an existing `out`, an ending of no format or a dtype the format lacks, CheckpointError or
    TextError for a model or a tokenizer that GGUF cannot represent, and what reading raises.
    """
    if not str(out):
        raise InputError("the name to write to is empty; give a directory or a .gguf file")
    path = Path(out)
    to = to or _format_of(str(out))
    _check(path, to, dtype, force)
    header = read_header(model, ignore=ignore, offline=offline)
    recover(path)
    return (_to_gguf if to == "gguf" else _to_hf)(header, path, dtype, ignore)


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


def _check(path: Path, to: Format, dtype: str | None, force: bool) -> None:
    known = [*PLAIN, *(QUANTIZED if to == "gguf" else ())]
    if dtype is not None and dtype not in known:
        what = "an HF directory" if to == "hf" else "a GGUF file"
        raise InputError(f"{what} cannot store {dtype!r}; use one of {', '.join(known)}")
    if to == "hf" and path.suffix.lower() in _WEIGHTS:
        problem = f"{path}: an HF checkpoint is a directory, not a {path.suffix} file"
        raise InputError(f"{problem}; name a directory, for example {path.with_suffix('')}")
    if path.exists() and (to == "gguf") == path.is_dir():
        raise InputError(
            f"{path} is a {'directory' if path.is_dir() else 'file'}, and {to} is not; choose another name"
        )
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or replace it with --force (force=True)")


def _to_hf(header: Header, path: Path, dtype: str | None, ignore: Sequence[str]) -> Conversion:
    source = header.source or open_source(header.path)
    wanted: torch.dtype = PLAIN[dtype] if dtype else getattr(torch, plain_dtype(source.infos))
    stored = StoredParameters(header.spec, source, ignore, torch.float32)  # fp32: operations must not round twice
    stored.check_duplicates()
    written: Counter[str] = Counter()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for step in families.save_plan(header.spec):
            value = step.to_source(stored).to(wanted)
            written[str(wanted).removeprefix("torch.")] += 1
            yield step.source, value

    config = {**header.hf, "dtype": str(wanted).removeprefix("torch.")}
    config.pop("torch_dtype", None)  # its old name
    write_directory(path, tensors(), config, _texts(header))
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    notes = () if dtype else _growth(nbytes, source, wanted)
    return Conversion(str(path), "hf", header.spec.family, nbytes, dict(written), notes)


def _growth(nbytes: int, source: Source, written: torch.dtype) -> tuple[str, ...]:
    """A note where unpacking made the files much larger than the source and no dtype was chosen."""
    stored = sum(info.nbytes for info in source.infos.values())
    if nbytes <= 1.5 * stored:
        return ()
    name = str(written).removeprefix("torch.")
    smaller = "; --dtype bf16 (dtype='bf16') writes half of it" if written == torch.float32 else ""
    return (f"{stored / 2**20:,.0f} MiB of packed weights became {nbytes / 2**20:,.0f} MiB of {name}{smaller}",)


def _texts(header: Header) -> dict[str, bytes]:
    """The files written beside the weights: the tokenizer's, the side files, and a GGUF's additional end tokens."""
    files = {file.name: file.read_bytes() for name in BESIDE if (file := header.path / name).is_file()}
    tokenizer = header.tokenizer()
    if tokenizer is None:
        return files
    if tokenizer.stop_ids - {tokenizer.eos_id}:
        files = {BESIDE[0]: json.dumps({"eos_token_id": sorted(tokenizer.stop_ids)}).encode()} | files
    return tokenizer.files() | files


def _to_gguf(header: Header, path: Path, dtype: str | None, ignore: Sequence[str]) -> Conversion:
    source = header.source or open_source(header.path)
    wanted = dtype or next(name for name, plain in PLAIN.items() if str(plain) == f"torch.{plain_dtype(source.infos)}")
    kind = QUANTIZED.get(wanted, wanted.upper())
    spec, notes = _without_idle_pooler(header.spec)
    metadata, extra = families.write_gguf(spec)
    stored = StoredParameters(header.spec, source, ignore, torch.float32)
    entries = [
        GGUFTensor(
            step.source,
            _stored_as(step.source, step.source_shape, kind),
            step.source_shape,
            partial(step.to_source, stored),
        )
        for step in families.save_plan(spec, "gguf")
    ]
    entries += [GGUFTensor(name, "F32", (len(v),), partial(torch.tensor, v)) for name, v in extra.items()]
    metadata |= {"general.name": header.path.stem, "general.file_type": TYPES[kind].file_type}
    metadata |= {"general.quantization_version": 2} if kind in WRITABLE else {}
    metadata |= SentenceSettings.of(header.hf.get(KEY, {}), str(header.path)).to_gguf()
    stored.check_duplicates()
    tokenizer = _tokenizer(header, spec)
    if any(f"tokenizer.ggml.{key}" in tokenizer for key in OWN_KEYS):
        notes += (
            "the tokenizer needs keys that only triptych reads; other readers split some texts differently, mostly "
            "around spaces",
        )
    nbytes = write_gguf(path, metadata | tokenizer, entries)
    notes += () if dtype else _growth(nbytes, source, PLAIN[wanted])
    tensors = dict(Counter(entry.kind for entry in entries))
    return Conversion(str(path), "gguf", spec.family, nbytes, tensors, notes)


def _without_idle_pooler(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """The spec without a pooler that its pooling does not use: GGUF has no place for one."""
    head = spec.head
    if not isinstance(head, PoolingSpec) or head.dense is None or head.mode == "dense":
        return spec, ()
    return replace(spec, head=replace(head, dense=None)), ("left out head.dense, which its pooling does not read",)


def _stored_as(name: str, shape: tuple[int, ...], kind: str) -> str:
    whole_blocks = shape[-1] % TYPES[kind].elements == 0
    return kind if len(shape) > 1 and whole_blocks and not name.endswith(_ALWAYS_FP32) else "F32"


def _tokenizer(header: Header, spec: Spec) -> dict[str, Any]:
    """The tokenizer's metadata; without a tokenizer, the special ids that the config names."""
    metadata = text.to_gguf(header.tokenizer(), spec.vocab)
    if spec.encoder is not None and spec.encoder.words.token_types:
        metadata["tokenizer.ggml.token_type_count"] = spec.encoder.words.token_types
    ids = {"bos": spec.ids.bos, "eos": next(iter(spec.ids.eos), None), "padding": spec.ids.pad}
    named = {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    return named | metadata
