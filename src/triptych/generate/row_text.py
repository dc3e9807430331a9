"""The text of a row while it grows, up to its first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triptych.text.detokenize import TextStream
from .stops import before_stop, stop_strings


class RowText:
    """Gives the text of a row in pieces, each as soon as no later id can change it: nothing of an end token, and
    nothing from the first stop string on, whose beginning is held back until it is certain.
    """

    def __init__(self, detokenizer: TextStream, ends: Collection[int] = (), stop: str | Sequence[str] = ()) -> None:
        self.detokenizer, self.ends, self.stop = detokenizer, ends, stop_strings(stop)
        self.stopped_by: str | None = None  # the stop string before which the text has ended
        self._unsure = max(map(len, self.stop), default=1) - 1  # characters that may begin a stop string
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether the text has ended before a stop string."""
        return self.stopped_by is not None

    def put(self, token: int) -> str:
        """The text that the next id makes certain; none once it has stopped."""
        if not self.stopped:
            self._held += self.detokenizer.put(token) if token not in self.ends else ""
            before = before_stop(self._held, self.stop)
            if before is not None:
                rest = self._held[len(before) :]
                self._held, self.stopped_by = before, next(end for end in self.stop if rest.startswith(end))
        return self._take(0 if self.stopped else self._unsure)

    def finish(self) -> str:
        """The rest of the text, where the row has ended."""
        if not self.stopped:
            self._held += self.detokenizer.flush()
        return self._take(0)

    def _take(self, left: int) -> str:
        certain = max(len(self._held) - left, 0)
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece
