"""The tokens of one forward of an engine, gathered from the rows that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .request import LiveRow


@dataclass(eq=False)
class Gathered:
    """The tokens of one forward, row after row: `ids` [N], of which `lengths` continue `past` of each row in its slot,
    and of each the first `prompts` are of its prompt.

    due            the rows that are read to their end, `places` where the logits of each begin among those of `wanted`,
                   which are the tokens whose logits choose the next ones.
    to_score       ids of prompts that are scored, of each row, and `before` the tokens that they follow.
    """

    ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    due: list[LiveRow] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    to_score: dict[LiveRow, Sequence[int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    def add(self, row: LiveRow, done: int, most: int) -> None:
        """Up to `most` ids of a row after the first `done`, and behind its end its draft."""
        piece, first, prompt = row.ids[done : done + most], len(self.ids), len(row.request.prompt)
        end = done + len(piece)
        if row.next_score < min(end + 1, prompt):
            self.to_score[row] = [int(token) for token in row.request.prompt[row.next_score : end + 1]]
            self.before.extend(range(first + row.next_score - 1 - done, first + min(end, prompt - 1) - done))
        if end == len(row.ids) and not row.only_scores:
            self.due.append(row)
            self.places.append(len(self.wanted))
            self.wanted.extend(range(first + len(piece) - 1, first + len(piece) + len(row.draft)))
            piece.extend(row.draft)
        self.ids += piece
        self.past.append(done)
        self.lengths.append(len(piece))
        self.slots.append(row.slot)
        self.prompts.append(min(max(prompt - done, 0), len(piece)))
