"""Writes checkpoints so that a crash, a full disk or a `kill -9` leaves either the old one or the new one complete.

A directory is built beside its target, every byte forced to disk, and then put in place by one rename.
Which tensors are written, under which names, and that a tied one is written once, `save_plan` decides
(mapping/tensor_plan.py).
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar, runtime_checkable

from triptych.errors import CheckpointError, InputError, shown
from triptych.files import writable_name
from .locate import PICKLES, open_source
from .safetensors import DTYPES, INDEX_SUFFIX
from .source import is_plain_name, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@runtime_checkable
class TensorForm(Protocol):
    """What of a tensor is known before it is made."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=TensorForm)

_WRITTEN: set[Path] = set()  # the temporary directories that this process writes into
_WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"  # what files of weights are called
_OURS = f"{_WEIGHTS}|adapter_config.json|tokenizer_config.json"
#: Every file that a model may have beside its weights and `config.json`.
_BESIDE = r"""(?x)(special_tokens_map|added_tokens|modules|sentence_bert_config|chat_template
|\w*(tokenizer|processor|generation)_config|tokenizer|vocab)\.json|chat_template\.jinja|tokenizer\.model|vocab\.txt|merges\.txt|1_Pooling
|(source|target|spm|spiece|sentencepiece\.bpe)\.(spm|model)"""


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """A tensor that is made when its turn to be written comes.

    like   a tensor of its shape and dtype, on the meta device.
    make   gives the tensor.
    """

    like: Tensor
    make: Callable[[], Tensor]

    @property
    def shape(self) -> Sequence[int]:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def nbytes(self) -> int:
        return self.like.nbytes


MAX_SHARD_BYTES = 5_000_000_000


def write_directory(
    path: str | Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor | DeferredTensor]],
    config: Mapping[str, Any],
    files: Mapping[str, bytes | str] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    names: tuple[str, str] = ("model.safetensors", "config.json"),
    keep: bool = True,
) -> None:
    """Write `path` as a directory other tools load: `model.safetensors` (or shards and an index), `config.json`,
    and `files`, by names relative to it.  `names` are other names for the first two; other weights are not sharded.

    Whatever else an existing directory holds stays in it; only weights, `config.json` and `files` are replaced, and,
    without `keep`, the tokenizer and all else that belongs to the model that is there.  Raises `CheckpointError`, with
    the target as it was, when anything cannot be written, and InputError as `check_directory`.
    """
    path = check_directory(path)
    recover(path)
    pairs: Iterable[tuple[str, Tensor | DeferredTensor]] = tensors.items() if isinstance(tensors, Mapping) else tensors
    with _temporary_directory_near(path) as temporary:
        _write_weights(temporary, pairs, {"format": "pt", **(metadata or {})}, max_shard_bytes, names[0])
        _write_file(temporary, names[1], json.dumps(config, indent=2, allow_nan=False) + "\n")
        for name, content in (files or {}).items():
            _write_file(temporary, name, content)
        if path.exists():
            weights = _WEIGHTS if names[0].startswith("model") else re.escape(names[0])
            another = not keep and os.path.exists(path / names[1])
            _link_other_files(path, temporary, f"{_BESIDE}|{weights}" if another else weights)
        for directory, _, _ in os.walk(temporary):
            sync_directory(Path(directory))
        put_in_place(temporary, path)


def check_directory(path: str | Path) -> Path:
    """The directory behind links, which may be replaced.  Raises InputError for one that holds the working directory,
    for one that is neither empty nor a checkpoint, an adapter or a tokenizer, for the name of a file of weights, and as
    `target_of`."""
    where = target_of(path)
    if where.suffix.lower() in (".safetensors", ".gguf", *PICKLES):
        raise InputError(
            f"{path}: an HF checkpoint is a directory, not a {where.suffix} file; name a directory, for example "
            f"{Path(path).with_suffix('')}"
        )
    with suppress(OSError):  # the working directory was deleted
        if Path.cwd().is_relative_to(where):
            raise InputError(f"{where} holds the working directory, which would be replaced; name one below it")
    if os.path.isdir(where) and not _is_ours(where):
        raise InputError(
            f"{where} holds other files and no checkpoint; name a new directory, such as {where / 'model'}"
        )
    return where


