"""Checks of arguments: integers, numbers, ids, and the annotations of functions; each refusal is one line.

`checked` applies the checks that the annotations of a public function name, and answers keywords it does not have.
"""

import ast
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import wraps
from inspect import getattr_static, isfunction, signature, unwrap
from numbers import Real
from os import PathLike
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from .errors import ArgumentError, InputError, TriptychError, first_line, shown
from .migration_hints import WRONG_TYPE, of_argument

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
HUGE = 1 << 63  # integers of torch have 64 bits


def integer(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int.  Raises InputError for anything else (a bool too), below `least`, and beyond 64 bits."""
    wanted = "an integer" if least is None else f"an integer of at least {least}"
    number = as_index(value)
    if number is None or (least is not None and number < least):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    if not -HUGE <= number < HUGE:
        raise InputError(f"{name}={shown(value)} must be {wanted} and below 2**63 in size")
    return number


def number(name: str, value: object, least: float, most: float, wanted: str) -> float:
    """`value` as a float.  Raises InputError for anything else (NaN and infinity too), and outside `[least, most]`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name}={shown(value)} must be a number {wanted}")
    try:
        real = float(value)
    except OverflowError:  # an integer
        real = math.inf
    if not least <= real <= most or math.isinf(real):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return real


def check_ids(ids: object, vocab: int, what: str) -> list[int]:
    """`ids`, in a list, an array or a tensor, as integers.  Raises InputError for a value that is none of these, and
    for anything in it that is no integer in `[0, vocab)`."""
    out = []
    for token in listed(ids, what):
        index = as_index(token)
        if index is None:
            raise InputError(f"{what}: {shown(token)} is no token id; ids are integers")
        if not 0 <= index < vocab:
            raise InputError(f"{what}: token id {shown(index)} is outside the vocabulary of {vocab}")
        out.append(index)
    return out


def listed(values: object, what: str) -> Iterable[object]:
    """The items of a list, an array or a tensor.  Raises InputError for a text, a mapping or set, whose items have no
    order, and for a tensor without values that can be read (of the device meta, sparse, quantized)."""
    if hasattr(values, "tolist"):
        readable(values, what)
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | bytearray | Mapping | Set):
        raise InputError(f"{what} is {shown(values)}, not a list of token ids; give [5, 6, 7]")
    return values


def readable(tensor: Any, what: str) -> None:
    """Raise InputError for a tensor whose numbers cannot be read."""
    sparse = "sparse" * (str(getattr(tensor, "layout", "torch.strided")) != "torch.strided")
    kind = next((k for k in ("meta", "quantized", "nested") if getattr(tensor, f"is_{k}", False)), sparse)
    if hasattr(tensor, "filled") and tensor.mask.any():  # one of NumPy, with places that are left out
        kind = "masked"
    if kind:
        raise InputError(f"{what}: this tensor is {kind}, so its numbers cannot be read; give a plain one with values")


def takes(function: object, *names: str) -> bool:
    """Whether `function` can be called with arguments of these names in this order; what has no signature, as some
    functions written in C, is taken to."""
    if not callable(function):
        return False
    try:
        signature(function).bind(*names)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def _called(kind: type) -> str:
    return f"a{'n' if kind.__name__[0] in 'AEIO' else ''} {kind.__name__}"


def as_index(value: object) -> int | None:
    """`value` as an int; None for anything else, a bool, also one in an array or tensor, too."""
    if type(value) is int:  # most are, and the other checks take microseconds
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or str(getattr(value, "dtype", "")) in _BOOLS:
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of floats, of several numbers, of the device meta
        return None


_BOOLS = ("bool", "torch.bool")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_integer(value: object) -> bool:
    number = as_index(value)
    return number is not None and -HUGE <= number < HUGE


def _is_list(value: object, of: Callable[[object], bool]) -> bool:
    is_text = isinstance(value, str | bytes | bytearray)
    return isinstance(value, Sequence) and not is_text and all(map(of, value))


def is_integers(value: object) -> bool:
    """Whether `value` is a list of integers that fit 64 bits; an array is none."""
    return _is_list(value, _is_integer)


def _function(arguments: str) -> tuple[str, Callable[[object], bool]]:
    return f"a function of ({arguments})", lambda value: takes(value, *arguments.split(", "))


#: One alternative of an annotation -> what it is called in a message, and its check.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "None": ("", lambda value: value is None),
    "bool": ("True or False", lambda value: type(value).__name__ in ("bool", "bool_")),  # the second is NumPy's
    "int": ("an integer", _is_integer),
    "float": ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    "str": ("a string", _is_text),
    "Path": ("a path", lambda value: isinstance(value, PathLike) and _is_path(value.__fspath__())),
    "PathText": ("a string that is not empty", _is_path),
    "dict": ("a dict", lambda value: isinstance(value, dict)),
    "Mapping": ("a dict", lambda value: isinstance(value, Mapping)),
    "Iterable[str]": (
        "texts, such as a list of strings",
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping),
    ),
    "Sequence[str]": ("a list of strings", lambda value: _is_list(value, _is_text)),
    "Sequence[int]": ("a list of integers", is_integers),
    "Callable": ("a function", callable),
    "ProbedModel": ("a Model, as triptych.load() makes one", lambda value: hasattr(type(value), "check_words")),
    "Decode": _function("ids"),
    "Hook": _function("name, tensor"),
    "OnEmbedded": _function("int, int"),
    "OnToken": _function("int, int"),
    "OnProgress": _function("QueueProgress"),
}


