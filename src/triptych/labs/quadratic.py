"""What do T tokens of attention cost?  (Lectures L4 12.9 and exercises 9 and 19)

The claim, T squared for whatever compares all pairs and T for whatever does not, is false if the processor time of full
attention does not grow as T² where scores exceed the processor's caches, or if that of a window does.  The exponents
are accepted within 0.35 of 2 and of 1: on one machine repeated fits differ by about 0.2, and 1.5 decides between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import attend, attend_reference, linear
from triptych.count import count
from triptych.families import read_config
from triptych.labs.lab import Check, LabResult, Setup
from triptych.labs.memory import peak_bytes
from triptych.labs.small import block, decoder, power
from triptych.model import Model
from triptych.page import Curve, Facts, TableSection
from triptych.spec import Mask, block_sparse, causal, window

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, WIDTH = 2, 64
REPEATS = 2  # the smallest time counts
SAME = 512  # tokens at which results that should be equal are compared
RESIDENT = 8192  # tokens at which the memory of the process is measured
LINEAR, SQUARE = (0.65, 1.35), (1.65, 2.35)
LINEAR_BYTES, SQUARE_BYTES = (0.9, 1.1), (1.9, 2.1)
LAYER, LAYER_VOCAB = 512, 64  # model width of the whole layer that is timed
SHORT, LONG = (128, 512), (2048, 8192)  # where its exponent is fitted

Tensors = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Measured = dict[str, dict[int, float]]  # by mechanism, by tokens
BAND = causal() & window(128)
BLOCKS = causal() & block_sparse(64, local=2, first=1)


@dataclass(frozen=True)
class MechanismCost:
    """One way to attend causally, the bounds of its exponents, and the lengths these are fitted to.  `exact` is what
    it must agree with, None where it computes something else; `nbytes` is None where a kernel hides its memory."""

    call: Call
    time: tuple[float, float]
    nbytes: tuple[float, float] | None
    fitted: tuple[int, int] = LONG
    exact: Call | None = None
    groups: int = HEADS


def _definition(mask: Mask) -> Call:
    return lambda q, k, v: attend_reference(q, k, v, mask=mask)


def _fast(mask: Mask) -> Call:
    return lambda q, k, v: attend(q, k, v, mask=mask)


FULL = _definition(causal())
MECHANISMS: Mapping[str, MechanismCost] = {
    "full": MechanismCost(FULL, SQUARE, SQUARE_BYTES),
    "fused": MechanismCost(_fast(causal()), SQUARE, None, exact=FULL),
    "one key/value head": MechanismCost(_fast(causal()), SQUARE, None, exact=FULL, groups=1),
    "window of 128": MechanismCost(_fast(BAND), LINEAR, LINEAR_BYTES, exact=_definition(BAND)),
    "block-sparse": MechanismCost(_fast(BLOCKS), LINEAR, LINEAR_BYTES, exact=_definition(BLOCKS)),
    "linear": MechanismCost(lambda q, k, v: linear(q, k, v, mask=causal()), LINEAR, LINEAR_BYTES),
}


@torch.inference_mode()
def run(setup: Setup) -> LabResult:
    """Seconds and bytes of each mechanism over T, and the powers of T they grow as; then a whole layer's time."""
    noise = torch.Generator().manual_seed(setup.seed)
    seconds, nbytes = _mechanisms(noise, setup)
    setup.progress(f"timing a layer of width {LAYER} and its matmuls alone")
    layer = _layer(setup.seed)
    resident = _resident(noise)
    share = {name: grown / (4 * HEADS * RESIDENT**2) for name, grown in resident.items()}
    checks = (
        *(
            Check(f"{name}: seconds grow as T to the power", _power(seconds[name], one.fitted), *one.time)
            for name, one in MECHANISMS.items()
        ),
        *(
            Check(f"{name}: bytes grow as T to the power", _power(nbytes[name], one.fitted), *one.nbytes)
            for name, one in MECHANISMS.items()
            if one.nbytes is not None
        ),
        *(
            Check(f"{name}: memory of the process at {RESIDENT:,} tokens, over one score matrix", share[name], *bounds)
            for name, bounds in (("full", (0.9, None)), ("fused", (None, 0.25)))
            if name in share
        ),
        Check("the layer's matmuls alone: seconds grow as T to the power", _power(layer["matmuls"], LONG), *LINEAR),
        Check(
            f"the layer, {SHORT[0]} to {SHORT[1]} tokens: seconds grow as T to the power",
            _power(layer["layer"], SHORT),
            most=1.5,
        ),
        Check(
            f"the layer less its matmuls, {LONG[0]:,} to {LONG[1]:,} tokens: the same",
            _power(layer["the rest"], LONG),
            *SQUARE,
        ),
        Check("largest difference between mechanisms that are exact", max(_differences(noise)), most=1e-4),
        Check("score FLOPs counted at T 32,768 over those at 2,048", _counted(32_768) / _counted(2_048), 256.0, 256.0),
    )
    meaning = (
        "Every token is compared with every other, so the work grows as T squared, and with the scores written out the"
        " memory does too. The fused kernel computes the same numbers tile by tile: T squared work, but the process"
        " never holds a score matrix. Only what leaves pairs out grows as T in both: a window, a block pattern, or"
        " linear attention, which is another function. Sharing key/value heads saves their memory, not the work. In a"
        " whole layer the projections and the MLP, linear in T, hide the square at small T; without them it shows."
        " Bytes are those of tensors between operations; the memory of the process also shows what a kernel takes."
    )
    sections = (*_tables(seconds, nbytes, layer), _facts(share), *_curves(seconds, nbytes, layer))
    return LabResult("What do T tokens of attention cost?", meaning, checks, sections)


