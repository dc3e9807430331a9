"""The face of the command line: its names, its exit codes, and one line for whatever goes wrong."""

import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import triptych
from cli_models import Captured, refused, said
from triptych import migration_hints
from triptych.cli import failure
from triptych.cli.app import app

FROZEN = Path(__file__).with_name("cli_surface.txt").read_text(encoding="utf-8").splitlines()

COMMANDS = [
    "quickstart", "train", "generate", "chat", "fill", "encode", "search", "classify", "caption", "tag", "answer",
    "summarize", "translate", "transcribe", "exercise", "lens", "patch", "ablate", "convert", "explain", "lab",
    "inspect", "heads", "page", "check", "count", "bench", "doctor", "story", "serve", "batch", "eval", "data",
]  # fmt: skip


def surface() -> list[str]:
    """Every command with its arguments and options, as a user types them."""
    found = []
    for name, command in every_command().items():
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            found.append(
                f"{name} {' '.join(names)}" if names[0].startswith("-") else f"{name} {parameter.name.upper()}"
            )
    return found


def every_command() -> dict[str, Any]:
    """The commands, those of a group by both names."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {word}": one for word, one in inner.items()}
    return found


def test_commands_and_options_are_those_on_the_list() -> None:
    """A renamed or removed option breaks scripts: change `cli_surface.txt` on purpose, with a line in CHANGELOG.md."""
    assert surface() == FROZEN


def test_every_option_and_argument_has_a_help() -> None:
    for name, command in every_command().items():
        assert not [parameter.name for parameter in command.params if not parameter.help], name


def test_the_page_of_the_command_line_names_what_there_is() -> None:
    """Every command is in its table, and no option is that no command has."""
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)[^`]*` \|", page, re.M)) == sorted(COMMANDS)
    options = {option for line in FROZEN for option in line.split()[1:] if option.startswith("--")}
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page))
    assert told - options == {"--help"}
    for line in page.splitlines():
        if line.startswith("$ triptych ") and line.split()[2] in COMMANDS:
            own = {option for one in FROZEN if one.split()[0] == line.split()[2] for option in one.split()[1:]}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= own, line


def test_every_command_answers_in_json() -> None:
    commands = {line.split()[0] for line in FROZEN}
    assert {line.split()[0] for line in FROZEN if line.endswith(" --json")} == commands
    assert commands == set(COMMANDS)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], [], *([*name.split(), "--help"] for name in every_command())])
def test_help(argv: list[str], capsys: Captured) -> None:
    out, err = said(argv, capsys)
    assert "Usage:" in out
    assert not err


@pytest.mark.parametrize("columns", [40, 71, 72, 80])
@pytest.mark.parametrize("name", every_command())
def test_help_shows_every_option_whole(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = said([*name.split(), "--help"], capsys)[0].replace(",", " ").split()
    options = {option for line in FROZEN if line.startswith(f"{name} --") for option in line.split()[1:]}
    assert options <= {part for word in words for part in word.split("/")}


def test_version(capsys: Captured) -> None:
    assert said(["--version"], capsys)[0] == f"triptych {triptych.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "MODEL"),
        (["generate", "m", "p", "--nonsense"], "--nonsense"),
        (["generate", "m", "p", "--temperature", "-1"], "--temperature"),
        (["generate", "m", "p", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["count", "m", "--dtype", "fp12"], "--dtype"),
        (["check", "m", "--against", "pytorch"], "--against"),
        (["check", "m", "--threshold", "-1e-4"], "--threshold"),
        (["quickstart", "--panel", "both"], "--panel"),
        (["generate", "m"], "no prompt given"),
        (["generate", "m", "-", "-"], "only once"),
        (["encode", "m", "a", "--out", "v.pt"], ".npy or .safetensors"),
        (["inspect", "m", "--head", "3"], "--head needs a TEXT"),
        (["lab", "--report", "labs.html"], "--report needs the NAME"),
        (["train", "r.toml", "--resume", "--show-batch"], "--resume"),
        (["generate", "m", "p", "--seed", "-3"], "--seed"),
        (["lab", "scaling", "--seed", "x"], "'x' is not an integer of 0 or more"),
        (["count", "m", "--context", "x"], "'x' is not an integer of 1 or more"),
        (["quickstart", "--data", "/nowhere/text"], "--data /nowhere/text: no such file"),
        (["quickstart", "--data", ""], "the path is empty"),
        (["quickstart", "--out", ""], "the path is empty"),
        (["data", "tokenize", "a.txt", "--out", "d", "--tokenizer", "byte", "--processes", "0"], "--processes"),
        (["data", "nonsense"], "nonsense"),
        (["data", "inspect", "d", "--document", "-1"], "--document"),
        (["lab", "permutation", "--out", ""], "the path is empty"),
        (["lab", "mask-leak", "--data", "/nowhere/text"], "--data /nowhere/text: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(argv: list[str], says: str, capsys: Captured) -> None:
    error = refused(argv, capsys, 2)
    assert says in error
    assert "--help" in error


def float_options() -> list[tuple[str, str]]:
    """Command and name of every option that takes a number with a fraction."""
    return [
        (name, parameter.opts[0])
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
        for parameter in command.params
        if "float" in parameter.type.name
    ]


def test_options_with_fractions_are_found() -> None:
    assert {("check", "--threshold"), ("generate", "--top-p"), ("quickstart", "--seconds")} <= set(float_options())


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("command", sorted({name for name, _ in float_options()}))
def test_no_option_takes_nan_or_infinity(command: str, number: str, capsys: Captured) -> None:
    for option in [option for name, option in float_options() if name == command]:
        model = [] if command == "quickstart" else ["m"]
        test_wrong_usage_is_one_line_and_exit_2([command, *model, f"{option}={number}"], option, capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "m"], "write triptych chat MODEL, or triptych generate MODEL PROMPT"),
        (["ls"], "triptych inspect MODEL"),
        (["list"], "triptych inspect MODEL"),
        (["pull", "smollm2"], "hub:org/name"),
        ([str(Path(__file__))], "a command before the model, for example triptych inspect"),
        (["hub:org/name"], "a command before the model"),
        (["generate", "m", "p", "-n", "3"], "-n; write --max-new-tokens"),
        (["generate", "m", "p", "--n-predict", "3"], "write --max-new-tokens"),
        (["generate", "m", "p", "--max_new_tokens=3"], "write --max-new-tokens"),
        (["chat", "m", "--temp", "0"], "write --temperature"),
        (["generate", "m", "p", "-temp", "0"], "-temp; write --temperature"),
        (["generate", "m", "p", "-ngl", "99"], "-ngl; write --device cuda"),
        (["generate", "-m", "m", "-p", "Once"], "write MODEL without an option: triptych generate MODEL [PROMPT]..."),
        (["generate", "m", "-p", "Once"], "write PROMPT without an option: triptych generate MODEL [PROMPT]..."),
        (["generate", "m", "--prompt=Once"], "write PROMPT without an option"),
        (["encode", "m", "--prompt", "Once"], "write TEXT without an option: triptych encode MODEL [TEXT]..."),
        (["check", "--model", "m"], "write MODEL without an option: triptych check MODEL"),
        (["lab", "induction", "-m", "m"], "write --model"),
        (["generate", "m", "p", "-t", "4"], "OMP_NUM_THREADS"),
        (["train", "r.toml", "-n", "3"], "No such option: -n; see triptych train --help"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_names_of_other_programs_are_answered_with_ours(argv: list[str], says: str, capsys: Captured) -> None:
    test_wrong_usage_is_one_line_and_exit_2(argv, says, capsys)


def test_what_is_to_be_written_in_their_place_exists() -> None:
    """No hint names a command or an option that is not there, and no table has a name that works here."""
    options = {option for line in FROZEN for option in line.split()[1:] if option.startswith("--")}
    for name, ours in migration_hints._TABLES["options"].items():
        assert {option.split()[0] for option in ours} <= options, name
    for name, sentence in migration_hints._TABLES["commands"].items():
        assert name not in COMMANDS
        assert set(re.findall(r"triptych ([a-z]+)", sentence)) - {"keeps"} <= set(COMMANDS), name
        assert set(re.findall(r"--[a-z-]+", sentence)) - {"--help", "--version"} <= options, name


def one_error(err: str) -> str:
    """The only line of stderr."""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: "), err
    return lines[0]


# ---------------------------------------------------------------- whatever a command raises


def raising(error: BaseException) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


def oserror(number: int, name: str) -> OSError:
    return OSError(number, "the system's words", name)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (triptych.InputError("a: is wrong; do b"), 1, "a: is wrong; do b"),
        (triptych.CheckpointError("two\nlines \x1b[31m"), 1, "two lines [31m"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes"), 1, "not enough memory"),
        (RecursionError(), 1, "nested too deeply"),
        (oserror(errno.ENOSPC, "/runs/a"), 1, "/runs/a: no space left on the disk"),
        (oserror(errno.EACCES, "/runs/a"), 1, "/runs/a: the system's words"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 1, "not UTF-8"),
        (ValueError("first\nsecond"), 1, "unexpected ValueError: first;"),
        (AssertionError(), 1, "unexpected AssertionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_exception_is_one_line(error: BaseException, code: int, says: str, capsys: Captured) -> None:
    assert failure.guarded(raising(error)) == code
    out, err = capsys.readouterr()
    assert not out
    assert says in one_error(err)


def test_an_unexpected_error_tells_how_to_see_more(capsys: Captured) -> None:
    failure.guarded(raising(ZeroDivisionError("x")))
    assert f"{failure.DEBUG}=1" in one_error(capsys.readouterr().err)


def test_a_traceback_only_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv(failure.DEBUG, "1")
    assert failure.guarded(raising(ZeroDivisionError("x"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "triptych", "--help"]
    env = os.environ | {"PYTHONPATH": str(Path(triptych.__file__).parents[1])}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, check=False)
    finally:
        os.close(writer)
    assert done.returncode == failure.BROKEN_PIPE
    assert not done.stderr


def test_a_disk_that_fills_while_results_are_flushed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise oserror(errno.ENOSPC, "<stdout>")

    monkeypatch.setattr(sys, "stdout", Full())
    assert failure.guarded(lambda: None) == 1
    assert "no space left" in one_error(capsys.readouterr().err)


def test_codes_of_commands_pass_through() -> None:
    assert failure.guarded(lambda: None) == 0
    assert failure.guarded(lambda: 1) == 1


def test_the_parsers_own_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("triptych.machine.use_threads", interrupted)
    assert one_error(said(["doctor"], capsys, 130)[1]) == "error: interrupted"
