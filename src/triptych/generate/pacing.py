"""How many ids of prompts a step may run beside rows that decode, so that their tokens keep coming."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOWER = 2.5  # times the seconds of a step of decoding alone that one with prompts may take
FEWEST = 16  # ids of prompts in a step, at least
WINDOW = 32  # steps that are looked back on


class Pace:
    """Measures steps of decoding alone, and what an id of a prompt adds to one.

    Until both are known, and where nothing decodes, a step runs `most` ids.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.alone: deque[float] = deque(maxlen=WINDOW)  # seconds of a step for each row that decodes
        self.of_id: deque[float] = deque(maxlen=WINDOW)  # seconds of an id of a prompt

    def ids(self, decoding: int) -> int:
        """Ids of prompts for the next step, in which so many rows decode."""
        if not decoding or not self.alone or not self.of_id:
            return self.most
        seconds = (SLOWER - 1) * median(self.alone) * decoding
        return max(FEWEST, min(self.most, int(seconds / median(self.of_id))))

    def measured(self, seconds: float, decoding: int, prompt_ids: int) -> None:
        """A step has run so many rows and ids of prompts in so many seconds."""
        if decoding and not prompt_ids:
            self.alone.append(seconds / decoding)
        elif prompt_ids >= FEWEST:
            before = median(self.alone) * decoding if self.alone else 0.0
            self.of_id.append(max(seconds - before, 1e-9) / prompt_ids)
