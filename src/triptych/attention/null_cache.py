"""What a decoder's forward needs of a cache, and the cache that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from triptych.attention.row_plan import FlatKeys, PlansRows
from triptych.attention.rows import Rows


@runtime_checkable
class KeyStep(Protocol):
    """One step of the layers that store their keys in the same way."""

    @property
    def layout(self) -> PlansRows:
        """Where their keys lie once this step's are in."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys [N, G, K] and values [N, G, Kv] -> all that its queries may see, as `layout`."""


@runtime_checkable
class Continued(Protocol):
    """What a stack decided for a step; kept with it, since the next step of the same rows changes little of it."""

    def try_advance(self, rows: Rows, x: Tensor) -> bool:
        """Adapt to the next token of each of the same rows; False where it must be decided anew."""


@runtime_checkable
class CacheStep(Protocol):
    """One forward's use of a cache.  `context` is what the stack decided in the step before, where that was one token
    of each of the same rows; None elsewhere."""

    context: Continued | None

    def of(self, layer: int) -> KeyStep: ...

    def finish(self) -> None:
        """Count the step, once every layer was extended with it."""


@runtime_checkable
class KVCache(Protocol):
    """What a decoder's forward needs of a cache; `NullCache` keeps nothing."""

    def begin(self, rows: Rows, provenance: str) -> CacheStep: ...


class NullCache:
    """Keeps nothing: training, encoders, scoring."""

    def begin(self, rows: Rows, provenance: str) -> NullStep:
        return NullStep(FlatKeys(rows))


NULL_CACHE = NullCache()


@dataclass(eq=False)
class NullStep:
    layout: FlatKeys
    context: Continued | None = None

    def of(self, layer: int) -> NullStep:
        return self

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def finish(self) -> None:
        pass
