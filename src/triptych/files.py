"""Reading files that may be anything: a pipe, a device, a link in a circle, or far larger than they should be; and the
tables of this package's own modules."""

import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InputError, TriptychError, shown


def read_regular(path: Path, limit: int, error: Callable[[str], TriptychError]) -> bytes:
    """All bytes of the regular file `path`, at most `limit`.  Opening never waits, as it does for a pipe.

    Raises `error(message)`, one line that begins with the path, for a file that is missing, is not a regular file,
    is larger than `limit` bytes or cannot be read.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r} is not a path")
    try:
        _check_regular(path.stat().st_mode, path, error)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)  # the path may lead to another file by now
            _check_regular(status.st_mode, path, error)
            if status.st_size > limit:
                raise error(f"{path}: is {status.st_size:,} bytes; {limit:,} is the limit")
            return file.read(status.st_size)
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from None


def _check_regular(mode: int, path: Path, error: Callable[[str], TriptychError]) -> None:
    if stat.S_ISDIR(mode):
        raise error(f"{path}: is a directory; give a file")
    if not stat.S_ISREG(mode):
        raise error(f"{path}: is a pipe or a device; give a regular file")


def exists(path: Path) -> bool:
    """Whether anything is at `path`, a link that leads nowhere included."""
    return os.path.lexists(path)


def writable_name(path: str | Path) -> str:
    """The name of what is to be written.  Raises InputError for one that would not be the place that it says: on the
    hub, on the net, in the home that a shell puts for ~; and for one that cannot be read on a screen."""
    text = os.fspath(path)
    if text.startswith("~"):
        raise InputError(f"{shown(text)}: ~ is not expanded here; write {shown(os.path.expanduser(text))}")
    if re.match(r"hub:|[A-Za-z][\w+.-]+:/", text):
        raise InputError(f"{shown(text)} is a name on the hub or the net; give a path on this machine to write to")
    if re.search(r"[\x01-\x1f\x7f]", text) or os.path.basename(text).isspace():
        raise InputError(f"{shown(text)} has a name that cannot be read on a screen; give another path")
    return text


def tables_of(module: str | Path) -> dict[str, Any]:
    """What stands in TOML beside the file of a module, under its name."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text("utf-8"))