def alternatives(annotation: str, known: Mapping[str, object]) -> list[tuple[str, Callable[[object], bool]]] | None:
    """The checks of the alternatives of an annotation, of which the classes of this package are `known` by their names;
    None where one of them is unknown here."""
    plain = re.sub(r"^(Callable|dict|Mapping)\[.*\](?=$| \| None$)", r"\1", annotation)
    names = [name.rpartition(".")[2] for name in plain.split(" | ")]
    if {"str", "Path"} <= set(names):
        names = ["PathText" if name == "str" else name for name in names]
    special = {name: _one_of(name) for name in names if name.startswith("Literal[")}
    if arguments := re.match(r"Callable\[\[(.+)\], ", annotation):
        special["Callable"] = _function(arguments[1])
    kinds = [special.get(name) or _KINDS.get(name) or _own(known.get(name)) for name in names]
    known_kinds = [kind for kind in kinds if kind is not None]
    return known_kinds if len(known_kinds) == len(kinds) else None


def _one_of(literal: str) -> tuple[str, Callable[[object], bool]]:
    choices = ast.literal_eval(f"({literal[8:-1]},)")
    return " or ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices


def _own(kind: object) -> tuple[str, Callable[[object], bool]] | None:
    """The check of a class of this package whose instances can be told."""
    if not isinstance(kind, type) or not kind.__module__.startswith("triptych") or vars(kind).get("_is_protocol"):
        return None
    return _called(kind), kind.__instancecheck__


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises an InputError in one line for an argument of a type that its annotation does not name,
    and an ArgumentError, with what to write, for a keyword that it does not have.

    Annotations of other types than those in `_KINDS` and classes of this package are left to the function.  A wrong
    number of arguments stays Python's own TypeError.
    """
    parameters = signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    classes = unwrap(function).__globals__
    checks = {name: alternatives(str(parameter.annotation), classes) for name, parameter in parameters.items()}
    order = [name for name, parameter in parameters.items() if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    by_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    title = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in checks and not takes_any:
                raise ArgumentError(f"{title} has no argument {name!r}{of_argument(name, known)}")
        if by_name and len(args) > len(order):
            raise ArgumentError(f"{title} has too many values without names; name the last, as in {by_name[0]}=...")
        if kwargs and not kwargs.keys().isdisjoint(order[: len(args)]):
            twice = min(kwargs.keys() & order[: len(args)])
            raise ArgumentError(f"{title} was given {twice!r} twice: by its place, and by its name; leave one out")
        for name, value in (*zip(order, args, strict=False), *kwargs.items()):
            kinds = checks.get(name)
            if kinds is not None and not any(fits(value) for _, fits in kinds):
                _refuse(function.__qualname__, name, value, [wanted for wanted, _ in kinds if wanted])
        torch = sys.modules.get("torch")
        try:
            if torch is None or not torch._C._len_torch_function_stack():
                return function(*args, **kwargs)
            with torch.device("cpu"):  # what is not said to be elsewhere is here, whatever the default of the caller is
                return function(*args, **kwargs)
        except RuntimeError as error:  # of torch
            if "can't allocate memory" in str(error):
                raise TriptychError("not enough memory; give a shorter text or fewer rows") from None
            if "same dtype" in str(error) or "scalar type" in str(error):
                problem = f"numbers of two dtypes meet ({first_line(error)})"
                raise InputError(f'{problem}; convert the whole model, as model.to("fp32") does') from error
            raise

    return call


def _refuse(function: str, name: str, value: object, wanted: Collection[str]) -> None:
    if wanted == ["an integer"]:
        integer(name, value)  # says what is wrong with a huge one
    sentence = WRONG_TYPE.get(f"{function} {name}")
    raise InputError(
        f"{sentence}, not {shown(value)}" if sentence else f"{name}={shown(value)} must be {' or '.join(wanted)}"
    )


def checked_methods(cls: C) -> C:
    """The class, with `checked` around its public methods and its constructor, those of its bases included."""
    for name in dir(cls):
        method = getattr_static(cls, name)
        own_constructor = name == "__init__" and isfunction(method)
        if name.startswith("_") and not own_constructor:
            continue
        if isinstance(method, classmethod):
            setattr(cls, name, classmethod(checked(method.__func__)))
        elif isfunction(method):
            setattr(cls, name, checked(method))
    return cls
