"""Values that a trace computes again when somebody looks at them, instead of keeping them.

A module that writes `taps.computed(function, *inputs)` says that a value is this function of these tensors and of
nothing else.  Where the trace keeps all of the inputs, it keeps the function in place of the value: the same function
of the same tensors gives the same bits.  A forward that somebody replaced says nothing of the kind unless it does so
itself, and what passes there is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from triptych.attention import Rows
from triptych.errors import ProbeError
from triptych.probe.records import Later


class Computation:
    """A value as a function of tensors that are kept, or of other computations; computed once."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor | Computation], value: Tensor) -> None:
        self.function, self.inputs = function, inputs
        self.shape, self.nbytes = value.shape, value.nbytes
        self.versions = [_version(x) for x in inputs]
        self.value: Tensor | None = None
        self.version = 0

    def compute(self) -> Tensor:
        """The value.  Raises ProbeError where one of the tensors it is computed from was changed since it was read."""
        if self.value is None:
            for one, version in zip(self.inputs, self.versions, strict=True):
                if _version(one) != version:
                    raise ProbeError(
                        "a tensor of this trace was changed in place, and this value is computed from it; change a "
                        "clone(), or look at the values that follow from a tensor before changing it"
                    )
            with torch.inference_mode(False), torch.no_grad():
                inputs = [one.compute() if isinstance(one, Computation) else one.detach() for one in self.inputs]
                self.value = self.function(*inputs)
            self.version, self.inputs = self.value._version, []
        return self.value

    def row(self, row: int, rows: Rows) -> Later:
        """What one row of the flat batch has of it."""

        def part() -> Tensor:
            whole = self.compute()
            return whole if len(rows) == 1 else rows.split(whole)[row]

        def place() -> Hashable:
            return (id(self), row) if self.value is None else (part().data_ptr(), part().nbytes)

        return Later(part, self.nbytes // self.shape[0] * rows.lengths[row], place)


class Computations:
    """Which tensors of one forward passed a site where they are kept, and which were computed from such tensors."""

    def __init__(self) -> None:
        self.kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a tensor that is kept -> True
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a tensor -> its computation, and its version then

    def add(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        """`value` is `function(*inputs)`.  Not remembered unless all of these are kept, or computed from kept ones."""
        if value.is_inference() or _casts(value) or any(x is value for x in inputs):
            return
        sources = [self._made(x) or (x if x in self.kept else None) for x in inputs]
        known = [x for x in sources if x is not None]
        if len(known) == len(inputs):
            self.made[value] = Computation(function, known, value), value._version

    def kept_as(self, value: Tensor, rows: Rows) -> Tensor | Computation:
        """What to keep of a value that passes a site of these rows: the value, or how it is computed."""
        computation = self._made(value)
        if computation is not None and value.shape[0] == rows.total:
            return computation
        self.kept[value] = True
        return value

    def _made(self, value: Tensor) -> Computation | None:
        """How a tensor was computed; None where that is not known, or where it was written to since."""
        computation, version = self.made.get(value, (None, -1))
        return None if computation is None or value._version != version else computation


def _version(one: Tensor | Computation) -> int:
    """How often a tensor was written to; of a computation, how often its value was since it was computed."""
    if isinstance(one, Tensor):
        return one._version
    return 0 if one.value is None else one.value._version - one.version


def _casts(value: Tensor) -> bool:
    """Whether functions give another dtype here than they will where somebody looks at the trace."""
    device = value.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
