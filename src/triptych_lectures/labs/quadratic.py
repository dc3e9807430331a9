"""What do T tokens of attention cost?  (Lectures L4 12.9 and exercises 9 and 19)

The claim is T squared for whatever compares all pairs and T for whatever does not.  The exponents are accepted within
0.35 of 2 and of 1: on one machine repeated fits differ by about 0.2, and 1.5 decides between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import attend, attend_reference, linear
from triptych.count import count
from triptych.errors import InputError
from triptych.families import read_config
from triptych.model import Model
from triptych.page import Curve, Facts, TableSection
from triptych.spec import Mask, block_sparse, causal, window
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.memory import peak_bytes
from triptych_lectures.labs.small import block, decoder, power

SAME = 512  # tokens at which results that should be equal are compared
LINEAR, SQUARE = (0.65, 1.35), (1.65, 2.35)
CALLS, ENOUGH = 3, 0.05  # of one measurement, at most; seconds after which no further call is made
OTHER_NUMBERS = 1 << 23  # fp32, 32 MiB
LINEAR_BYTES, SQUARE_BYTES = (0.9, 1.1), (1.9, 2.1)
LAYER_VOCAB = 64
FALSIFIED_BY = (
    "The claim is false if the processor time of full attention does not grow as T² where scores exceed the"
    " processor's caches, or if that of a window does. It is false too if the fused kernel holds a score matrix, or"
    " if attention that should be exact differs from the definition."
)


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...] = size(
        (128, 256, 512, 1024, 2048, 4096, 8192), "tokens T, ascending; those of short and long too", ascending=True
    )
    short: tuple[int, ...] = size((128, 512), "first and last T where a layer's exponent is fitted while small")
    long: tuple[int, ...] = size((2048, 8192), "first and last T where the other exponents are fitted")
    heads: int = size(2, "heads")
    width: int = size(64, "head width")
    window: int = size(128, "keys that a window sees")
    block: int = size(64, "tokens of a block of the block pattern")
    layer: int = size(512, "model width of the whole layer that is timed, a multiple of the head width")
    resident: int = size(8192, "tokens at which the memory of the process is measured")
    repeats: int = size(1, "times that each is measured; the shortest counts")

    def __post_init__(self) -> None:
        for name, ends in (("short", self.short), ("long", self.long)):
            if len(ends) != 2 or ends[0] >= ends[1] or not {*ends} <= {*self.lengths}:
                raise InputError(f"size {name}: give the first and the last T of a fit, both of them in lengths")
        if len([length for length in self.lengths[1:] if self.long[0] <= length <= self.long[1]]) < 2:
            raise InputError("sizes lengths and long: long must have two lengths, each with a shorter one before it")
        if self.layer % self.width:
            raise InputError(f"size layer: must be a multiple of the head width, {self.width}")


FULL = Sizes(repeats=2)
SEEDS = 5

Tensors = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Measured = dict[str, dict[int, float]]  # by mechanism, by tokens


@dataclass(frozen=True)
class MechanismCost:
    """One way to attend causally, with `groups` key/value heads, and the bounds of its exponents.  `exact` is what it
    must agree with, None where it computes something else; `nbytes` is None where a kernel hides its memory."""

    call: Call
    time: tuple[float, float]
    nbytes: tuple[float, float] | None
    groups: int
    exact: Call | None = None


def _definition(mask: Mask) -> Call:
    return lambda q, k, v: attend_reference(q, k, v, mask=mask)


def _fast(mask: Mask) -> Call:
    return lambda q, k, v: attend(q, k, v, mask=mask)


def mechanisms(sizes: Sizes) -> dict[str, MechanismCost]:
    """All that are measured, by name."""
    every, fast = _definition(causal()), _fast(causal())
    band = causal() & window(sizes.window)
    blocks = causal() & block_sparse(sizes.block, local=2, first=1)
    heads = sizes.heads
    return {
        "full": MechanismCost(every, SQUARE, SQUARE_BYTES, heads),
        "fused": MechanismCost(fast, SQUARE, None, heads, exact=every),
        "one key/value head": MechanismCost(fast, SQUARE, None, 1, exact=every),
        f"window of {sizes.window}": MechanismCost(_fast(band), LINEAR, LINEAR_BYTES, heads, exact=_definition(band)),
        "block-sparse": MechanismCost(_fast(blocks), LINEAR, LINEAR_BYTES, heads, exact=_definition(blocks)),
        "linear": MechanismCost(lambda q, k, v: linear(q, k, v, mask=causal()), LINEAR, LINEAR_BYTES, heads),
    }


@torch.inference_mode()
def run(setup: Setup) -> LabResult:
    """Seconds and bytes of each mechanism over T, and the powers of T they grow as; then a whole layer's time."""
    sizes = setup.sized(Sizes(), FULL)
    ways, short, long = mechanisms(sizes), sizes.short, sizes.long
    noise = torch.Generator().manual_seed(setup.seed)
    seconds, nbytes = _measured(ways, sizes, noise, setup)
    setup.progress(f"timing a layer of width {sizes.layer} and its matmuls alone")
    layer = _layer(sizes, setup.seed)
    resident = _resident(ways, sizes, noise)
    share = {name: grown / (4 * sizes.heads * sizes.resident**2) for name, grown in resident.items()}
    checks = (
        *(
            Check(f"{name}: seconds grow as T to the power", _power(seconds[name], long), *way.time)
            for name, way in ways.items()
        ),
        *(
            Check(f"{name}: bytes grow as T to the power", _power(nbytes[name], long), *way.nbytes)
            for name, way in ways.items()
            if way.nbytes is not None
        ),
        *(
            Check(
                f"{name}: memory of the process at {sizes.resident:,} tokens, over one score matrix",
                share[name],
                *bounds,
            )
            for name, bounds in (("full", (0.9, None)), ("fused", (None, 0.25)))
            if name in share
        ),
        Check("the layer's matmuls alone: seconds grow as T to the power", _power(layer["matmuls"], long), *LINEAR),
        Check(
            f"the layer, {short[0]} to {short[1]} tokens: seconds grow as T to the power",
            _power(layer["layer"], short),
            most=1.5,
        ),
        Check(
            f"the layer less its matmuls and all that grows as T, {long[0]:,} to {long[1]:,} tokens:"
            " seconds grow as T to the power",
            _power(_faster(layer["the rest"]), long),
            *SQUARE,
        ),
        Check("largest difference between mechanisms that are exact", max(_differences(ways, sizes, noise)), most=1e-4),
        Check(
            "score FLOPs counted at T 32,768 over those at 2,048",
            _counted(sizes, 32_768) / _counted(sizes, 2_048),
            256.0,
            256.0,
        ),
    )
    meaning = (
        "Every token is compared with every other, so the work grows as T squared, and with the scores written out the"
        " memory does too. The fused kernel computes the same numbers tile by tile: T squared work, but the process"
        " never holds a score matrix. Only what leaves pairs out grows as T in both: a window, a block pattern, or"
        " linear attention, which is another function. Sharing key/value heads saves their memory, not the work. In a"
        " whole layer the projections and the MLP, linear in T, hide the square at small T; without them it shows."
        " Bytes are those of tensors between operations; the memory of the process also shows what a kernel takes."
    )
    sections = (
        *_tables(seconds, nbytes, layer, sizes),
        _facts(share, sizes),
        *_curves(seconds, nbytes, layer, sizes),
    )
    return LabResult("What do T tokens of attention cost?", meaning, checks, sections)


