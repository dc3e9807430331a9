"""A constraint while a row writes: the mask of the next token, one token on, some tokens back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from triptych.errors import InputError
from triptych.native import usable_threads
from ..sampling import TokenMasks
from .vocabulary import STUCK, TokenVocabulary, Words, bits_of, guidance, reason

IN_PARALLEL = 4  # masks from which on threads share the work


class RowConstraint:
    """What a row has written of its constraint.

    Raises InputError where nothing may be written, so that no row begins.
    """

    def __init__(self, vocabulary: TokenVocabulary, matcher: Any, ends: Collection[int]) -> None:
        self.vocabulary, self.matcher = vocabulary, matcher
        self.ends = bits_of([end for end in ends if end < vocabulary.size], vocabulary.words)
        self.written = 0  # tokens
        self.problem: str | None = None
        if not (fill_masks([self])[0] & ~self.ends).any():
            empty = "it allows the empty text alone" if matcher.is_accepting() else None
            raise InputError(f"the constraint cannot be kept: {empty or self.problem or 'it allows no token'}")

    @property
    def error(self) -> InputError:
        """The error of a row that cannot go on."""
        return InputError(f"the constraint cannot be kept after {self.written:,} tokens: {self.problem}")

    def advance(self, token: int) -> bool:
        """Add a token that the mask allows and that is no end id.  True where nothing can follow it; what went wrong is
        in `problem`."""
        if not self.matcher.consume_token(token):
            self.problem = _problem_of(self.matcher)
            return False
        self.written += 1
        return bool(self.matcher.is_stopped())

    def roll_back(self, count: int) -> None:
        """Take back the newest tokens, and what became of them."""
        undone = not count or self.matcher.rollback(count)
        self.problem = None if undone and not self.matcher.is_error() else _problem_of(self.matcher)
        self.written -= count

    def leading(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could come next, one after another."""
        if not self.written and tokens and _has(self.vocabulary.never_first, tokens[0]):
            return 0
        return int(self.matcher.validate_tokens(list(tokens)))

    def copy(self) -> RowConstraint:
        """The same state, to go on in another way (beams)."""
        twin = object.__new__(RowConstraint)
        twin.__dict__.update(self.__dict__, matcher=self.matcher.deep_copy())
        return twin


def fill_masks(rows: Sequence[RowConstraint]) -> Words:
    """The bits `[B, W]` of the tokens that may come next in each row; where none may, `problem` says why."""
    words = rows[0].vocabulary.words
    masks = np.zeros((len(rows), words), np.uint32)
    threads = usable_threads(torch.get_num_threads())
    if threads > 1 and len(rows) >= IN_PARALLEL:
        pairs = [(row.matcher, i) for i, row in enumerate(rows)]
        _executor(threads).unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * words, len(rows))
    else:
        for row, mask in zip(rows, masks, strict=True):
            row.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * words)
    for row, mask in zip(rows, masks, strict=True):
        _finish(row, mask)
    return masks


def _finish(row: RowConstraint, mask: Words) -> None:
    """Make of the library's mask that of the model's own ids: the row's end ids where the text may end."""
    end, matcher = row.vocabulary.end, row.matcher
    may_end = bool(mask[end >> 5] >> (end & 31) & 1)
    if matcher.is_error() or (may_end and not matcher.is_accepting()):  # then it allows the end, whatever was written
        row.problem = _problem_of(matcher)
        mask[:] = 0
        return
    mask &= ~row.ends
    if not row.written:
        mask &= ~row.vocabulary.never_first
    if may_end:
        mask |= row.ends
        mask[end >> 5] &= np.uint32(~(1 << (end & 31)) & 0xFFFFFFFF)
    if not mask.any():
        row.problem = STUCK


def masks_of(rows: Sequence[RowConstraint | None]) -> TokenMasks:
    """The tokens that may come next in each row; all of them in one without a constraint."""
    limited = [row for row in rows if row is not None]
    numbers = iter(range(len(limited)))
    return TokenMasks(fill_masks(limited), np.array([-1 if row is None else next(numbers) for row in rows], np.int32))


def _problem_of(matcher: Any) -> str:
    message = reason(matcher.get_error())
    return message or f"the text can neither end nor go on here ({matcher.stop_reason()})"


def _has(words: Words, token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1) if token >> 5 < len(words) else False


@cache
def _executor(threads: int) -> Any:
    return guidance().LLExecutor(threads)
