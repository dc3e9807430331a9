"""Where a forward can be looked into.

Every module is handed a `Taps` and passes its values through it: `x = taps("resid_pre", x, rows)`.  The one here lets
everything pass untouched, as the null cache keeps nothing, so there is one forward and no `if` in it.  The taps that
read and edit are in `triptych.probe`; they are an argument, never module state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from triptych.attention import FlatKeys, Rows, SlotKeys


class Taps:
    """Taps that read and change nothing.

    `provenance` names the edits a forward runs under: what a cache holds of it must not be read under others.
    """

    provenance = ""

    def at(self, name: str) -> Taps:
        """The taps of a sub-module, by its dotted name."""
        return self

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        """The value to go on with at `site`; `value` is `[N, ...]` over the flat batch of `rows`."""
        return value

    def keys(self, keys: FlatKeys | SlotKeys) -> FlatKeys | SlotKeys:
        """The keys and values this forward reads (`k_ctx`, `v_ctx`), the cache's included."""
        return keys

    def attend(self, call: Callable[..., Tensor], rows: Rows) -> Tensor:
        """Run the attention `call`; one that serves `scores` or `pattern` passes it a `hook=`."""
        return call()


NO_TAPS: Any = Taps()
