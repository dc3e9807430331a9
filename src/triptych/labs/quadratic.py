"""What do T tokens of attention cost? (lectures L4 10 and exercises 9 and 19)"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triptych.attention import attend, attend_reference, linear
from triptych.count import count
from triptych.families import read_config
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import power
from triptych.page import Curve, Facts, TableSection
from triptych.spec import block_sparse, causal, window

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, WIDTH = 4, 64
REPEATS = 3  # the least counts
SAME = 512  # tokens at which what should be equal is compared
LINEAR, SQUARE = (0.5, 1.45), (1.55, 2.9)  # exponents; fresh memory costs time of its own, so 2 may come out as 2.5
LINEAR_BYTES, SQUARE_BYTES = (0.9, 1.2), (1.8, 2.1)

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
BAND = causal() & window(128)
BLOCKS = causal() & block_sparse(64, local=2, first=1)


@dataclass(frozen=True)
class Way:
    """One way to attend causally, the lengths it is run at and those its exponents are fitted to, and what these must
    be.  `exact` is what it must agree with, None where it computes something else."""

    call: Call
    time: tuple[float, float]
    nbytes: tuple[float, float]
    fitted: tuple[int, int]
    exact: Call | None = None
    groups: int = HEADS


def _definition(mask: Any) -> Call:
    return lambda q, k, v: attend_reference(q, k, v, mask=mask)


def _fast(mask: Any) -> Call:
    return lambda q, k, v: attend(q, k, v, mask=mask)


FULL = _definition(causal())
WAYS: Mapping[str, Way] = {
    "full": Way(FULL, SQUARE, SQUARE_BYTES, (512, 2048)),
    "fused": Way(_fast(causal()), SQUARE, LINEAR_BYTES, (1024, 8192), FULL),
    "one key/value head": Way(_fast(causal()), SQUARE, LINEAR_BYTES, (1024, 8192), FULL, groups=1),
    "window of 128": Way(_fast(BAND), LINEAR, LINEAR_BYTES, (1024, 8192), _definition(BAND)),
    "block-sparse": Way(_fast(BLOCKS), LINEAR, LINEAR_BYTES, (1024, 8192), _definition(BLOCKS)),
    "linear": Way(lambda q, k, v: linear(q, k, v, mask=causal()), LINEAR, LINEAR_BYTES, (1024, 8192)),
}


@torch.inference_mode()
def run(setup: Setup) -> Finding:
    """Seconds and bytes of every way to attend over T, and the powers of T they grow as."""
    noise = torch.Generator().manual_seed(setup.seed)
    seconds: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    nbytes: dict[str, dict[int, float]] = {name: {} for name in WAYS}
    for repeat in range(REPEATS):
        setup.say(
            f"attending in {len(WAYS)} ways over {LENGTHS[0]} to {LENGTHS[-1]:,} tokens: {repeat + 1} of {REPEATS}"
        )
        for length in LENGTHS:
            for name, way in WAYS.items():
                if length <= way.fitted[1]:
                    given = _inputs(length, way.groups, noise)
                    seconds[name][length] = min(_seconds(way.call, given), seconds[name].get(length, math.inf))
                    nbytes[name][length] = peak(way.call, given) if not repeat else nbytes[name][length]
    checks = (
        *(
            Check(f"{name}: seconds grow as T to the power", _power(seconds[name], way.fitted), *way.time)
            for name, way in WAYS.items()
        ),
        *(
            Check(f"{name}: bytes grow as T to the power", _power(nbytes[name], way.fitted), *way.nbytes)
            for name, way in WAYS.items()
        ),
        Check("greatest difference between ways that are exact", max(_differences(noise)), most=1e-4),
        Check("score FLOPs counted at T 32,768 over those at 2,048", _counted(32_768) / _counted(2_048), 256.0, 256.0),
    )
    meaning = (
        "Every token looks at every other, so the work grows as T squared, and written out so does the memory: the"
        " score matrix. The fused kernel makes the same numbers tile by tile: still T squared work, and memory that"
        " grows as T. Only what leaves pairs out grows as T in both - a window, a block pattern, or linear attention,"
        " which is another function. Sharing key/value heads saves their memory, not the work. Bytes are those of"
        " tensors between operations; what a kernel holds for itself is not seen."
    )
    return Finding("What do T tokens of attention cost?", meaning, checks, _sections(seconds, nbytes))


def _inputs(length: int, groups: int, noise: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, heads, length, WIDTH, generator=noise) for heads in (HEADS, groups, groups))
    return q, k, v


def _seconds(call: Call, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of processor time on one thread, which a busy machine hardly lengthens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.thread_time()
        call(*given)
        return time.thread_time() - began
    finally:
        torch.set_num_threads(threads)


def peak(call: Call, given: tuple[Tensor, Tensor, Tensor]) -> int:
    """The most bytes that tensors made by `call` hold at one time, its result included and what it was given not."""
    watch = _Watch(given)
    with watch:
        call(*given)
    return watch.most


class _Watch(TorchDispatchMode):
    """Sees every storage an operation makes, and its end."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = {x.untyped_storage().data_ptr(): 0 for x in given}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()).data_ptr() not in self.live:
                self.live[storage.data_ptr()] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.data_ptr())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, pointer: int) -> None:
        self.now -= self.live.pop(pointer)


