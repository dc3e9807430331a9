"""`Model.loss`: the loss of rows of token ids that the caller passes, for training loops outside this library."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from triptych.errors import InputError, counted
from triptych.nn import InputRow, Transformer
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec
from .objectives import Example, Ids, TokenMasking, TrainingBatch, causal, collate, loss, seq2seq

IGNORED = -100  # a label that does not count, as in PyTorch
IdRows = Sequence[Sequence[int]]


def mean_loss(module: Transformer, batch: TrainingBatch) -> Tensor:
    """The mean cross-entropy of the trained tokens in nats: a scalar in fp32 or better, with a graph."""
    nats, count = loss(module, batch)
    return nats / count


def decoder_batch(module: Transformer, rows: IdRows, labels: IdRows | None) -> TrainingBatch:
    """Each token predicted from those before it; with `labels`, these in its place, but for those that are IGNORED.

    A row of fewer than two tokens has none to predict, and is left out.  Raises InputError where every row is.
    """
    _check_head(module, LMHeadSpec)
    long_enough = [i for i, row in enumerate(rows) if len(row) > 1]
    if not long_enough:
        raise InputError("no row has two tokens, one to read and one to predict; give longer rows")
    examples = [causal(rows[i]) for i in long_enough]
    if labels is not None:
        checked = _checked_labels(module, rows, labels)
        examples = [_labelled(one, checked[i][1:]) for i, one in zip(long_enough, examples, strict=True)]
    return collate(examples, module.device)


def encoder_batch(
    module: Transformer, rows: IdRows, labels: IdRows | None, mask: int | None, special: frozenset[int], seed: int
) -> TrainingBatch:
    """Hidden tokens predicted from their row: 15% of each, hidden as BERT does by random numbers of `seed`; with
    `labels`, `rows` have them hidden already and a label that is not IGNORED is the token that was there."""
    _check_head(module, MaskedLMHeadSpec)
    if labels is not None:
        ids = [np.asarray(row, dtype=np.int32) for row in rows]
        pairs = zip(ids, _checked_labels(module, rows, labels), strict=True)
        whole = ((Example(row, row, np.ones(len(row), dtype=bool)), label) for row, label in pairs if len(row))
        return collate([_labelled(*pair) for pair in whole], module.device)
    if mask is None:
        raise InputError("this tokenizer has no mask token, so nothing can be hidden; give labels")
    masking, random = TokenMasking(mask, module.spec.vocab, special), np.random.Generator(np.random.Philox(seed))
    return collate([masking(row, random) for row in rows if len(row)], module.device)


def encoder_decoder_batch(module: Transformer, sources: Sequence[InputRow], targets: IdRows) -> TrainingBatch:
    """Each target predicted from its source, by teacher forcing."""
    _check_head(module, LMHeadSpec)
    start = module.spec.start_id()
    if len(sources) != len(targets):
        raise InputError(f"there are {len(sources)} sources and {len(targets)} targets; give one target for each")
    batch = collate([replace(seq2seq([0], row, start), source=None) for row in targets], module.device)
    return replace(batch, source=module.flat(sources))


def _labelled(example: Example, labels: Ids) -> Example:
    trained = labels != IGNORED
    return replace(example, targets=np.where(trained, labels, 0).astype(np.int32), trained=trained)


def _checked_labels(module: Transformer, rows: IdRows, labels: IdRows) -> list[Ids]:
    """The labels as arrays.  Raises InputError where they are not one a token, or neither IGNORED nor an id."""
    if not isinstance(labels, Sequence) or len(labels) != len(rows):
        raise InputError(f"labels must be a list with one row of labels for each of the {len(rows)} rows")
    checked, vocab = [], module.spec.vocab
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        ids = np.asarray(label)
        if ids.shape != (len(row),) or ids.dtype.kind not in "iu":
            tokens, ids_wanted = counted(len(row), "token"), counted(len(row), "id")
            raise InputError(f"row {i} has {tokens}; give its labels as {ids_wanted}, {IGNORED} to ignore")
        wrong = ids[(ids != IGNORED) & ((ids < 0) | (ids >= vocab))]
        if len(wrong):
            raise InputError(f"row {i}: label {wrong[0]} is neither one of {vocab} ids nor {IGNORED}")
        checked.append(ids.astype(np.int32))
    return checked


def _check_head(module: Transformer, kind: type[LMHeadSpec | MaskedLMHeadSpec]) -> None:
    """Raises InputError for a model without a head that predicts tokens."""
    spec = module.spec
    if not isinstance(spec.head, kind):
        raise InputError(
            f"this {spec.family} {spec.layout} has no head that predicts tokens, whose loss this is; of another head, "
            "compute one from model.module.logits(...)"
        )


def drawn_seed() -> int:
    """A seed from torch's random numbers, so that `torch.manual_seed` governs what is hidden."""
    return int(torch.randint(2**62, ()))
