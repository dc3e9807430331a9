"""The base of all modules, and `Taps`, through which the values of a forward are read and edited.

The `tensors()` of a part become parameters and its `children()` sub-modules, under the same names: by this one rule a
module's `named_parameters()` are its spec's `shapes()`.  Every concrete module adds only its arithmetic.

Every module is given a `Taps` and passes its values through it: `x = taps("resid_pre", x, rows)`.  The one here
passes everything unchanged, as the null cache keeps nothing, so there is one forward and no `if` in it.  The taps that
read and edit are those of `triptych.probe.apply_plan`; they are an argument, never module state.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from triptych.attention import AttendPlan, ContentBias, Rows
from triptych.errors import InputError, shown
from triptych.spec.part import Part
from .packed_weight import PackedWeight

S = TypeVar("S", bound=Part)
VectorMap = Callable[[Tensor], Tensor]
"""What acts on the vector of one token at a time, as a norm does."""


class Module(nn.Module, Generic[S]):
    """Base of every part's module.  A subclass passes its spec class as `of=`, which registers it for `build`."""

    built: ClassVar[dict[type[Part], type[Module[Any]]]] = {}
    spec: S

    def __init_subclass__(cls, of: type[Part] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            Module.built[of] = cls

    #: The dtype activations have and the device parameters are on.  They follow `.to(...)`, `.half()` and loading.
    dtype: torch.dtype
    device: torch.device

    #: Whether `weight` is a matrix that may be packed (`PackedWeight`).  A part that needs the exact numbers of one it
    #: holds, as those that choose among few do, sets it to False there.
    takes_packed: bool = False

    def __init__(self, spec: S) -> None:
        super().__init__()
        self.spec = spec
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()
        for name, shape in spec.tensors().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name, child in spec.children():
            path, _, leaf = name.rpartition(".")  # of `blocks.3` and `kinds.self`, `blocks` is a plain container
            if path and path not in self._modules:
                self.add_module(path, nn.ModuleList() if leaf.isdigit() else nn.ModuleDict())
            self.get_submodule(path).add_module(leaf, build(child))
        for name, value in vars(spec).items():  # an empty slot, and one without its tensor, holds None
            if (value is None or value is False) and not hasattr(self, name):
                setattr(self, name, None)

    @property
    def has_packed_weights(self) -> bool:
        """Whether some weight of this part, or of one below it, is packed."""
        return any(isinstance(weight, PackedWeight) for weight in self.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module[S]:
        """Every cast and move of torch goes through here: apply it to `dtype` and `device` as well."""
        nn.Module._apply(self, fn, recurse)
        example = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.dtype, self.device = example.dtype, example.device
        return self

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


def build(spec: Part) -> Module[Any]:
    """The module of a part, on the current default device, uninitialized."""
    if type(spec) not in Module.built:
        raise InputError(f"{shown(spec)} is no spec of a part; triptych.create(config) makes a model of a config")
    return Module.built[type(spec)](spec)


def assign(root: nn.Module, name: str, value: Tensor) -> None:
    """Put the weight `value`, dense or packed, in the slot called `name`, whatever device the module was built on.

    A packed weight and one of integers are not trained.
    """
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    trained = value.is_floating_point() and not isinstance(value, PackedWeight)
    owner.register_parameter(leaf, nn.Parameter(value, requires_grad=trained))


def tie(root: nn.Module, ties: dict[str, str]) -> None:
    """Let each alias share the weight of its source: one object in both slots.  A file has it once
    (`mapping/tensor_plan.py::save_plan`)."""
    for alias, source in ties.items():
        path, _, leaf = alias.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, root.get_parameter(source))


class Taps:
    """The places where a forward can be read and edited; these taps do neither.

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
