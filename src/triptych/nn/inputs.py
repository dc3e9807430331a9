"""Rows of ids, frames or pixels as one flat batch, and their vectors: the parts that fill a stack's input slot.

Each part knows how its rows become one flat batch (`flat`) and what vectors `[N, D]` come of that; `N` counts
positions of the stack, which are as many as the rows' items for token ids only.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from triptych import ops
from triptych.attention import Rows
from triptych.attention.rows import FlatBatch
from triptych.errors import InputError
from triptych.spec import inputs, parts
from triptych.spec.part import Part
from .part import Module, VectorMap
from .positions import Position

InputSpec = TypeVar("InputSpec", bound=inputs.FramesSpec | inputs.PatchesSpec)
InputRow = Sequence[int] | Tensor
"""What one row is read from: token ids, frames `[T, M]`, or the pixels `[C, H, W]` of an image."""


def flat(rows: Sequence[Sequence[int]], device: torch.device) -> FlatBatch:
    """Rows of ids as the flat batch: [N] and where each row lies.  Raises InputError for an empty row."""
    for i, row in enumerate(rows):
        if not len(row):
            raise InputError(f"the text is empty (row {i}); give at least one token")
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.long, device=device)
    return ids, Rows(tuple(len(row) for row in rows))


class Table(Module[parts.TableSpec], of=parts.TableSpec):
    """One vector a row."""

    takes_packed = True
    weight: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)


class Embed(Module[parts.EmbedSpec], of=parts.EmbedSpec):
    """`project(norm(widen(scale * tokens[id] + position + token_types[type])))`."""

    tokens: Table
    token_types: Table
    position: Position[Part] | None
    widen: VectorMap | None
    norm: VectorMap | None
    project: VectorMap | None

    def __init__(self, spec: parts.EmbedSpec) -> None:
        super().__init__(spec)
        if spec.token_types:
            self.token_types.takes_packed = False  # a few rows that every token adds

    def length(self, row: InputRow) -> int:
        """The number of positions that a row takes."""
        return len(row)

    def flat(self, rows: Sequence[Any]) -> FlatBatch:
        """Rows of token ids -> [N]."""
        return flat(rows, self.device)

    def forward(
        self, ids: Tensor, rows: Rows, token_types: Tensor | None = None, random: ops.RowNoise | None = None
    ) -> Tensor:
        x = self.tokens(ids)  # [N, D]
        if self.spec.scale is not None:
            x = x * self.spec.scale
        if self.spec.token_types:
            x = x + self.token_types(torch.zeros_like(ids) if token_types is None else token_types)
        if self.position is not None:
            x = x + self.position.embed(rows.positions(ids.device)).to(x.dtype)
        if self.widen is not None:
            x = self.widen(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.spec.dropout:
            x = ops.dropout(x, self.spec.dropout, self.training, random)
        return x if self.project is None else self.project(x)


class Conv(Module[inputs.ConvSpec], of=inputs.ConvSpec):
    """`[M, inputs] -> [M / stride, outputs]`, along each of the rows of these lengths."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return ops.conv1d(x, self.weight, self.bias, self.spec.stride, lengths)


class _PositionedInput(Module[InputSpec]):
    """An input whose vectors have their positions added."""

    position: Position[Part]

    def with_positions(self, x: Tensor, rows: Rows, random: ops.RowNoise | None) -> Tensor:
        x = x + self.position.embed(rows.positions(x.device)).to(x.dtype)
        return ops.dropout(x, self.spec.dropout, self.training, random)


class Frames(_PositionedInput[inputs.FramesSpec], of=inputs.FramesSpec):
    """`gelu(conv2(gelu(conv1(frames)))) + position` of each row."""

    conv1: Conv
    conv2: Conv

    def length(self, row: InputRow) -> int:
        return len(row) // self.spec.stride

    def flat(self, rows: Sequence[Any]) -> FlatBatch:
        """Rows of frames `[T, M]` -> [N * stride, M].  Raises InputError for a row of another form."""
        mels, stride = self.spec.conv1.inputs, self.spec.stride
        for i, row in enumerate(rows):
            _check_floats(i, row, f"mel frames [T, {mels}]", (None, mels))
            if not len(row) or len(row) % stride:
                raise InputError(f"row {i}: {len(row)} frames, no positive multiple of {stride}; pad with silence")
        return torch.cat(list(rows)).to(self.conv1.weight), Rows(tuple(map(self.length, rows)))

    def forward(
        self, frames: Tensor, rows: Rows, token_types: None = None, random: ops.RowNoise | None = None
    ) -> Tensor:
        return self.with_positions(self.convolved(frames, rows, ops.ACTIVATIONS["gelu"]), rows, random)

    def convolved(self, frames: Tensor, rows: Rows, act: VectorMap | None = None) -> Tensor:
        """`act(conv2(gelu(conv1(frames))))` of each row: frames [N * stride, M] -> [N, D].

        Each row is computed by itself, from memory of its own, so that it has the same bits in any batch: torch's
        convolutions round by the layout of their input, and its activations by the place in a tensor.
        """
        lengths = [self.spec.stride * n for n in rows.lengths]
        if len(lengths) > 1 and not has_torch_function_unary(frames):
            each = zip(frames.split(lengths), range(len(rows)), strict=True)
            return torch.cat([self.convolved(part.clone(), rows.take([i]), act) for part, i in each])
        x = self.conv2(ops.ACTIVATIONS["gelu"](self.conv1(frames, lengths)), lengths)
        return x if act is None else act(x)


class Patches(_PositionedInput[inputs.PatchesSpec], of=inputs.PatchesSpec):
    """A vector of its own, then one for each patch, with their positions added."""

    first: Tensor
    weight: Tensor
    bias: Tensor

    def length(self, row: InputRow) -> int:
        return self.spec.position.length

    def flat(self, rows: Sequence[Any]) -> FlatBatch:
        """Images `[C, H, W]` -> their patches [P, C * patch * patch].  Raises InputError for one of another size."""
        shape, p = (self.spec.channels, *self.spec.image), self.spec.patch
        for i, row in enumerate(rows):
            _check_floats(i, row, f"the pixels {list(shape)} of an image", shape)
        images = torch.stack(list(rows)).to(self.weight)
        return F.unfold(images, p, stride=p).transpose(1, 2).flatten(0, 1), Rows(tuple(map(self.length, rows)))

    def forward(
        self, patches: Tensor, rows: Rows, token_types: None = None, random: ops.RowNoise | None = None
    ) -> Tensor:
        return self.with_positions(ops.patches(patches, self.first, self.weight, self.bias, rows), rows, random)


def _check_floats(i: int, row: Any, what: str, shape: tuple[int | None, ...]) -> None:
    """Refuse what is no finite tensor of this shape, None being any number.  Raises InputError."""
    if not isinstance(row, Tensor) or not row.is_floating_point() or row.is_meta or row.is_sparse:
        raise InputError(f"row {i}: this model reads {what} as a float tensor, not {type(row).__name__}")
    if row.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, row.shape, strict=True)):
        raise InputError(f"row {i}: this model reads {what}, not {list(row.shape)}")
    if not row.isfinite().all():
        raise InputError(f"row {i}: its numbers are not all finite")
