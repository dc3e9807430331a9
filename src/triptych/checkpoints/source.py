"""The interface of every weights file, mapped files and strict JSON for its readers, and the report of a load.

Names, shapes and dtypes are known at once; numbers are read one tensor at a time.

Files are mapped privately: a tensor returned in its stored dtype is a view of the page cache.  It costs no memory of
its own, keeps its mapping alive, and a change in place never reaches the file.  Nothing here imports torch until a
tensor is read.
"""

from __future__ import annotations

import json
import mmap
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from triptych.errors import CheckpointError, first_line, nearest, shown
from triptych.mapping import Values
from triptych.mapping.weight_table import FileFormat

if TYPE_CHECKING:
    import torch


MAX_TEXT = 1 << 28  # bytes of a JSON or text file
MAX_NAME = 255  # bytes of a file's name, the limit of most file systems


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor without its numbers."""

    name: str
    dtype: str  # as the format spells it: "F32", "BF16", "Q4_K"
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    nbytes: int
    file: Path
    offset: int  # of its first byte, from the start of `file`


class Source:
    """Named tensors in one file or several, already checked: sizes, offsets and names can be trusted."""

    kind: ClassVar[FileFormat] = "hf"  # whose names the tensors have
    path: Path
    infos: dict[str, TensorInfo]
    metadata: Values

    @property
    def names(self) -> list[str]:
        return list(self.infos)

    def info(self, name: str) -> TensorInfo:
        """The tensor called `name`.  Raises CheckpointError, with the nearest name, where there is none."""
        if name not in self.infos:
            raise fault(self.path, f"no tensor {shown(name)}{nearest(name, self.infos)}")
        return self.infos[name]

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor called `name`, of shape `infos[name].shape`.

        In the stored dtype it is a view of the mapped file; packed formats come as float32.  Another `dtype` is
        converted while reading, without a second copy of all of it.
        """
        raise NotImplementedError

    def is_packed(self, name: str) -> bool:
        """Whether the tensor is stored in packed blocks or groups that can stay so."""
        return False

    def read_raw(self, name: str) -> torch.Tensor:
        """The stored bytes, uint8: `[..., bytes of a row]` for a packed format, `[nbytes]` otherwise."""
        raise NotImplementedError


def fault(path: Path, problem: str) -> CheckpointError:
    """The error for a malformed file."""
    return CheckpointError(f"{path}: {problem}")


def file_size(path: Path) -> int | None:
    """Bytes of the regular file at `path`; None where there is nothing.

    Raises CheckpointError for whatever else is there: opening a pipe would wait for ever, a device has no end, and a
    directory or a link that leads nowhere must not count as absent.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise fault(path, "is a link to a file that does not exist") from None
        return None
    except OSError as error:  # a loop of links, no permission, a name that is too long
        raise fault(path, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise fault(path, "is a directory, not a file" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
    return status.st_size


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a regular file, mapped copy-on-write; `CheckpointError` when there is nothing to map."""
    try:
        if file_size(path) is None:
            raise fault(path, "no such file")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise fault(path, "is empty, not a checkpoint") from None
    except OSError as error:
        raise fault(path, f"cannot be read ({error.strerror})") from None
    if data[:23] == b"version https://git-lfs":
        raise fault(path, "is a pointer of Git LFS, not the file itself; run: git lfs pull")
    return data


