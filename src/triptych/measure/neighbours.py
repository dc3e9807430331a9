"""Whether other processes used the cores while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

TOLERATED = 0.15  # of a core


class Neighbours:
    """Watches from now on.  `ours` gives the processor seconds used so far by the processes that are measured."""

    def __init__(self, ours: Callable[[], float], root: Path = Path("/")) -> None:
        self.ours, self.root = ours, root
        self.begin = self._now()

    def cores(self) -> float | None:
        """How many of the cores that this process may use others kept busy since the beginning; None where the system
        does not say."""
        now = self._now()
        if self.begin is None or now is None:
            return None
        seconds, busy, own = (b - a for a, b in zip(self.begin, now, strict=True))
        return max(0.0, (busy - own) / seconds) if seconds > 0 else None

    def _now(self) -> tuple[float, float, float] | None:
        """The clock, seconds that the cores were busy or kept from us, and seconds that we used."""
        busy = busy_seconds(self.root)
        times = os.times()
        return None if busy is None else (time.perf_counter(), busy, times.user + times.system + self.ours())


def busy_seconds(root: Path = Path("/")) -> float | None:
    """Seconds, summed over the cores that this process is bound to, that they did anything since the start of the
    system; None where /proc/stat is not to be had."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    total = 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in cores:
            user, nice, system, _idle, _waiting, interrupts, soft, *stolen = map(int, fields[:8])
            total += user + nice + system + interrupts + soft + sum(stolen)
    return total / os.sysconf("SC_CLK_TCK")


def verdict(cores: float | None, usable: int, threads: int) -> str | None:
    """One line where others left fewer than `threads` of the `usable` cores; None on a quiet machine."""
    if cores is None or cores <= usable - threads + TOLERATED:
        return None
    return f"the machine is busy: other processes used {cores:.1f} of {usable} cores, so the figures are low"
