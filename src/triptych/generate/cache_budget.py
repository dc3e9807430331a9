"""The memory that the caches of several schedulers may take together."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from weakref import WeakKeyDictionary

from triptych.arguments import integer


class CacheBudget:
    """Bytes for the caches of the models of one process.  Each scheduler, in whatever thread, claims what its rows need
    before they join.

    Raises InputError for a number below 1.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = integer("cache_bytes", nbytes, 1)
        self.lock = Lock()
        self.claims: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # a scheduler has its budget
        self.lacking: WeakKeyDictionary[object, Callable[[], object]] = WeakKeyDictionary()  # called for another's sake

    def left(self, owner: object) -> int:
        """Bytes that one may claim altogether, beside what the others have."""
        with self.lock:
            return self.nbytes - sum(nbytes for other, nbytes in self.claims.items() if other is not owner)

    def claim(self, owner: object, nbytes: int) -> bool:
        """Let one have so many bytes altogether.  Where they are not left its claim stays, False is returned, and the
        others are asked to give back what they do not use."""
        with self.lock:
            others = sum(claimed for other, claimed in self.claims.items() if other is not owner)
            granted = others + nbytes <= self.nbytes
            if granted:
                self.claims[owner] = nbytes
            callbacks = [] if granted else [call for other, call in self.lacking.items() if other is not owner]
        for callback in callbacks:
            callback()
        return granted

    def follow(self, owner: object, lacking: Callable[[], object]) -> None:
        """Have `lacking` called, from any thread, where another one's claim is not granted."""
        with self.lock:
            self.lacking[owner] = lacking