def view(data: mmap.mmap, info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """`info`'s bytes in `data` as a tensor of `dtype` and `shape` that shares their memory."""
    import torch

    count = info.nbytes // dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if info.offset % dtype.itemsize:  # old files: kernels need aligned elements, so copy
        return torch.frombuffer(bytearray(data[info.offset : info.offset + info.nbytes]), dtype=dtype).view(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=info.offset).view(shape)


def check_places(infos: Iterable[TensorInfo], path: Path, start: int, total: int, *, gaps: bool) -> None:
    """Raise CheckpointError for tensors that overlap or end after the file, whose data begin at `start`, and unless
    there may be `gaps` for unused bytes between or after them."""
    position = start
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        end = info.offset + info.nbytes
        if end > total:
            raise fault(path, f"truncated: tensor {shown(info.name)} ends at byte {end} of {total}")
        if info.offset < position or (info.offset > position and not gaps):
            what = "overlaps the tensor before it" if info.offset < position else "follows unused bytes"
            raise fault(path, f"tensor {shown(info.name)} {what} (starts at byte {info.offset}, not {position})")
        position = end
    if position != total and not gaps:
        raise fault(path, f"has {total - position} bytes after its last tensor")


def is_plain_name(name: str) -> bool:
    """Whether `name` can only be a visible file in the directory it is joined to."""
    short = len(name.encode(errors="surrogatepass")) <= MAX_NAME
    return len(name) > 0 and short and name.isprintable() and name[0] != "." and not set(name) & set('/\\:*?"<>|')


def json_object(raw: bytes, path: Path) -> Values:
    """Strict JSON: an object, each key once, no NaN.  Raises CheckpointError for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> Values:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise fault(path, f"has the key {shown(twice)} twice")
        return result

    def constant(text: str) -> NoReturn:
        raise fault(path, f"holds {text}, which is not JSON")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise fault(path, f"its JSON is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise fault(path, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise fault(path, f"its JSON cannot be parsed ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise fault(path, "its JSON is not an object")
    return value


def read_json(path: Path) -> Values:
    """The JSON object in the file `path`, read as strictly as `json_object`."""
    check_text_size(path, file_size(path))
    return json_object(bytes(map_file(path)), path)


def json_if_there(path: Path) -> Values:
    """The JSON object in the file `path`, an empty one where there is no such file."""
    return {} if file_size(path) is None else read_json(path)


def check_text_size(path: Path, size: int | None) -> None:
    """Raise CheckpointError for a text or JSON file too large to be one: all of it would be read into memory."""
    if size is not None and size > MAX_TEXT:
        raise fault(path, f"is {size:,} bytes long; no config or tokenizer is longer than {MAX_TEXT:,}")


@dataclass(frozen=True)
class LoadedTensor:
    """One of our parameters and the stored tensors it came from."""

    ours: str
    sources: tuple[str, ...]
    file: str
    dtype: str  # as stored, in the format's spelling
    shape: tuple[int, ...]  # ours, after `op`
    op: str = "copy"


@dataclass(frozen=True)
class LoadReport:
    """The report of how a checkpoint was loaded; `print(report)` shows it.

    tensors   for each parameter the tensor of the file that it comes from, and how that was stored.
    ties      parameter -> the parameter whose tensor it shares.
    ignored   tensor that was not read -> the reason.
    notes     lines on what differs from the file or from the arguments of `load`, such as another dtype.
    packed    how many matrices are packed, with their bytes; empty where none is.
    """

    tensors: tuple[LoadedTensor, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    packed: str = ""

    @property
    def unpacked(self) -> bool:
        """Whether packed matrices of the file are plain numbers in the model."""
        return not self.packed and any(re.match(r"I?Q|I\d", t.dtype) for t in self.tensors)

    def to_dict(self) -> Values:
        """Plain lists, strings and numbers, ready for JSON."""
        tensors = [{**asdict(t), "sources": list(t.sources), "shape": list(t.shape)} for t in self.tensors]
        more = {"ignored": dict(self.ignored), "notes": list(filter(None, (self.packed, *self.notes)))}
        return {"tensors": tensors, "ties": dict(self.ties), **more}

    def __str__(self) -> str:
        rows = [("parameter", "shape", "from", "stored as", "op", "file")]
        for t in self.tensors:
            rows.append((t.ours, "×".join(map(str, t.shape)), " + ".join(t.sources), t.dtype, t.op, t.file))
        rows += [(alias, "", target, "", "tie", "") for alias, target in self.ties.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(f"{len(self.tensors)} loaded, {len(self.ties)} tied, {len(self.ignored)} ignored")
        lines += [f"ignored  {line}" for line in by_reason(self.ignored)]
        return "\n".join([*lines, *filter(None, (self.packed, *self.notes))])


def by_reason(ignored: Mapping[str, str]) -> Iterator[str]:
    """One line a reason, with the first tensor it holds for and how many more there are."""
    for why in dict.fromkeys(ignored.values()):
        first, *others = [name for name, reason in ignored.items() if reason == why]
        yield f"{first}{f' and {len(others)} more' if others else ''}: {why}"
