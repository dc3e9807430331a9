"""What a step trains on, token by token, for a person to read before the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.text import Tokenizer
from triptych.train.objectives import Example


@dataclass(frozen=True)
class ShownToken:
    """The token that goes in, the one that should come out, and whether that counts."""

    token: str
    target: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """One row; `source` are the encoder's tokens, none of which is ever trained."""

    tokens: tuple[ShownToken, ...]
    source: tuple[str, ...] = ()

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


def show_batch(examples: Sequence[Example], tokenizer: Tokenizer) -> list[ShownRow]:
    """The rows of a draw with their tokens readable: `job.trainer.data.draw(seed, step, rows)`."""
    rows = []
    for example in examples:
        names = (tokenizer.tokens(side.tolist()) for side in (example.ids, example.targets))
        tokens = tuple(ShownToken(*three) for three in zip(*names, example.trained.tolist(), strict=True))
        source = () if example.source is None else tuple(tokenizer.tokens(example.source.tolist()))
        rows.append(ShownRow(tokens, source))
    return rows
