"""Random texts under a constraint, without a model: each token is drawn from those that the mask allows."""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np

from triptych.generate import Constraint
from triptych.generate.constraints import RowConstraint
from triptych.generate.constraints.row_constraint import fill_masks
from triptych.text import Tokenizer, byte_tokenizer

ENDING = frozenset(b'"]},')  # bytes that end a part of JSON, drawn more often


@cache
def bytewise() -> Tokenizer:
    return byte_tokenizer()


def allowed(row: RowConstraint) -> list[int]:
    """The ids that the mask allows."""
    [words] = fill_masks([row])
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def texts(constraint: Constraint, count: int, draw: random.Random, *, limit: int = 400) -> Iterator[tuple[str, str]]:
    """Texts with the reasons why they end: "end", "length", or "error: ..."."""
    tokenizer = bytewise()
    end = tokenizer.eos_id
    assert end is not None
    first = constraint.start(tokenizer, tokenizer.vocab_size, [end])
    for _ in range(count):
        row, ids, reason = first.copy(), list[int](), "length"
        while len(ids) < limit:
            choices = allowed(row)
            if not choices:
                reason = f"error: {row.problem}"
                break
            closing = [token for token in choices if token in ENDING]
            share = 0.2 if len(ids) < limit // 6 else 0.8
            token = end if end in choices and draw.random() < 0.5 else draw.choice(choices)
            if token != end and closing and draw.random() < share:
                token = draw.choice(closing)
            if token == end or (ids.append(token) or row.advance(token)):
                reason = "end"
                break
            if row.problem is not None:
                reason = f"error: {row.problem}"
                break
        yield tokenizer.decode(ids), reason
