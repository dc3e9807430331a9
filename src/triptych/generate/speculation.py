"""Exact speculation: several next tokens are guessed, one forward computes the logits after each, and those that would
have been chosen anyway are taken (Leviathan et al. 2023; prompt lookup: Saxena 2023).

Each token is chosen from its own logits exactly as without guesses: by the same rules and settings and with the same
random numbers, which are a function of (seed, request, position).  A guess is right where it is that token (`accepts`).
The ids are therefore those of a run without guesses, sampled ones too, and not only their distribution.  A guess x is
accepted as often as the model itself would draw x, with probability p(x).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor

from triptych.arguments import integer
from triptych.attention import Cache
from triptych.attention.layer_cache import Snapshot
from triptych.errors import InputError, shown
from .request import LiveRow
from .step_runner import StepRunner

LONGEST_NGRAM = 3
SHORTEST_NGRAM = 2
WINDOW = 12  # steps that are compared
PAUSE, LONGEST_PAUSE = 32, 1024  # steps without guesses after a loss; doubled at each
REFRESH = 128  # steps with guesses after which some without are measured again


@runtime_checkable
class Drafts(Protocol):
    """An object that guesses the next tokens of rows."""

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        """Up to `counts[i]` next ids of each row."""

    def forget(self, rows: Sequence[LiveRow]) -> None:
        """These rows have left."""

    def reset(self) -> None:
        """All rows have left, or an exception left the drafts in an unknown state."""


class PromptLookup:
    """Guesses what followed the newest ids where they stood before: in the row itself, and in the ids of its source."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.texts: WeakKeyDictionary[LiveRow, _Text] = WeakKeyDictionary()

    def forget(self, rows: Sequence[LiveRow]) -> None:
        for row in rows:
            self.texts.pop(row, None)

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        guesses = []
        for row, count in zip(rows, counts, strict=True):
            text = self.texts.get(row)
            if text is None:
                source = row.request.source  # sound and images have no ids
                text = _Text([] if source is None or isinstance(source, Tensor) else list(source))
                self.texts[row] = text
            guesses.append(text.following(row.ids, count))
        return guesses


class _Text:
    """Ids with the last place of each of their n-grams."""

    def __init__(self, before: list[int]) -> None:
        self.ids, self.before = before, len(before)
        self.places: dict[tuple[int, ...], int] = {}
        self._index(0)

    def _index(self, first: int) -> None:
        """Note what follows each n-gram that ends at `first` or later: the newest place counts."""
        for end in range(max(first, SHORTEST_NGRAM), len(self.ids)):
            for n in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
                self.places[tuple(self.ids[end - n : end])] = end

    def following(self, row: Sequence[int], count: int) -> list[int]:
        """`count` ids that followed the row's last n-gram, the longest that is known; where they reach the end of the
        row, it is guessed to go on repeating itself."""
        known = len(self.ids)
        self.ids += row[known - self.before :]
        self._index(known)
        for n in range(min(LONGEST_NGRAM, len(self.ids)), SHORTEST_NGRAM - 1, -1):
            place = self.places.get(tuple(self.ids[-n:]))
            if place is not None:
                return [self.ids[place + i % (len(self.ids) - place)] for i in range(count)]
        return []


def accepts(row: LiveRow, token: int) -> bool:
    """Whether `token`, just chosen as the next id of a row that has run with its draft, is the guess at that place:
    then the forward has computed the logits after it."""
    place = len(row.ids) - row.cached + len(row.draft)
    return place < len(row.draft) and row.draft[place] == token


