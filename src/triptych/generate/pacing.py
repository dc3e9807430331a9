"""How long the prompts of a step may take beside rows that decode, so that their tokens keep coming."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOWER = 2.0  # times the seconds of a step of decoding alone that one with prompts may take
UNHURRIED = 0.05  # seconds of prompts in a step in which nothing decodes, so that others join and leave soon
STEPS = 8  # over which a forward of prompts is spread, where it can be
FEWEST = 16  # ids of prompts in a forward, at least
WINDOW = 32  # steps of decoding that are looked back on
FORWARDS = 5  # of prompts that are looked back on: fewer, as an id costs more the further a prompt is read


class Pace:
    """Measures steps of decoding alone, and what an id of a prompt costs.

    most        ids of prompts in a forward, at most; so many run until their cost is known.
    in_pieces   whether a forward of prompts is spread over several steps.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_pieces = False
        self.alone: deque[float] = deque(maxlen=WINDOW)  # seconds of a step for each row that decodes
        self.of_id: deque[float] = deque(maxlen=FORWARDS)  # seconds of an id of a prompt

    def seconds(self, decoding: int) -> float:
        """Seconds of prompts in the next step, in which so many rows decode."""
        if not decoding or not self.alone:
            return UNHURRIED
        return (SLOWER - 1) * median(self.alone) * decoding

    def ids(self, decoding: int) -> int:
        """Ids of prompts for the next forward of them, where so many rows decode."""
        if not self.of_id or not (self.in_pieces or (decoding and self.alone)):
            return self.most
        seconds = self.seconds(decoding) * (STEPS if self.in_pieces else 1)
        return max(FEWEST, min(self.most, int(seconds / median(self.of_id))))

    def measured(self, seconds: float, decoding: int, prompt_ids: int) -> None:
        """A step, or a forward of prompts alone, has run so many rows and ids of prompts in so many seconds."""
        if decoding and not prompt_ids:
            self.alone.append(seconds / decoding)
        elif prompt_ids >= FEWEST:
            before = median(self.alone) * decoding if self.alone else 0.0
            self.of_id.append(max(seconds - before, 1e-9) / prompt_ids)