def _measured(
    ways: Mapping[str, MechanismCost], sizes: Sizes, noise: torch.Generator, setup: Setup
) -> tuple[Measured, Measured]:
    """(seconds, bytes) of one call of each mechanism at each length."""
    seconds: Measured = {name: {} for name in ways}
    nbytes: Measured = {name: {} for name in ways}
    lengths = sizes.lengths
    for repeat in range(sizes.repeats):
        setup.progress(
            f"{len(ways)} mechanisms, {lengths[0]} to {lengths[-1]:,} tokens: {repeat + 1} of {sizes.repeats}"
        )
        for length in lengths:
            for name, way in ways.items():
                inputs = _inputs(length, way.groups, sizes, noise)
                seconds[name][length] = min(_seconds(way.call, inputs), seconds[name].get(length, math.inf))
                nbytes[name][length] = peak_bytes(way.call, inputs) if not repeat else nbytes[name][length]
    return seconds, nbytes


def _inputs(length: int, groups: int, sizes: Sizes, noise: torch.Generator) -> Tensors:
    q, k, v = (torch.randn(1, heads, length, sizes.width, generator=noise) for heads in (sizes.heads, groups, groups))
    return q, k, v


def _seconds(call: Callable[..., object], inputs: tuple[Tensor, ...]) -> float:
    """Of processor time on one thread, which other work on the machine lengthens little; the shortest of several short
    calls.  Before each the processor's caches are filled with other numbers: short inputs would stay in them and
    long ones not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls: list[float] = []
        while sum(calls) < ENOUGH and len(calls) < CALLS:
            torch.ones(OTHER_NUMBERS).sum()
            start = time.thread_time()
            call(*inputs)
            calls.append(time.thread_time() - start)
        return min(calls)
    finally:
        torch.set_num_threads(threads)


def _layer(sizes: Sizes, seed: int) -> Measured:
    """Seconds of a decoder of one layer, of its weights' matmuls alone, and of the rest, over T."""
    spec = decoder(LAYER_VOCAB, [block(sizes.layer, sizes.layer // sizes.width, 4 * sizes.layer)])
    model = Model(nn.new(spec, seed))
    weights = [p for name, p in model.module.named_parameters() if p.dim() == 2 and "embed" not in name]
    times: Measured = {"layer": {}, "matmuls": {}}
    for length in sizes.lengths:
        ids = [i % LAYER_VOCAB for i in range(length)]
        rows = {p.shape[1]: torch.randn(length, p.shape[1]) for p in weights}
        for _ in range(sizes.repeats):
            for name, call in (
                ("layer", lambda ids=ids: model.logits([ids])),
                ("matmuls", lambda rows=rows: [rows[p.shape[1]] @ p.T for p in weights]),
            ):
                times[name][length] = min(_seconds(call, ()), times[name].get(length, math.inf))
    rest = {length: max(times["layer"][length] - times["matmuls"][length], 1e-9) for length in sizes.lengths}
    return times | {"the rest": rest}


def _faster(seconds: Mapping[int, float]) -> dict[int, float]:
    """Their part that grows as T²: of u T + v T² at a and b the first term cancels, and v b² (1 - a / b) is left."""
    return {b: max((seconds[b] - b / a * seconds[a]) / (1 - a / b), 1e-9) for a, b in pairwise(seconds)}


def _resident(ways: Mapping[str, MechanismCost], sizes: Sizes, noise: torch.Generator) -> dict[str, int]:
    """By how many bytes one call raises the largest resident memory of this process, for full and fused attention;
    empty where the system cannot reset that figure (it is Linux that can)."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    grown: dict[str, int] = {}
    for name in ("fused", "full"):
        inputs = _inputs(sizes.resident, sizes.heads, sizes, noise)
        ways[name].call(*(x[:, :, :SAME] for x in inputs))  # loads what the first call loads
        try:
            clear.write_text("5")
            before = _peak_resident(status)
            ways[name].call(*inputs)
            grown[name] = _peak_resident(status) - before
        except OSError:
            return {}
    return grown


def _peak_resident(status: Path) -> int:
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _power(measured: Mapping[int, float], fitted: Sequence[int]) -> float:
    """The power of T that the measurements grow as, from `fitted[0]` to `fitted[1]` tokens."""
    lengths = [n for n in measured if fitted[0] <= n <= fitted[1]]
    return power(lengths, [measured[n] for n in lengths])


def _differences(ways: Mapping[str, MechanismCost], sizes: Sizes, noise: torch.Generator) -> list[float]:
    """The largest difference of each exact mechanism from the definition."""
    differences = []
    for way in ways.values():
        if way.exact is not None:
            inputs = _inputs(SAME, way.groups, sizes, noise)
            differences.append(float((way.call(*inputs) - way.exact(*inputs)).abs().max()))
    return differences


def _counted(sizes: Sizes, length: int) -> int:
    """By the arithmetic of `triptych count`, for a llama of one layer."""
    shape = {
        "hidden_size": sizes.heads * sizes.width,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "vocab_size": 256,
    }
    model = {"model_type": "llama", "num_attention_heads": sizes.heads, "max_position_embeddings": 32_768}
    return count(read_config(model | shape, where="quadratic")).flops(length)["scores"]


def _tables(
    seconds: Measured, nbytes: Measured, layer: Measured, sizes: Sizes
) -> tuple[TableSection, TableSection, TableSection]:
    shown = sizes.lengths[::2]
    header = ("", *(f"T {n:,}" for n in shown), "power of T")

    def milliseconds(x: float) -> str:
        return f"{x * 1e3:,.1f} ms"

    def table(title: str, measured: Measured, form: Callable[[float], str]) -> TableSection:
        rows = [
            [name, *(form(times[n]) for n in shown), f"{_power(times, sizes.long):.2f}"]
            for name, times in measured.items()
        ]
        return TableSection(title, header, rows)

    scores = [f"{4 * sizes.heads * n * n / 2**20:,.1f} MiB" for n in shown]
    memory = table("Memory of tensors beside q, k and v", nbytes, lambda x: f"{x / 2**20:,.1f} MiB")
    memory = replace(memory, rows=[["one score matrix, counted", *scores, "2.00"], *memory.rows])
    return (
        table(f"Processor time, {sizes.heads} heads of width {sizes.width}", seconds, milliseconds),
        memory,
        table(f"A decoder of one layer of width {sizes.layer}", layer, milliseconds),
    )


def _facts(share: Mapping[str, float], sizes: Sizes) -> Facts:
    longest = sizes.lengths[-1]
    keys = [
        (f"k and v, {g} key/value heads", f"{8 * g * sizes.width * longest / 2**20:.1f} MiB") for g in (sizes.heads, 1)
    ]
    process = [(f"memory of the process, {name}", f"{x:.2f} score matrices") for name, x in share.items()]
    return Facts(f"At {longest:,} tokens", keys + process)


def _curves(seconds: Measured, nbytes: Measured, layer: Measured, sizes: Sizes) -> tuple[Curve, Curve, Curve]:
    def curve(title: str, unit: str, measured: Measured) -> Curve:
        lines = {name: [(float(n), x) for n, x in values.items()] for name, values in measured.items()}
        return Curve(title, "T", unit, lines, {}, "xy")

    return (
        curve("Processor time of attention", "s", seconds),
        curve("Memory of tensors beside q, k and v", "bytes", nbytes),
        curve(f"A layer of width {sizes.layer}, and its matmuls alone", "s", layer),
    )
