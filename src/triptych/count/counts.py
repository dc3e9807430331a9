"""Parameters, bytes, FLOPs and the largest possible speed (roofline) of a model, from its spec alone: no weights, and
no torch but for FLOPs (those of each operation: `ops/table.py`)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from triptych.arguments import checked, checked_methods, integer, number
from triptych.errors import InputError, nearest
from triptych.mapping.gguf_types import TYPES
from triptych.spec import (
    AttentionSpec,
    DisentangledSpec,
    FramesSpec,
    LayerNormSpec,
    LearnedSpec,
    ModelSpec,
    MoESpec,
    RMSNormSpec,
    StackSpec,
    T5BucketsSpec,
)
from triptych.spec.parts import TableSpec
from .activations import kv_width, span_of, visible
from .training import TrainingMemory, TrainingRow, activation_bytes

if TYPE_CHECKING:
    from triptych.program.kind_programs import KindProgram


FLOP_PARTS = ("projections", "scores", "mlp", "head")


def kinds_of(spec: ModelSpec) -> KindProgram:
    """The program that FLOPs are counted in.  Needs torch, and allocates nothing."""
    from triptych.program.kind_programs import lower_kinds

    return lower_kinds(spec)


def row_flops(kinds: KindProgram, tokens: int, cached: int, logits: int, source: int) -> dict[str, int]:
    """Matmul FLOPs of one forward of a row by part (`FLOP_PARTS`), read from the model's program with one block of each
    kind: of `tokens` new ones after `cached`, of which `logits` reach the head.

    A multiply and an add are two FLOPs, so a product of `[m, k]` by `[k, n]` is `2 m n k`.  Norms, activations, softmax
    and lookups are a few operations an element and are not counted.  Every query is counted against every key its
    window leaves, masked by causality or not, which is what a dense kernel computes and how the field counts.

    An encoder-decoder with nothing cached also runs its encoder over `source` tokens, and projects these once.
    """
    total, spec = Counter(dict.fromkeys(FLOP_PARTS, 0)), kinds.spec
    sizes = {"M": source, "B": 1}
    if spec.encoder is not None and not (spec.decoder is not None and cached):
        read = tokens if spec.decoder is None else source
        total.update(kinds.flops("encode", {"B": 1, "M": read, **_of_stack(spec.encoder, read, read)}))
    if spec.decoder is not None:
        sizes |= _of_stack(spec.decoder, tokens, cached + tokens)
        for entry in ("decode", *(("cross_kv",) if spec.encoder is not None and not cached else ())):
            total.update(kinds.flops(entry, sizes))
    if spec.head is not None:
        total.update(kinds.flops("unembed", {"N": logits, "B": 1}))
    return dict(total)


def _of_stack(stack: StackSpec, tokens: int, keys: int) -> dict[str, int]:
    """Numbers for the symbols of a stack's shapes.  All logarithmic buckets of distance are counted, as a row that is
    long enough needs them; of an image all tokens but the first are patches."""
    spans = [kind.position.span for kind in stack.kinds.values() if isinstance(kind.position, DisentangledSpec)]
    reached = max(0, min(2 * keys - 1, 2 * spans[0])) if spans else 0
    features = stack.embed.stride * tokens if isinstance(stack.embed, FramesSpec) else max(0, tokens - 1)
    return {"N": tokens, "S": keys, "P": features, "R": reached}


# Bytes of one number.  Packed formats store blocks with their scales: Q4_0 keeps 32 numbers in 18 bytes.
_PACKED = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0")
DTYPES: Mapping[str, Fraction] = {
    "fp32": Fraction(4), "bf16": Fraction(2), "fp16": Fraction(2), "fp8": Fraction(1), "int8": Fraction(1),
    **{name: TYPES[name.upper()].bytes_per_element for name in _PACKED},
}  # fmt: skip
_BUFFERS = {(family, "head.proj", "bias") for family in ("bart", "mbart", "marian")}
PARTS = ("embedding", "position", "attention", "mlp", "norms", "head")


@checked_methods
@dataclass(frozen=True)
class Count:
    """The costs of a model.  `parameters` by part (`PARTS`), a tied one counted once, where it is stored."""

    spec: ModelSpec
    parameters: dict[str, int]

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def active(self) -> int:
        """Parameters one token goes through: all but the experts it does not go through."""
        mixtures = (part for _, part in self.spec.walk() if isinstance(part, MoESpec))
        return self.total - sum((m.experts - m.top_k) * sum(map(prod, m.expert.shapes().values())) for m in mixtures)

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all parameters in one `dtype` of `DTYPES`.  Raises InputError for another."""
        return _bytes(self.total, dtype)

    def cache_bytes(
        self, positions: int, *, batch: int = 1, dtype: str = "fp16", source: int = 0, page: int = 1
    ) -> int:
        """Bytes of the keys and values of `batch` rows of `positions` tokens: `positions * G * (K + Kv)` numbers a
        layer, and in "int8", as `cache="int8"` keeps them, 2 bytes of scale for each 32 numbers of a vector.  A layer
        with a window keeps no more than it sees, causal linear attention `G * K * (Kv + 1)` numbers of fp32 for any
        `positions` and `dtype`; cross-attention keeps `source` positions; an encoder alone keeps nothing.  Layers that
        keep every token have room for whole pages of `page` positions, in an engine `PAGE_POSITIONS`."""
        return sum(self.caches_bytes(positions, batch=batch, dtype=dtype, source=source, page=page).values())

    def caches_bytes(
        self, positions: int, *, batch: int = 1, dtype: str = "fp16", source: int = 0, page: int = 1
    ) -> dict[Literal["self", "cross"], int]:
        """`cache_bytes` of self-attention and of cross-attention."""
        self._check_sizes(positions=positions, batch=batch, source=source)
        in_pages = -(-positions // integer("page", page, 1)) * page
        own = cross = sums = 0
        decoder = self.spec.decoder
        if decoder is not None:
            for attn, read in ((block.attn, block.cross) for block in decoder.blocks):
                if decoder.keeps_sums(attn):
                    sums += attn.kv_heads * attn.head_width * (attn.value_width + 1)
                else:
                    paged = visible(decoder.kinds[attn.kind].mask) is None
                    span = in_pages if paged else span_of(decoder, attn.kind, positions)
                    own += _cache_width(attn, dtype) * span
                cross += 0 if read is None else _cache_width(read, dtype) * source
        return {"self": _bytes(own * batch, dtype) + 4 * sums * batch, "cross": _bytes(cross * batch, dtype)}

    def step_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the weights that one token goes through, in one dtype: those that a step of decoding reads, or an
        encoder's once for all its tokens (`read_in_a_step`).  Raises InputError for another dtype."""
        return _bytes(round(sum(share * prod(shape) for _, shape, share in read_in_a_step(self.spec))), dtype)

    def training_memory(
        self, tokens: int, *, batch: int = 1, source: int = 0, optimizer: Literal["adamw", "muon"] = "adamw",
        recompute: bool = False,
    ) -> TrainingMemory:  # fmt: skip
        """The memory that a step in fp32 needs for `batch` rows of `tokens`, all of them trained on, in one batch.

        Weights and gradients are four bytes a parameter.  AdamW keeps two moments of each; Muon one of the matrices in
        blocks, which it trains, and AdamW's two of the rest.  `recompute` keeps the input of each block alone.
        """
        self._check_sizes(tokens=tokens, batch=batch, source=source)
        momenta = self.parameters["attention"] + self.parameters["mlp"] if optimizer == "muon" else 0
        rows = {TrainingRow(tokens, source): batch}
        activations, logits = activation_bytes(self.spec, rows, recompute=recompute)
        state = 4 * (2 * self.total - momenta)
        return TrainingMemory(4 * self.total, 4 * self.total, state, activations, logits)

    def flops(self, tokens: int, *, cached: int = 0, logits: int | None = None, source: int = 0) -> dict[str, int]:
        """Matmul FLOPs of one forward of a row: `tokens` new ones after `cached`, by part.

        `logits` is how many places the head runs on, all new ones when None.  An encoder-decoder with nothing cached
        also runs its encoder over `source` tokens and projects their keys and values once.  Needs torch.

        Raises InputError for more logits than tokens, an encoder-decoder without `source`, and one of other models.
        """
        logits = tokens if logits is None else logits
        self._check_sizes(tokens=tokens, cached=cached, logits=logits, source=source)
        if logits > tokens:
            raise InputError(f"logits={logits} is more than the {tokens} new tokens; each has one place for the head")
        if not source and self.spec.layout == "encoder-decoder":
            raise InputError("source=0; give the number of tokens that the encoder of an encoder-decoder reads")
        return row_flops(self._kinds, tokens, cached, logits, source)

    def _check_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            integer(name, size, 0)
        if sizes.get("source") and self.spec.layout != "encoder-decoder":
            which = f"source={sizes['source']} for a model of the layout {self.spec.layout}"
            raise InputError(f"{which}; it is the tokens that the encoder of an encoder-decoder reads, 0 elsewhere")

    @cached_property
    def _kinds(self) -> KindProgram:
        return kinds_of(self.spec)

    def prefill_flops(self, tokens: int, *, source: int = 0) -> int:
        """A prompt of `tokens`, logits at its end only."""
        return sum(self.flops(tokens, logits=1, source=source).values())

    def decode_flops(self, cached: int, *, source: int = 0) -> int:
        """One more token after `cached` ones (at least 1).  Raises InputError for an encoder."""
        if self.spec.decoder is None:
            raise InputError("an encoder decodes nothing; prefill_flops(tokens) is the forward of a text")
        return sum(self.flops(1, cached=integer("cached", cached, 1), source=source).values())

    def training_flops(self, tokens: int, *, source: int = 0) -> int:
        """Forward and backward over a row of `tokens`: the backward has two matmuls for each of the forward's."""
        return 3 * sum(self.flops(tokens, source=source).values())

    def score_elements(self, tokens: int) -> int:
        """Numbers in the score matrices of one row of `tokens`, all layers and heads: what O(T^2) is about."""
        self._check_sizes(tokens=tokens)
        return sum(
            block.attn.heads * tokens * span_of(stack, block.attn.kind, tokens)
            for stack in self.spec.stacks.values()
            for block in stack.blocks
        )

    def to_dict(self, positions: int, *, batch: int = 1, source: int = 0) -> dict[str, Any]:
        """Everything at `positions` tokens, as plain data for JSON; bytes by dtype, FLOPs a row."""
        caches = partial(self.caches_bytes, positions, batch=batch, source=source)
        training = partial(self.training_memory, positions, batch=batch, source=source)
        return {
            "family": self.spec.family,
            "layout": self.spec.layout,
            "positions": positions,
            "batch": batch,
            "parameters": {**self.parameters, "total": self.total, "active": self.active},
            "weight_bytes": {dtype: self.weight_bytes(dtype) for dtype in DTYPES},
            "cache_bytes": {d: sum(caches(dtype=d).values()) for d in ("fp32", "fp16", "q8_0")},
            "caches_bytes": caches(),
            "step_bytes": {dtype: self.step_bytes(dtype) for dtype in DTYPES},
            "training_bytes": training().to_dict(),
            "training_bytes_recomputed": training(recompute=True).to_dict(),
            "flops": {
                "prefill": self.prefill_flops(positions, source=source),
                "decode": self.decode_flops(positions, source=source) if self.spec.decoder is not None else 0,
                "train": self.training_flops(positions, source=source),
                "forward": self.flops(positions, source=source),
            },
        }


@checked
def count(spec: ModelSpec) -> Count:
    """Count `spec`.  A bias that the reference of the family keeps as a buffer, which is zeros, is no parameter."""
    total = Counter(dict.fromkeys(PARTS, 0))
    for name, part in spec.walk():
        for leaf, shape in part.tensors().items():
            if f"{name}.{leaf}" not in spec.ties and (spec.family, name, leaf) not in _BUFFERS:
                total[_part_of(name, part)] += prod(shape)
    return Count(spec, dict(total))


def read_in_a_step(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], Fraction]]:
    """The tensors that one token goes through: the name of each, its shape, and the share of it that is read.

    Of tables of embeddings a token uses one row, so they are left out; a head that is tied to one reads it whole.  Of a
    mixture the experts that a token goes through.  Of an encoder-decoder what one step of decoding reads: no encoder,
    and of cross-attention not the maps to keys and values, which are applied once to a source.
    """
    used: dict[str, Fraction] = {}
    stack = "encoder." if spec.decoder is None else "decoder."
    for name, part in spec.walk():
        if isinstance(part, MoESpec):
            used[f"{name}.experts"] = Fraction(part.top_k, part.experts)
        not_read = isinstance(part, TableSpec | LearnedSpec) or name.endswith((".cross.k", ".cross.v"))
        if not_read or not name.startswith((stack, "head.")):
            continue
        share = used.get(name.rpartition(".experts.")[0] + ".experts", Fraction(1))
        for leaf, shape in part.tensors().items():
            yield f"{name}.{leaf}", shape, share


