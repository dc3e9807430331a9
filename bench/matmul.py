"""Native products with the shapes of SmolLM2-135M: bytes of weights read in a second, beside the memory of the machine.

`python bench/matmul.py` on a quiet machine; `--seconds 0.2` for each figure.

For each layout, kernels and number of threads, the five shapes of a decoding step of SmolLM2 are multiplied with one
vector in turn, as many different matrices of each as make `--megabytes`, so that the weights come from where those of a
model of that size come from.  Printed are GB/s of packed weights (median of rounds) and, for 8 vectors, the time beside
that for one.  The machine's figure is a sum over 512 MB by torch with as many threads.  Then, for more vectors, as in a
prefill: GOP/s (a product and a sum are two), all shapes but the head's together, the shortest time of each.
"""

import argparse
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from triptych.native import Input, library, why_not
from triptych.native.loader import LEVELS
from triptych.quantize import LAYOUTS, PackedMatrix
from triptych.quantize.kernel_layouts import Codes, floats_of, matrix_struct

VECTORS = (1, 4, 16, 64, 256)
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))


def times(call: Callable[[], object], seconds: float) -> list[float]:
    """The times of a call, over `seconds` and at least 3 calls."""
    call()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def median_time(call: Callable[[], object], seconds: float) -> float:
    """The median of `times`."""
    return statistics.median(times(call, seconds))


def matrix(name: str, rows: int, columns: int) -> PackedMatrix | None:
    """A random matrix; None where the columns are not whole blocks."""
    layout = LAYOUTS[name]
    if columns % layout.block:
        return None
    if layout.dense:
        return PackedMatrix.of(torch.randn(rows, columns).to(torch.float32 if name == "F32" else torch.bfloat16))
    groups, unsigned = (rows, columns // layout.block), name in ("U4", "U5")
    low, high = (0, 16 if name == "U4" else 32) if unsigned else (-127, 128)
    scales = torch.rand(groups) * 0.01 + 0.001  # no subnormal ones, which are slow to convert
    numbers = Codes(
        torch.randint(low, high, (rows, columns), dtype=torch.uint8 if unsigned else torch.int8),
        scales,
        -8 * scales if unsigned else None,
        torch.randint(-32, 32, (rows, columns // 16), dtype=torch.int8) if name == "S8X16" else None,
    )
    return PackedMatrix(layout, rows, columns, layout.pack(numbers))


def read_bandwidth(threads: int, seconds: float) -> float:
    """GB/s of a sum over 512 MB."""
    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 27)
    return numbers.nbytes / median_time(lambda: numbers.sum(), seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--kernels", nargs="*", default=list(LEVELS[1:]))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    kernels = library()
    if kernels is None:
        raise SystemExit(why_not())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for threads in options.threads:
        print(f"{threads} thread(s): a sum over 512 MB reads {read_bandwidth(threads, 1):.1f} GB/s")
    shapes = "".join(f"{f'{rows}x{columns}':>12}" for rows, columns in SHAPES)
    print(f"\nGB/s with one vector, and in brackets the time of 8 vectors over that of one\n{'':26}{shapes}")
    for name in options.layouts:
        matrices = [copies(name, *shape, options.megabytes) for shape in SHAPES]
        for isa in options.kernels:
            if kernels.use(isa) != isa:
                continue
            for threads in options.threads:
                figures = "".join(figure(kernels.functions, some, threads, options.seconds) for some in matrices)
                print(f"{name:8}{isa:10}{threads} thr.  {figures}", flush=True)
    print(f"\nGOP/s by the number of vectors\n{'':26}{''.join(f'{count:>12}' for count in VECTORS)}")
    for name in options.layouts:
        one_of_each = [found for shape in SHAPES[:-1] if (found := matrix(name, *shape)) is not None]
        for isa in options.kernels:
            if kernels.use(isa) != isa or not one_of_each:
                continue
            for threads in options.threads:
                rates = (rate(kernels.functions, one_of_each, count, threads, options.seconds) for count in VECTORS)
                print(f"{name:8}{isa:10}{threads} thr.  {''.join(f'{each:12.0f}' for each in rates)}", flush=True)


def copies(name: str, rows: int, columns: int, megabytes: float) -> list[PackedMatrix]:
    """As many matrices of one shape as make `megabytes`."""
    one = matrix(name, rows, columns)
    if one is None:
        return []
    more = range(int(megabytes * 1e6 / one.nbytes))
    return [one, *(PackedMatrix(one.layout, rows, columns, one.data.clone()) for _ in more)]


def repeated(functions: ctypes.CDLL, matrices: list[PackedMatrix], count: int, threads: int) -> Callable[[], object]:
    """A call that multiplies all matrices, of one shape, with `count` vectors: the library's functions with their
    arguments made beforehand, so that Python's share of `multiply` is not measured."""
    columns, rows = matrices[0].columns, matrices[0].rows
    x, out = torch.randn(count, columns), torch.empty(count, rows)
    memory = torch.empty(functions.input_bytes(count, columns), dtype=torch.uint8)
    vectors = Input(count, columns, floats_of(x), columns)
    functions.place_input(vectors, memory.data_ptr())
    structs = [matrix_struct(weight) for weight in matrices]

    def call(keep: object = (x, out, memory)) -> None:
        for struct in structs:
            functions.multiply_parallel(struct, vectors, out.data_ptr(), rows, None, threads)

    return call


def figure(functions: ctypes.CDLL, matrices: list[PackedMatrix], threads: int, seconds: float) -> str:
    if not matrices:
        return f"{'-':>12}"
    one, eight = (median_time(repeated(functions, matrices, count, threads), seconds) for count in (1, 8))
    return f"{sum(weight.nbytes for weight in matrices) / one / 1e9:6.1f} ({eight / one:3.1f})"


def rate(functions: ctypes.CDLL, matrices: list[PackedMatrix], count: int, threads: int, seconds: float) -> float:
    """GOP/s over one matrix of each shape."""
    calls = [repeated(functions, [weight], count, threads) for weight in matrices]
    least = sum(min(times(call, seconds / len(calls))) for call in calls)
    return 2 * count * sum(weight.rows * weight.columns for weight in matrices) / least / 1e9


if __name__ == "__main__":
    main()
