"""The tensor types of GGUF: number, block size and bytes of a block (github.com/ggml-org/ggml, ggml-common.h).

This is the only place where the size of a block is written.  `checkpoints.gguf_blocks` adds to each packed type the
functions that read and write its blocks; `count` computes bytes per weight from it.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod


@dataclass(frozen=True)
class GGUFType:
    """The storage of one tensor type: `elements` of a row in a block of `nbytes` bytes.

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


_TABLE = """
name     number elements nbytes  torch_dtype file_type
F32           0        1      4  float32             0
F16           1        1      2  float16             1
Q4_0          2       32     18  -                   2
Q4_1          3       32     20  -                   3
Q5_0          6       32     22  -                   8
Q5_1          7       32     24  -                   9
Q8_0          8       32     34  -                   7
Q2_K         10      256     84  -                  10
Q3_K         11      256    110  -                  11
Q4_K         12      256    144  -                  14
Q5_K         13      256    176  -                  16
Q6_K         14      256    210  -                  18
IQ2_XXS      16      256     66  -                  19
IQ2_XS       17      256     74  -                  20
IQ3_XXS      18      256     98  -                  23
IQ1_S        19      256     50  -                  24
IQ4_NL       20       32     18  -                  25
IQ3_S        21      256    110  -                  26
IQ2_S        22      256     82  -                  28
IQ4_XS       23      256    136  -                  30
I8           24        1      1  int8                -
I16          25        1      2  int16               -
I32          26        1      4  int32               -
I64          27        1      8  int64               -
F64          28        1      8  float64             -
IQ1_M        29      256     56  -                  31
BF16         30        1      2  bfloat16           32
TQ1_0        34      256     54  -                  36
TQ2_0        35      256     66  -                  37
MXFP4        39       32     17  -                  38
"""


def _type(row: list[str]) -> GGUFType:
    name, number, elements, nbytes, dtype, file_type = row
    torch_dtype, file_number = None if dtype == "-" else dtype, None if file_type == "-" else int(file_type)
    return GGUFType(name, int(number), int(elements), int(nbytes), torch_dtype, file_number)


#: Every type that can be read, by its name in GGUF.
TYPES: dict[str, GGUFType] = {row[0]: _type(row) for row in map(str.split, _TABLE.strip().splitlines()[1:])}
BY_NUMBER: dict[int, GGUFType] = {kind.number: kind for kind in TYPES.values()}
