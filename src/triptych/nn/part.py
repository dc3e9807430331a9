"""How a part becomes a module: parameters from its `tensors()`, sub-modules from its `children()`, same names.

Because both trees are made from the spec by this one rule, a module's `named_parameters()` are its spec's `shapes()`.
Every concrete module adds only its arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from triptych.spec.part import Part

S = TypeVar("S", bound=Part)


class Module(nn.Module, Generic[S]):
    """Base of every part's module; `S` is the spec class it is built from, named once more with `of=` at run time."""

    built: ClassVar[dict[type[Part], type[Module[Any]]]] = {}
    spec: S

    def __init_subclass__(cls, of: type[Part] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            Module.built[of] = cls

    def __init__(self, spec: S) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in spec.tensors().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name, child in spec.children():
            _attach(self, name.split("."), build(child))
        for name, value in vars(spec).items():  # an empty slot is an attribute that holds None
            if value is None and not hasattr(self, name):
                setattr(self, name, None)

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


def build(spec: Part) -> Module[Any]:
    """The module of a part, on the current default device, uninitialized."""
    return Module.built[type(spec)](spec)


def _attach(parent: nn.Module, path: list[str], child: nn.Module) -> None:
    """Put `child` at `blocks.3` or `kinds.self`: the step in between is a plain container."""
    if len(path) == 1:
        parent.add_module(path[0], child)
        return
    if path[0] not in parent._modules:
        parent.add_module(path[0], nn.ModuleList() if path[1].isdigit() else nn.ModuleDict())
    parent._modules[path[0]].add_module(path[1], child)  # type: ignore[union-attr]


def assign(root: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` the storage of parameter `name`, whatever device the module was built on."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    owner.register_parameter(leaf, nn.Parameter(value, requires_grad=value.is_floating_point()))


def tie(root: nn.Module, ties: dict[str, str]) -> None:
    """Let each alias share its source's parameter."""
    for alias, source in ties.items():
        path, _, leaf = alias.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, root.get_parameter(source))
