"""How torch's threads wait for each other while a run trains: spinning on a quiet machine, asleep on a busy one.

GNU OpenMP, which torch brings on Linux, lets a thread that waits for others look for them many times before it sleeps.
On a quiet machine this makes small operations faster.  Beside other busy processes the system takes the processor from
threads that work as soon as their waiting has used it up, all others wait in turn, and a step takes four times as long
(docs/log.md).  The library reads the number of looks from the environment once, but it looks only a hundred times while
the process has more OpenMP threads than processors.  So on a busy machine a `Waiting` keeps some more threads, asleep.
Each operation is still shared among as many threads as before, so the numbers stay the same, bit for bit.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from triptych import machine

INTERVAL = 1.0  # seconds of which the use of the processors is the mean
BUSY, QUIET = 0.3, 0.15  # processors that others use beyond those the threads leave to them; between the two, no change
ELEMENTS = 1 << 18  # of a tensor that torch adds to with all threads


class Waiting:
    """`with Waiting(say) as waiting:` around a run on the CPU, with `waiting.look()` after each step.

    `say` receives one line when other processes are found busy, the first time.  With one thread, another OpenMP, or
    OMP_WAIT_POLICY in the environment this does nothing.
    """

    def __init__(self, say: Callable[[str], None], usage: Callable[[], machine.Usage | None] = machine.usage) -> None:
        self._say, self._usage = say, usage
        self._surplus: _Surplus | None = None
        self._last: machine.Usage | None = None
        self._reported = False

    @property
    def asleep(self) -> bool:
        """Whether waiting threads sleep at once."""
        return self._surplus is not None

    def __enter__(self) -> Waiting:
        openmp = gnu_openmp()
        if torch.get_num_threads() > 1 and openmp is not None and "OMP_WAIT_POLICY" not in os.environ:
            self._last = self._usage()
        if self._last is not None:  # until the first look, a busy machine is assumed: its steps cost more
            self._surplus = _Surplus(openmp, torch.get_num_threads())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._last = None
        self._end()

    def look(self) -> None:
        """Change over if the machine has become busy or quiet since the last look, INTERVAL or more ago."""
        now = None if self._last is None else self._usage()
        if self._last is None or now is None or now.at - self._last.at < INTERVAL:
            return
        used = now.by_others(self._last)
        beyond = used - (now.processors - torch.get_num_threads())
        self._last = now
        if beyond < QUIET:
            self._end()
        elif beyond > BUSY:
            self._surplus = self._surplus or _Surplus(gnu_openmp(), torch.get_num_threads())
            if not self._reported:
                self._reported = True
                self._say(f"other programs keep {used:.1f} of {now.processors} processors busy; training is slower")

    def _end(self) -> None:
        if self._surplus is not None:
            self._surplus.end()
            self._surplus = None


class _Surplus:
    """Sleeping OpenMP threads: with the `working` ones, they are one more than the processors of this process."""

    def __init__(self, openmp: ctypes.CDLL | None, working: int) -> None:
        self._openmp, self._team = openmp, max(2, machine.cores().affinity - working + 2)
        self._started, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="surplus", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        """Make a team of this thread's own, which ends with the thread."""
        try:
            numbers = torch.zeros(ELEMENTS)
            numbers.add_(1)  # torch sets the number of threads at a thread's first operation
            if self._openmp is not None:
                self._openmp.omp_set_num_threads(self._team)
                numbers.add_(1)
        finally:
            self._started.set()
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def gnu_openmp() -> ctypes.CDLL | None:
    """GNU OpenMP, where torch or another library has loaded it."""
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # not loaded; a system without RTLD_NOLOAD
        return None
