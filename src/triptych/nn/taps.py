"""The places where a forward can be read and edited, and taps that do neither.

Every module is given a `Taps` and passes its values through it: `x = taps("resid_pre", x, rows)`.  The one here
passes everything unchanged, as the null cache keeps nothing, so there is one forward and no `if` in it.  The taps that
read and edit are those of `triptych.probe.session`; they are an argument, never module state.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call

from torch import Tensor

from triptych.attention import AttendPlan, ContentBias, Rows


class Taps:
    """Taps that read and change nothing.

    `provenance` names the edits a forward runs under: what a cache holds of it must not be read under others.
    """

    provenance = ""

    def at(self, name: str) -> Taps:
        """The taps of a sub-module, by its dotted name."""
        return self

    def run(self, block: Callable[..., Tensor], x: Tensor, ctx: object, layer: int) -> Tensor:
        """Run one block of a stack, whose taps these are."""
        return block(x, ctx, layer, self)

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        """The value to go on with at `site`; `value` is `[N, ...]` over the flat batch of `rows`."""
        return value

    #: `computed(function, *inputs)` is `function(*inputs)`, where the function reads nothing but these and changes
    #: nothing: taps that keep the inputs need not keep the result.
    computed: Callable[..., Tensor] = call  # written in C: no frame for each, and not bound to the taps

    def attend(
        self, plan: AttendPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None
    ) -> Tensor:
        """Run attention as planned; k and v are all that this forward reads, the cache's included.  Taps that serve
        `k_ctx`, `v_ctx`, `scores` or `pattern` take their place here."""
        return plan.run(q, k, v, sinks, content)


NO_TAPS = Taps()
