"""A side in this process, or in its own so that its threads, memory and runtime do not affect those of another.

The process reads one JSON object a line and answers each with one.  What it and its libraries print goes to standard
error.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triptych.errors import InputError, TriptychError, first_line
from triptych.machine import process_status
from . import peers
from .jobs import BenchJob
from .side import Options, Side, perform

DEBUG = "TRIPTYCH_DEBUG"  # set, it shows what the processes print


class SameProcess:
    """A side in this process."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._before = forget_peak()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """`perform` a `job`, or tell `versions`, `facts` or `memory`.  Raises InputError where the side cannot."""
        match what:
            case "perform":
                return perform(self.side, BenchJob.of(arguments["job"]), arguments.get("keep"))
            case "facts":
                return self.side.facts() | {"form": self.side.dtype}
            case "memory":
                peak = process_status("VmHWM")
                return {"memory": None if peak is None or self._before is None else peak - self._before}
        return {"versions": self.side.versions}

    def cpu_seconds(self) -> float:
        """Processor time it used so far, beyond that of this process."""
        return 0.0

    def close(self) -> None:
        """Nothing is to be ended."""


class SeparateProcess:
    """A side in a process of its own.

    Raises InputError where it does not start, with its last words.
    """

    def __init__(self, name: str, options: Options, *, spin: bool = True) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(options.threads),
            "TOKENIZERS_PARALLELISM": "true",
        }
        if spin:  # how long idle threads spin is a choice of this package for itself alone: OpenMP's own number
            environment["GOMP_SPINCOUNT"] = "300000"
        self.name = name
        command = [sys.executable, "-m", "triptych.measure", name, json.dumps(asdict(options))]
        errors = None if os.environ.get(DEBUG) else subprocess.DEVNULL  # libraries print what they like
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said last is read below
        line = self.process.stdout.readline()
        if not line:
            raise InputError(
                f"the process of {self.name} ended with code {self.process.wait()}; {DEBUG}=1 shows what it prints"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(answer["error"])
        return answer

    def cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            return 0.0

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # a process that has ended did not read its last line
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


Runner = SameProcess | SeparateProcess


def serve(name: str, options: str) -> None:
    """Answer the lines of standard input until it ends; `options` is `Options` as JSON."""
    make = peers.side(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on standard output
    side: SameProcess | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            side = side or SameProcess(make(Options(**json.loads(options))))
            answer = side.ask(request.pop("what"), **request)
        except TriptychError as error:
            answer = {"error": str(error)}
        except Exception as error:  # a peer raises whatever it likes
            if os.environ.get(DEBUG):
                traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {first_line(error)}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def forget_peak() -> int | None:
    """Set the peak of memory to what is in use now -> that, in bytes; None where the system keeps no peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return process_status("VmRSS")
