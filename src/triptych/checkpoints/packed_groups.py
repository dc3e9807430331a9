"""The matrices of GPTQ and AWQ as codes in groups: `value[out, in] = (code - zero) * scale`.

`packed_safetensors` describes how they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.errors import shown
from .source import Source, TensorInfo, fault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word, lowest first, hold its columns 0, 1, ...


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """A matrix `[out, in]` as codes whose inputs share scales and zero points in groups."""

    bits: int  #: of a code, 4 or 8
    codes: Tensor  #: `[out, in]`, uint8
    scales: Tensor  #: `[out, groups]`, float32
    zeros: Tensor  #: `[out, groups]`, float32 whole numbers
    of: Tensor  #: `[in]`, int64: the group of each input; groups need not follow each other (act-order)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the zero points as stored, and of the scales in fp16."""
        return (self.codes.numel() + self.zeros.numel()) * self.bits // 8 + 2 * self.scales.numel()

    def values(self) -> Tensor:
        """The numbers, `[out, in]`, float32."""
        difference: Tensor = self.codes.float() - self.zeros[:, self.of]
        return difference * self.scales[:, self.of]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers in `dtype`, rounded from float32."""
        return self.values().to(dtype)

    def moved(self, rows: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, PackedGroups]:
        """The matrices that `rows`, which only moves and splits whole rows, makes of this one."""
        codes, scales, zeros = (rows(part) for part in (self.codes, self.scales, self.zeros))
        return {name: PackedGroups(self.bits, codes[name], scales[name], zeros[name], self.of) for name in codes}


#: Opens the stored tensors of a matrix and returns a function that reads its outputs [a, b).
GroupReader = Callable[[Source], Callable[[int, int], PackedGroups]]


def stored_groups(
    source: Source, stem: str, bits: int, group: int | None, *, awq: bool, minus_one: bool
) -> tuple[list[TensorInfo], tuple[int, int], GroupReader]:
    """The tensors of a module of GPTQ or AWQ whose names begin with `stem`, the shape of its matrix, and its reader.

    Raises CheckpointError for tensors that are missing or do not fit each other.
    """
    file = source.infos[f"{stem}qweight"].file

    def part(name: str, shape: tuple[int, ...] | None, *dtypes: str) -> TensorInfo:
        info = source.infos.get(f"{stem}{name}")
        if info is None:
            raise fault(file, f"the packed matrix {shown(stem + 'qweight')} comes without its {name}")
        if info.dtype not in dtypes or 0 in info.shape or len(info.shape) > 2:
            raise fault(
                file, f"tensor {shown(info.name)} is {info.dtype} {list(info.shape)}, not {' or '.join(dtypes)}"
            )
        if shape is not None and info.shape != shape:
            raise fault(file, f"tensor {shown(info.name)} is {list(info.shape)}, its matrix asks for {list(shape)}")
        return info

    words = part("qweight", None, "I32")
    if len(words.shape) != 2:
        raise fault(file, f"tensor {shown(words.name)} is {list(words.shape)}, not a matrix")
    size, (inputs, outputs) = 32 // bits, words.shape
    inputs, outputs = (inputs, outputs * size) if awq else (inputs * size, outputs)
    groups, ordered = -(-inputs // (group or inputs)), not awq and f"{stem}g_idx" in source.infos
    infos = [words, part("scales", (groups, outputs), "F16", "BF16", "F32")]
    infos.append(part("qzeros", (groups, outputs * bits // 32), "I32"))
    if ordered:
        infos.append(part("g_idx", (inputs,), "I32"))

    def read(source: Source) -> Callable[[int, int], PackedGroups]:
        import torch

        order = torch.tensor(_AWQ_ORDER) if awq else slice(None)
        of = source.read(f"{stem}g_idx").long() if ordered else torch.arange(inputs) // (group or inputs)
        if int(of.min()) < 0 or int(of.max()) >= groups:
            raise fault(file, f"tensor {shown(stem + 'g_idx')} names a group that is not there")
        codes, scales = source.read(f"{stem}qweight"), source.read(f"{stem}scales", torch.float32)
        zeros = _fields(source.read(f"{stem}qzeros"), bits)[..., order].flatten(1).int()
        zeros = ((zeros + int(minus_one)) & (2**bits - 1)).float()

        def rows(a: int, b: int) -> PackedGroups:
            if awq:  # a word holds several outputs
                words = _fields(codes[:, a // size : -(-b // size)], bits)[..., order].flatten(1)
                own = words[:, a % size : a % size + b - a].T
            else:
                own = _fields(codes[:, a:b].T, bits).flatten(1)
            return PackedGroups(bits, own, scales[:, a:b].T, zeros[:, a:b].T, of)

        return rows

    return infos, (outputs, inputs), read


def _fields(words: Tensor, bits: int) -> Tensor:
    """The `bits`-wide numbers of each 32-bit word, lowest first: `[..., n]` -> `[..., n, 32 / bits]`, uint8."""
    import torch

    fields = torch.empty((*words.shape, 32 // bits), dtype=torch.uint8)
    for i in range(32 // bits):  # one at a time: as int32 they would take four times the memory
        fields[..., i] = (words >> (bits * i)) & (2**bits - 1)
    return fields
