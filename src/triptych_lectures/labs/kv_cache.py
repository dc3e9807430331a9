"""What does the KV cache change, and what does it save?  (Lectures L0 2.9 and L4 exercise 18)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.count import count
from triptych.errors import InputError
from triptych.families import read_config
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.nn import Batch, empty
from triptych.page import Facts, TableSection
from .bounds import rounded_up
from .counting import ProductCounts, products, shortest_seconds
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, size
from .parameters import QWEN3_4B
from .pretrained import decoder
from .small_models import curve


class KvCacheLab(Lab):
    name = "kv-cache"
    seeds = 1

    prompt: str = size("Once upon a time, in a village by the sea, there lived", "text that is continued")
    written: int = size(12, "tokens written both ways", full=24)
    lengths: Ints = size(
        (64, 128, 512),
        "tokens before the one that is counted; powers of two from 64 on",
        values=2,
        ascending=True,
        full=(64, 128, 256, 512),
    )
    repeats: int = size(2, "times that each is timed; the shortest is shown", full=3)

    def __post_init__(self) -> None:
        if any(n < 64 or n & (n - 1) for n in self.lengths):
            # a cache of another length has room for more positions than it holds
            raise InputError("size lengths: give powers of two from 64 on")

    @torch.inference_mode()
    def run(self, setup: Setup) -> LabResult:
        model = decoder(setup)
        if model.spec.layout != "decoder":
            raise InputError(f"this lab continues a prompt: it needs a decoder, not an {model.spec.layout}")
        (prompt,), count_new = model.ids([self.prompt]), self.written
        setup.progress(f"writing {count_new} tokens with the cache, and again without")
        cached, with_cache = _write(prompt, partial(_cached, _engine(model)), count_new)
        plain, without = _write(prompt, partial(_recomputed, model), count_new)
        lengths = [n for n in self.lengths if model.spec.context is None or n <= model.spec.context]
        if len(lengths) < 2:
            raise InputError(
                f"size lengths: two or more must fit in the model's context of {model.spec.context} tokens"
            )
        setup.progress(f"counting one more token after {', '.join(map(str, lengths))}")
        text = (cached * (max(lengths) // len(cached) + 1))[: max(lengths)]
        costs = [NextToken.measured(model, text[:n], self.repeats) for n in lengths]
        largest = float((with_cache - without).abs().max())
        unchanged = clause(
            "A token's keys and values depend on what came before it and never change again, so they are computed"
            f" once and kept. Nothing is approximated: the {self.written} tokens are the same, and no logit differs by"
            f" more than {rounded_up(largest, '.1g')}.",
            Check("tokens that differ with the cache", sum(a != b for a, b in zip(cached, plain, strict=True)), most=0),
            Check("greatest difference of a logit", largest, most=1e-3),
            instead="With the cache something else is computed",
        )
        return self.result((unchanged, *_costs(model, lengths, costs)), _sections(model, lengths, costs))


def _costs(model: Model, lengths: Sequence[int], costs: Sequence[NextToken]) -> Clauses:
    """What one more token costs after each of `lengths` tokens, in FLOPs, in bytes read and in bytes kept."""
    shortest, longest = lengths[0], lengths[-1]
    first, *_, last = [cost.fewer_flops for cost in costs]
    counted, longer = _counted_bytes(model, longest), longest / shortest
    growing = 0.75 * longer, 1.25 * longer
    read = costs[-1].again.counts.read / costs[-1].once.counts.read
    yield clause(
        f"The next token is one row of work instead of T: after {longest} tokens it takes {last:.0f} times fewer"
        f" FLOPs with the cache, after {shortest} tokens {first:.0f} times.",
        Check(f"FLOPs of one token at {longest}, all again over with the cache", last, least=longest / 2),
        Check(f"these FLOPs saved at {longest} over those at {shortest}", last / first, *growing),
        instead="The FLOPs saved are not about T times, growing as T",
    )
    yield clause(
        "The bytes that are read fall by much less, since a single token reads every weight for one row of use:"
        f" here {read:.1f} times.",
        Check(f"FLOPs saved at {longest} over bytes saved", last / read, least=10.0),
        instead="The bytes read fall as the FLOPs do",
    )
    yield clause(
        "The price is memory that grows with T: layers x key/value heads x (key + value width) numbers a token,"
        f" here {_counted_bytes(model, 1):,} bytes, and {LECTURE_BYTES / 2**20:.0f} MiB for Qwen3-4B at"
        f" {LECTURE_POSITIONS:,} positions in fp16.",
        Check(f"bytes allocated at {longest} over bytes counted", costs[-1].cache / counted, 1.0, 1.0),
        Check(f"bytes at {longest} over those at {shortest}", costs[-1].cache / costs[0].cache, longer, longer),
        Check("bytes of Qwen3-4B's cache at 4,096 positions, fp16", _lecture_bytes(), LECTURE_BYTES, LECTURE_BYTES),
        instead="The cache does not have these bytes",
    )


# L0 2.9 asks for the cache of Qwen3-4B at 4,096 positions in fp16, and gives its bytes.
LECTURE_POSITIONS, LECTURE_BYTES = 4096, 603_979_776


def _cached(engine: Engine, row: Sequence[int]) -> Tensor:
    """Logits after a row, from what is new in it."""
    if not engine.rows:
        engine.add(Request(prompt=row, max_new_tokens=0))
    engine.rows[0].ids = list(row)
    return engine.logits()[0]


def _engine(model: Model) -> Engine:
    return Engine(model.module, executor="modules")  # what computes the rows without a cache as well


def _recomputed(model: Model, row: Sequence[int]) -> Tensor:
    """Logits after a row, all of it computed again."""
    x = model.module(Batch(inputs=torch.tensor(row, device=model.device), rows=Rows((len(row),))))
    return model.module.unembed(x[-1:], Rows((1,), (len(row) - 1,)))[0]


def _write(prompt: Sequence[int], logits: Callable[[Sequence[int]], Tensor], tokens: int) -> tuple[list[int], Tensor]:
    """Greedy: the row with `tokens` tokens written on, and the logits each was chosen by, `[NEW, V]`."""
    row, rows = list(prompt), []
    for _ in range(tokens):
        rows.append(logits(row).float())
        row.append(int(rows[-1].argmax()))
    return row, torch.stack(rows)


class Cost(NamedTuple):
    """Counts of the matrix products of a call, and its shortest seconds of processor time."""

    counts: ProductCounts
    seconds: float


class NextToken(NamedTuple):
    """What the logits after a row cost, all of it computed again and with all but its last token cached, and the bytes
    of the cache."""

    again: Cost
    once: Cost
    cache: int

    @property
    def fewer_flops(self) -> float:
        """How many times fewer FLOPs the cache leaves."""
        return self.again.counts.total / self.once.counts.total

    @staticmethod
    def measured(model: Model, row: Sequence[int], repeats: int) -> NextToken:
        """Of a row, whose seconds are the shortest of `repeats`."""
        engine = _engine(model)
        _cached(engine, row)
        (live,) = engine.rows

        def once() -> None:
            engine.trim(live, len(row) - 1)
            _cached(engine, row)

        again = partial(_recomputed, model, row)
        all_again, cached = (Cost(products(call), shortest_seconds(call, calls=repeats)) for call in (again, once))
        return NextToken(all_again, cached, engine.cache.nbytes)


def _counted_bytes(model: Model, positions: int) -> int:
    return count(model.spec).cache_bytes(positions, dtype="fp32") // 4 * model.module.dtype.itemsize


def _lecture_bytes() -> int:
    """Of a real cache filled with 4,096 tokens, on the device where tensors have sizes and no memory."""
    module = empty(read_config(dict(QWEN3_4B), where="Qwen3-4B")).half()
    assert module.decoder is not None
    cache = module.decoder.cache(1)
    step = cache.begin(Rows((LECTURE_POSITIONS,)), "")
    for layer, block in enumerate(module.decoder.blocks):
        attn = block.attn.spec
        widths = attn.head_width, attn.value_width
        k, v = (torch.empty(LECTURE_POSITIONS, attn.kv_heads, width, device="meta") for width in widths)
        step.of(layer).extend(layer, k, v)
    return cache.nbytes


def _sections(model: Model, lengths: Sequence[int], costs: Sequence[NextToken]) -> Sections:
    ways = {"all again": [cost.again for cost in costs], "with the cache": [cost.once for cost in costs]}
    cells = [
        [str(n), *(f"{x.counts.total / 1e9:,.2f} G" for x in own), f"{cost.fewer_flops:.0f}"]
        + [f"{x.counts.read / 2**20:,.1f} MiB" for x in own]
        + [f"{x.seconds * 1e3:,.0f} ms" for x in own]
        + [f"{cost.again.seconds / cost.once.seconds:.1f}", f"{cost.cache / 2**20:.1f} MiB"]
        for n, cost, *own in zip(lengths, costs, *ways.values(), strict=True)
    ]
    header = ["T", "FLOPs, all again", "with the cache", "times fewer", "read, all again", "read, with the cache"]
    header += ["time, all again", "time, with the cache", "times faster", "cache"]
    seconds = {way: [cost.seconds for cost in line] for way, line in ways.items()}
    flops = {way: [cost.counts.total for cost in line] for way, line in ways.items()}
    lecture = f"{LECTURE_BYTES:,} bytes ({LECTURE_BYTES / 2**20:.0f} MiB)"
    facts = [
        ("a token of this model", f"{_counted_bytes(model, 1):,} bytes"),
        (f"Qwen3-4B, {LECTURE_POSITIONS:,} positions, fp16", lecture),
    ]
    yield TableSection("The next token after T", header, cells)
    yield curve("Seconds for the next token", "T", "s", lengths, seconds, log="xy")
    yield curve("FLOPs for the next token", "T", "FLOPs", lengths, flops, log="xy")
    yield Facts("Size of the cache", facts)
