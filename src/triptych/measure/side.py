"""The interface of a measured library (a side), ours or a peer, and the timing of a job.

The clock runs inside the process of the side, so that nothing of the conversation with it is counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from triptych.attention import CacheType
from triptych.errors import InputError
from triptych.generate import Executor
from triptych.media.audio import Samples
from triptych.program.native_encoder import Matmul
from .jobs import BenchJob, Ids, sound

Sources = Sequence[Ids] | Sequence[Samples]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings by which a side runs.

    model      the path of the model.
    dtype      fp32, bf16 or int8; None takes what the file has.
    quantize   of ours: int8 or int4; "file", the packed types of the file; "none", plain numbers; None, as `load`
               does by itself.
    executor   of ours: what computes the steps, as `generate.Engine` says.
    matmul     of ours: what an encoder, or prompts, are multiplied in (`Model.encode`, `Model.generate`).
    cache      of ours: what keys and values are kept in.
    layout     that of the model, and `sound` whether it reads sound.
    """

    model: str
    threads: int
    layout: str
    sound: bool = False
    dtype: str | None = None
    device: str = "cpu"
    quantize: str | None = None
    executor: Executor = "auto"
    matmul: Matmul = "auto"
    cache: CacheType = "auto"
    offline: bool = False
    ignore: tuple[str, ...] = ()


class Side:
    """The interface of a side.  A method that it does not have raises InputError, with the reason.

    The constructor imports what the side needs and loads nothing.  Of a peer, `needs` are the modules that it imports,
    `install` says how to get them, and `dtypes` are the forms of the weights that it can be asked for, none where the
    file alone decides.
    """

    name = "a side"
    needs: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = "pip install -e '.[bench]'"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def missing(cls) -> list[str]:
        """Those of the modules it needs that are not installed."""
        return [name for name in cls.needs if find_spec(name) is None]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that compute."""
        raise NotImplementedError

    @property
    def dtype(self) -> str:
        """The form of the weights in use."""
        return self.options.dtype or "as in the file"

    def load(self) -> None:
        """Load the model, in place of one that was loaded before."""
        raise NotImplementedError

    def prepare(self, rows: int, tokens: int) -> None:
        """Make room for `rows` rows of `tokens` tokens; the time is not counted."""

    def start(self, rows: Sequence[Ids], new: int) -> None:
        """Read prompts and choose the first token of each; `new` tokens will follow."""
        raise InputError(f"{self.name} is not measured on decoding")

    def step(self) -> int:
        """One more token of each row -> how many tokens were made."""
        raise InputError(f"{self.name} is not measured on decoding")

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """A vector for each text, `[B, D]`."""
        raise InputError(f"{self.name} is not measured on encoding")

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text that `encode` reads."""
        raise InputError(f"{self.name} is not measured on encoding")

    def read(self, sources: Sources) -> None:
        """The encoder of an encoder-decoder alone, on ids or on sound."""
        raise InputError(f"{self.name} is not measured on the encoder alone")

    def write(self, sources: Sources, new: int, beams: int) -> list[int]:
        """Exactly `new` tokens for each source, ends ignored -> how many were made for each."""
        raise InputError(f"{self.name} is not measured on encoder-decoders")

    def wait(self) -> None:
        """Return when everything that was asked is done, where a device works by itself."""

    def facts(self) -> dict[str, Any]:
        """The facts known once the model is loaded; of ours what a decoding step reads."""
        return {}


def perform(side: Side, job: BenchJob, keep: str | None = None) -> dict[str, Any]:
    """Do a job -> `values`, one for each of its figures, and `counts`, the work as the side counted it.

    `keep` is a file for the vectors of a job that encodes, as .npy.
    """
    sources: Sources = job.rows or [sound(job.seconds)]
    counts: list[int] = []
    match job.kind:
        case "first":
            return _first(side, job, sources)
        case "prefill":
            side.prepare(len(job.rows), len(job.rows[0]) + 1)
            seconds = _seconds(side, lambda: side.start(job.rows, 1))
            count = sum(map(len, job.rows))
            return {"values": [count / seconds], "counts": [count]}
        case "decode" | "together":
            side.prepare(len(job.rows), len(job.rows[0]) + job.new + 1)
            side.start(job.rows, job.new + 1)
            seconds = _seconds(side, lambda: counts.extend(side.step() for _ in range(job.new)))
            return {"values": [sum(counts) / seconds], "counts": [sum(counts)]}
        case "encode":
            return _encode(side, job, keep)
        case "encoder":
            return {"values": [_seconds(side, lambda: side.read(sources))], "counts": [len(sources)]}
    seconds = _seconds(side, lambda: counts.extend(side.write(sources, job.new, job.beams)))
    return {"values": [sum(counts) / seconds, seconds], "counts": counts}


def _first(side: Side, job: BenchJob, sources: Sources) -> dict[str, Any]:
    """Seconds of loading, and from its beginning to the first result."""
    begin = time.perf_counter()
    side.load()
    loaded = time.perf_counter() - begin
    if job.texts:
        side.encode(job.texts)
    elif side.options.layout == "decoder":
        side.prepare(len(job.rows), len(job.rows[0]) + 1)
        side.start(job.rows, 1)
    else:
        side.write(sources, job.new, 1)
    side.wait()
    return {"values": [loaded, time.perf_counter() - begin], "counts": [1]}


def _encode(side: Side, job: BenchJob, keep: str | None) -> dict[str, Any]:
    vectors: list[NDArray[np.float32]] = []
    seconds = _seconds(side, lambda: vectors.append(side.encode(job.texts)))
    lengths = side.lengths(job.texts)
    if keep is not None:
        with Path(keep).open("wb") as file:
            np.save(file, vectors[0], allow_pickle=False)
    return {"values": [len(vectors[0]) / seconds, sum(lengths) / seconds], "counts": lengths}


def _seconds(side: Side, call: Any) -> float:
    side.wait()
    begin = time.perf_counter()
    call()
    side.wait()
    return time.perf_counter() - begin
