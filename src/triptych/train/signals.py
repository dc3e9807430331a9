"""Signals that end a run: the first one is noted, so that the job finishes its step and writes a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run ended early because of the signal `number`; the state after step `step` is saved under `out`."""

    def __init__(self, number: int, step: int, out: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step:,}; saved in {out}")
        self.number, self.step, self.out = number, step, out


class Received:
    """The signal that arrived, if any."""

    number: int | None = None


@contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[Received]:
    """Inside, the first SIGINT or SIGTERM calls `stop`; a second one has its usual effect.

    Python runs signal handlers in the main thread only; in another thread this changes nothing.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def handle(number: int, _: FrameType | None) -> None:
        received.number = number
        restore()
        stop()

    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:  # nohup and the like
            signal.signal(number, handle)
    try:
        yield received
    finally:
        restore()
