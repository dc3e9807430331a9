"""Ids of prompts whose log-probabilities a forward gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from .next_tokens import token_logprobs
from .request import LiveRow, TokenLogprobs


@dataclass(eq=False)
class ScoredTokens:
    """The ids of each row that are scored by one forward, and the tokens `before` them, by their places in it."""

    ids: dict[LiveRow, list[int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    def add(self, row: LiveRow, done: int, end: int, first: int) -> None:
        """The forward runs the ids from `done` to `end` of a row, the first of them in the place `first`."""
        last = min(end + 1, len(row.request.prompt))
        self.ids[row] = [int(token) for token in row.request.prompt[row.next_score : last]]
        self.before.extend(range(first + row.next_score - 1 - done, first + last - 1 - done))

    def scores(self, logits: Tensor, chosen: Sequence[int]) -> dict[LiveRow, list[TokenLogprobs]]:
        """Their log-probabilities, by the logits [C, V] of the tokens `chosen`; the rows go on behind them."""
        every = [token for ids in self.ids.values() for token in ids]
        counts = {row: row.request.logprobs or 0 for row in self.ids}
        most = max(counts.values())
        own = logits if len(self.before) == len(chosen) else logits[places(self.before, chosen)]
        scored, scores = iter(token_logprobs(own, every, most)), dict[LiveRow, list[TokenLogprobs]]()
        for row, ids in self.ids.items():
            of_row = islice(scored, len(ids))
            scores[row] = [one if counts[row] == most else replace(one, top=one.top[: counts[row]]) for one in of_row]
            row.next_score += len(ids)
        return scores


def places(tokens: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The places of some tokens among the `chosen` ones."""
    at = {token: place for place, token in enumerate(chosen)}
    return [at[token] for token in tokens]
