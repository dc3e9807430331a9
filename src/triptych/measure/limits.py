"""The machine's limits: its measured rates, and from these the limit of each job (a roofline, Williams et al. 2009).

A job reads bytes and computes: it takes at least as long as the slower of both would take by itself.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from triptych.count import Count, read_in_a_step
from triptych.nn import Transformer
from triptych.nn.packed_weight import PackedWeight
from .bench_results import Limit, Rates
from .jobs import BenchJob

ONE_BYTE = "fp8"  # a cache in it has as many bytes as numbers
READ_BYTES = 512 << 20  # much more than any cache holds
SQUARE = 2048  # rows and columns of the matrices of the matmul rate


@dataclass(frozen=True)
class Costs:
    """What a decoding step of a loaded model reads: `step` bytes of weights, and keys and values of `cache_bytes` bytes
    a number, its part of a scale included."""

    step: int
    cache_bytes: float


def step_bytes(module: Transformer) -> int:
    """Bytes of weights that decoding one token of one row reads (`count.read_in_a_step`), as they lie in memory."""
    total = Fraction(0)
    for name, _, share in read_in_a_step(module.spec):
        owner, _, leaf = name.rpartition(".")
        total += share * nbytes(getattr(module.get_submodule(owner), leaf))
    return round(total)


def nbytes(weight: Tensor) -> int:
    """Bytes of a weight as it is stored: of a packed one those of its blocks."""
    return weight.blocks.nbytes if isinstance(weight, PackedWeight) else weight.nbytes


def limits(
    job: BenchJob, count: Count, costs: Costs | None, rates: Rates, flops: float, by: str, lengths: Sequence[int] = ()
) -> list[Limit | None]:
    """The limit of each figure of a job; None where none is known.

    flops     operations of matmuls in a second that the model may use; `by` says which they are.
    lengths   tokens of each text of a job that encodes texts.
    """
    bytes_read, operations = work(job, count, costs, lengths)
    reading, computing = bytes_read / rates.read, operations / flops
    seconds, why = (reading, "read bandwidth") if reading >= computing else (computing, by)
    if not seconds:
        return [None] * len(job.figures)
    return [Limit(seconds if unit == "s" else amount(job, unit, lengths) / seconds, why) for _, unit in job.figures]


def amount(job: BenchJob, unit: str, lengths: Sequence[int] = ()) -> int:
    """The number of things of a unit that a job makes or reads: sentences, or tokens."""
    if job.kind == "encode":
        return len(job.texts) if unit == "sentences/s" else sum(lengths)
    return sum(map(len, job.rows)) if job.kind == "prefill" else max(1, len(job.rows)) * job.new


def work(job: BenchJob, count: Count, costs: Costs | None, lengths: Sequence[int] = ()) -> tuple[float, float]:
    """Bytes that a job reads at least, and the FLOPs of its matmuls.

    A causal mask leaves half of the scores of a prompt.  Keys and values of a source are read once for all its beams.
    """
    spec, rows = count.spec, [len(row) for row in job.rows]
    weights, number = (0, 0) if costs is None else (costs.step, costs.cache_bytes)
    if job.kind == "prefill":
        parts = [count.flops(n, logits=1) for n in rows]
        return weights, sum(sum(part.values()) - part["scores"] / 2 for part in parts)
    if job.kind == "encode":
        return 0, sum(sum(count.flops(n, logits=0).values()) for n in lengths)
    if job.kind in ("decode", "together"):
        middle = max(1, rows[0] + job.new // 2)
        cached = len(rows) * number * count.cache_bytes(middle, dtype=ONE_BYTE)
        return job.new * (weights + cached), job.new * len(rows) * count.decode_flops(middle)
    if job.kind not in ("encoder", "write"):
        return 0, 0
    read = rows or [round(job.seconds * 100) // getattr(spec.reads.embed, "stride", 1)]
    encoding = sum(sum(count.flops(0, source=n, logits=0).values()) for n in read)
    if job.kind == "encoder":
        return 0, encoding - sum(map(partial(_cross_flops, count), read))
    middle, source = max(1, job.new // 2), sum(read) // len(read)
    own = len(read) * job.beams * count.cache_bytes(middle, dtype=ONE_BYTE)
    cross = len(read) * count.cache_bytes(0, dtype=ONE_BYTE, source=source)
    computed = len(read) * job.beams * count.decode_flops(middle, source=source)
    return job.new * (weights + number * (own + cross)), encoding + job.new * computed


def _cross_flops(count: Count, source: int) -> int:
    """FLOPs of the maps of a source to the keys and values that the decoder looks at."""
    blocks = () if count.spec.decoder is None else count.spec.decoder.blocks
    maps = [part for block in blocks if block.cross is not None for part in (block.cross.k, block.cross.v)]
    return sum(2 * source * part.inputs * part.outputs for part in maps)


# ---------------------------------------------------------------- rates of the machine


def measure_rates(device: str = "cpu", *, size: int = READ_BYTES, square: int = SQUARE, repeat: int = 5) -> Rates:
    """Rates of this machine by as many threads as torch uses: medians of `repeat` runs.

    Reading is the faster of two: a sum of 64-bit integers, and a product of a matrix and a vector of fp32.  On a GPU
    there is eight times as much to read and the matrices have four times the sides, so that starting the work does not
    count.
    """
    if device != "cpu":
        size, square = 8 * size, 4 * square
    floats = torch.ones(size // 4, device=device)
    words, matrix = floats.view(torch.int64), floats.view(-1, 1 << 10)
    vector = torch.ones(1 << 10, device=device)
    ways = (lambda: words.sum(), lambda: matrix @ vector)
    read = max(words.nbytes / _median_seconds(way, device, repeat) for way in ways)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.rand(square, square, device=device).to(dtype)  # equal numbers would be multiplied faster on a GPU
        rates[dtype] = 2 * square**3 / _median_seconds(partial(torch.matmul, a, a), device, repeat)
    return Rates(read, rates[torch.float32], rates[torch.bfloat16])


def _median_seconds(call: Callable[[], object], device: str, repeat: int) -> float:
    times = []
    for _ in range(repeat + 1):  # the first is a warm-up
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
