"""`Transformer` (an encoder, a decoder or both, and a head), the `Batch` that it reads, and the random weights of a
new one (`new`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from triptych import machine, ops
from triptych.arguments import checked
from triptych.attention import NULL_CACHE, CrossCache, CrossKeys, EncoderOutput, KVCache, Rows, sinusoidal
from triptych.attention.rows import FlatBatch
from triptych.errors import InputError, shown
from triptych.ops.noise import DECODER, ENCODER
from triptych.spec import ModelSpec
from triptych.spec.norms import LayerNormSpec, RMSNormSpec
from triptych.spec.parts import LinearSpec
from triptych.spec.positions import LearnedSpec, SinusoidalSpec
from .heads import Head
from .inputs import Embed, Frames, InputRow, Patches, flat
from .part import NO_TAPS, Module, Taps, assign, build, tie
from .positions import refuse_length
from .stack import Stack

NO_ROWS = Rows(())


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The input of one forward.

    inputs        [N] token ids, or what else the input slot reads: the decoder's where there is one.  None where only
                  the source is to be encoded.
    rows          where each row of `inputs` begins and ends, what a cache holds of it, and its documents where packed.
    token_types   [N], for encoders that have them; 0 by default.
    source        what the encoder beside a decoder reads, and its rows.
    cache         keys and values that outlive the forward; they continue the rows.
    cross         where the projected source is kept; without it, each forward encodes its source again.
    random        where dropout draws from; torch's global generator when None.
    """

    inputs: Tensor | None = None
    rows: Rows = NO_ROWS
    token_types: Tensor | None = None
    source: FlatBatch | None = None
    cache: KVCache = NULL_CACHE
    cross: CrossCache | None = None
    taps: Taps = NO_TAPS
    random: ops.RowNoise | None = None


def _noise(random: ops.RowNoise, part: int, rows: Rows) -> ops.RowNoise:
    """What a part of the model draws from.  Raises InputError for anything else than a RowNoise."""
    if not isinstance(random, ops.RowNoise):
        raise InputError(
            f"random is a {type(random).__name__}; dropout draws from an ops.RowNoise(seed, numbers of the rows), or "
            "from torch's global generator where it is None"
        )
    return random.of(part, rows.lengths)


class ExecutorPlans(dict[str, Any]):
    """The plans that executors made of one module and keep with it, by their kind; of each kind one or several.

    They belong to the module's own parts and weights: they are neither copied nor pickled with it.

    lock    held while a plan is looked up or made, by any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = RLock()

    def __deepcopy__(self, memo: dict[int, object]) -> ExecutorPlans:
        return ExecutorPlans()

    def __reduce__(self) -> tuple[type[ExecutorPlans], tuple[()]]:
        return ExecutorPlans, ()


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: LoRA in some of its linear slots.

    rank, alpha   the rank of its matrices A [rank, inputs] and B [outputs, rank], whose product is multiplied by
                  alpha / rank; a file may have others for some slots.
    dropout       the probability with which an input of A is dropped in training.
    slots         the dotted names of the linear maps that it changes.
    parameters    the number of trained parameters.
    """

    rank: int
    alpha: float
    dropout: float
    slots: tuple[str, ...] = field(repr=False)
    parameters: int
    frozen: tuple[str, ...] = field(repr=False)  #: parameters that were trained before it was added


@runtime_checkable
class TokenLoss(Protocol):
    """The sum of the cross-entropies of vectors [M, D] for targets [M], of which the share `smoothing` is spread over
    the vocabulary."""

    def __call__(self, x: Tensor, rows: Rows, targets: Tensor, smoothing: float) -> Tensor: ...


