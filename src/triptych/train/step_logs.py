"""Logs of the steps of a run, in its directory: a line of JSON for each, and the event files of TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.errors import CheckpointError, InputError
from .settings import LogKind

if TYPE_CHECKING:
    from .loop import Event

LINES, EVENTS = "steps.jsonl", "tensorboard"
Write = Callable[[dict[str, Any]], None]  # the figures of a step by name, and its number as `step`


def check_logs(kinds: Sequence[LogKind]) -> None:
    """Raises InputError where the package that writes one of the logs is missing."""
    if "tensorboard" in kinds and find_spec("tensorboard") is None:
        raise InputError("run.logs: tensorboard is not installed; run: pip install tensorboard")


@contextmanager
def step_logs(kinds: Sequence[LogKind], directory: Path, step: int) -> Iterator[Callable[[Event], None]]:
    """Inside, what is to be called after each step of a run that goes on after `step`; what the logs have of later
    steps is removed.

    Raises CheckpointError where a log cannot be written, InputError where a package is missing.
    """
    check_logs(kinds)
    with ExitStack() as opened:
        writers = [opened.enter_context(_WRITERS[kind](directory, step)) for kind in dict.fromkeys(kinds)]

        def write(event: Event) -> None:
            for writer in writers:
                try:
                    writer(figures(event))
                except OSError as error:
                    raise _unwritable(directory, error) from None

        yield write


def figures(event: Event) -> dict[str, Any]:
    """The figures of a step by name; after an evaluation those of the held-out data too, `held_out/` before them."""
    values: dict[str, Any] = {
        "step": event.step, "loss": event.loss, "lr": event.lr, "norm": event.norm, "progress": event.progress,
        "tokens_per_second": event.tokens_per_second,
    }  # fmt: skip
    if event.score is not None:
        values["held_out/loss"] = event.score.nats_per_token
        values |= {f"held_out/{name}": value for name, value in event.score.metrics.items()}
    return values


@contextmanager
def _json_lines(directory: Path, step: int) -> Iterator[Write]:
    path = directory / LINES
    try:
        before = path.read_bytes().splitlines(keepends=True) if step and path.exists() else []
        kept = [line for line in before if line.endswith(b"\n") and _step_of(line, path) <= step]
        with path.open("w", encoding="utf-8") as file:
            file.write(b"".join(kept).decode())
            file.flush()

            def write(values: dict[str, Any]) -> None:
                file.write(json.dumps(values) + "\n")
                file.flush()

            yield write
    except OSError as error:
        raise _unwritable(directory, error) from None


def _step_of(line: bytes, path: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} has a line that is no step of a run; remove or rename the file") from None


@contextmanager
def _events(directory: Path, step: int) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(directory / EVENTS), purge_step=step + 1)

    def write(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step":
                writer.add_scalar(name, value, values["step"])

    try:
        yield write
    finally:
        writer.close()


_WRITERS = {"jsonl": _json_lines, "tensorboard": _events}


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write the logs in {directory}: {error.strerror or error}")