def _is_ours(path: Path) -> bool:
    """Whether a directory is empty, or holds a model, an adapter or a tokenizer, perhaps a damaged one."""
    with suppress(CheckpointError, OSError):
        names = os.listdir(path)
        mine = not names or any(re.fullmatch(_OURS, name) for name in names)
        return mine or "model_type" in read_json(path / "config.json")
    return False


def atomic_write(path: str | Path, content: bytes) -> None:
    """Replace the file `path` by `content`, on disk when this returns.  On a CheckpointError the old file remains."""
    with replacing(path) as file:
        file.write(content)


def write_files(path: str | Path, files: Mapping[str, bytes], own: str, mark: bytes) -> None:
    """Replace what an earlier call wrote to the directory `path` by `files`, in one step; other files there stay.

    Files of an earlier call are those whose names match `own` and that contain `mark`.  Raises InputError for a file,
    for the working directory, and where a name that matches `own` belongs to another file.
    """
    where = target_of(path)
    if where.exists() and not where.is_dir():
        raise InputError(f"{path} is a file; name a new directory for these {len(files)} files")
    with suppress(OSError):  # the working directory was deleted
        if Path.cwd().is_relative_to(where):
            raise InputError(f"{where} holds the working directory, which would be replaced; name one below it")
    for name in sorted(os.listdir(where)) if where.is_dir() else ():
        if re.fullmatch(own, name) and not ((where / name).is_file() and mark in (where / name).read_bytes()):
            raise InputError(
                f"{where / name} is not a file of an earlier run, and would be replaced; name another directory"
            )
    recover(where)
    with _temporary_directory_near(where) as temporary:
        for name, content in files.items():
            with _synced(temporary / name) as file:
                file.write(content)
        if where.exists():
            _link_other_files(where, temporary, own)
        sync_directory(temporary)
        put_in_place(temporary, where)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block ends without an error; until then the old one is untouched."""
    path = target_of(path)
    if re.fullmatch(f"{_BESIDE}|{_WEIGHTS}|config.json", path.name) and os.path.exists(path.parent / "config.json"):
        raise InputError(f"{path} is a file of the model in that directory; choose another name")
    with _temporary_directory_near(path) as temporary:
        with _synced(temporary / "content") as file:
            yield file
        os.replace(temporary / "content", path)
        sync_directory(path.parent)


def is_complete(path: str | Path) -> bool:
    """Whether `path` holds a readable `config.json` and weights whose headers describe the files exactly."""
    try:
        read_json(Path(path) / "config.json")
        open_source(path)
    except CheckpointError:
        return False
    return True


def target_of(path: str | Path) -> Path:
    """The path behind links.  Raises CheckpointError for what is none, InputError for a name that would not be the
    place that it says: on the hub, on the net, in the home that a shell puts for ~, and for one that cannot be read."""
    text = writable_name(path)
    try:
        where = Path(os.path.realpath(path))
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(where)
    except (OSError, ValueError) as error:  # a zero byte, half of a surrogate pair, a loop of links
        raise CheckpointError(f"cannot write {shown(text)}: {getattr(error, 'strerror', error)}") from None
    if not where.name:
        raise CheckpointError(f"cannot write {where}: it is the root of a file system; choose another name")
    return where


def recover(path: str | Path) -> None:
    """Finish or undo a replacement of `path` that was interrupted, and remove temporary files of writers that ended."""
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.old")
    if aside.exists() and not path.exists():
        aside.rename(path)
    shutil.rmtree(aside, ignore_errors=True)
    _remove_leftovers(path)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary directories in which `path` was written by processes that have ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        writer = left.name.split(".")[-2]
        if writer.isdecimal():
            ours = int(writer) == os.getpid()
            if not (left in _WRITTEN if ours else _is_running(int(writer))):
                shutil.rmtree(left, ignore_errors=True)


def written_in_order(
    tensors: Iterable[tuple[str, DeferredTensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[tuple[str, DeferredTensor]]:
    """The tensors in the order in which `write_directory` makes them."""
    return [(name, shard[name]) for shard in _shards(tensors, max_shard_bytes) for name in _file_order(shard)]


def _file_order(tensors: Mapping[str, T]) -> list[str]:
    """Widest first, so that with a header of a multiple of eight bytes every tensor starts on a multiple of its element
    size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor | DeferredTensor], metadata: Mapping[str, str]
) -> None:
    """One safetensors file, streamed: one tensor at a time is made, copied to the CPU and made contiguous where
    needed."""
    import torch

    spelling = {name: ours for ours, name in DTYPES.items()}
    order = _file_order(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        dtype = spelling.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or name == "__metadata__":
            raise CheckpointError(f"tensor {shown(name)} of {tensor.dtype} cannot be stored as safetensors")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = tensors[name]
        numbers = tensor.make() if isinstance(tensor, DeferredTensor) else tensor
        file.write(numbers.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_weights(
    directory: Path,
    pairs: Iterable[tuple[str, Tensor | DeferredTensor]],
    metadata: Mapping[str, str],
    limit: int,
    single: str,
) -> None:
    """Shards of at most `limit` bytes (a larger tensor has one to itself); one shard is called `single`, and needs no
    index."""
    where: dict[str, int] = {}
    total = shards = 0
    for shard in _shards(pairs, limit):
        shards += 1
        if twice := where.keys() & shard.keys():
            raise CheckpointError(f"two tensors are called {shown(min(twice))}")
        where |= dict.fromkeys(shard, shards)
        total += sum(tensor.nbytes for tensor in shard.values())
        with _synced(directory / f"{shards}.part") as file:
            write_safetensors(file, shard, metadata)
    names = {number: f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)}
    for number, name in names.items():
        (directory / f"{number}.part").rename(directory / (single if shards == 1 else name))
    if shards == 1:
        return
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[n] for name, n in where.items()}}
    _write_file(directory, "model" + INDEX_SUFFIX, json.dumps(index, indent=2) + "\n")


