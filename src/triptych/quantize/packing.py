"""Weights of a model in the layouts that native kernels read: from what, and how they multiply.  Which slots take
a packed weight their part says (`takes_packed` in nn/part.py; not a router in nn/feedforward.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.checkpoints import Source
from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.checkpoints.load_weights import stores_packed
from triptych.checkpoints.packed_groups import PackedGroups
from triptych.checkpoints.source import by_reason
from triptych.errors import CheckpointError, InputError, nearest
from triptych.native import library, why_not
from triptych.native.huge_pages import HugePages
from triptych.nn.packed_weight import PackedWeight
from .kernel_layouts import BAND, Allocator, Layout, PackedMatrix, multiply
from .repack import INVERTIBLE, SAME_NUMBERS, blocks_of, repack, repack_groups
from .rounding import FORMS, quantize

#: The dtypes of activations that packed weights are meant for; others ask for more digits than 8 bits, or fewer.
_COMPUTED_IN = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class BandFormat:
    """A layout of `native/matmul.h` as the format of a `PackedWeight`: a row of blocks is a band of 16 rows.

    kind   the type of GGUF whose blocks were repacked; None where the weight came from something else.
    """

    layout: Layout
    kind: str | None = None

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

    @property
    def stored_as(self) -> str | None:
        """The type of GGUF it came from, or the one that holds the same numbers exactly."""
        return self.kind or SAME_NUMBERS[self.layout.name]

    def stored(self, raw: Tensor, rows: int, file: Callable[[], Tensor | None]) -> Tensor | None:
        """See `BlockFormat.stored`.  Q4_K and Q5_K need the file, whose blocks are packed again and compared."""
        kind = self.stored_as
        assert kind is not None
        if kind in INVERTIBLE:
            return blocks_of(self._matrix(raw, rows), kind).raw
        blocks = file()
        same = blocks is not None and torch.equal(repack(PackedBlocks(block_format(kind), blocks)).data, raw.view(-1))
        return blocks if same else None

    def _matrix(self, raw: Tensor, rows: int) -> PackedMatrix:
        columns = raw.shape[1] // self.nbytes * self.elements
        return PackedMatrix(self.layout, rows, columns, raw.contiguous().view(-1))


@dataclass(frozen=True, eq=False)
class OrderedBandFormat(BandFormat):
    """The same with the columns in another order: column i of the layout is column `order[i]` of the matrix."""

    order: Tensor = field(kw_only=True)  #: int64 `[columns]`

    @property
    def stored_as(self) -> None:
        """No type of GGUF has columns in another order."""

    def unpack(self, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `BandFormat.unpack`."""
        return super().unpack(raw, dtype)[:, self.order.argsort()]

    def multiply(self, raw: Tensor, rows: int, x: Tensor) -> Tensor | None:
        """See `BandFormat.multiply`."""
        return super().multiply(raw, rows, x[:, self.order])


