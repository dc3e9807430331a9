"""Five models for one translation task: an encoder-decoder transformer, a decoder with a prefix mask, a decoder with a
plain prompt, and recurrent encoder-decoders with one fixed vector (Sutskever et al. 2014; Cho et al. 2014) or with
attention over all states of the source (Bahdanau et al. 2015).

All are trained on the same pairs in the same order, with the same optimizer, schedule and number of steps, and write
freely: each token after those that the model itself wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from triptych import nn
from triptych.attention import Rows, additive
from triptych.spec import BlockSpec, Mask, ModelSpec, RMSNormSpec, SinusoidalSpec, attention, full, keys, same_document
from triptych.train import Data, Example, OptimizerSettings, Pairs, Schedule, TrainingBatch
from triptych.train.data import EpochRows
from .small_models import CAUSAL, Points, block, decoder, descend, fit

Ids = list[int]
END_ID, START_ID = 0, 1
CLIP = 1.0
ANY_LENGTH = 1 << 16  # tokens of a row, more than any has
SMOOTHED = 10  # steps over which a loss is averaged


class Training(NamedTuple):
    """What all models of a comparison share: width D, heads, blocks of a stack, rows of a step, steps, peak rate.
    Cross-attention may have a number of heads of its own."""

    width: int
    heads: int
    layers: int
    rows: int
    steps: int
    rate: float
    seed: int
    cross_heads: int | None = None

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(name="adamw", lr=self.rate, betas=(0.9, 0.98), weight_decay=0.01, clip=CLIP)

    @property
    def schedule(self) -> Schedule:
        return Schedule(shape="linear", warmup=0.1)


class Translator:
    """A model that writes the translation of a source."""

    module: torch.nn.Module

    def next_tokens(self, sources: Sequence[Ids], written: Sequence[Ids]) -> Tensor:
        """`[B]`, the likeliest token after each row of `written`, all of one length and each begun by `START_ID`."""
        raise NotImplementedError

    def sequential_steps(self, source: int, target: int) -> int:
        """The longest chain of cells or sublayers of one forward in training, each of which must wait for the one
        before it."""
        raise NotImplementedError


class TrainedTranslator(NamedTuple):
    """A model, its losses in nats a token of each training step, and the processor's seconds that training took."""

    model: Translator
    losses: Points
    seconds: float

    def reached(self, nats: float) -> int | None:
        """The first step from which the mean loss of `SMOOTHED` steps was at most `nats`; None where it never was, and
        where there were fewer steps."""
        if len(self.losses) < SMOOTHED:
            return None
        below = np.flatnonzero(self._means <= nats)
        return int(below[0]) + SMOOTHED if len(below) else None

    @property
    def last(self) -> float:
        """The mean loss of the last `SMOOTHED` steps, in the same bits as `reached` compares, so that it is reached."""
        return float(self._means[-1])

    @property
    def _means(self) -> NDArray[np.float64]:
        """The mean losses of `SMOOTHED` steps in a row, or of all where there are fewer."""
        losses = [loss for _, loss in self.losses]
        window = min(SMOOTHED, len(losses))
        return np.convolve(losses, np.full(window, 1 / window), "valid")


# ---------------------------------------------------------------- transformers


class PrefixExample(Example):
    """A row whose source every token of the row may see: the source is one document, and each token of the target is
    one of its own, so that `causal() | same_document()` is the mask of a prefix language model (Raffel et al. 2020)."""

    def collated(self, examples: Sequence[Example], device: torch.device | str) -> TrainingBatch:
        batch = super().collated(examples, device)
        prefixes = [len(example.ids) - int(example.trained.sum()) + 1 for example in examples]
        return replace(batch, rows=with_prefixes(batch.rows.lengths, prefixes))


def with_prefixes(lengths: Sequence[int], prefixes: Sequence[int]) -> Rows:
    """Rows whose first `prefixes[i]` tokens are one document; each later token is a document of its own."""
    places = [np.arange(length) for length in lengths]
    documents = [np.where(at < prefix, 0, at) for at, prefix in zip(places, prefixes, strict=True)]
    return Rows(tuple(lengths), documents=torch.from_numpy(np.concatenate(documents)))


