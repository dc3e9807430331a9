"""Every exception of a command becomes one line on stderr and an exit code; TRIPTYCH_DEBUG=1 adds the traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from triptych.errors import TriptychError

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # the last two: 128 + the number of the signal
DEBUG = "TRIPTYCH_DEBUG"


@runtime_checkable
class ParserError(Protocol):
    """An error of the argument parser.  Typer brings its own copy of Click, so that its classes have no public name."""

    exit_code: int

    def format_message(self) -> str: ...


def guarded(run: Callable[[], object]) -> int:
    """`run()` -> exit code; no exception leaves this function."""
    try:
        result = run()
        sys.stdout.flush()  # raises here if the disk is full or the pipe is closed
    except (BrokenPipeError, SystemExit):  # Typer turns BrokenPipeError into SystemExit
        with open(os.devnull, "wb") as null:  # receives what is flushed at exit
            os.dup2(null.fileno(), sys.stdout.fileno())
        return BROKEN_PIPE
    except BaseException as error:  # a command never ends with a traceback
        if os.environ.get(DEBUG):
            traceback.print_exc()
        code, line = describe_error(error)
        print_error(line)
        return code
    if result == INTERRUPTED:
        print_error("interrupted")
    return result if isinstance(result, int) else 0


def describe_error(error: BaseException) -> tuple[int, str]:
    """The exit code and the line to print for an exception."""
    match error:
        case TriptychError():
            return FAILED, str(error)
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case MemoryError():
            return FAILED, "not enough memory; use a smaller model, a shorter text, fewer rows or --dtype bf16"
        case RecursionError():
            return FAILED, "the input is nested too deeply"
        case UnicodeDecodeError():
            return FAILED, f"the input is not UTF-8 (byte {error.start}); convert it to UTF-8 first"
        case ParserError():  # raised by the parser
            return error.exit_code, _describe_usage_error(error)
        case OSError():
            return FAILED, _describe_os_error(error)
    if _out_of_memory(error):
        return describe_error(MemoryError())
    hint = f"this is a bug in triptych; set {DEBUG}=1 to see where, and report it"
    return FAILED, f"unexpected {type(error).__name__}: {_first_line(str(error))}; {hint}"


def print_error(line: str) -> None:
    """Print `error: ...` as one line: text from files may contain line breaks and escape codes."""
    plain = "".join(c if c.isprintable() else " " for c in line)
    print("error: " + " ".join(plain.split()), file=sys.stderr, flush=True)


def _describe_usage_error(error: ParserError) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context is not None else ""
    return error.format_message().rstrip(".") + hint


def _describe_os_error(error: OSError) -> str:
    path = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}no space left on the disk; free some space or write elsewhere"
    return f"{path}{error.strerror or _first_line(str(error))}"


def _out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate memory: its own exception for a GPU, a RuntimeError for the CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "no message"
