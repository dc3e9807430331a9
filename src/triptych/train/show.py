"""The rows of a training step, token by token, to be read before the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.text import Tokenizer
from triptych.train.objectives import Example

#: A token whose prediction counts in the loss, one that the model only reads, or one that is predicted from its own
#: place, where another stands for it.
State = Literal["trained", "read", "hidden"]


@dataclass(frozen=True)
class ShownToken:
    """The input token, its target, and whether the target counts in the loss."""

    token: str
    target: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """One row; `source` are the encoder's tokens, which are not trained.  Where `shifted`, the target of a token is the
    one after it."""

    tokens: tuple[ShownToken, ...]
    source: tuple[str, ...] = ()
    shifted: bool = True

    @property
    def text(self) -> list[tuple[str, State]]:
        """The tokens of the row's text in order, each once, with its state: of a shifted row the first input, then the
        targets; otherwise the targets."""
        states: list[State] = ["trained" if one.trained else "read" for one in self.tokens]
        if not self.shifted:
            hidden = [one.trained and one.token != one.target for one in self.tokens]
            states = ["hidden" if hides else state for hides, state in zip(hidden, states, strict=True)]
            return [(one.target, state) for one, state in zip(self.tokens, states, strict=True)]
        first: list[tuple[str, State]] = [(one.token, "read") for one in self.tokens[:1]]
        return first + [(one.target, state) for one, state in zip(self.tokens, states, strict=True)]

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


def show_batch(examples: Sequence[Example], tokenizer: Tokenizer | None, *, shifted: bool = True) -> list[ShownRow]:
    """The rows of a draw with their tokens readable: `job.trainer.data.draw(seed, step, rows)`.

    Without a tokenizer the rows are those of images, whose positions have numbers.  `shifted` says whether each target
    is the token after its input, as it is but for masked language modelling.
    """
    rows = []
    for example in examples:
        if tokenizer is None:
            names = [str(i) for i in range(len(example.ids))], [""] * len(example.ids)
        else:
            names = tokenizer.tokens(example.ids.tolist()), example.target_names(tokenizer)
        tokens = tuple(ShownToken(*fields) for fields in zip(*names, example.trained.tolist(), strict=True))
        source = () if example.source is None or tokenizer is None else tuple(tokenizer.tokens(example.source.tolist()))
        rows.append(ShownRow(tokens, source, shifted))
    return rows
