"""One shard: a safetensors file with the token ids of some documents, one after the other.

    ends    uint64 [documents]        where each document ends in `tokens`, so that the last is their number
    hashes  uint64 [documents]        of the ids of each document, by which equal documents are known
    tokens  uint16 or uint32 [tokens] ids without special tokens

The metadata of the file say which run made it, from which part of the inputs and with which tokenizer, and have the
SHA-256 of everything after the header.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from triptych.checkpoints.safetensors import parse_header
from triptych.checkpoints.source import file_size, json_object
from triptych.errors import CheckpointError, TextError, library

Integers = NDArray[np.integer]
_TYPES: dict[str, type[np.unsignedinteger]] = {"U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
_KEY = "shard"  # of the metadata
_BLOCK = 1 << 24  # bytes that are hashed at once


def shard_name(number: int) -> str:
    return f"shard-{number:06}.safetensors"


@dataclass(frozen=True)
class ShardOrigin:
    """How a shard came to be: the `run` that made it, from which part of its inputs (`number`), the hash of the
    tokenizer, the bytes of text, how many `empty` documents were left out, and the digest of a part that is read once
    (empty for files, which can be read again)."""

    run: str
    number: int
    tokenizer: str
    text_bytes: int
    empty: int
    digest: str = ""


@dataclass(frozen=True)
class ShardHeader:
    """What the header of a shard says; `size` are the bytes of the file, `places` the first byte and the type of each
    array, `data` where the arrays begin."""

    origin: ShardOrigin
    documents: int
    tokens: int
    size: int
    sha256: str
    data: int
    places: dict[str, tuple[int, type[np.unsignedinteger]]]


def write_shard(path: Path, tokens: Integers, ends: Integers, hashes: Integers, origin: ShardOrigin) -> None:
    """Write a shard, on the disk when this returns.  Raises OSError where that fails."""
    arrays = {"ends": ends, "hashes": hashes, "tokens": tokens}  # in the order in which the format stores them
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    # One text, because the library writes several in an order that varies.
    metadata = {_KEY: json.dumps(asdict(origin) | {"sha256": digest.hexdigest()})}
    with library(lambda problem: TextError(f"cannot write {path}: {problem}")):
        save_file(arrays, path, metadata)
    path.chmod(0o644)  # the library lets nobody else read it
    with path.open("rb") as file:
        os.fsync(file.fileno())


def open_shard(path: Path) -> tuple[ShardHeader, mmap.mmap]:
    """The header of a shard and its mapped bytes.  Raises TextError for a file that is missing, truncated or no shard;
    the arrays themselves are not read."""
    try:
        if file_size(path) is None:
            raise TextError(f"{path}: the shard is missing")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        infos, metadata = parse_header(data, path)
    except (CheckpointError, ValueError) as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{path}: is empty"
        raise TextError(f"{problem}; this is no whole shard") from None
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from None
    kinds = {name: (info.dtype, len(info.shape)) for name, info in infos.items()}
    ids = kinds.get("tokens", ("", 0))[0]
    if kinds != {"ends": ("U64", 1), "hashes": ("U64", 1), "tokens": (ids, 1)} or ids not in ("U16", "U32"):
        raise TextError(f"{path}: has not the arrays of a shard, which are ends, hashes and tokens")
    origin, sha256 = _origin(path, metadata)
    documents, tokens = infos["ends"].shape[0], infos["tokens"].shape[0]
    if infos["hashes"].shape[0] != documents or tokens < documents:
        raise TextError(f"{path}: has {documents} ends, {infos['hashes'].shape[0]} hashes and {tokens} tokens")
    places = {name: (info.offset, _TYPES[info.dtype]) for name, info in infos.items()}
    start = min(info.offset for info in infos.values())
    return ShardHeader(origin, documents, tokens, len(data), sha256, start, places), data


def _origin(path: Path, metadata: Mapping[str, str]) -> tuple[ShardOrigin, str]:
    """The origin that the metadata of a shard tell, and the SHA-256 of what follows the header."""
    try:
        values = json_object(metadata.get(_KEY, "{}").encode(), path)
        kinds = {name: type(value) for name, value in values.items()}
        if kinds != {**{one.name: int if one.type == "int" else str for one in fields(ShardOrigin)}, "sha256": str}:
            raise CheckpointError
    except (CheckpointError, UnicodeEncodeError):
        raise TextError(f"{path}: its metadata are not those of a shard") from None
    sha256 = values.pop("sha256")
    return ShardOrigin(**values), sha256


def array_of(header: ShardHeader, data: mmap.mmap, name: str) -> Integers:
    """The array called `name` as a view of the mapped bytes."""
    offset, kind = header.places[name]
    count = header.tokens if name == "tokens" else header.documents
    return np.frombuffer(data, dtype=kind, count=count, offset=offset)


def check_bytes(path: Path) -> None:
    """Read the whole shard.  Raises TextError where its bytes are not those of its checksum, or its ends do not
    rise to the number of its tokens."""
    header, data = open_shard(path)
    digest = hashlib.sha256()
    with memoryview(data) as view:
        for at in range(header.data, header.size, _BLOCK):
            digest.update(view[at : at + _BLOCK])
    if digest.hexdigest() != header.sha256:
        raise TextError(f"{path}: its bytes have changed since it was written (SHA-256); tokenize again")
    ends = array_of(header, data, "ends").astype(np.int64)
    if header.tokens != (ends[-1] if len(ends) else 0) or (np.diff(ends, prepend=0) < 1).any():
        raise TextError(f"{path}: its documents do not end where its tokens do; tokenize again")
