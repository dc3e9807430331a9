"""Whatever goes wrong in a command, as one line on stderr and an exit code; a traceback only when asked for."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from triptych.errors import TriptychError

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # the last two: 128 + the number of the signal
DEBUG = "TRIPTYCH_DEBUG"


def guarded(run: Callable[[], object]) -> int:
    """`run()` -> exit code.  Every exception ends here."""
    try:
        result = run()
        sys.stdout.flush()  # a full disk or a closed pipe shows here at the latest
    except (BrokenPipeError, SystemExit):  # the parser makes the second of the first
        with open(os.devnull, "wb") as nowhere:  # for what is still to be flushed
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return BROKEN_PIPE
    except BaseException as error:  # one line for all of them is the promise
        if os.environ.get(DEBUG):
            traceback.print_exc()
        code, line = told(error)
        say(line)
        return code
    if result == INTERRUPTED:
        say("interrupted")
    return result if isinstance(result, int) else 0


def told(error: BaseException) -> tuple[int, str]:
    """Exit code and the line to print for an exception."""
    match error:
        case TriptychError():
            return FAILED, str(error)
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case MemoryError():
            return FAILED, "not enough memory; use a smaller model, a shorter text, fewer rows or --dtype bf16"
        case RecursionError():
            return FAILED, "the input is nested too deeply to be read"
        case UnicodeDecodeError():
            return FAILED, f"the input is not UTF-8 (byte {error.start}); convert it to UTF-8 first"
        case OSError():
            return FAILED, _of_system(error)
    if hasattr(error, "format_message"):  # the parser's own
        return getattr(error, "exit_code", FAILED), _of_parser(error)
    if _out_of_memory(error):
        return told(MemoryError())
    hint = f"this is a bug in triptych; set {DEBUG}=1 to see where, and report it"
    return FAILED, f"unexpected {type(error).__name__}: {_first(str(error))}; {hint}"


def say(line: str) -> None:
    """`error: ...`, one line whatever the text holds: names out of files may carry line breaks and escape codes."""
    plain = "".join(c if c.isprintable() else " " for c in line)
    print("error: " + " ".join(plain.split()), file=sys.stderr, flush=True)


def _of_parser(error: BaseException) -> str:
    ctx = getattr(error, "ctx", None)
    more = f"; see {ctx.command_path} --help" if ctx is not None else ""
    return error.format_message().rstrip(".") + more  # type: ignore[attr-defined, no-any-return]


def _of_system(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk; free some or write elsewhere"
    return f"{where}{error.strerror or _first(str(error))}"


def _out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate: its own class for a GPU, a RuntimeError for the CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _first(text: str) -> str:
    return text.strip().partition("\n")[0] or "no message"
