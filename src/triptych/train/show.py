"""The rows of a training step, token by token, to be read before the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.text import Tokenizer
from triptych.train.objectives import Example


@dataclass(frozen=True)
class ShownToken:
    """The input token, its target, and whether the target counts in the loss."""

    token: str
    target: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """One row; `source` are the encoder's tokens, which are not trained."""

    tokens: tuple[ShownToken, ...]
    source: tuple[str, ...] = ()

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


def show_batch(examples: Sequence[Example], tokenizer: Tokenizer) -> list[ShownRow]:
    """The rows of a draw with their tokens readable: `job.trainer.data.draw(seed, step, rows)`."""
    rows = []
    for example in examples:
        names = tokenizer.tokens(example.ids.tolist()), example.target_names(tokenizer)
        tokens = tuple(ShownToken(*fields) for fields in zip(*names, example.trained.tolist(), strict=True))
        source = () if example.source is None else tuple(tokenizer.tokens(example.source.tolist()))
        rows.append(ShownRow(tokens, source))
    return rows
