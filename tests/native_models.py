"""Runs of one model through the modules and through the native step, side by side."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import references
from triptych import nn
from triptych.attention import Cache, CacheType, CrossCache, Rows
from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.model import create
from triptych.native import library, why_not
from triptych.native.step import PAGE_POSITIONS
from triptych.program.native_encoder import NativeEncoder
from triptych.program.native_executor import NativeStep
from triptych.quantize import kernel_matrix, packed_weight, repack
from triptych.spec import FramesSpec

needs_native = pytest.mark.skipif(library() is None, reason=str(why_not()))

EXACT = 1e-4  # of log-probabilities, in fp32
LLAMA = {"model_type": "llama", "vocab_size": 41, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 700,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

#: Tokens of each of three rows, step after step: a ragged prefill, single tokens, both together, a row that pauses.
STEPS = ((7, 1, 3), (1, 1, 1), (1, 5, 2), (1, 0, 1), (6, 1, 9), (2, 1, 1))
ANY = 1 << 30


def llama(**changes: Any) -> nn.Transformer:
    return create(LLAMA | changes).module


def packed(name: str = "Q8_0", **changes: Any) -> nn.Transformer:
    """A model whose matrices are packed."""
    module, form = llama(**changes), block_format(name)
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            blocks = PackedBlocks(form, form.pack(weight.detach().reshape(-1, form.elements)).view(len(weight), -1))
            part.register_parameter("weight", torch.nn.Parameter(packed_weight(repack(blocks)), requires_grad=False))
    return module


GENERATE = ("CausalLM", "LMHeadModel", "ConditionalGeneration", "MTModel")


def decoders() -> list[str]:
    """The references that generate."""
    return [name for name, (_, model, _) in references.VARIANTS.items() if model.endswith(GENERATE)]


def seq2seq() -> list[str]:
    """Those of them that read a source."""
    return [name for name in decoders() if references.VARIANTS[name][1].endswith(GENERATE[2:])]


@dataclass
class Side:
    """A cache, and what reads it."""

    module: nn.Transformer
    cache: Cache
    cross: CrossCache | None
    native: NativeStep | None
    native_sources: bool = False  # otherwise the modules run the step that reads them

    def step(self, ids: Sequence[int], rows: Rows, source: tuple[Tensor, Rows] | None) -> Tensor:
        if self.native is not None and (source is None or self.native_sources):
            if source is not None:
                assert self.cross is not None
                encoder = NativeEncoder(self.module, matrix_of=kernel_matrix, dense=True)
                assert encoder.project(*source, self.cross), encoder.why_modules
            logits = self.native.logits(ids, rows, range(len(ids)))
            assert logits is not None, self.native.why_modules
            return logits
        inputs = torch.tensor(ids, device=self.module.device)
        batch = nn.Batch(inputs=inputs, rows=rows, source=source, cache=self.cache, cross=self.cross)
        return self.module.logits(batch)


@dataclass
class Run:
    """Rows with ids drawn from a seed; `step` runs the next tokens of each and gives all logits."""

    module: nn.Transformer
    rows: int = 3
    seed: int = 0
    sources: list[list[int]] = field(default_factory=lambda: [[5, 6, 7], [9], [10, 11, 12, 13]])
    native_sources: bool = False
    cache_type: CacheType = "auto"
    page: int | None = PAGE_POSITIONS

    def side(self, native: bool) -> Side:
        cache = self.module.decoder.cache(self.rows, self.cache_type, page=self.page)
        cross = None if self.module.encoder is None else self.module.decoder.cross_cache(self.cache_type)
        step = NativeStep(self.module, cache, cross, matrix_of=kernel_matrix, most_dense=ANY) if native else None
        return Side(self.module, cache, cross, step, self.native_sources)

    @torch.inference_mode()
    def both(self, steps: Sequence[Sequence[int]] = STEPS, native: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """The log-probabilities of each step, by the modules and natively (without `native`, by modules twice)."""
        draw = random.Random(self.seed)
        sides, out = (self.side(False), self.side(native)), ([], [])
        source = self._source()
        for lengths in steps:
            live = [i for i, length in enumerate(lengths) if length]
            past = tuple(sides[0].cache.lengths[i] for i in live)
            rows = Rows(tuple(lengths[i] for i in live), past, tuple(live))
            ids = [draw.randrange(min(self.module.spec.vocab or 1, references.V)) for _ in range(rows.total)]
            for side, found in zip(sides, out, strict=True):
                found.append(side.step(ids, rows, source).float().log_softmax(-1))
            source = None
        return out

    def _source(self) -> tuple[Tensor, Rows] | None:
        if self.module.encoder is None:
            return None
        embed = self.module.spec.reads.embed
        if isinstance(embed, FramesSpec):
            random = torch.Generator().manual_seed(1)
            length, width = embed.stride * embed.position.length, embed.conv1.inputs
            return self.module.flat([torch.randn(length, width, generator=random) for _ in range(self.rows)])
        return self.module.flat(self.sources)

    def gap(self, steps: Sequence[Sequence[int]] = STEPS) -> float:
        """The largest difference of log-probabilities."""
        return max(float((a - b).abs().max()) for a, b in zip(*self.both(steps), strict=True))