def _shards(pairs: Iterable[tuple[str, T]], limit: int) -> Iterator[dict[str, T]]:
    """At least one shard, in the order of `pairs`."""
    shard: dict[str, T] = {}
    size = 0
    for name, tensor in pairs:
        if name in shard or (shard and size + tensor.nbytes > limit):  # the caller refuses a repeated name
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_file(directory: Path, name: str, content: bytes | str) -> None:
    if not all(is_plain_name(part) for part in name.split("/")):
        raise CheckpointError(f"{shown(name)} is not a name for a file of a checkpoint")
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    with _synced(directory / name) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A new file whose bytes are on the disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _temporary_directory_near(path: Path) -> Iterator[Path]:
    """A directory next to `path`, gone when the block ends; what the disk refuses becomes a `CheckpointError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _remove_leftovers(path)  # also of a killed process with this one's number, as they all have in a container
        temporary.mkdir(parents=True)
        _WRITTEN.add(temporary)
        try:
            yield temporary
        finally:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
            finally:  # Ctrl-C comes here too
                _WRITTEN.discard(temporary)
    except (OSError, TypeError) as error:  # also a config of values that JSON does not have
        raise CheckpointError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _link_other_files(old: Path, new: Path, weights: str) -> None:
    """Link into `new` the files of `old` that are neither weights, by their names, nor written again."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a filesystem without links
            shutil.copy2(source, target)

    def replaced(directory: str, names: list[str]) -> set[str]:
        inside = new / Path(directory).relative_to(old)
        own = weights if directory == str(old) else ""  # one below may be another model
        return {name for name in names if re.fullmatch(own, name) or (inside / name).is_file()}

    shutil.copytree(old, new, symlinks=True, ignore=replaced, copy_function=link, dirs_exist_ok=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """`temporary` becomes `path`.  Where the system cannot swap two directories, the old one is renamed to
    one that `recover` knows, so that a kill between the two renames loses nothing."""
    if not path.exists():
        temporary.rename(path)
    elif not _swap(temporary, path):
        aside = path.with_name(f".{path.name}.old")
        path.rename(aside)
        temporary.rename(path)
        shutil.rmtree(aside)
    sync_directory(path.parent)


def _swap(a: Path, b: Path) -> bool:
    """Exchange two paths in one step (Linux `renameat2`); false where that does not exist."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def sync_directory(path: Path) -> None:
    """Sync the renames inside `path` to disk."""
    if os.name == "nt":  # directories cannot be opened there, and renames are journalled
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True
