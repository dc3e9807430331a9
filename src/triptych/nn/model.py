"""The three layouts: an encoder, a decoder, or both, under one head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.attention import CrossCache, Rows, sinusoidal
from triptych.errors import InputError
from triptych.nn.inputs import Row
from triptych.nn.part import Module, assign, build, tie
from triptych.nn.positions import check_context
from triptych.nn.stack import Stack
from triptych.nn.taps import NO_TAPS, Taps
from triptych.spec import Model
from triptych.spec.norms import LayerNorm, RMSNorm
from triptych.spec.parts import Linear
from triptych.spec.positions import Learned, Sinusoidal


class Transformer(Module, of=Model):
    """`head(stack(ids))`; with both stacks, the decoder reads the encoder's output through its cross slots."""

    spec: Model
    encoder: Stack | None
    decoder: Stack | None
    head: Callable[[Tensor, Rows], Tensor] | None

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        tie(self, model.ties)

    @property
    def input(self) -> Any:
        """The input slot the source enters."""
        return (self.decoder if self.encoder is None else self.encoder).embed  # type: ignore[union-attr]

    def length(self, row: Row) -> int:
        """How many positions a row of the source takes."""
        return self.input.length(row)  # type: ignore[no-any-return]

    def flat(self, rows: Sequence[Row]) -> tuple[Tensor, Rows]:
        """Rows of what the model reads (its source, beside a decoder) as the flat batch `encode` or `decode` takes.

        Raises InputError for a row that is empty or of another form.
        """
        return self.input.flat(rows)  # type: ignore[no-any-return]

    def encode(self, ids: Tensor, rows: Rows, *, token_types: Tensor | None = None, taps: Taps = NO_TAPS) -> Tensor:
        """[M] source ids, or what else the input slot reads -> [M, D] of the encoder."""
        assert self.encoder is not None
        check_context(rows, self.spec.source_context, "source" if self.decoder is not None else "input")
        return self.encoder(ids, rows, token_types=token_types, taps=taps.at(self._prefix("encoder")))  # type: ignore[no-any-return]

    def remember(self, memory: Tensor, rows: Rows, *, taps: Taps = NO_TAPS) -> CrossCache:
        """What the decoder needs of an encoder's output [M, D]: pass it to `decode`."""
        assert self.decoder is not None
        return self.decoder.remember(memory, rows, taps.at(self._prefix("decoder")))

    def decode(
        self, ids: Tensor, rows: Rows, *, cache: Any = None, cross: CrossCache | None = None, taps: Taps = NO_TAPS
    ) -> Tensor:
        """[N] ids -> [N, D] of the decoder; with a cache they continue the rows it holds."""
        assert self.decoder is not None
        if (cross is None) != (self.encoder is None):
            raise InputError("a decoder beside an encoder needs a source, and a decoder alone takes none")
        check_context(rows, self.spec.context, "input")
        return self.decoder(ids, rows, cache=cache, cross=cross, taps=taps.at(self._prefix("decoder")))  # type: ignore[no-any-return]

    def logits(self, x: Tensor, rows: Rows, taps: Taps = NO_TAPS) -> Tensor:
        """[N, D] -> what the head makes of it, usually [N, V]."""
        if self.head is None:
            raise InputError(f"this {self.spec.family} model has no head")
        return taps("logits", self.head(x, rows), rows)

    def forward(
        self,
        ids: Tensor,
        rows: Rows,
        *,
        source: tuple[Tensor, Rows] | None = None,
        token_types: Tensor | None = None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """One uncached pass of whole rows: `ids` [N] are the decoder's where there is one; `source` (ids, rows)."""
        if self.decoder is None:
            return self.logits(self.encode(ids, rows, token_types=token_types, taps=taps), rows, taps)
        cross = None
        if source is not None:
            cross = self.remember(self.encode(*source, taps=taps), source[1], taps=taps)
        return self.logits(self.decode(ids, rows, cross=cross, taps=taps), rows, taps)

    def _prefix(self, stack: str) -> str:
        """Sites carry the stack's name only where there are two."""
        return stack if self.spec.layout == "encoder-decoder" else ""


def empty(model: Model) -> Transformer:
    """The module on the meta device: shapes and no storage, to be filled by `assign` tensor by tensor."""
    with torch.device("meta"):
        module = build(model)
    assert isinstance(module, Transformer)
    return module


def finish(module: Transformer) -> Transformer:
    """After every stored parameter was assigned: restore the ties, evaluation mode, nothing left on meta."""
    tie(module, module.spec.ties)
    left = [name for name, p in module.named_parameters() if p.is_meta]
    assert not left, left
    module.set_placement(*_placement(module))
    return module.eval()


def _placement(module: Transformer) -> tuple[torch.dtype, torch.device]:
    """The dtype most numbers of the model have, and its device."""
    sizes: Counter[torch.dtype] = Counter()
    device = module.device
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
        device = parameter.device
    return max(sizes, key=lambda dtype: sizes[dtype]), device


def new(model: Model, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A fresh model: normal weights of `init_std`, those that write to the residual stream divided by
    sqrt(number of sublayers) (Radford et al. 2019), norms 1, biases 0.

    A learned position table begins as sinusoids: from noise, attention must first find out which places are near each
    other, and a small BERT spends its first minutes on that alone (docs/log.md).
    """
    module = empty(model)
    random = torch.Generator().manual_seed(seed)
    for name, part in model.walk():
        for leaf, shape in part.tensors().items():
            full = f"{name}.{leaf}"
            if full in model.ties:
                continue
            if leaf == "bias" or leaf == "sinks":
                value = torch.zeros(shape, dtype=dtype)
            elif isinstance(part, LayerNorm | RMSNorm):
                value = torch.full(shape, 1.0 - getattr(part, "offset", 0.0), dtype=dtype)
            elif isinstance(part, Learned):
                places, waves = torch.arange(shape[0]), Sinusoidal(width=shape[1])
                value = (sinusoidal(places, waves) * 2.5 * model.init_std).to(dtype)
            else:
                value = torch.empty(shape).normal_(0, _std(model, name, part), generator=random).to(dtype)
            assign(module, full, value)
    return finish(module)


def _std(model: Model, name: str, part: object) -> float:
    writes = isinstance(part, Linear) and name.endswith((".attn.out", ".cross.out", ".down"))
    if not writes:
        return model.init_std
    stack = model.stacks[name.split(".")[0]]
    sublayers = sum(1 + (block.cross is not None) + (block.mlp is not None) for block in stack.blocks)
    return float(model.init_std / sublayers**0.5)