def _power(measured: Mapping[int, float], fitted: tuple[int, int]) -> float:
    """The power of T that the measurements grow as, from `fitted[0]` to `fitted[1]` tokens."""
    lengths = [n for n in measured if fitted[0] <= n <= fitted[1]]
    return power(lengths, [measured[n] for n in lengths])


def _differences(noise: torch.Generator) -> list[float]:
    found = []
    for way in WAYS.values():
        if way.exact is not None:
            given = _inputs(SAME, way.groups, noise)
            found.append(float((way.call(*given) - way.exact(*given)).abs().max()))
    return found


def _counted(length: int) -> int:
    """By the arithmetic of `triptych count`, for a llama of one layer."""
    shape = {"hidden_size": HEADS * WIDTH, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 256}
    model = {"model_type": "llama", "num_attention_heads": HEADS, "max_position_embeddings": 32_768}
    return count(read_config(model | shape, where="quadratic")).flops(length)["scores"]


def _sections(
    seconds: Mapping[str, Mapping[int, float]], nbytes: Mapping[str, Mapping[int, float]]
) -> tuple[TableSection, TableSection, Facts, Curve, Curve]:
    def table(title: str, measured: Mapping[str, Mapping[int, float]], form: Callable[[float], str]) -> TableSection:
        rows = []
        for name, way in WAYS.items():
            cells = [form(measured[name][n]) if n in measured[name] else "" for n in LENGTHS[::2]]
            rows.append([name, *cells, f"{_power(measured[name], way.fitted):.2f}"])
        return TableSection(title, ("", *(f"T {n:,}" for n in LENGTHS[::2]), "power of T"), rows)

    def curve(title: str, unit: str, measured: Mapping[str, Mapping[int, float]]) -> Curve:
        return Curve(
            title,
            "T",
            unit,
            {name: [(float(n), x) for n, x in found.items()] for name, found in measured.items()},
            {},
            "xy",
        )

    scores = [f"{4 * HEADS * n * n / 2**20:,.1f} MiB" for n in LENGTHS[::2]]
    memory = table("Memory beside q, k and v", nbytes, lambda x: f"{x / 2**20:,.1f} MiB")
    memory = replace(memory, rows=[["one score matrix, counted", *scores, "2.00"], *memory.rows])
    kept = [(f"{g} key/value heads", f"{8 * g * WIDTH * LENGTHS[-1] / 2**20:.1f} MiB") for g in (HEADS, 1)]
    return (
        table(f"Time on one core, {HEADS} heads of width {WIDTH}", seconds, lambda x: f"{x * 1e3:,.1f} ms"),
        memory,
        Facts(f"k and v of {LENGTHS[-1]:,} tokens", kept),
        curve("Time on one core", "s", seconds),
        curve("Memory beside q, k and v", "bytes", nbytes),
    )