class Speculation:
    """Guesses for the rows of an engine, how many were right, and whether they pay.

    The time for a new token with guesses is compared with that without them, each over its last steps; where guesses
    lose, they rest a while and are tried again.  `adaptive=False` always guesses.  Raises InputError for no `Drafts`.
    """

    def __init__(self, drafts: Drafts, tokens: int = 4, *, adaptive: bool = True) -> None:
        if not isinstance(drafts, Drafts):
            raise InputError(f"drafts={shown(drafts)} must be a generate.PromptLookup() or another of generate.Drafts")
        self.drafts, self.tokens, self.adaptive = drafts, integer("draft_tokens", tokens, 1), adaptive
        self.drafted = self.accepted = 0
        self.with_guesses: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.without: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.steps_without_guesses, self.pause, self.steps = 0, PAUSE, 0
        self.snapshots: dict[LiveRow, Snapshot] = {}
        self.guessing = False  # in the step that runs

    def reset(self) -> None:
        """All rows have left."""
        self.snapshots.clear()
        self.drafts.reset()

    def forget(self, rows: Sequence[LiveRow]) -> None:
        """These rows have left."""
        for row in rows:
            self.snapshots.pop(row, None)
        self.drafts.forget(rows)

    def propose(self, rows: Sequence[LiveRow], runner: StepRunner) -> None:
        """Set the drafts of the rows that decode and may have one: those that want all logits are computed one token at
        a time."""
        self.guessing = False
        counts: dict[LiveRow, int] = {}
        for row in rows:
            row.draft = ()
            if row.decodes and self.should_guess:
                most = self._longest_draft(row, runner)
                if most > 0:
                    counts[row] = most
        if not counts:
            return
        guesses = self.drafts.guess(list(counts), list(counts.values()))
        vocab = runner.module.spec.vocab
        for row, ids in zip(counts, guesses, strict=True):
            guess = [*takewhile(lambda token: token < vocab, ids)]  # a source may have more ids than the decoder
            if row.constraint is not None:
                guess = guess[: row.constraint.leading(guess)]
            if guess:
                row.draft = guess
                self.guessing = True
                if runner.cache.forgets:
                    self.snapshots[row] = runner.cache.snapshot(row.slot, 1 + len(guess))

    def _longest_draft(self, row: LiveRow, runner: StepRunner) -> int:
        """The longest draft of a row: the token after it is chosen too, and stays within the row's limit; a ring has
        places for all; and it does not cross the length at which LongRoPE changes its factors."""
        if row.request.all_logits:
            return 0
        most = min(self.tokens, row.limit - len(row.ids) - 1)
        if runner.cache.smallest_window is not None:
            most = min(most, runner.cache.smallest_window - 1)
        if len(row.ids) <= runner.switch + 1:
            most = min(most, runner.switch - len(row.ids))
        return most

    def forget_wrong_guesses(self, row: LiveRow, cache: Cache) -> None:
        """Remove the wrong guesses of a row from the cache, and what its probe read of them, after its tokens were
        chosen."""
        right = len(row.ids) - 1
        if row.request.probe is not None:
            row.request.probe.cut(row.path[-1], right)
        snapshot = self.snapshots.pop(row, None)
        if row.cached > right:
            if snapshot is None:
                cache.trim(row.slot, right)
            else:
                cache.rollback(row.slot, right, snapshot)
            row.cached = right
        row.drafted += len(row.draft)
        self.drafted += len(row.draft)
        row.draft = ()

    # -- whether it pays ------------------------------------------------------------------------------------------

    @property
    def should_guess(self) -> bool:
        """Whether the next step should guess."""
        return not self.adaptive or self.steps_without_guesses == 0

    def measured(self, seconds: float, tokens: int) -> None:
        """A step that read no prompt took so long and gave so many tokens."""
        if not tokens or not self.adaptive:
            return
        (self.with_guesses if self.guessing else self.without).append((seconds, tokens))
        if self.steps_without_guesses:
            self.steps_without_guesses -= 1
            return
        self.steps += 1
        if len(self.without) < WINDOW // 3 or self.steps >= REFRESH:
            self.steps_without_guesses, self.steps = WINDOW // 3, 0
        elif len(self.with_guesses) == WINDOW:
            if _seconds_per_token(self.with_guesses) > _seconds_per_token(self.without):
                self.steps_without_guesses, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
                self.with_guesses.clear()
            else:
                self.pause = PAUSE


def _seconds_per_token(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds of a token, over some steps; the slowest step is left out: it may have read a draft model's prompt."""
    usual = sorted(steps)[:-1]
    return sum(seconds for seconds, _ in usual) / sum(tokens for _, tokens in usual)