def packed_weight(
    matrix: PackedMatrix, dtype: torch.dtype = torch.float32, *, kind: str | None = None, order: Tensor | None = None
) -> PackedWeight:
    """A matrix in the slot of a weight, computing in `dtype`; the memory is shared.

    `kind` is the type of GGUF whose blocks it came from; `order [columns]`, where given, says which column of the
    weight each column of the matrix is.
    """
    form = BandFormat(matrix.layout, kind) if order is None else OrderedBandFormat(matrix.layout, kind, order=order)
    return PackedWeight(matrix.data.view(-(-matrix.rows // BAND), -1), form, dtype, matrix.rows)


def kernel_matrix(weight: PackedWeight) -> tuple[int, Tensor] | None:
    """The layout of a weight, by its number in matmul.h, and its bytes; None where the kernels do not read it."""
    form = weight.format
    if not isinstance(form, BandFormat) or isinstance(form, OrderedBandFormat) or not weight.blocks.is_contiguous():
        return None
    return form.layout.code, weight.blocks.view(-1)


@dataclass
class Packer:
    """Packs the matrices of a model one by one while it is loaded.

    form      `int8` or `int4` for weights that are stored as plain numbers; None leaves these as they are.
    refused   the matrices that were not packed, and why.
    memory    where they are packed to.
    """

    form: str | None = None
    before: int = 0  # bytes of what was packed, as the file has it
    after: int = 0  # bytes of it at run time
    count: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    memory: Allocator = field(default_factory=lambda: HugePages().take)

    def stored(self, name: str, weight: PackedBlocks | PackedGroups, dtype: torch.dtype) -> PackedWeight | None:
        """The weight `name` from what a file has packed; None where the layouts cannot hold it."""
        if isinstance(weight, PackedBlocks):
            kind, nbytes = weight.format.type.name, weight.raw.nbytes
            return self._packed(name, nbytes, lambda: packed_weight(repack(weight, self.memory), dtype, kind=kind))

        def packed() -> PackedWeight:
            matrix, order = repack_groups(weight, self.memory)
            return packed_weight(matrix, dtype, order=order)

        return self._packed(name, weight.nbytes, packed)

    def numbers(self, name: str, weight: Tensor) -> PackedWeight | None:
        """The weight `name` from its numbers; None where it stays as it is."""
        form = self.form
        if form is None or weight.dim() != 2 or not weight.is_floating_point():
            return None
        return self._packed(
            name, weight.nbytes, lambda: packed_weight(quantize(weight, form, self.memory), weight.dtype)
        )

    def _packed(self, name: str, nbytes: int, pack: Callable[[], PackedWeight]) -> PackedWeight | None:
        try:
            weight = pack()
        except (CheckpointError, InputError) as error:
            self.refused[name] = str(error)
            return None
        self.before, self.after, self.count = self.before + nbytes, self.after + weight.blocks.nbytes, self.count + 1
        return weight

    @property
    def notes(self) -> list[str]:
        """A line for each reason why a matrix was not packed, with the first it holds for; one where there was none."""
        refused = [f"not packed: {line}" for line in by_reason(self.refused)]
        return refused if refused or self.count else ["nothing is packed: the checkpoint has no packed matrices"]

    @property
    def packed(self) -> str:
        """The number of packed matrices, and their bytes; empty where none was."""
        if not self.count:
            return ""
        growth = self.after / self.before - 1
        size = f"{self.before / 1e6:.1f} MB as stored, {self.after / 1e6:.1f} MB at run time ({growth:+.0%})"
        return f"{self.count} matrices are packed: {size}; dequantize=True (--quantize none) loads plain numbers"


def packer_for(form: str | None, device: torch.device | str = "cpu") -> Packer:
    """A packer of this form for a model on `device`.

    Raises InputError for an unknown form, for a device that is no CPU, and where the native kernels are not there: a
    packed model would then be unpacked in every step.
    """
    if form is not None and (not isinstance(form, str) or form not in FORMS):
        raise InputError(f"quantize={form!r}{nearest(str(form), FORMS)}; known are {', '.join(FORMS)}")
    if reason := _why_not(device):
        raise InputError(f"packed weights {reason}; leave out quantize= and dequantize=False")
    return Packer(form)


def packing_arguments(form: str | None) -> tuple[str | None, bool | None]:
    """`quantize` and `dequantize` of `triptych.load` for a value of `--quantize`: "file" keeps the packed matrices of
    the file or fails, "none" dequantizes them, and any other form rounds anew; None is the default of `load`."""
    dequantize_by_form = {None: None, "file": False, "none": True}
    return (None, dequantize_by_form[form]) if form in dequantize_by_form else (form, None)


@dataclass(frozen=True)
class Packing:
    """The treatment of a checkpoint's matrices: `read_weights` takes the first two."""

    dequantize: bool = True  #: whether the packed matrices of the file are read as plain numbers
    packer: Packer | None = None
    notes: tuple[str, ...] = ()  #: for the load report


def packing_for(
    source: Source,
    quantize: str | None = None,
    dequantize: bool | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Packing:
    """The way to load the checkpoint `source`, from the arguments of `triptych.load`.

    Without `quantize` and `dequantize` the packed matrices of a file stay packed on a CPU with native kernels where
    `dtype` is not given, float32 or bfloat16; elsewhere they are dequantized, and a note says why.
    Raises InputError where packed weights were asked for and cannot be used (see `packer_for`), and for both arguments
    at once.
    """
    if quantize is not None:
        if dequantize:
            raise InputError(f"quantize={quantize!r} packs what dequantize=True unpacks; give one of the two")
        return Packing(dequantize is not False, packer_for(quantize, device))
    if dequantize is not None:
        return Packing() if dequantize else Packing(False, packer_for(None, device))
    if not stores_packed(source):
        return Packing()
    reason = _why_not(device)
    if dtype not in (None, *_COMPUTED_IN):
        reason = f"compute in float32 or bfloat16, and {str(dtype).removeprefix('torch.')} was asked for"
    if reason is None:
        return Packing(False, Packer())
    note = f"the packed matrices of the file are dequantized, which takes more memory and time: they {reason}"
    return Packing(notes=(note,))


def _why_not(device: torch.device | str) -> str | None:
    """The reason why packed weights cannot be used on this device, to be read after "they"; None where they can."""
    if torch.device(device).type != "cpu":
        return f"run on the CPU, not on {device}"
    return f"need native kernels: {why_not()}" if library() is None else None