class Transformer(Module[ModelSpec], of=ModelSpec):
    """`unembed(forward(batch))`; with both stacks, the decoder reads the encoder's output through its cross slots."""

    encoder: Stack | None
    decoder: Stack | None
    head: Head | None
    lora_adapter: Adapter | None = None
    whole_copy: Callable[[], Transformer] | None = None  #: where each process has a part of the weights
    token_loss: TokenLoss | None = None  #: where the vocabulary is divided among processes

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.plans = ExecutorPlans()  # of the executors
        self.prefix = {name: name if model.layout == "encoder-decoder" else "" for name in model.stacks}
        tie(self, model.ties)

    @property
    def input(self) -> Embed | Frames | Patches:
        """The input slot the source enters."""
        stack = self.decoder if self.encoder is None else self.encoder
        assert stack is not None
        return stack.embed

    def whole(self) -> Transformer:
        """This module, or a copy with all weights where each of several processes has a part of them, all of which
        must make this call."""
        return self if self.whole_copy is None else self.whole_copy()

    def length(self, row: InputRow) -> int:
        """The number of positions that a row of the source takes."""
        return self.input.length(row)

    def flat(self, rows: Sequence[InputRow]) -> FlatBatch:
        """Rows of what the model reads (its source, beside a decoder) as one flat batch.

        Raises InputError for a row that is empty or of another form.
        """
        return self.input.flat(rows)

    def batch(
        self, rows: Sequence[InputRow], target: Sequence[Sequence[int]] | None = None, taps: Taps = NO_TAPS
    ) -> Batch:
        """The batch of one forward: rows of the source, and beside it the ids that the decoder reads."""
        inputs, where = self.flat(rows)
        if target is None:
            return Batch(inputs=inputs, rows=where, taps=taps)
        ids, of_target = flat(target, self.device)
        return Batch(inputs=ids, rows=of_target, source=(inputs, where), taps=taps)

    def forward(self, batch: Batch) -> Tensor:
        """The final vectors [N, D] of the decoder, or of an encoder alone; of the source [M, D] where the batch has
        nothing else.  Raises InputError for a row longer than the model's context, and for a source that is missing or
        not read, and for anything but a batch."""
        if not isinstance(batch, Batch):
            raise InputError(
                f"a module runs a triptych.nn.Batch, not a {type(batch).__name__}; write model.logits(rows), or "
                "module(nn.Batch(inputs=ids, rows=rows)) with what module.flat(rows) gives"
            )
        if self.decoder is None:
            if batch.source is not None or batch.inputs is None:
                raise InputError("an encoder alone reads `inputs`, not a source")
            return self._encoded(batch.inputs, batch.rows, batch)
        if (self.encoder is None) != (batch.source is None and batch.cross is None):
            raise InputError("a decoder beside an encoder needs a source, and a decoder alone takes none")
        cross: CrossKeys | None = batch.cross
        if batch.source is not None:
            memory = self._encoded(*batch.source, batch)
            if batch.cross is not None:
                batch.cross.fill(memory, batch.source[1])
            if batch.inputs is None:
                return memory
            cross = batch.cross or EncoderOutput(memory, batch.source[1])
        assert batch.inputs is not None
        rows, limit, taps, prefix = batch.rows, self.spec.longest_row, batch.taps, self.prefix["decoder"]
        if limit is not None and rows.end > limit:
            refuse_length(rows, limit, "input")
        return self.decoder(
            batch.inputs, rows, token_types=batch.token_types, cache=batch.cache, cross=cross,
            taps=taps.at(prefix) if prefix else taps,
            random=None if batch.random is None else _noise(batch.random, DECODER, rows),
        )  # fmt: skip

    def unembed(self, hidden: Tensor, rows: Rows, taps: Taps = NO_TAPS, random: ops.RowNoise | None = None) -> Tensor:
        """[N, D] of `forward` -> what the head gives, usually [N, V].  Raises InputError for a model without a head."""
        if self.head is None:
            raise InputError(f"this {self.spec.family} model has no head")
        return taps("logits", self.head(hidden, rows, random), rows)

    def logits(self, batch: Batch) -> Tensor:
        """The output of the head for every position of the batch."""
        return self.unembed(self(batch), batch.rows, batch.taps, batch.random)

    def labelled_batch(
        self, inputs: Tensor, rows: Rows, *, token_types: Tensor | None = None, random: ops.RowNoise | None = None
    ) -> Batch:
        """The batch in which a model with a head over labels reads rows of its source.

        The decoder beside an encoder reads the source too, shifted one position to the right: each row begins with the
        start token there, or with the row's own last token (mBART's language) where the config names none.
        """
        if self.decoder is None or self.encoder is None:
            return Batch(inputs=inputs, rows=rows, token_types=token_types, random=random)
        ends = torch.tensor(rows.lengths, device=inputs.device).cumsum(0)
        shifted, start = inputs.roll(1), self.spec.ids.start
        shifted[ends - torch.tensor(rows.lengths, device=inputs.device)] = (
            inputs[ends - 1] if start is None else torch.full_like(ends, start)
        )
        return Batch(inputs=shifted, rows=rows, source=(inputs, rows), random=random)

    def _encoded(self, inputs: Tensor, rows: Rows, batch: Batch) -> Tensor:
        """[M] source ids, or what else the input slot reads -> [M, D] of the encoder."""
        assert self.encoder is not None
        limit = self.spec.source_context
        if limit is not None and rows.end > limit:
            refuse_length(rows, limit, "source" if self.decoder is not None else "input")
        types = batch.token_types if self.decoder is None else None
        taps = batch.taps.at(self.prefix["encoder"])
        random = None if batch.random is None else _noise(batch.random, ENCODER, rows)
        return self.encoder(inputs, rows, token_types=types, taps=taps, random=random)


def empty(model: ModelSpec) -> Transformer:
    """The module on the meta device: shapes and no storage, to be filled by `assign` tensor by tensor."""
    with torch.device("meta"):
        module = build(model)
    assert isinstance(module, Transformer)
    return module