def _part_of(name: str, part: object) -> str:
    if isinstance(part, LayerNormSpec | RMSNormSpec):
        return "norms"
    if isinstance(part, LearnedSpec | T5BucketsSpec | DisentangledSpec):
        return "position"
    places = {"attn": "attention", "cross": "attention", "mlp": "mlp", "embed": "embedding", "head": "head"}
    places |= {"branch": "mlp", "project": "head"}
    return next(places[word] for word in name.split(".") if word in places)


def _cache_width(attn: AttentionSpec, dtype: str) -> int:
    """Numbers that a cache keeps of one position; in int8 the bytes of the scales are counted among them."""
    scales = 2 * (-(-attn.head_width // 32) - (-attn.value_width // 32)) if dtype == "int8" else 0
    return kv_width(attn) + attn.kv_heads * scales


def _bytes(numbers: int, dtype: str) -> int:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    return -(-numbers * DTYPES[dtype].numerator // DTYPES[dtype].denominator)


@dataclass(frozen=True)
class Prediction:
    """The most tokens a second that one row can read and then decode, and FLOPs per byte of memory read.

    The intensity of a machine is its FLOPs a second over the bytes it reads a second: work of less intensity waits for
    memory, work of more for arithmetic.
    """

    prefill: float
    decode: float | None
    prefill_intensity: float
    decode_intensity: float | None
    machine_intensity: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@checked
def predict(
    count: Count, positions: int, *, read: float, flops: float, dtype: str = "bf16", cache_dtype: str = "fp16",
    source: int = 0,
) -> Prediction:  # fmt: skip
    """A prompt of `positions` tokens read at once, and one more token decoded after them: a roofline (Williams et al.
    2009).  A forward takes at least as long as the slower of reading its weights and cache and computing its matmuls.

    read    bytes that the machine reads in a second.
    flops   matmul FLOPs that it computes in a second.

    Raises InputError for a dtype that is not in `DTYPES`, and for a rate that is not above 0.
    """
    for name, rate in (("read", read), ("flops", flops)):
        number(name, rate, sys.float_info.min, sys.float_info.max, "above 0 and finite")
    step_bytes = count.step_bytes(dtype)
    # The tokens of a prompt go through different experts, so all of them are read.
    prompt_bytes = step_bytes + count.weight_bytes(dtype) * (count.total - count.active) // count.total
    prompt_flops = count.prefill_flops(positions, source=source)
    prefill = positions / max(prompt_bytes / read, prompt_flops / flops)
    if count.spec.decoder is None:
        return Prediction(prefill, None, prompt_flops / prompt_bytes, None, flops / read)
    step_bytes += count.cache_bytes(positions, dtype=cache_dtype, source=source)
    step_flops = count.decode_flops(positions, source=source)
    decode = 1 / max(step_bytes / read, step_flops / flops)
    return Prediction(prefill, decode, prompt_flops / prompt_bytes, step_flops / step_bytes, flops / read)
