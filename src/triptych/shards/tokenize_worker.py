"""The program that makes one shard after another; `tokenizing` starts several.

It reads one JSON request a line: first what all shards have in common, then a part each.  It answers with the
characters read so far, and at the end of a part with the name of the file that it wrote, or an error.  It ends when its
input does, also in the middle of a part, so that none outlives the process that commits what it writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from triptych.errors import TextError, TriptychError
from triptych.text import Tokenizer, from_directory
from .inputs import InputPart, texts_of
from .shard_file import Integers, ShardOrigin, write_shard

_AT_ONCE = 1 << 21  # characters that are encoded in one call
_HASHED = 8  # bytes of the hash of a document


@dataclass(frozen=True)
class ShardWork:
    """What all shards of a run have in common: the directory, the run, how texts are read, and the tokenizer, its hash
    and the type of its ids."""

    out: Path
    run: str
    field: str
    separator: str | None
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def kind(self) -> type[np.unsignedinteger]:
        return np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32


def make_shard(work: ShardWork, number: int, part: InputPart, progress: Callable[[int], object]) -> Path:
    """Tokenize a part, and write its shard under a temporary name.

    `progress` is called with the characters read so far.  Raises TextError and InputError for texts that cannot be
    read or encoded, and where the shard cannot be written.
    """
    ids, ends, hashes, text_bytes, empty, read, end = list[Integers](), list[int](), list[int](), 0, 0, 0, 0
    for group in _groups(texts_of(part, work.field, work.separator)):
        for document in work.tokenizer.encode_documents(group):
            if not len(document):
                empty += 1
                continue
            digest = hashlib.blake2b(document.tobytes(), digest_size=_HASHED).digest()
            hashes.append(int.from_bytes(digest, "little"))
            ids.append(document.astype(work.kind))
            end += len(document)
            ends.append(end)
        text_bytes += sum(len(text.encode()) for text in group)
        read += sum(map(len, group))
        progress(read)
    path = work.out / f".shard-{number:06}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    origin = ShardOrigin(work.run, number, work.fingerprint, text_bytes, empty, part.digest)
    tokens = np.concatenate([np.zeros(0, work.kind), *ids])
    try:
        write_shard(path, tokens, np.array(ends, np.uint64), np.array(hashes, np.uint64), origin)
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def _groups(texts: Iterator[str]) -> Iterator[list[str]]:
    """The texts in lists of about `_AT_ONCE` characters; one without anything but white space becomes empty."""
    group, size = list[str](), 0
    for text in texts:
        group.append(text if text.strip() else "")
        size += len(text)
        if size >= _AT_ONCE or len(group) >= _AT_ONCE // 32:
            yield group
            group, size = [], 0
    if group:
        yield group


def main() -> None:
    """Answer the requests of stdin until it ends."""
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    first = json.loads(sys.stdin.readline())
    Thread(target=_read, args=(requests,), daemon=True).start()

    def answer(**values: object) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    try:
        tokenizer = from_directory(first["tokenizer"])
        work = ShardWork(
            Path(first["out"]), first["run"], first["field"], first["separator"], tokenizer, first["fingerprint"]
        )
        while True:
            request = requests.get()
            part = InputPart.from_json(request["part"])
            path = make_shard(work, request["number"], part, lambda read: answer(read=read))
            answer(file=path.name)
    except TriptychError as error:
        answer(error=str(error), kind=type(error).__name__)
    except Exception as error:  # reported by the process that started this one
        answer(error=f"{type(error).__name__}: {error}", kind="TextError")


def _read(requests: SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)
