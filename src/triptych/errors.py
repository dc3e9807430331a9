"""Every error a user can meet, one family.

Each message is one line that names what was wrong, where, and what to do.  The command line prints it and
exits 1; a traceback that reaches a user is a bug.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class TriptychError(Exception):
    """Base of every error raised on purpose."""


class InputError(TriptychError, ValueError):
    """An argument, a text or a tensor cannot be used as given."""


class ConfigError(TriptychError):
    """A model config, a recipe or a spec holds something that is not understood."""


class CheckpointError(TriptychError):
    """A weights file is malformed, incomplete, or does not fit its config."""


class TextError(TriptychError):
    """A tokenizer, a chat template or a text file cannot be used."""


class ProbeError(TriptychError):
    """A site, read or edit that does not exist, cannot be served, or never took effect."""


class FetchError(TriptychError):
    """Something that had to come over the network did not arrive."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """`repr(value)`, kept short and shallow: nothing out of a file breaks a one-line message."""
    return _SHORT.repr(value)
