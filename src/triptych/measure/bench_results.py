"""The result of a bench: figures with their limits, and those of the peers."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limit:
    """The machine's limit of one figure, in the unit of the figure.  `by` is what it follows from."""

    value: float
    by: str


@dataclass(frozen=True)
class PeerFigure:
    """A peer's runs of the same work; none where it could not do it, and `note` says why."""

    runs: tuple[float, ...] = ()
    note: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.runs) if self.runs else None


@dataclass(frozen=True)
class Figure:
    """One figure: the median of `runs`, in `unit`; seconds, or a number of things in a second."""

    name: str
    unit: str
    runs: tuple[float, ...]
    limit: Limit | None = None
    peers: dict[str, PeerFigure] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return statistics.median(self.runs)

    @property
    def reached(self) -> float | None:
        """The share of the limit, of 1."""
        if self.limit is None:
            return None
        return self.limit.value / self.value if self.unit == "s" else self.value / self.limit.value

    def ratio(self, peer: str) -> float | None:
        """The speed as a multiple of the peer's: the median over the pairs of runs; None where it has no figure."""
        theirs = self.peers[peer].runs if peer in self.peers else ()
        pairs = list(zip(self.runs, theirs, strict=False))
        if not pairs:
            return None
        return statistics.median(b / a if self.unit == "s" else a / b for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        peers = {
            name: asdict(one) | {"value": one.value, "ratio": self.ratio(name)} for name, one in self.peers.items()
        }
        return asdict(self) | {"value": self.value, "reached": self.reached, "peers": peers}


@dataclass(frozen=True)
class Rates:
    """The measured rates of the machine: bytes read in a second, and matmul operations in a second by dtype."""

    read: float
    fp32: float
    bf16: float


@dataclass(frozen=True)
class MeasuredSide:
    """One of those that were measured: versions, dtype, and bytes of memory at the peak beyond its imports.  A peer
    that did not start has no versions."""

    name: str
    versions: dict[str, str]
    dtype: str
    memory: int | None = None


@dataclass(frozen=True)
class BenchReport:
    """The result of `bench`.

    step_bytes   bytes of weights that one decoding step reads, None for an encoder.
    sides        ours first.
    busy         cores that other processes used meanwhile.
    agreement    for an encoder the smallest and the mean cosine to each peer's vectors.
    notes        what a reader must know, such as that the machine was busy; one line each.
    """

    model: str
    layout: str
    device: str
    processor: str
    cores: int
    threads: int
    repeat: int
    rates: Rates
    step_bytes: int | None
    sides: tuple[MeasuredSide, ...]
    figures: tuple[Figure, ...]
    busy: float | None = None
    agreement: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def figure(self, name: str) -> Figure:
        """The figure of that name.  Raises KeyError where there is none."""
        return {one.name: one for one in self.figures}[name]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"figures": [figure.to_dict() for figure in self.figures]}