class BesideEncoder(Translator):
    """A decoder that reads the output of an encoder through cross-attention."""

    module: nn.Transformer

    def __init__(self, module: nn.Transformer) -> None:
        self.module = module
        stacks = [stack for stack in (module.spec.encoder, module.spec.decoder) if stack is not None]
        self.sublayers = sum(2 + (block.cross is not None) for stack in stacks for block in stack.blocks)

    def sequential_steps(self, source: int, target: int) -> int:
        return self.sublayers

    @torch.no_grad()
    def next_tokens(self, sources: Sequence[Ids], written: Sequence[Ids]) -> Tensor:
        source = _flat(sources), Rows(tuple(map(len, sources)))
        return self._last(nn.Batch(inputs=_flat(written), rows=Rows(tuple(map(len, written))), source=source))

    def _last(self, batch: nn.Batch) -> Tensor:
        ends = torch.tensor(batch.rows.starts) + torch.tensor(batch.rows.lengths) - 1
        return self.module.unembed(self.module(batch)[ends], Rows((1,) * len(ends))).argmax(-1)


class BehindPrompt(BesideEncoder):
    """A decoder alone, for which the source is the beginning of the row; with `prefix` a part that all of it sees."""

    def __init__(self, module: nn.Transformer, *, prefix: bool) -> None:
        super().__init__(module)
        self.prefix = prefix

    @torch.no_grad()
    def next_tokens(self, sources: Sequence[Ids], written: Sequence[Ids]) -> Tensor:
        rows = [[*source, *target] for source, target in zip(sources, written, strict=True)]
        return self._last(self._batch(rows, [len(source) + 1 for source in sources]))

    @torch.no_grad()
    def reads_ahead(self, source: Ids) -> float:
        """How far the vector of the first word moves, over its length, when other tokens stand behind it."""
        others = [source[0], *[START_ID] * (len(source) - 1)]
        own, moved = (self.module(self._batch([row], [len(row)]))[0] for row in (source, others))
        return float((own - moved).norm() / own.norm())

    def _batch(self, rows: Sequence[Ids], prefixes: Sequence[int]) -> nn.Batch:
        lengths = tuple(map(len, rows))
        return nn.Batch(inputs=_flat(rows), rows=with_prefixes(lengths, prefixes) if self.prefix else Rows(lengths))


def beside_encoder(pairs: Sequence[tuple[Ids, Ids]], vocab: int, training: Training) -> TrainedTranslator:
    """An encoder-decoder, trained."""
    width, heads = training.width, training.heads
    plain = block(width, heads, 2 * width)
    cross = attention(width, training.cross_heads or heads, kv_inputs=width)
    crossed = replace(plain, cross=cross, cross_norm=plain.attn_norm)
    spec, reader = (_stack(vocab, layer, training.layers, mask) for layer, mask in ((crossed, CAUSAL), (plain, full())))
    module = nn.new(replace(spec, encoder=reader.decoder), training.seed)
    return _fit(BesideEncoder(module), _rows(pairs), training)


def _behind(pairs: Sequence[tuple[Ids, Ids]], vocab: int, training: Training, *, prefix: bool) -> TrainedTranslator:
    """A decoder of twice as many blocks as a stack of the encoder-decoder, so that both have as many MLPs; trained."""
    mask = CAUSAL | same_document() if prefix else CAUSAL
    layer = block(training.width, training.heads, 2 * training.width)
    spec = _stack(vocab, layer, 2 * training.layers, mask)
    rows = EpochRows(tuple(_prompted(pair, PrefixExample if prefix else Example) for pair in pairs))
    return _fit(BehindPrompt(nn.new(spec, training.seed), prefix=prefix), rows, training)


def _prompted(pair: tuple[Ids, Ids], kind: type[Example]) -> Example:
    """A row of the source, the start token and the target, trained on the target alone."""
    source, target = pair
    row = np.array([*source, START_ID, *target], dtype=np.int32)
    return kind(row[:-1], row[1:], np.arange(len(row) - 1) >= len(source))


behind_prefix = partial(_behind, prefix=True)  # it sees the whole source from everywhere
behind_prompt = partial(_behind, prefix=False)  # the source is a prompt like any other


def _stack(vocab: int, layer: BlockSpec, layers: int, mask: Mask) -> ModelSpec:
    """Blocks with sinusoidal positions, and embeddings as large as these (Vaswani et al. 2017, section 3.4)."""
    width = layer.attn.q.inputs
    positions, norm = SinusoidalSpec(width=width), RMSNormSpec(width=width)
    return decoder(vocab, [layer] * layers, embedded=positions, final_norm=norm, mask=mask, scale=width**0.5)


def _fit(model: BesideEncoder, data: Data, training: Training) -> TrainedTranslator:
    began = time.process_time()
    losses = fit(
        model.module, data, rows=training.rows, length=ANY_LENGTH, steps=training.steps, seed=training.seed,
        optimizer=training.optimizer, schedule=training.schedule,
    )  # fmt: skip
    model.module.eval()
    return TrainedTranslator(model, losses, time.process_time() - began)


