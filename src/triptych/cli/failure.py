"""Every exception of a command becomes one line on stderr and an exit code; TRIPTYCH_DEBUG=1 adds the traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from triptych.errors import TriptychError
from triptych.migration_hints import of_commands, of_options

if TYPE_CHECKING:
    from typer import Typer

#: All commands; `app`, which imports the files of the commands and so this one, sets it.
application: Typer | None = None

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # the last two: 128 + the number of the signal
DEBUG = "TRIPTYCH_DEBUG"
# Of a command, arguments of the library that have another name than the option.
_OTHER_NAMES = {
    "lens": {"at": "--position"}, "bench": {"max_new_tokens": "--new-tokens"},
    "translate": {"source": "--from", "target": "--to"}, "train": {"base": "--from", "changes": "--set"},
}  # fmt: skip


class ReportedExit(int):
    """The exit code of a run whose interruption the command has reported already."""


@runtime_checkable
class ParserError(Protocol):
    """An error of the argument parser.  Typer brings its own copy of Click, so that its classes have no public name."""

    exit_code: int

    def format_message(self) -> str: ...


def guarded(run: Callable[[], object], arguments: Sequence[str] = ()) -> int:
    """`run()` -> exit code; no exception leaves this function.  `arguments` are those that `run` parses."""
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
        code, line = describe_error(error, arguments)
        print_error(line)
        return code
    if result == INTERRUPTED and not isinstance(result, ReportedExit):
        print_error("interrupted")
    return result if isinstance(result, int) else 0


def describe_error(error: BaseException, arguments: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code and the line to print for an exception of a command with these arguments."""
    match error:
        case TriptychError():
            return FAILED, _with_options(str(error), arguments)
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case MemoryError():
            return FAILED, "not enough memory; use a smaller model, a shorter text, fewer rows or --dtype bf16"
        case RecursionError():
            return FAILED, "the input is nested too deeply"
        case UnicodeDecodeError():
            return FAILED, f"the input is not UTF-8 (byte {error.start}); convert it to UTF-8 first"
        case ParserError():  # raised by the parser
            return error.exit_code, _describe_usage_error(error, arguments)
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


def _with_options(line: str, arguments: Sequence[str]) -> str:
    """The line of a library's error with the options of the command in place of Python's arguments: `--top-k 3` for
    `top_k=3`, `--position -1` for `positions=-1`, and of names with an underscore, or that the line begins with, also
    without a value."""
    for name, option in _options(arguments).items():
        line = line.replace(f" ({name}=True)", "")  # beside the option
        line = re.sub(rf"(?<![\w.'\"-]){name}s?=(?=\S)|^{name}s? (?=must )", f"{option} ", line)
        if "_" in name:
            line = re.sub(rf"(?<![\w.'\"-]){name}(?![\w=])", option, line)
    return line


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """The options of the command that was typed, by the name of the parameter and by their own with underscores."""
    from typer.main import get_command

    commands = {} if application is None else getattr(get_command(application), "commands", {})
    word = next((argument for argument in arguments if argument in commands), None)
    command = None if word is None else commands[word]
    for argument in arguments:  # the command of a group
        command = getattr(command, "commands", {}).get(argument, command)
    named: dict[str, str] = {}
    for parameter in () if command is None else command.params:
        for option in (one for one in parameter.opts if one.startswith("--")):
            named |= {parameter.name: option, option[2:].replace("-", "_"): option}
    return named | _OTHER_NAMES.get(word or "", {})


def _describe_usage_error(error: ParserError, arguments: Sequence[str]) -> str:
    """The parser's message with what to type: for a name of another program our own, else where the help is."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return error.format_message().rstrip(".")
    hint = f"; see {context.command_path} --help"
    words = [argument for argument in arguments if not argument.startswith("-")]
    commands = getattr(context.command, "commands", None)
    if commands is not None and words and words[0] not in commands:
        return _describe_unknown_command(error, words[0], hint)
    if type(error).__name__ != "NoSuchOption":
        return _in_words(error.format_message().rstrip("."), getattr(error, "param", None)) + hint
    typed = _as_typed(getattr(error, "option_name", ""), arguments)
    options = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    pieces = [piece.strip("{}") for piece in context.command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    usage = " ".join([context.command_path, *pieces])
    ours = of_options(typed, options, usage)
    return f"No such option: {typed}; write {ours}{hint}" if ours else error.format_message().rstrip(".") + hint


def _in_words(message: str, parameter: Any) -> str:
    """The parser's message with what an option takes in place of the name of its type."""
    least = getattr(getattr(parameter, "type", None), "min", None)
    above = "" if least is None else f" of {least} or more"
    for kind, words in {"int": "an integer", "integer": "an integer", "float": "a number"}.items():
        message = re.sub(rf"a valid {kind}( range)?$", words + above, message)
    return message


def _describe_unknown_command(error: ParserError, word: str, hint: str) -> str:
    ours = of_commands(word)
    if not ours and (word.startswith("hub:") or os.path.exists(word)):
        ours = f"a command before the model, for example triptych inspect {word}"
    return f"No such command {word!r}; write {ours}{hint}" if ours else error.format_message().rstrip(".") + hint


def _as_typed(option: str, arguments: Sequence[str]) -> str:
    """The option as it was typed: of -ngl the parser names -n alone."""
    names = [argument.partition("=")[0] for argument in arguments]
    if option in names or option.startswith("--"):
        return option
    return next((name for name in names if name.startswith(option)), option)


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
