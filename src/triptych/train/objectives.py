"""What is predicted from what: the shift, the loss mask and the loss, in this one place.

An `Example` is one row with the shift already made: `targets[t]` is what the model should say at place `t`, and
`trained[t]` whether saying it counts.  Both follow from the structure of the row (where it begins and ends, which
places were hidden), never from the value of an id: a padding id in a text is a token like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triptych import nn
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.nn import Transformer

Ids = NDArray[np.int32]
_LOGITS_AT_ONCE = 1 << 26  # numbers of [M, V] alive at a time: 256 MiB in fp32


@dataclass(frozen=True, eq=False)
class Example:
    """One row: `ids` [T] go in, `targets` [T] should come out where `trained` [T]; `source` [S] is the encoder's."""

    ids: Ids
    targets: Ids
    trained: NDArray[np.bool_]
    source: Ids | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows end to end: N tokens, M of them trained.

    `at` [M] are the trained places and `targets` [M] what belongs there; `source` is the encoder's ids [S] and rows.
    """

    ids: Tensor
    rows: Rows
    at: Tensor
    targets: Tensor
    source: tuple[Tensor, Rows] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that pass through the model, the encoder's included."""
        return len(self.ids) + (0 if self.source is None else len(self.source[0]))

    @property
    def trained(self) -> int:
        return len(self.at)


def causal(tokens: Sequence[int] | Ids) -> Example:
    """Each token from those before it: `tokens[:-1]` -> `tokens[1:]`.  Raises InputError for fewer than two."""
    ids = np.asarray(tokens, dtype=np.int32)
    if len(ids) < 2:
        raise InputError(f"a causal row needs at least two tokens, one to read and one to predict; got {len(ids)}")
    return Example(ids[:-1], ids[1:], np.ones(len(ids) - 1, dtype=bool))


def seq2seq(source: Sequence[int] | Ids, target: Sequence[int] | Ids, start: int) -> Example:
    """`target` from `source`, each token given the right ones before it (teacher forcing).

    The decoder reads `[start] + target[:-1]` and is trained on all of `target`, its EOS included, as T5 is (Raffel et
    al. 2020).  Raises InputError if either side is empty.
    """
    given, wanted = np.asarray(source, dtype=np.int32), np.asarray(target, dtype=np.int32)
    if not len(given) or not len(wanted):
        raise InputError(f"a pair needs both sides; got {len(given)} source and {len(wanted)} target tokens")
    begin = np.array([start], dtype=np.int32)
    return Example(np.concatenate([begin, wanted[:-1]]), wanted, np.ones(len(wanted), dtype=bool), given)


@dataclass(frozen=True, eq=False)
class Hide:
    """BERT's rule (Devlin et al. 2019): of the ordinary tokens of a row `rate` are predicted, at least one; of these
    80% read `mask`, 10% a random ordinary token and 10% themselves (`shares`).  `special` ids are neither hidden nor
    drawn."""

    mask: int
    vocab: int
    special: frozenset[int]
    rate: float = 0.15
    shares: tuple[float, float] = (0.8, 0.1)  # masked, random; the rest stays

    def all_masked(self) -> Hide:
        """For evaluation: 15%, every one of them masked, so that none can be read off or misleads."""
        return replace(self, rate=0.15, shares=(1.0, 0.0))

    def __post_init__(self) -> None:
        keep = np.setdiff1d(np.arange(self.vocab, dtype=np.int32), np.array(sorted(self.special), dtype=np.int32))
        object.__setattr__(self, "_ordinary", keep)

    def __call__(self, tokens: Sequence[int] | Ids, random: np.random.Generator) -> Example:
        """The row with some tokens hidden; `random` alone decides which.  A row of special tokens trains nothing."""
        targets = np.asarray(tokens, dtype=np.int32)
        ordinary: Ids = self._ordinary  # type: ignore[attr-defined]
        places = np.flatnonzero(np.isin(targets, ordinary))
        count = min(len(places), max(1, round(self.rate * len(places))))
        hidden = random.choice(places, count, replace=False) if count else places
        fate, others = random.random(count), random.choice(ordinary, count)
        ids, trained = targets.copy(), np.zeros(len(targets), dtype=bool)
        trained[hidden] = True
        masked, swapped = self.shares
        kept = np.where(fate < masked + swapped, others, targets[hidden])
        ids[hidden] = np.where(fate < masked, self.mask, kept)
        return Example(ids, targets, trained)


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Rows as one flat batch.  Raises InputError when none of their tokens is trained."""
    trained = np.concatenate([e.trained for e in examples]) if examples else np.zeros(0, dtype=bool)
    if not trained.any():
        raise InputError(
            f"a batch of {len(examples)} rows and {len(trained)} tokens has no trained token; "
            "its loss would be 0 / 0: check the data and the objective"
        )
    on = partial(_tensor, device=torch.device(device))
    source = None
    if examples[0].source is not None:
        given = [e.source for e in examples if e.source is not None]
        source = (on(np.concatenate(given)), Rows(tuple(map(len, given))))
    return Batch(
        ids=on(np.concatenate([e.ids for e in examples])),
        rows=Rows(tuple(len(e.ids) for e in examples)),
        at=on(np.flatnonzero(trained)),
        targets=on(np.concatenate([e.targets for e in examples])[trained]),
        source=source,
    )


def _tensor(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)


def final(module: Transformer, batch: Batch) -> Tensor:
    """[M, D]: the vectors from which the trained places are predicted."""
    x = module(nn.Batch(inputs=batch.ids, rows=batch.rows, source=batch.source))
    return x if batch.trained == len(x) else x[batch.at]


def loss(module: Transformer, batch: Batch) -> tuple[Tensor, int]:
    """The sum of the nats of the trained tokens, in fp32 or better, and their number M.

    The sum, not the mean: whoever adds up batches divides once, by the tokens of all.  Only trained places reach the
    head, and with a large vocabulary they go through it in parts whose logits are made again in the backward pass,
    so that `[M, V]` never exists whole.
    """
    x = final(module, batch)
    part = max(1, _LOGITS_AT_ONCE // module.spec.vocab)
    if part >= batch.trained:
        return _nats(module, batch.rows, x, batch.targets), batch.trained
    total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for vectors, targets in zip(torch.split(x, part), torch.split(batch.targets, part), strict=True):
        total = total + checkpoint(_nats, module, batch.rows, vectors, targets, use_reentrant=False)
    return total, batch.trained


def _nats(module: Transformer, rows: Rows, x: Tensor, targets: Tensor) -> Tensor:
    logits = module.unembed(x, rows)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, reduction="sum")
