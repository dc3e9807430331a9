"""Examples, targets and losses of token prediction (causal, seq2seq, masked), and a readable view of a batch.

An `Example` is one row whose targets are shifted already: `targets[t]` is the token the model should predict at
position `t`, and `trained[t]` whether it counts in the loss.  Both follow from the structure of the row (where it
begins and ends, which positions were hidden), never from the value of an id: a padding id in a text is a token like any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triptych import nn
from triptych.arguments import checked
from triptych.attention import Rows
from triptych.count import MAX_LOGITS
from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.ops import RowNoise
from triptych.text import Tokenizer

Ids = NDArray[np.int32]
Integers = NDArray[np.integer]
TokenIds = Sequence[int] | Ids
Device = torch.device | str
B = TypeVar("B", bound="TrainingBatch")


@dataclass(frozen=True, eq=False)
class Example:
    """One row: the model reads `ids` [T] and should predict `targets` [T] where `trained` [T] is true; the encoder, if
    there is one, reads `source` [S]."""

    ids: Ids
    targets: Ids
    trained: NDArray[np.bool_]
    source: Ids | None = None

    def collated(self, examples: Sequence[Example], device: Device) -> TrainingBatch:
        """The rows `examples`, all of this row's class, as one batch; other objectives have batches of their own."""
        return TrainingBatch.of(examples, device)

    def sources(self, examples: Sequence[Example], device: Device) -> tuple[Tensor, Rows] | None:
        """The encoder's input beside the rows `examples`, all of this row's class, and where that of each lies."""
        ids = [one.source for one in examples if one.source is not None]
        return (joined(ids, device), Rows(tuple(map(len, ids)))) if ids else None

    def target_names(self, tokenizer: Tokenizer) -> list[str]:
        """The target at each token, to be read by people."""
        return tokenizer.tokens(self.targets.tolist())

    def shown(self) -> tuple[Example, ...]:
        """The rows that people are shown of it."""
        return (self,)


