"""The lock of a run directory, so that two runs never train into one, and the signals that end a run.

The operating system holds the lock and releases it when the process ends, however it ends: a killed run leaves the
file `.lock` behind, but no lock.  `filelock` does not serve here: it does not say which process holds a lock, and where
the file system has none it falls back to a file that a killed run leaves locked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from triptych.errors import CheckpointError, ConfigError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 1 << 30, os.SEEK_SET)  # beyond the process id, which other processes must be able to read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    _unlock_and_close = os.close

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock_and_close(file: int) -> None:
        """Closing alone would not release it while a child that was just forked still has the file open."""
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


class RunLock:
    """An exclusive lock on the existing directory `directory`, through the file `.lock` in it.

    `with lock:` acquires it unless this object already holds it, and releases it at the end.  It is also released when
    the object is deleted.  A forked child does not inherit it.
    """

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory) / ".lock"
        self._close: weakref.finalize[[int], RunLock] | None = None

    def acquire(self) -> RunLock:
        """Raises ConfigError, naming the process, if another run holds the lock, and CheckpointError if the directory
        does not exist, cannot be written or is on a file system without locks."""
        if self._close is not None and self._close.alive:
            return self
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except FileNotFoundError:
            raise CheckpointError(f"there is no run directory {self.path.parent}") from None
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}; a run is a folder") from None
        close = weakref.finalize(self, _unlock_and_close, file)
        try:
            _lock(file)
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, str(os.getpid()).encode())
        except (BlockingIOError, PermissionError):
            os.lseek(file, 0, os.SEEK_SET)
            owner = os.read(file, 20).decode("ascii", "replace")  # the process that holds the lock wrote itself into it
            close()
            owner = f"process {owner}" if owner.isdecimal() else "another process"
            owner = "another run of this process" if owner == f"process {os.getpid()}" else owner
            raise ConfigError(
                f"{self.path.parent} is in use by {owner}; wait until that run ends, or give another directory"
            ) from None
        except OSError as error:
            close()
            raise CheckpointError(
                f"cannot lock {self.path}: {error.strerror or error}; put the run on a local disk"
            ) from None
        self._close = close
        _HELD.add(self)
        return self

    def release(self, *_: object) -> None:
        if self._close is not None:
            self._close()

    __enter__, __exit__ = acquire, release


_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child shares the open file, so that the lock would outlive the parent for as long as the child lives."""
    for lock in list(_HELD):
        if lock._close is not None and (held := lock._close.detach()) is not None:
            os.close(*held[2])


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run ended early because of the signal `number`; the state after step `step` is saved under `out`."""

    def __init__(self, number: int, step: int, out: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step:,}; saved in {out}")
        self.number, self.step, self.out = number, step, out


@contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Inside, the first SIGINT or SIGTERM calls `stop` and is appended to the list; a second one has its usual effect.

    Python runs signal handlers in the main thread only; in another thread this changes nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        stop()

    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:  # nohup and the like
            signal.signal(number, handle)
    try:
        yield received
    finally:
        restore()
