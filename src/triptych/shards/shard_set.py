"""A finished directory of shards, opened: documents and tokens by number, of which only those asked for are read.

In memory are the manifest and the headers, about a kilobyte for each shard.  The shards are mapped when they are read,
so that their pages belong to the system, which takes them back when it needs memory.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.arguments import checked
from triptych.errors import ConfigError, InputError, TextError, counted, shown
from triptych.text import Tokenizer, from_directory
from .manifest import MANIFEST, PLAN, TOKENIZER, Manifest, fingerprint, read_manifest
from .shard_file import Integers, ShardHeader, array_of, check_bytes, open_shard, shard_name

_MAPPED = 4096  # shards at one time; each holds a file open, and at most half of the files that a process may open
Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Arrays:
    """The arrays of a shard, mapped."""

    ends: Integers
    hashes: Integers
    tokens: Integers


class ShardSet:
    """The shards in the directory `path`.

    Raises ConfigError for a directory without shards or with a run that is not finished, and TextError naming a shard
    that is missing, truncated, of another run or of another tokenizer.  The bytes of tokens are read by `check` alone.
    """

    @checked
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = _finished(self.path)
        self._headers = [self._header(number) for number in range(len(self.manifest.shards))]
        self.token_ends = list(accumulate(header.tokens for header in self._headers))
        self.document_ends = list(accumulate(header.documents for header in self._headers))
        self.arrays = lru_cache(_most_mapped())(self._arrays)

    def __repr__(self) -> str:
        return f"ShardSet({counted(self.documents, 'document')}, {counted(self.tokens, 'token')})"

    @property
    def documents(self) -> int:
        return self.document_ends[-1]

    @property
    def tokens(self) -> int:
        return self.token_ends[-1]

    def _header(self, number: int) -> ShardHeader:
        entry, path = self.manifest.shards[number], self.path / shard_name(number)
        header, _ = open_shard(path)
        origin = header.origin
        if origin.tokenizer != self.manifest.tokenizer:
            hashes = f"{origin.tokenizer[:12]}, and the manifest's is {self.manifest.tokenizer[:12]}"
            raise TextError(f"{path}: was made with another tokenizer, of the hash {hashes}; tokenize again")
        if (origin.run, origin.number, entry.name) != (self.manifest.run, number, path.name):
            raise TextError(f"{path}: is a shard from another run; put back the one of this run, or tokenize again")
        facts = (header.size, header.documents, header.tokens, header.sha256)
        if facts != (entry.size, entry.documents, entry.tokens, entry.sha256):
            raise TextError(f"{path}: is not the shard that {MANIFEST} lists; tokenize again")
        return header

    def _arrays(self, number: int) -> _Arrays:
        path, header = self.path / shard_name(number), self._headers[number]
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise TextError(f"{path}: cannot be read ({error})") from None
        if hasattr(mmap, "MADV_RANDOM"):  # rows come from anywhere, so that what stands behind one is of no use
            data.madvise(mmap.MADV_RANDOM)
        if len(data) != header.size:
            raise TextError(f"{path}: has {len(data):,} bytes, and had {header.size:,} when it was opened")
        return _Arrays(*(array_of(header, data, name) for name in ("ends", "hashes", "tokens")))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards.  Raises TextError where the one beside them has another hash."""
        tokenizer = from_directory(self.path / TOKENIZER)
        if (there := fingerprint(tokenizer)) != self.manifest.tokenizer:
            problem = f"{self.path / TOKENIZER} has the hash {there[:12]}, and made the shards with"
            raise TextError(f"{problem} {self.manifest.tokenizer[:12]}; put back the tokenizer that made them")
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer, whose: str) -> None:
        """Raises ConfigError unless `tokenizer` gives the ids that the shards have."""
        if (there := fingerprint(tokenizer)) != self.manifest.tokenizer:
            problem = f"{self.path} was made with the tokenizer of hash {self.manifest.tokenizer[:12]}"
            raise ConfigError(f"{problem}, and {whose} has {there[:12]}; tokenize with the model's: --tokenizer MODEL")

    @checked
    def document(self, number: int) -> Ids:
        """The ids `[N]` of a document, counted from 0.  Raises InputError for a number that there is not."""
        if not 0 <= number < self.documents:
            raise InputError(f"document {number} does not exist; there are {self.documents:,}, counted from 0")
        shard = bisect_right(self.document_ends, number)
        return self.document_of(shard, number - (self.document_ends[shard - 1] if shard else 0))

    def document_of(self, shard: int, number: int, first: int = 0, last: int | None = None) -> Ids:
        """The ids of a document of a shard, or those at `[first, last)` of them; places that it has not are left
        out."""
        ends = self.arrays(shard).ends
        start, stop = int(ends[number - 1]) if number else 0, int(ends[number])
        count = stop - start
        last = count if last is None else min(max(0, last), count)
        return self.ids(shard, start + min(max(0, first), last), start + last)

    def ids(self, shard: int, start: int, stop: int) -> Ids:
        """The ids at `[start, stop)` of a shard.  Raises TextError for one that the tokenizer does not have."""
        ids = self.arrays(shard).tokens[start:stop].astype(np.int32)
        if len(ids) and int(ids.view(np.uint32).max()) >= self.manifest.vocab_size:
            problem = f"has the id {int(ids.view(np.uint32).max())} of a vocabulary of {self.manifest.vocab_size}"
            raise TextError(f"{self.path / shard_name(shard)}: {problem}; its bytes have changed, tokenize again")
        return ids

    def check(self) -> Iterator[str]:
        """Read every byte of every shard; what is wrong with those that are damaged, a line each."""
        for number in range(len(self._headers)):
            try:
                check_bytes(self.path / shard_name(number))
            except TextError as error:
                yield str(error)


def _most_mapped() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 256
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAPPED if most == resource.RLIM_INFINITY else min(_MAPPED, most // 2)


def _finished(path: Path) -> Manifest:
    if not path.is_dir():
        raise ConfigError(f"there is no directory {shown(str(path))}; triptych data tokenize makes one of shards")
    if (path / MANIFEST).exists():
        manifest = read_manifest(path / MANIFEST)
        if not manifest.shards:
            raise TextError(f"{path / MANIFEST}: lists no shard; tokenize again")
        return manifest
    if (path / PLAN).exists():
        raise ConfigError(f"{path} is not finished; run the same `triptych data tokenize` again, and it goes on")
    raise ConfigError(f"{path} holds no shards; triptych data tokenize makes them")


def holds_shards(path: Path | str) -> bool:
    """Whether a directory holds shards, finished or not."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, PLAN))
