"""A draft model for speculative decoding: a smaller model of the same vocabulary guesses the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from triptych.errors import InputError
from .engine import Engine
from .next_tokens import choose
from .request import LiveRow, Request


class DraftModel:
    """Guesses what a smaller model of the same vocabulary would choose, by the row's own sampling and noise.

    Raises InputError for a model with another vocabulary.
    """

    def __init__(self, engine: Engine, vocab: int) -> None:
        if engine.module.spec.vocab != vocab:
            raise InputError(
                f"the draft model has a vocabulary of {engine.module.spec.vocab} tokens, the model {vocab}; a draft "
                "model must have the same vocabulary"
            )
        if engine.cross is not None:
            raise InputError("a draft model must be a decoder alone; prompt lookup works for any model")
        if engine.cache.sums:
            raise InputError(
                "a draft model with linear attention cannot take back its wrong guesses from its sums without reading "
                "the text again; use one that keeps keys, or prompt lookup"
            )
        self.engine = engine
        self.reset()

    def reset(self) -> None:
        self.engine.reset()
        self.twins: WeakKeyDictionary[LiveRow, LiveRow] = WeakKeyDictionary()

    def forget(self, rows: Sequence[LiveRow]) -> None:
        twins = [self.twins.pop(row, None) for row in rows]
        self.engine.free([twin for twin in twins if twin is not None])

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        limit = self.engine.module.spec.longest_row
        target_lengths: dict[LiveRow, int] = {}
        lengths = [row.constraint.written if row.constraint is not None else 0 for row in rows]
        for row, count in zip(rows, counts, strict=True):
            most = count if limit is None else min(count, limit - len(row.ids))
            if most > 0:
                twin = self._twin(row)
                twin.constraint = row.constraint  # its own state goes on with the guesses, and back afterwards
                target_lengths[twin] = len(row.ids) + most
        unfinished = list(target_lengths)
        while unfinished:
            chosen = choose(unfinished, self.engine.logits(rows=unfinished))
            for twin, choice in zip(unfinished, chosen, strict=True):
                ended = choice.error is not None or choice.token in twin.request.ends
                if not ended and twin.constraint is not None:
                    ended = twin.constraint.advance(choice.token) or twin.constraint.problem is not None
                if choice.error is None:
                    twin.ids.append(choice.token)
                if ended:
                    target_lengths[twin] = len(twin.ids)
            unfinished = [twin for twin in unfinished if len(twin.ids) < target_lengths[twin]]
        for row, length in zip(rows, lengths, strict=True):
            if row.constraint is not None:
                row.constraint.roll_back(row.constraint.written - length)
        twins = [self.twins.get(row) for row in rows]
        return [
            twin.ids[len(row.ids) :] if twin is not None and twin in target_lengths else []
            for row, twin in zip(rows, twins, strict=True)
        ]

    def _twin(self, row: LiveRow) -> LiveRow:
        """The draft model's own row of the same ids; its cache keeps what they share."""
        twin = self.twins.get(row)
        if twin is None:
            request = Request(
                prompt=list(row.ids), sampling=row.request.sampling, number=row.request.number, max_new_tokens=0,
                ends=row.request.ends,
            )  # fmt: skip
            (twin,) = self.engine.add(request)
            self.engine.cache.expect(twin.slot, len(row.ids), row.limit)
            self.twins[row] = twin
            return twin
        same = min(twin.cached, len(row.ids) - 1)
        while twin.ids[:same] != row.ids[:same]:
            same -= 1
        if same < twin.cached:
            try:
                self.engine.trim(twin, same)
            except InputError:  # a window has passed
                self.engine.trim(twin, 0)
        twin.ids = list(row.ids)
        return twin