#: The weights of a model by name, one after another, so that all of them need never be in memory together.
NamedWeights = Iterable[tuple[str, Tensor]]


@checked
def fill(module: Transformer, weights: NamedWeights) -> Transformer:
    """Put `weights`, dense or packed, into the slots of a module on the meta device, each into all that share it, and
    return the module.  What it does not train stays so.

    Raises InputError for a weight that the module does not have, of another shape, or that is missing.
    """
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                slots[parameter].append((part, leaf))
    for pair in weights:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"fill() takes pairs of a name and a weight, not {shown(pair)}")
        name, value = pair
        before = _slot(module, name, value)
        assign(module, name, value)
        after = module.get_parameter(name)
        after.requires_grad_(after.requires_grad and before.requires_grad)
        for owner, leaf in slots[before]:
            owner.register_parameter(leaf, after)
    if left := [name for name, parameter in module.named_parameters() if parameter.is_meta]:
        raise InputError(f"the weights of this {module.spec.family} model lack {left[0]}")
    return finish_loading(module)


def _slot(module: Transformer, name: object, value: object) -> nn.Parameter:
    """What `value` takes the place of.  Raises InputError where it does not fit."""
    try:
        slot = module.get_parameter(str(name))
    except AttributeError:
        raise InputError(f"a {module.spec.family} model has no weight {shown(name)}") from None
    if not isinstance(value, Tensor) or value.shape != slot.shape:
        what = list(value.shape) if isinstance(value, Tensor) else shown(value)
        raise InputError(f"the weight {name} of this {module.spec.family} model is {list(slot.shape)}, not {what}")
    return slot


def finish_loading(module: Transformer) -> Transformer:
    """After every stored parameter was assigned: restore the ties, evaluation mode, nothing left on meta."""
    tie(module, module.spec.ties)
    left = [name for name, p in module.named_parameters() if p.is_meta]
    assert not left, left
    sizes: Counter[torch.dtype] = Counter()
    device = module.device
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
        device = parameter.device
    dtype = sizes.most_common(1)[0][0]  # that most numbers have
    for part in module.modules():
        if isinstance(part, Module):
            part.dtype, part.device = dtype, device
    return module.eval()


@checked
def new(model: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A fresh model, whose weights are `initial_weights`.

    Raises InputError where they do not fit into the memory that is free.
    """
    check_weights_fit(model, dtype)
    return fill(empty(model), initial_weights(model, seed, dtype))


@checked
def check_weights_fit(model: ModelSpec, dtype: torch.dtype = torch.float32, processes: int = 1) -> None:
    """Raises InputError where the weights, divided among so many processes, do not fit into the memory that is free."""
    needed = dtype.itemsize * sum(map(math.prod, model.shapes().values())) // processes
    free = machine.free_memory()
    if free is not None and needed > free:
        raise InputError(f"this {model.family} model needs {needed:,} bytes for its weights, and {free:,} are free")


@checked
def initial_weights(
    model: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a fresh model, one after another: normal ones of `init_std`, those that write to the residual
    stream divided by sqrt(number of sublayers) (Radford et al. 2019), norms 1, biases 0.

    A learned position table begins as sinusoids: from noise, attention must first find out which places are near each
    other, and a small BERT spends its first minutes on that alone (docs/log.md).
    """
    random = torch.Generator().manual_seed(seed)
    for name, part in model.walk():
        for leaf, shape in part.tensors().items():
            full = f"{name}.{leaf}"
            if full in model.ties:
                continue
            if leaf == "bias" or leaf == "sinks":
                value = torch.zeros(shape, dtype=dtype)
            elif isinstance(part, LayerNormSpec | RMSNormSpec):
                value = torch.full(shape, 1.0 - getattr(part, "offset", 0.0), dtype=dtype)
            elif isinstance(part, LearnedSpec):
                places, waves = torch.arange(shape[0]), SinusoidalSpec(width=shape[1])
                table = sinusoidal(places, waves)[:, : shape[1]]  # of an odd width the last cosine is left out
                value = (table * 2.5 * model.init_std).to(dtype)
            else:
                value = (
                    torch.empty(shape, dtype=torch.float32)
                    .normal_(0, _std(model, name, part), generator=random)
                    .to(dtype)
                )
            yield full, value


def _std(model: ModelSpec, name: str, part: object) -> float:
    writes = isinstance(part, LinearSpec) and name.endswith((".attn.out", ".cross.out", ".down"))
    if not writes:
        return model.init_std
    stack = model.stacks[name.split(".")[0]]
    sublayers = sum(1 + (block.cross is not None) + (block.mlp is not None) for block in stack.blocks)
    return float(model.init_std / sublayers**0.5)
