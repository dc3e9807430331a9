"""The vectors of passages, kept between searches in one safetensors file for a folder, a model and its settings.

The file has `vectors` [N, D] in fp32, `spans` [N, 4] (the fields of `Span`) and `counts` [F], the passages of each
file, and in its metadata the SHA-256 of the bytes of each file.  Nothing of the texts is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from triptych.checkpoints import atomic_write, recover
from triptych.errors import CheckpointError, first_line
from triptych.files import exists, read_regular
from triptych.tasks.passages import Span

FORMAT = "triptych search index 1"
MOST_BYTES = 16 << 30
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
    data = read_regular(file, MOST_BYTES, CheckpointError)
    try:
        digests = _digests(data)
        tensors = load(data)
        vectors, spans, counts = (tensors[name] for name in ("vectors", "spans", "counts"))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is no index of a search ({first_line(error)})") from None
    n, files = len(spans) if spans.ndim else 0, len(digests)
    shapes = {"vectors": (vectors, (n, width), "float32"), "spans": (spans, (n, 4), "int64"),
              "counts": (counts, (files,), "int64")}  # fmt: skip
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor.shape != shape or str(tensor.dtype) != dtype:
            raise CheckpointError(f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
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
        {"format": FORMAT, "digests": json.dumps(list(files))},
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file.parent}: cannot be made ({error.strerror})") from None
    recover(file)
    atomic_write(file, content)


def _digests(data: bytes) -> list[str]:
    """The SHA-256 of each file, from the header of a safetensors file.  Raises ValueError for anything else."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise ValueError("it ends within its header")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    digests = json.loads(metadata.get("digests", "null"))
    if metadata.get("format") != FORMAT or not isinstance(digests, list) or len(set(digests)) != len(digests):
        raise ValueError("its header does not say so")
    if not all(isinstance(one, str) and len(one) == 64 and set(one) <= HEXADECIMAL for one in digests):
        raise ValueError("a digest is none")
    return digests


def _in_order(spans: NDArray[np.int64]) -> bool:
    """Whether each passage begins before it ends."""
    begin, end, line, last_line = spans.T
    return bool(((begin >= 0) & (begin < end) & (line >= 1) & (line <= last_line)).all())