@runtime_checkable
class VectorGathering(Protocol):
    """What joins the vectors of processes that train together (`triptych.train.ranks`)."""

    def gathered(self, vectors: Tensor) -> Tensor: ...
    def rows_before(self, count: int) -> int: ...


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Rows end to end: `ids` [N], of which M positions are trained.

    `at` [M] are their indices and `targets` [M] their targets; `source` has the encoder's ids [S] and rows.  The share
    `smoothing` of each target is spread over the vocabulary, `examples` are the rows that the batch was made from, and
    `numbers` theirs in a step.
    """

    ids: Tensor
    rows: Rows
    at: Tensor
    targets: Tensor
    source: tuple[Tensor, Rows] | None = None
    smoothing: float = 0.0
    examples: tuple[Example, ...] = ()
    numbers: Sequence[int] = ()

    def numbered(self: B, numbers: Sequence[int]) -> B:
        """This batch, whose rows are those of these numbers in a step."""
        return replace(self, numbers=tuple(numbers))

    @property
    def numbers_of_rows(self) -> Sequence[int]:
        """The number of each row of the batch in its step, from which dropout draws."""
        return self.numbers

    @classmethod
    def of(cls: type[B], examples: Sequence[Example], device: Device) -> B:
        """The tokens of the rows end to end, and their sources."""
        trained = np.concatenate([e.trained for e in examples])
        return cls(
            ids=joined([e.ids for e in examples], device),
            rows=Rows(tuple(len(e.ids) for e in examples)),
            at=joined([np.flatnonzero(trained)], device),
            targets=joined([np.concatenate([e.targets for e in examples])[trained]], device),
            source=examples[0].sources(examples, device),
            examples=tuple(examples),
        )

    def across(self: B, ranks: VectorGathering) -> B:
        """This batch, where it is one process' share of a batch of several."""
        return self

    @property
    def tokens(self) -> int:
        """Tokens that the model reads, the encoder's included."""
        return len(self.ids) + (0 if self.source is None else len(self.source[0]))

    @property
    def trained(self) -> int:
        return len(self.at)

    @property
    def weight(self) -> float:
        """The divisor of the sum of a step's losses: the trained tokens."""
        return float(self.trained)

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        """The sum of the losses []; see `loss`."""
        x = final(module, self, random)
        most = len(x) if self.smoothing else max_logits // module.spec.vocab
        return in_parts(partial(_nats, module, self.rows, smoothing=self.smoothing), most, x, self.targets)

    def nats_of_rows(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        """The sum of the losses of each row, [rows]."""
        x = final(module, self, random)
        most = max_logits // module.spec.vocab
        counts = torch.bincount(self.rows.row_of(self.at.device)[self.at], minlength=len(self.rows)).tolist()
        sides = zip(torch.split(x, counts), torch.split(self.targets, counts), strict=True)
        of_part: Callable[..., Tensor] = partial(_nats, module, self.rows)
        if len(x) > most:  # the logits of all rows together are too many to be kept: they are computed again
            of_part = partial(checkpoint, of_part, use_reentrant=False)
        return torch.stack([torch.stack([of_part(*part) for part in _parts(most, *side)]).sum() for side in sides])


def in_parts(loss: Callable[..., Tensor], most: int, *rows: Tensor) -> Tensor:
    """The sum [] of `loss` over parts of at most `most` of the rows [M, ...]; `loss(*rows)` where they are no more.

    The gradient of a part follows its loss at once, before the next part is computed, so that no part is computed
    twice: of a sum, the gradient is known but for the factor that the backward pass multiplies it with.  Parts have no
    second backward pass and no gradient of gradients.
    """
    if most >= len(rows[0]):
        return loss(*rows)
    total = torch.zeros((), dtype=torch.promote_types(rows[0].dtype, torch.float32), device=rows[0].device)
    read: dict[Tensor, Tensor] = {}  # what the losses read and is trained, with its gradient
    of_rows: list[list[Tensor]] = [[] for _ in rows]
    for part in _parts(most, *rows):
        own = [one.detach().requires_grad_(row.requires_grad) for one, row in zip(part, rows, strict=True)]
        value = loss(*own)
        leaves = _leaves(value)
        for leaf, gradient in zip(leaves, torch.autograd.grad(value, leaves) if leaves else (), strict=True):
            read[leaf] = read[leaf] + gradient if leaf in read else gradient
        for gathered, one in zip(of_rows, own, strict=True):
            if one.requires_grad:
                gathered.append(read.pop(one) if one in read else torch.zeros_like(one))
        total += value.detach()
    gradients = {row: torch.cat(some) for row, some in zip(rows, of_rows, strict=True) if some} | read
    return _sum(total, tuple(gradients.values()), *gradients)


def _parts(most: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of at most `most` of the rows, at least of one."""
    return zip(*(torch.split(one, max(1, most)) for one in rows), strict=True)


def _leaves(value: Tensor) -> list[Tensor]:
    """What the graph of `value` begins with: the tensors that have a gradient and follow from no others."""
    found, seen, waiting = dict[Tensor, None](), set[object](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[leaf] = None
        waiting.extend(before for before, _ in node.next_functions)
    return list(found)


class _SumOfParts(torch.autograd.Function):
    """A sum whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: tuple[Tensor, ...], *read: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a loss in parts were used already; compute the loss again")
        return None, None, *(gradient.mul_(factor) for gradient in gradients)


_sum: Callable[..., Tensor] = _SumOfParts.apply  # torch's has no annotation


def causal(tokens: TokenIds) -> Example:
    """Each token predicted from those before it: `tokens[:-1]` -> `tokens[1:]`.  Raises InputError for fewer than 2."""
    ids = np.asarray(tokens, dtype=np.int32)
    if len(ids) < 2:
        raise InputError(f"a causal row needs at least two tokens, one to read and one to predict; got {len(ids)}")
    return Example(ids[:-1], ids[1:], np.ones(len(ids) - 1, dtype=bool))


def seq2seq(source: TokenIds, target: TokenIds, start: int) -> Example:
    """`target` predicted from `source`, each token after the correct ones before it (teacher forcing).

    The decoder reads `[start] + target[:-1]` and is trained on all of `target`, its EOS included, as T5 is (Raffel et
    al. 2020).  Raises InputError if either side is empty.
    """
    source_ids, targets = np.asarray(source, dtype=np.int32), np.asarray(target, dtype=np.int32)
    if not len(source_ids) or not len(targets):
        raise InputError(f"a pair needs both sides; got {len(source_ids)} source and {len(targets)} target tokens")
    ids = np.append(np.int32(start), targets[:-1])
    return Example(ids, targets, np.ones(len(targets), dtype=bool), source_ids)


@dataclass(frozen=True, eq=False)
class TokenMasking:
    """Masked language modelling as in BERT (Devlin et al. 2019): a share `rate` of the ordinary tokens of a row is
    predicted, at least one token.  Of these, 80% are replaced by the id `mask`, 10% by a random ordinary token, and 10%
    stay (`shares`).  Ids in `special` are not ordinary: they are neither predicted nor used as replacements."""

    mask: int
    vocab: int
    special: frozenset[int]
    rate: float = 0.15
    shares: tuple[float, float] = (0.8, 0.1)  # replaced by `mask`, by a random token; the rest stay

    def all_masked(self) -> TokenMasking:
        """For evaluation: 15% are predicted, all replaced by `mask`, so that no target can be read from the input."""
        return replace(self, rate=0.15, shares=(1.0, 0.0))

    @cached_property
    def ordinary(self) -> Ids:
        """The ids that are not special, in order."""
        return np.setdiff1d(np.arange(self.vocab, dtype=np.int32), np.array(sorted(self.special), dtype=np.int32))

    def __call__(self, tokens: TokenIds, random: np.random.Generator) -> Example:
        """The row with some tokens hidden, chosen by `random`.  In a row of special tokens none is trained."""
        targets = np.asarray(tokens, dtype=np.int32)
        positions = np.flatnonzero(np.isin(targets, self.ordinary))
        count = min(len(positions), max(1, round(self.rate * len(positions))))
        hidden = random.choice(positions, count, replace=False) if count else positions
        uniform, others = random.random(count), random.choice(self.ordinary, count)
        ids, trained = targets.copy(), np.zeros(len(targets), dtype=bool)
        trained[hidden] = True
        masked, replaced = self.shares
        not_masked = np.where(uniform < masked + replaced, others, targets[hidden])
        ids[hidden] = np.where(uniform < masked, self.mask, not_masked)
        return Example(ids, targets, trained)


def collate(examples: Sequence[Example], device: Device = "cpu") -> TrainingBatch:
    """Rows as one flat batch.  Raises InputError when none of their tokens is trained."""
    trained = np.concatenate([e.trained for e in examples]) if examples else np.zeros(0, dtype=bool)
    if not trained.any():
        raise InputError(
            f"a batch of {len(examples)} rows and {len(trained)} tokens has no trained token and thus no loss; "
            "check the data and the objective"
        )
    return examples[0].collated(examples, device)


def joined(arrays: Sequence[Sequence[int] | Integers], device: Device) -> Tensor:
    """The numbers of all arrays, end to end, as int64 on `device`."""
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device, non_blocking=True)


def final(module: Transformer, batch: TrainingBatch, random: RowNoise | None = None) -> Tensor:
    """[M, D]: the vectors from which the trained positions are predicted; dropout draws from `random`."""
    x = module(nn.Batch(inputs=batch.ids, rows=batch.rows, source=batch.source, random=random))
    return x if batch.trained == len(x) else x[batch.at]


@checked
def loss(
    module: Transformer, batch: TrainingBatch, max_logits: int = MAX_LOGITS, random: RowNoise | None = None
) -> tuple[Tensor, int]:
    """The sum of the cross-entropies of the trained tokens in nats, in fp32 or better, and their number M.

    It is the sum and not the mean, so that a step of several batches divides once, by the tokens of all.  The head
    reads only trained positions.  If `[M, V]` has more than `max_logits` elements, they go through the head in parts,
    each followed by its gradient, so that `[M, V]` is never in memory as a whole.  Dropout draws
    from `random`, from torch's global generator when None.
    """
    return batch.nats(module, max_logits, random), batch.trained


def _nats(module: Transformer, rows: Rows, x: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    if module.token_loss is not None:
        return module.token_loss(x, rows, targets, smoothing)
    logits = exact(module.unembed(x, rows))
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def exact(outputs: Tensor) -> Tensor:
    """The outputs in fp32 or better, in which every loss is computed."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


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
        text: list[tuple[str, State]] = [(one.token, "read") for one in self.tokens[: int(self.shifted)]]
        for one in self.tokens:
            hides = not self.shifted and one.token != one.target
            text.append((one.target, "read" if not one.trained else "hidden" if hides else "trained"))
        return text

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)


def show_batch(examples: Sequence[Example], tokenizer: Tokenizer | None, *, shifted: bool = True) -> list[ShownRow]:
    """The rows of a draw with their tokens readable: `job.trainer.data.draw(seed, step, rows)`.

    Without a tokenizer the rows are those of images, whose positions have numbers.  `shifted` says whether each target
    is the token after its input, as it is but for masked language modelling.
    """
    rows = []
    for example in (row for one in examples for row in one.shown()):
        if tokenizer is None:
            names = [str(i) for i in range(len(example.ids))], [""] * len(example.ids)
        else:
            names = tokenizer.tokens(example.ids.tolist()), example.target_names(tokenizer)
        tokens = tuple(ShownToken(*fields) for fields in zip(*names, example.trained.tolist(), strict=True))
        source = () if example.source is None or tokenizer is None else tuple(tokenizer.tokens(example.source.tolist()))
        rows.append(ShownRow(tokens, source, shifted))
    return rows
