"""The tensor types of GGUF: number, block size and bytes of a block (github.com/ggml-org/ggml, ggml-common.h).

This is the only place where the size of a block is written.  `checkpoints.gguf_blocks` adds to each packed type the
functions that read and write its blocks; `count` computes bytes per weight from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod


@dataclass(frozen=True)
class GGUFType:
    """How one tensor type stores numbers: `elements` of a row in a block of `nbytes` bytes.

    A plain type has one element a block and names its torch dtype; a packed type has none.  `file_type` is the value of
    `general.file_type` for files most of whose matrices have this type (llama.cpp's `llama_ftype`; of the mixtures with
    K-quants, S); None for types that no matrix is stored in.
    """

    name: str
    number: int
    elements: int
    nbytes: int
    torch_dtype: str | None = None
    file_type: int | None = None

    @property
    def bytes_per_element(self) -> Fraction:
        return Fraction(self.nbytes, self.elements)

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`, whose rows are whole blocks."""
        return prod(shape) // self.elements * self.nbytes

    def raw_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored bytes of a tensor of `shape`: `[..., bytes of a row]`."""
        return (*shape[:-1], shape[-1] // self.elements * self.nbytes)


#: Every type that can be read, by its name in GGUF.
TYPES: dict[str, GGUFType] = {
    kind.name: kind
    for kind in (
        GGUFType("F32", 0, 1, 4, "float32", file_type=0),
        GGUFType("F16", 1, 1, 2, "float16", file_type=1),
        GGUFType("Q4_0", 2, 32, 18, file_type=2),
        GGUFType("Q4_1", 3, 32, 20, file_type=3),
        GGUFType("Q5_0", 6, 32, 22, file_type=8),
        GGUFType("Q5_1", 7, 32, 24, file_type=9),
        GGUFType("Q8_0", 8, 32, 34, file_type=7),
        GGUFType("Q2_K", 10, 256, 84, file_type=10),
        GGUFType("Q3_K", 11, 256, 110, file_type=11),
        GGUFType("Q4_K", 12, 256, 144, file_type=14),
        GGUFType("Q5_K", 13, 256, 176, file_type=16),
        GGUFType("Q6_K", 14, 256, 210, file_type=18),
        GGUFType("IQ2_XXS", 16, 256, 66, file_type=19),
        GGUFType("IQ2_XS", 17, 256, 74, file_type=20),
        GGUFType("IQ3_XXS", 18, 256, 98, file_type=23),
        GGUFType("IQ1_S", 19, 256, 50, file_type=24),
        GGUFType("IQ4_NL", 20, 32, 18, file_type=25),
        GGUFType("IQ3_S", 21, 256, 110, file_type=26),
        GGUFType("IQ2_S", 22, 256, 82, file_type=28),
        GGUFType("IQ4_XS", 23, 256, 136, file_type=30),
        GGUFType("I8", 24, 1, 1, "int8"),
        GGUFType("I16", 25, 1, 2, "int16"),
        GGUFType("I32", 26, 1, 4, "int32"),
        GGUFType("I64", 27, 1, 8, "int64"),
        GGUFType("F64", 28, 1, 8, "float64"),
        GGUFType("IQ1_M", 29, 256, 56, file_type=31),
        GGUFType("BF16", 30, 1, 2, "bfloat16", file_type=32),
        GGUFType("TQ1_0", 34, 256, 54, file_type=36),
        GGUFType("TQ2_0", 35, 256, 66, file_type=37),
        GGUFType("MXFP4", 39, 32, 17, file_type=38),
    )
}
BY_NUMBER: dict[int, GGUFType] = {kind.number: kind for kind in TYPES.values()}
