"""Registers the function of tensors of each operation, and records calls of it in a program."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function

from .table import OPERATIONS, Operation

Arguments = dict[str, Any]
NamedCall = tuple[str, Arguments]
ArgumentBinder = Callable[..., NamedCall]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

RUN: dict[str, Callable[..., Any]] = {}
"""The function of tensors of each operation, by its name."""

_BINDERS: dict[object, ArgumentBinder] = {}


class NotLowerable(Exception):
    """A forward did something that is no operation; the message says what."""


def implements(name: str) -> Callable[[FunctionT], FunctionT]:
    """A decorator: the function computes the operation `name` of the table, and a call of it is recorded as that."""
    operation = OPERATIONS[name]

    def bind(*arguments: Any, **named: Any) -> NamedCall:
        return name, dict(zip(operation.arguments, arguments, strict=False)) | named

    def register(function: FunctionT) -> FunctionT:
        RUN[name] = function
        _BINDERS.setdefault(function, bind)
        return function

    return register


def recorded_as(*functions: object) -> Callable[[ArgumentBinder], ArgumentBinder]:
    """A decorator for a binder: from the arguments of a call of one of `functions`, the name of the operation that it
    is and that operation's arguments."""

    def register(binder: ArgumentBinder) -> ArgumentBinder:
        _BINDERS.update(dict.fromkeys(functions, binder))
        return binder

    return register


def recorded_call(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Operation, Arguments]:
    """The operation that a call of torch or of `triptych.ops` is, and its arguments by name.  Raises NotLowerable for a
    call that is no operation."""
    binder = _BINDERS.get(function)
    if binder is None:
        name = getattr(function, "__qualname__", None) or getattr(function, "__name__", function)
        raise NotLowerable(f"{name} is no operation of the table (triptych.ops)")
    name, bound = binder(*arguments, **named)
    operation = OPERATIONS[name]
    if unknown := set(bound) - set(operation.arguments):
        raise NotLowerable(f"{name} has no argument {sorted(unknown)[0]!r}")
    return operation, bound


def record(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Let the symbolic values among the arguments of an operation note the call `function(*arguments)` instead of
    computing it."""
    value: Tensor = handle_torch_function(function, arguments, *arguments)
    return value
