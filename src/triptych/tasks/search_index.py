"""The vectors of passages, kept between searches in one safetensors file for a folder, a model and its settings.

The file has `vectors` [N, D] in fp32, `spans` [N, 4] (the fields of `Span`) and `counts` [F], the passages of each
file, and in its metadata the SHA-256 of the bytes of each file.  Nothing of the texts is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from triptych.checkpoints import atomic_write, recover
from triptych.checkpoints.safetensors import open_file
from triptych.errors import CheckpointError
from triptych.files import exists
from triptych.tasks.passages import Span

FORMAT = "triptych search index 2"
HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True, eq=False)
class Embedded:
    """The passages of one file, and their vectors [N, D] of length 1 in fp32."""

    spans: tuple[Span, ...]
    vectors: NDArray[np.float32]


def read_index(file: Path, width: int) -> dict[str, Embedded]:
    """What the index `file` holds by the SHA-256 of each text; nothing where there is no file.

    Raises CheckpointError for anything but an index whose vectors have `width` numbers.
    """
    if not exists(file):
        return {}
    source = open_file(file)
    digests = _digests(source.metadata)
    if digests is None or source.infos.keys() != {"vectors", "spans", "counts"}:
        raise CheckpointError(f"{file}: is no index of a search")
    n = source.infos["spans"].shape[0] if source.infos["spans"].shape else 0
    shapes = {"vectors": ("F32", (n, width)), "spans": ("I64", (n, 4)), "counts": ("I64", (len(digests),))}
    for name, (dtype, shape) in shapes.items():
        info = source.infos[name]
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(f"{file}: {name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")
    vectors, spans, counts = (source.read(name).numpy().copy() for name in shapes)
    if (counts < 0).any() or int(counts.sum()) != n or not _in_order(spans) or not np.isfinite(vectors).all():
        raise CheckpointError(f"{file}: its passages do not fit together")
    ends = np.cumsum(counts).tolist()
    places = zip([0, *ends[:-1]], ends, strict=True)
    return {
        digest: Embedded(tuple(Span(*row) for row in spans[a:b].tolist()), vectors[a:b])
        for digest, (a, b) in zip(digests, places, strict=True)
    }


def write_index(file: Path, files: Mapping[str, Embedded], width: int) -> None:
    """Replace `file` as a whole; of two processes the last one's index stays.

    Raises CheckpointError, with the old file as it was, where that cannot be written.
    """
    parts = list(files.values())
    spans = [astuple(span) for part in parts for span in part.spans]
    content = save(
        {
            "vectors": np.concatenate([np.zeros((0, width), np.float32), *(part.vectors for part in parts)]),
            "spans": np.asarray(spans, np.int64).reshape(-1, 4),
            "counts": np.asarray([len(part.spans) for part in parts], np.int64),
        },
        {"format": FORMAT, "digests": " ".join(files)},
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file.parent}: cannot be made ({error.strerror})") from None
    recover(file)
    atomic_write(file, content)


def _digests(metadata: Mapping[str, str]) -> list[str] | None:
    """The SHA-256 of each file; None where the metadata are not those of an index."""
    digests = metadata.get("digests", "").split()
    known = metadata.get("format") == FORMAT and len(set(digests)) == len(digests)
    return digests if known and all(len(one) == 64 and set(one) <= HEXADECIMAL for one in digests) else None


def _in_order(spans: NDArray[np.int64]) -> bool:
    """Whether each passage begins before it ends."""
    begin, end, line, last_line = spans.T
    return bool(((begin >= 0) & (begin < end) & (line >= 1) & (line <= last_line)).all())
