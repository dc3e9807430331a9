"""Weights of a model in the layouts that native kernels read: which are packed, from what, and how they multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.checkpoints.gguf_blocks import PackedBlocks
from triptych.errors import CheckpointError, InputError, nearest
from triptych.native import library, why_not
from triptych.nn.weights import PackedWeight
from triptych.quantize.layouts import BAND, Layout, PackedMatrix
from triptych.quantize.products import multiply
from triptych.quantize.repack import repack
from triptych.quantize.rounding import FORMS, quantize


@dataclass(frozen=True)
class BandFormat:
    """A layout of `native/matmul.h` as the format of a `PackedWeight`: a row of blocks is a band of 16 rows."""

    layout: Layout

    @property
    def elements(self) -> int:
        """Columns of a block."""
        return self.layout.block

    @property
    def nbytes(self) -> int:
        """Bytes of a block of 16 rows."""
        return self.layout.block_bytes

    @property
    def band(self) -> int:
        """Rows stored together."""
        return BAND

    def unpack(self, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`raw [n, bytes of a band]` -> `[16 n, columns]` in `dtype`, rounded from float32."""
        return self._matrix(raw, len(raw) * BAND).dense(dtype)

    def multiply(self, raw: Tensor, rows: int, x: Tensor) -> Tensor | None:
        """`x [N, columns]`, float32 -> `[N, rows]`; None without the native kernels."""
        return None if library() is None else multiply(self._matrix(raw, rows), x)

    def _matrix(self, raw: Tensor, rows: int) -> PackedMatrix:
        columns = raw.shape[1] // self.nbytes * self.elements
        return PackedMatrix(self.layout, rows, columns, raw.contiguous().view(-1))


def packed_weight(matrix: PackedMatrix, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """A matrix in the slot of a weight, computing in `dtype`; the memory is shared."""
    bands = -(-matrix.rows // BAND)
    return PackedWeight(matrix.data.view(bands, -1), BandFormat(matrix.layout), dtype, matrix.rows)


def kernel_matrix(weight: PackedWeight) -> tuple[int, Tensor] | None:
    """The layout of a weight, by its number in matmul.h, and its bytes; None where the kernels do not read it."""
    if not isinstance(weight.format, BandFormat) or not weight.blocks.is_contiguous():
        return None
    return weight.format.layout.code, weight.blocks.view(-1)


@dataclass
class Packer:
    """Packs the matrices of a model one by one while it is loaded.

    form     `int8` or `int4` for weights that are stored as plain numbers; None leaves these as they are.
    notes    what was packed, and what was not, with the reason; for the load report.
    """

    form: str | None = None
    before: int = 0  # bytes of what was packed, as the file has it
    after: int = 0  # bytes of it at run time
    count: int = 0
    refused: list[str] = field(default_factory=list)

    def blocks(self, name: str, blocks: PackedBlocks, dtype: torch.dtype) -> PackedWeight | None:
        """The weight `name` from the blocks of a file; None where the layouts cannot hold it."""
        return self._packed(name, blocks.raw.nbytes, dtype, lambda: repack(blocks))

    def numbers(self, name: str, weight: Tensor) -> PackedWeight | None:
        """The weight `name` from its numbers; None where it stays as it is."""
        form = self.form
        if form is None or weight.dim() != 2 or not weight.is_floating_point():
            return None
        return self._packed(name, weight.nbytes, weight.dtype, lambda: quantize(weight, form))

    def _packed(
        self, name: str, nbytes: int, dtype: torch.dtype, matrix: Callable[[], PackedMatrix]
    ) -> PackedWeight | None:
        try:
            packed = matrix()
        except (CheckpointError, InputError) as error:
            self.refused.append(f"{name} is not packed: {error}")
            return None
        self.before, self.after, self.count = self.before + nbytes, self.after + packed.nbytes, self.count + 1
        return packed_weight(packed, dtype)

    @property
    def notes(self) -> list[str]:
        """One line on what was packed, and one for each matrix that was not."""
        if not self.count:
            return self.refused or ["nothing is packed: the checkpoint has no matrix in a packed type of GGUF"]
        growth = self.after / self.before - 1
        size = f"{self.before / 1e6:.1f} MB as stored, {self.after / 1e6:.1f} MB at run time ({growth:+.0%})"
        return [f"{self.count} matrices are packed: {size}", *self.refused]


def packer_for(form: str | None, device: torch.device | str = "cpu") -> Packer:
    """A packer of this form for a model on `device`.

    Raises InputError for an unknown form, for a device that is no CPU, and where the native kernels are not there: a
    packed model would then be unpacked in every step.
    """
    if form is not None and (not isinstance(form, str) or form not in FORMS):
        raise InputError(f"quantize={form!r}{nearest(str(form), FORMS)}; known are {', '.join(FORMS)}")
    if torch.device(device).type != "cpu":
        raise InputError(f"packed weights run on the CPU, not on {device}; leave out quantize= and dequantize=False")
    if library() is None:
        raise InputError(f"packed weights need native kernels: {why_not()}; leave out quantize= and dequantize=False")
    return Packer(form)
