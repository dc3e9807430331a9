"""Checkpoints converted between formats, and models saved from memory: an HF directory or one GGUF file.

`convert` copies tensors from file to file one at a time and builds no model.  What a GGUF file is given stands in
`gguf_export.py`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from triptych import families
from triptych.arguments import checked, readable
from triptych.errors import CheckpointError, InputError
from triptych.mapping import Values
from triptych.mapping.gguf_metadata import difference
from triptych.nn import Transformer
from triptych.nn.packed_weight import PackedWeight
from triptych.spec import ModelSpec as Spec
from triptych.text import Tokenizer
from . import Source, open_source, recover, write_directory
from .adapter_files import read_adapter
from .adapters import with_base
from .gguf_export import QUANTIZED, Origin, export_gguf, packed_type, without_idle_pooler
from .header import BESIDE, Header, read_header
from .load_weights import DetachedWeights, ModelParameters, StoredParameters, to_checkpoint
from .locate import PICKLES
from .packed_safetensors import plain_dtype
from .save import check_directory, target_of
from .source import map_file

Format = Literal["hf", "gguf"]
#: Endings of the files in an HF directory.
_WEIGHTS = (".safetensors", *PICKLES)
#: Values of `dtype` -> torch's plain dtype.
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


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
    to: Literal["hf", "gguf"] | None = None,
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
    to = to or _format_of(os.fspath(out))
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
        origin = Origin(header.spec, header.hf, header.tokenizer(), header.path)
        done = _to_gguf(path, origin, stored, dtype, _name(plain))
    else:
        done = _to_hf(header, stored, path, PLAIN[dtype] if dtype else plain)
    return done if dtype else replace(done, notes=(*done.notes, *_growth(done.nbytes, source, plain)))


def _format_of(out: str) -> Format:
    """The format that the ending of `out` names.  What follows the last dot of "Llama-3.2-1B" is no ending: it does not
    begin with a letter."""
    suffix = Path(out).suffix
    if suffix.lower() == ".gguf" and not out.endswith("/"):
        return "gguf"
    if suffix[1:2].isalpha() and suffix.lower() not in _WEIGHTS and not out.endswith("/") and not os.path.isdir(out):
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
    again.  A directory gets plain numbers, which a note says.  Raises InputError for an ending of no format and a file
    that is no GGUF and would be replaced, and CheckpointError for what cannot be written.
    """
    to = _format_of(os.fspath(path))
    path = Path(path)
    _check(path, to, None, force=True)
    if to == "gguf" and path.is_file() and path.stat().st_size and bytes(map_file(path)[:4]) != b"GGUF":
        raise InputError(f"{path} is no GGUF file and would be lost; choose another name, or remove it first")
    _check_whole(module, hf)
    packed = {name: p for name, p in module.named_parameters() if isinstance(p, PackedWeight)}
    if to == "gguf":
        numbers = DetachedWeights(module, lambda: _read_again(module.spec, origin))
        plain = _name(module.dtype if module.dtype in PLAIN.values() else torch.float32)
        done = _to_gguf(path, Origin(module.spec, hf or {}, tokenizer, origin or path), numbers, None, plain)
        plan = families.save_plan(without_idle_pooler(module.spec)[0], "gguf")
        lost = [name for step in plan if packed_type(step, numbers) is None for name in step.ours if name in packed]
    else:
        tensors, config = to_checkpoint(module, hf)
        done = _write_hf(path, module.spec, tensors, config, files, origin)
        lost = list(packed)
    if not lost:
        return done
    note = f"{len(lost)} packed matrices were written as plain numbers in {str(module.dtype).removeprefix('torch.')}"
    return replace(done, notes=(*done.notes, note))


def _check_whole(module: Transformer, hf: Values | None) -> None:
    """Raise InputError where the parameters or the config are not those of the spec: nothing could load them."""
    for name, parameter in module.named_parameters():
        readable(parameter, f"the weight {name}")
    sizes = {(name, tuple(value.shape)) for name, value in module.named_parameters(remove_duplicate=False)}
    if lost := module.spec.shapes().items() - sizes:
        raise InputError("the module has no {} {}, which model.spec names; save it as it was made".format(*min(lost)))
    if hf is None:
        return
    stored = [step.source for step in families.save_plan(module.spec)]
    other = difference(module.spec, families.read_config(hf, stored=stored, ignore=hf, where="model.hf"))
    if other is not None:
        what = other.partition(" is ")[0]
        raise InputError(f"model.hf is not the config of this model: {what} differs; take it from load() or create()")


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
    (target_of if to == "gguf" else check_directory)(path)
    if path.exists() and (to == "gguf") == path.is_dir():
        raise InputError(
            f"{path} is a {'directory' if path.is_dir() else 'file'}, and {to} is not; choose another name"
        )
    if to == "gguf" and path.suffix.lower() != ".gguf":
        raise InputError(f"{path}: the name of a GGUF file ends in .gguf; write {path}.gguf")
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or replace it with --force (force=True)")


def _to_gguf(path: Path, origin: Origin, numbers: ModelParameters, dtype: str | None, plain: str) -> Conversion:
    return Conversion(str(path), "gguf", origin.spec.family, *export_gguf(path, origin, numbers, dtype, plain))


def _to_hf(header: Header, stored: StoredParameters, path: Path, dtype: torch.dtype) -> Conversion:
    tensors = ((step.source, step.to_source(stored).to(dtype)) for step in families.save_plan(header.spec))
    config = {**header.hf, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)  # its old name
    return _write_hf(path, header.spec, tensors, config, files_beside(header), header.path)


def _write_hf(
    path: Path,
    spec: Spec,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
    origin: Path | None,
) -> Conversion:
    """Write an HF directory, and count its tensors; of what is there the files of a model that is not `origin` go."""
    written: Counter[str] = Counter()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            written[str(value.dtype).removeprefix("torch.")] += 1
            yield name, value

    # The working directory, which "" is, is never replaced.
    write_directory(path, counted(), config, files, keep=os.path.realpath(origin or "") == os.path.realpath(path))
    nbytes = sum(file.stat().st_size for file in target_of(path).glob("*.safetensors"))
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


def _name(plain: torch.dtype) -> str:
    """The name of a plain dtype, as in `dtype`."""
    return next(name for name, one in PLAIN.items() if one == plain)