def _mechanisms(noise: torch.Generator, setup: Setup) -> tuple[Measured, Measured]:
    """(seconds, bytes) of one call of each mechanism at each length."""
    seconds: Measured = {name: {} for name in MECHANISMS}
    nbytes: Measured = {name: {} for name in MECHANISMS}
    for repeat in range(REPEATS):
        setup.progress(
            f"{len(MECHANISMS)} mechanisms, {LENGTHS[0]} to {LENGTHS[-1]:,} tokens: {repeat + 1} of {REPEATS}"
        )
        for length in LENGTHS:
            for name, one in MECHANISMS.items():
                inputs = _inputs(length, one.groups, noise)
                seconds[name][length] = min(_seconds(one.call, inputs), seconds[name].get(length, math.inf))
                nbytes[name][length] = peak_bytes(one.call, inputs) if not repeat else nbytes[name][length]
    return seconds, nbytes


def _inputs(length: int, groups: int, noise: torch.Generator) -> Tensors:
    q, k, v = (torch.randn(1, heads, length, WIDTH, generator=noise) for heads in (HEADS, groups, groups))
    return q, k, v


def _seconds(call: Callable[..., object], inputs: tuple[Tensor, ...]) -> float:
    """Of processor time on one thread, which other work on the machine lengthens little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.thread_time()
        call(*inputs)
        return time.thread_time() - start
    finally:
        torch.set_num_threads(threads)


def _layer(seed: int) -> Measured:
    """Seconds of a decoder of one layer, of its weights' matmuls alone, and of the rest, over T."""
    spec = decoder(LAYER_VOCAB, [block(LAYER, LAYER // WIDTH, 4 * LAYER)])
    model = Model(nn.new(spec, seed))
    weights = [p for name, p in model.module.named_parameters() if p.dim() == 2 and "embed" not in name]
    times: Measured = {"layer": {}, "matmuls": {}}
    for length in LENGTHS:
        ids = [i % LAYER_VOCAB for i in range(length)]
        rows = {p.shape[1]: torch.randn(length, p.shape[1]) for p in weights}
        for _ in range(REPEATS):
            for name, call in (
                ("layer", lambda ids=ids: model.logits([ids])),
                ("matmuls", lambda rows=rows: [rows[p.shape[1]] @ p.T for p in weights]),
            ):
                times[name][length] = min(_seconds(call, ()), times[name].get(length, math.inf))
    rest = {length: max(times["layer"][length] - times["matmuls"][length], 1e-9) for length in LENGTHS}
    return times | {"the rest": rest}


def _resident(noise: torch.Generator) -> dict[str, int]:
    """By how many bytes one call raises the largest resident memory of this process, for full and fused attention;
    empty where the system cannot reset that figure (it is Linux that can)."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    grown: dict[str, int] = {}
    for name in ("fused", "full"):
        inputs = _inputs(RESIDENT, HEADS, noise)
        MECHANISMS[name].call(*(x[:, :, :SAME] for x in inputs))  # loads what the first call loads
        try:
            clear.write_text("5")
            before = _peak_resident(status)
            MECHANISMS[name].call(*inputs)
            grown[name] = _peak_resident(status) - before
        except OSError:
            return {}
    return grown


def _peak_resident(status: Path) -> int:
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _power(measured: Mapping[int, float], fitted: tuple[int, int]) -> float:
    """The power of T that the measurements grow as, from `fitted[0]` to `fitted[1]` tokens."""
    lengths = [n for n in measured if fitted[0] <= n <= fitted[1]]
    return power(lengths, [measured[n] for n in lengths])


def _differences(noise: torch.Generator) -> list[float]:
    """The largest difference of each exact mechanism from the definition."""
    differences = []
    for one in MECHANISMS.values():
        if one.exact is not None:
            inputs = _inputs(SAME, one.groups, noise)
            differences.append(float((one.call(*inputs) - one.exact(*inputs)).abs().max()))
    return differences


def _counted(length: int) -> int:
    """By the arithmetic of `triptych count`, for a llama of one layer."""
    shape = {"hidden_size": HEADS * WIDTH, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 256}
    model = {"model_type": "llama", "num_attention_heads": HEADS, "max_position_embeddings": 32_768}
    return count(read_config(model | shape, where="quadratic")).flops(length)["scores"]


def _tables(seconds: Measured, nbytes: Measured, layer: Measured) -> tuple[TableSection, TableSection, TableSection]:
    shown = LENGTHS[::2]
    header = ("", *(f"T {n:,}" for n in shown), "power of T")

    def milliseconds(x: float) -> str:
        return f"{x * 1e3:,.1f} ms"

    def table(title: str, measured: Measured, form: Callable[[float], str]) -> TableSection:
        rows = [
            [name, *(form(times[n]) for n in shown), f"{_power(times, LONG):.2f}"] for name, times in measured.items()
        ]
        return TableSection(title, header, rows)

    scores = [f"{4 * HEADS * n * n / 2**20:,.1f} MiB" for n in shown]
    memory = table("Memory of tensors beside q, k and v", nbytes, lambda x: f"{x / 2**20:,.1f} MiB")
    memory = replace(memory, rows=[["one score matrix, counted", *scores, "2.00"], *memory.rows])
    return (
        table(f"Processor time, {HEADS} heads of width {WIDTH}", seconds, milliseconds),
        memory,
        table(f"A decoder of one layer of width {LAYER}", layer, milliseconds),
    )


def _facts(share: Mapping[str, float]) -> Facts:
    sizes = [(f"k and v, {g} key/value heads", f"{8 * g * WIDTH * LENGTHS[-1] / 2**20:.1f} MiB") for g in (HEADS, 1)]
    process = [(f"memory of the process, {name}", f"{x:.2f} score matrices") for name, x in share.items()]
    return Facts(f"At {LENGTHS[-1]:,} tokens", sizes + process)


def _curves(seconds: Measured, nbytes: Measured, layer: Measured) -> tuple[Curve, Curve, Curve]:
    def curve(title: str, unit: str, measured: Measured) -> Curve:
        lines = {name: [(float(n), x) for n, x in values.items()] for name, values in measured.items()}
        return Curve(title, "T", unit, lines, {}, "xy")

    return (
        curve("Processor time of attention", "s", seconds),
        curve("Memory of tensors beside q, k and v", "bytes", nbytes),
        curve(f"A layer of width {LAYER}, and its matmuls alone", "s", layer),
    )
