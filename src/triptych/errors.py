"""The errors that Triptych raises: one family.

Each message is one line that names what was wrong, where, and what to do.  The command line prints it and
exits 1; a traceback that reaches a user is a bug.
"""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class TriptychError(Exception):
    """Base class of every error of Triptych; the message is one line that says what is wrong, where, and what to do."""


class InputError(TriptychError, ValueError):
    """An argument, a text or a tensor cannot be used; also a ValueError."""


class ArgumentError(InputError, TypeError):
    """A function does not have an argument of this name, or an object is not called; also a TypeError."""


class MissingNameError(InputError, AttributeError):
    """A module or an object does not have an attribute of this name; also an AttributeError."""


class MissingExecutableError(InputError):
    """A program that is no part of this package is not installed."""


class ConfigError(TriptychError):
    """A model config, a recipe or a spec contains something that is not understood."""


class CheckpointError(TriptychError):
    """A weights file is malformed, incomplete, or does not fit its config."""


class TextError(TriptychError):
    """A tokenizer, a chat template or a text file cannot be used."""


class ProbeError(TriptychError):
    """A site, a read or an edit does not exist, is not possible, or had no effect."""

    trace: object | None = None  #: the Trace of a run whose reads or edits had no effect


class FetchError(TriptychError):
    """A download failed, or a file that is needed was not downloaded before (`offline`)."""


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name most similar to `name`; None where none is as similar as `cutoff` (difflib's ratio, in [0, 1])."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or the empty string; `cutoff` as for `closest`."""
    close = closest(name, known, cutoff)
    return "" if close is None else f" (did you mean {close!r}?)"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """`repr(value)`, kept short, shallow and in one line: nothing out of a file breaks a one-line message."""
    return _SHORT.repr(value).replace("\n", " ")


def counted(number: int, noun: str) -> str:
    """`"1 token"`, `"2,048 tokens"`: a number with its noun, which takes an s in the plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """The first line of what another library says, kept short and free of anything a terminal would obey."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    plain = "".join(char if char.isprintable() else "?" for char in line[:240])
    return plain if len(line) <= 240 else f"{plain}..."


@contextmanager
def library(into: Callable[[str], TriptychError]) -> Iterator[None]:
    """Turn whatever another library raises inside into our error `into(what it says)`.

    A panic of a library written in Rust is no `Exception`, so that it would pass by everything that expects one.
    """
    try:
        yield
    except TriptychError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise into(first_line(error)) from error
