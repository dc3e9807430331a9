"""Seconds of a run: what each part of it took, and whether another step and what follows the last one still fit."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["step", "evaluation", "sample", "checkpoint"]
REMEMBERED = 3  # times of each part; a first step is slower than the others
SHARE = 0.1  # of the seconds: for what a run does of one part before its end, and for the evaluation at its end


class Budget:
    """What the parts of a run took, in seconds, out of `seconds` in all (None: no limit)."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._took: dict[Part, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._total: dict[Part, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Inside, `part` happens."""
        began = time.monotonic()
        yield
        self.add(part, time.monotonic() - began)

    def add(self, part: Part, seconds: float) -> None:
        """`part` took `seconds`."""
        self._took[part].append(seconds)
        self._total[part] += seconds

    def expected(self, part: Part) -> float:
        """The seconds that `part` will take: the most of those it took lately, and 0 before it first happens."""
        return max(self._took[part], default=0.0)

    def limit(self, share: float = 1.0) -> float | None:
        """The seconds for each of 1 / `share` evaluations; None without a limit."""
        return None if self.seconds is None else SHARE * share * self.seconds

    def allows(self, part: Part) -> bool:
        """Whether all of `part` before the end of the run, with one more, take at most `SHARE` of the seconds."""
        return self.seconds is None or self._total[part] + self.expected(part) <= SHARE * self.seconds
