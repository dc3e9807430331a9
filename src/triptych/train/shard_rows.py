"""Rows from shards on the disk (`triptych.shards`): the same kinds of rows as from text in memory.

Which documents stand in a row is a function of (seed, number of the row), and what is hidden in it too, so that a rank
reads its own rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.errors import TextError, counted
from triptych.shards import Mixture, RowOrder, ShardSet
from triptych.shards.order import Frame, Positions
from triptych.text import Tokenizer
from .data import Windows, random_numbers
from .objectives import Example, Ids
from .recipe import DataSettings

HELD_OUT = 1 << 18  # tokens, unless the recipe says
SAMPLE = 1 << 18  # tokens to train on that are read for baselines and checks
PLACES = 64  # from which they are


@dataclass(frozen=True, eq=False)
class ShardRows:
    """Rows of a mixture of shards; `windows` makes the rows of pieces, and holds a sample of the documents."""

    windows: Windows
    mixture: Mixture

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return self.draw_some(seed, step * rows, (step + 1) * rows)

    def draw_some(self, seed: int, first: int, stop: int) -> list[Example]:
        """The rows numbered `[first, stop)`; of each only its own tokens are read."""
        examples: list[Example] = []
        for number in range(first, stop):
            which, cuts = self.mixture.row(seed, number)
            positions, random = self.mixture.orders[which].positions, random_numbers(seed, self.windows.use, number)
            examples += self.windows.rows_of(map(positions.read, cuts), random)
        return examples

    def held_out_rows(self) -> Iterator[Example]:
        """Those of the sample."""
        return self.windows.held_out_rows()

    def targets(self) -> Ids:
        """The tokens of the sample that can be targets."""
        return self.windows.targets()


class ShardDocuments:
    """The sets that a recipe names, of each of which the end is held out."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings, self.weights = settings, settings.shard_weights
        self.sets = {path: ShardSet(path) for path in self.weights}

    @property
    def notes(self) -> list[str]:
        """What each set holds."""
        return [
            f"{path}: {counted(one.documents, 'document')}, {counted(one.tokens, 'token')}"
            for path, one in self.sets.items()
        ]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sets.  Raises ConfigError where they have several."""
        first, *others = self.sets.values()
        tokenizer = first.tokenizer()
        for one in others:
            one.check_tokenizer(tokenizer, f"that of {first.path}")
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a model whose tokenizer is not that of the shards."""
        for one in self.sets.values():
            one.check_tokenizer(tokenizer, "that of the model")

    def in_memory(self, frame: Frame) -> list[list[Ids]]:
        """Documents of a sample of those to train on, and those held out: of each set its share by weight.

        Raises TextError where there are none.
        """
        train, held_out = list[Ids](), list[Ids]()
        total = sum(self.weights.values())
        for path, one in self.sets.items():
            share, positions = self.weights[path] / total, Positions(one, frame)
            stop = self._stop(positions, share)
            train += _sampled(positions, stop, max(1, round(SAMPLE * share)))
            held_out += _documents(positions, stop, len(positions))
        if not train or not held_out:
            raise self._too_short()
        return [train, held_out]

    def _too_short(self) -> TextError:
        return TextError(f"{', '.join(self.sets)}: too short to hold out a part; give more text")

    def _stop(self, positions: Positions, share: float) -> int:
        """Where training ends and the held-out positions begin: where a document does, unless more than twice as much
        would be held out."""
        every = len(positions)
        most = max(1, round((self.settings.held_out_limit or HELD_OUT) * share))
        held_out = min(max(1, round(self.settings.held_out * every)), most)
        if held_out >= every:
            raise self._too_short()
        (cut,) = positions.cut(every - held_out, every - held_out + 1)
        begins = every - held_out - cut.first
        return begins if begins > 0 and cut.first <= held_out else every - held_out

    def rows(self, windows: Windows, frame: Frame) -> ShardRows:
        """The rows to train on, as long as those of `windows`."""
        orders = {}
        for path, one in self.sets.items():
            positions = Positions(one, frame)
            stop = self._stop(positions, self.weights[path] / sum(self.weights.values()))
            orders[path] = RowOrder(positions, windows.length, self.settings.pack, stop)
        return ShardRows(windows, Mixture(orders, self.weights))


def _sampled(positions: Positions, stop: int, most: int) -> list[Ids]:
    """About `most` tokens of the first `stop` positions, from places evenly apart; all of them where they are fewer."""
    if stop <= most:
        return _documents(positions, 0, stop)
    size = -(-most // PLACES)
    starts: Sequence[int] = [place * (stop - size) // PLACES for place in range(PLACES)]
    return [ids for start in starts for ids in _documents(positions, start, start + size)]


def _documents(positions: Positions, start: int, stop: int) -> list[Ids]:
    """The tokens at `[start, stop)` of each document there, without what is put around it."""
    read, shift = list[Ids](), len(positions.frame.before)
    for cut in positions.cut(start, stop):
        ids = positions.shards.document_of(cut.shard, cut.document, cut.first - shift, cut.last - shift)
        if len(ids):
            read.append(ids)
    return read
