"""Annotations of the package, checked while it is tested: types by beartype, the sizes of tensors by jaxtyping.

jaxtyping's import hook decorates every function and every dataclass.  Its own decorator prepares three checks of every
function when the module is imported and binds the arguments anew at each call, which took a third of the time of the
tests.  The one here prepares a function's check at the first call, and opens a context for the names of sizes only
where an annotation has some.  Of a function within a function the first that is made is checked.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import beartype
import jaxtyping

sizes: Callable[[str], AbstractContextManager[None]] = jaxtyping.jaxtyped
config = beartype.BeartypeConf(is_pep484_tower=True)
seen: set[types.CodeType] = set()  # functions within functions


def install(packages: list[str]) -> None:
    """Has every module of the packages checked that is imported from now on."""
    jaxtyping.jaxtyped = lambda typechecker: decorated  # what the hook writes above functions and classes
    jaxtyping.install_import_hook(packages, None)


def switch(on: bool) -> None:
    jaxtyping.config.update("jaxtyping_disable", not on)


def decorated(definition: Any) -> Any:
    """A function with checks; a class, of which the `__init__` that `dataclass` wrote is checked."""
    if not isinstance(definition, type):
        return checked(definition)
    init = vars(definition).get("__init__")
    if dataclasses.is_dataclass(definition) and init is not None and not hasattr(init, "__wrapped__"):
        definition.__init__ = checked(init)  # type: ignore[misc]
    return definition


def checked(function: types.FunctionType) -> Callable[..., Any]:
    """The function, whose annotations are checked from its first call on, unless `switch(False)`."""
    if "<locals>" in function.__qualname__:
        if function.__code__ in seen:
            return function
        seen.add(function.__code__)
    check: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal check
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if check is None:
            check = with_checks(function)
        return check(*args, **kwargs)

    return call


def with_checks(function: types.FunctionType) -> Callable[..., Any]:
    """The function with checks of its arguments and its result."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__module__, copy.__qualname__ = (
        function.__kwdefaults__,
        function.__module__,
        function.__qualname__,
    )
    copy.__annotations__ = {name: resolved(hint, copy) for name, hint in function.__annotations__.items()}
    check = beartype.beartype(conf=config)(copy)
    if not any(names_sizes(hint) for hint in copy.__annotations__.values()):
        return check

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with sizes("context"):
            return check(*args, **kwargs)

    return call


def resolved(hint: Any, function: types.FunctionType) -> Any:
    """The annotation as an object; `Any` for one whose names are imported for the type checker alone."""
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except Exception:
        return Any


def names_sizes(hint: Any) -> bool:
    """Whether the annotation has a tensor with named sizes anywhere in it."""
    return getattr(hint, "__module__", "") == "jaxtyping" or any(names_sizes(part) for part in typing.get_args(hint))