# ---------------------------------------------------------------- recurrent


class Recurrent(Translator):
    """A recurrent encoder-decoder."""

    def __init__(self, module: RecurrentTranslator) -> None:
        self.module = module

    def sequential_steps(self, source: int, target: int) -> int:
        return source + target

    @torch.no_grad()
    def next_tokens(self, sources: Sequence[Ids], written: Sequence[Ids]) -> Tensor:
        logits: Tensor = self.module([torch.tensor(source) for source in sources], torch.tensor(written))
        return logits[:, -1].argmax(-1)


def _recurrent(
    pairs: Sequence[tuple[Ids, Ids]], vocab: int, training: Training, *, attention: bool
) -> TrainedTranslator:
    """The loop of `Trainer` for a module that is not one of the library's: the same rows, rates, clipping and AdamW."""
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        module = RecurrentTranslator(vocab, training.width, attention=attention)
    data, began = _rows(pairs), time.process_time()
    steps = descend(
        module,
        lambda step: _recurrent_loss(module, data.draw(training.seed, step, training.rows)),
        steps=training.steps,
        optimizer=training.optimizer,
        schedule=training.schedule,
    )
    losses = [(step + 1.0, nats) for step, nats in enumerate(steps)]
    return TrainedTranslator(Recurrent(module.eval()), losses, time.process_time() - began)


fixed_vector, bahdanau = partial(_recurrent, attention=False), partial(_recurrent, attention=True)


def _recurrent_loss(module: RecurrentTranslator, examples: Sequence[Example]) -> Tensor:
    """Mean nats of the trained tokens."""
    sources = [torch.as_tensor(example.source).long() for example in examples]
    written = [torch.as_tensor(example.ids).long() for example in examples]
    targets = [torch.as_tensor(example.targets).long() for example in examples]
    logits = module(sources, pad_sequence(written, batch_first=True))
    right = pad_sequence(targets, batch_first=True, padding_value=-100)
    return F.cross_entropy(logits.flatten(0, 1), right.flatten())


Builder = Callable[[Sequence[tuple[Ids, Ids]], int, Training], TrainedTranslator]


def _rows(pairs: Sequence[tuple[Ids, Ids]]) -> Pairs:
    return Pairs.of(pairs, START_ID, max(max(map(len, pair)) for pair in pairs))


def _flat(rows: Sequence[Ids]) -> Tensor:
    return torch.tensor([token for row in rows for token in row])


class RecurrentTranslator(torch.nn.Module):
    """A bidirectional GRU reads the source, another GRU writes the target, each with states of width D.

    The last states of the source start the decoder.  Without attention they are also a part of each of its inputs;
    with attention this part is the mean of the source's states, weighted by an additive score against the decoder's
    state before.
    """

    def __init__(self, vocab: int, width: int, *, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        self.embed = torch.nn.Embedding(vocab, width)
        self.encoder = torch.nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.first_state = torch.nn.Linear(width, width)
        self.decoder = torch.nn.GRUCell(2 * width, width)
        self.query, self.key = torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.score = torch.nn.Parameter(torch.empty(width).normal_(0, width**-0.5))
        self.head = torch.nn.Linear(2 * width, vocab)
        if not attention:
            del self.query, self.key, self.score

    def forward(self, sources: Sequence[Tensor], written: Tensor) -> Tensor:
        """Rows of source ids, and `[B, T]` decoder inputs -> logits `[B, T, V]` of the token after each."""
        lengths = torch.tensor([len(source) for source in sources])
        embedded = self.embed(pad_sequence(list(sources), batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = pad_packed_sequence(states, batch_first=True)
        fixed = torch.cat([last[0], last[1]], -1)
        state, outputs = self.first_state(fixed).tanh(), []
        for token in self.embed(written).unbind(1):
            context = self._read(state, states, lengths) if self.attention else fixed
            state = self.decoder(torch.cat([token, context], -1), state)
            outputs.append(torch.cat([state, context], -1))
        logits: Tensor = self.head(torch.stack(outputs, 1))
        return logits

    def _read(self, state: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """`[B, D]`: the mean of the source's states `[B, S, D]` that one state `[B, D]` asks for."""
        read = additive(
            state[:, None, None], states[:, None], states[:, None],
            w_q=self.query.weight, w_k=self.key.weight, w_v=self.score, mask=keys(lengths.tolist()),
        )  # fmt: skip
        return read[:, 0, 0]
