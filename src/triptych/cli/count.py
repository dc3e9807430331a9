"""`triptych count`: parameters, bytes, FLOPs, memory and possible speed of a model that is not loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.families.named_configs import NAMED
from . import options, screen
from .count_training import PlanOptions, amount, show_plan
from .loading import header_of
from .options import argument
from .screen import mib

if TYPE_CHECKING:
    from triptych.checkpoints.header import Header
    from triptych.count import Count, Prediction

DEFAULT_POSITIONS = 4096  # for models without a context limit
Row = tuple[str, str, str]
Amount = Annotated[float | None, typer.Option(parser=amount)]


def count(
    model: Annotated[
        str,
        argument(
            "A model directory, a config.json, a .gguf file, hub:org/name, or a known model: " + ", ".join(NAMED) + ".",
            "MODEL",
        ),
    ],
    *,
    context: options.Positive | None = None,
    batch: options.Positive | None = None,
    dtype: str = "fp16",
    cache_dtype: str | None = None,
    speed: bool = False,
    read: Annotated[float | None, typer.Option(min=1e-3)] = None,
    matmul: Annotated[float | None, typer.Option(min=1e-3)] = None,
    train: bool = False,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", "--processes", metavar="N", min=1, help="With --train: GPUs, or processes on CPUs."),
    ] = None,
    memory: Amount = None,
    length: options.Positive | None = None,
    precision: Literal["bf16", "fp32"] | None = None,
    optimizer: Literal["adamw", "muon"] | None = None,
    flops: Amount = None,
    bandwidth: Amount = None,
    between: Amount = None,
    per_node: options.Positive | None = None,
    offline: bool = False,
    ignore: list[str] | None = None,
    as_json: options.Json = False,
) -> None:
    """Count parameters, bytes, FLOPs and memory for training, from the config or header alone; with --train plan how
    several GPUs train the model.

    --context N: Positions in the cache, which keeps whole pages of 64; by default the model's context.
    --batch N: Number of sequences that run together, by default 1; with --train rows in a step, by default N of --gpus.
    --dtype: Dtype of the weights: fp32, bf16, fp16, fp8, int8, q8_0, q4_k and other types.
    --cache-dtype: Dtype of the cache, int8 with its scales; that of weights in fp32 or bf16, else fp16.
    --speed: Measure this machine for a few seconds and print the speed it allows.
    --read GB/S: Memory bandwidth of another machine, with --matmul.
    --matmul GFLOP/S: Matmul rate of another machine, with --read.
    --train: Plan the training on --gpus: mesh, micro-batches, recomputation, what each keeps and sends, and the recipe.
    --memory BYTES: With --train: memory of a GPU, like 80G, of which a tenth stays free.
    --length N: With --train: tokens in a row, by default the model's context, at most 4096.
    --precision: With --train: that of the arithmetic, by default bf16.
    --optimizer: With --train: what changes the weights, by default adamw.
    --flops RATE: With --train and --bandwidth: matmul FLOPs a second of a GPU, like 400T.
    --bandwidth BYTES/S: With --train: bytes a second that a GPU sends to others of its machine, like 300G.
    --between BYTES/S: With --per-node: bytes a second that a GPU sends to other machines, like 50G for 400 Gbit/s.
    --per-node N: With --between: GPUs of a machine.
    """
    plans: dict[str, object] = {
        "--gpus": gpus,
        "--memory": memory,
        "--length": length,
        "--precision": precision,
        "--optimizer": optimizer,
    }
    plans |= {"--flops": flops, "--bandwidth": bandwidth, "--between": between, "--per-node": per_node}
    inference: dict[str, object] = {"--context": context, "--dtype": dtype if dtype != "fp16" else None}
    inference |= {"--cache-dtype": cache_dtype, "--speed": speed or None, "--read": read, "--matmul": matmul}
    if train:
        _refuse(inference, "is not for --train; leave it out")
        cluster = flops, bandwidth, between, per_node
        asked = PlanOptions(gpus, memory, length, batch, precision or "bf16", optimizer or "adamw", *cluster)
        show_plan(header_of(model, ignore or (), offline=offline).spec, asked, as_json=as_json)
        return
    _refuse(plans, "is for --train; give both, or leave it out")
    batch = batch or 1
    from triptych.count import DTYPES, predict
    from triptych.count import count as count_model

    for typed, name in (("--dtype", dtype), ("--cache-dtype", cache_dtype)):
        if name is not None and name not in DTYPES:
            raise typer.BadParameter(f"{typed} {name!r} is not one of {', '.join(DTYPES)}")
    if (read is None) != (matmul is None):
        raise typer.BadParameter("--read and --matmul go together: the speed follows from both")
    header = header_of(model, ignore or (), offline=offline)
    spec, stored = header.spec, _stored_bytes(header)
    counts, positions = count_model(spec), context or spec.context or DEFAULT_POSITIONS
    if spec.context and positions > spec.context:
        screen.note(f"--context {positions:,} is beyond the {spec.context:,} positions that this model reads")
    cache_dtype = cache_dtype or (dtype if dtype in ("fp32", "bf16") else "fp16")
    source = positions if spec.layout == "encoder-decoder" else 0
    rates = _measured(dtype) if speed else None
    if read is not None and matmul is not None:
        rates = read * 1e9, matmul * 1e9
    predicted = rates and predict(
        counts, positions, read=rates[0], flops=rates[1], dtype=dtype, cache_dtype=cache_dtype, source=source
    )
    if as_json:
        cache = sum(_caches(counts, positions, batch, cache_dtype, source).values())
        chosen = {
            "dtype": dtype, "cache_dtype": cache_dtype, "weight_bytes": counts.weight_bytes(dtype),
            "cache_bytes": cache,
        }  # fmt: skip
        more = {"chosen": chosen, "stored_bytes": stored, "predicted": predicted and predicted.to_dict()}
        screen.result(counts.to_dict(positions, batch=batch, source=source) | more)
        return
    _show_parts(counts, model)
    _show("cost", _costs(counts, positions, batch, (dtype, cache_dtype), source) + _stored(stored))
    _show("training in fp32, with AdamW", _training(counts, positions, batch, source))
    if predicted and rates:
        _show(
            f"at most, with {rates[0] / 1e9:,.1f} GB/s and {rates[1] / 1e9:,.0f} GFLOP/s", _speed(predicted, positions)
        )


def _refuse(values: Mapping[str, object], why: str) -> None:
    """Refuse the first option that was given."""
    for name, value in values.items():
        if value is not None:
            raise typer.BadParameter(f"{name} {why}")


def _stored_bytes(header: Header) -> dict[str, int]:
    """The bytes of a file's tensors by the type they are stored in; empty without a file."""
    stored: Counter[str] = Counter()
    for info in header.source.infos.values() if header.source is not None else ():
        stored[info.dtype] += info.nbytes
    return dict(stored)


def _measured(dtype: str) -> tuple[float, float]:
    """Bytes that this machine reads and FLOPs that it computes in a second."""
    with screen.waiting("rates of the machine"):
        from triptych.measure.limits import measure_rates

        rates = measure_rates()
    return rates.read, rates.fp32 if dtype == "fp32" else max(rates.fp32, rates.bf16)


def _show_parts(counts: Count, asked: str) -> None:
    numbers = ["parameters", "share"]
    parts = screen.table("part", *numbers, right=numbers)
    for name, number in counts.parameters.items():
        if number:
            parts.add_row(name, f"{number:,}", f"{number / counts.total:.1%}")
    parts.add_row("total", f"{counts.total:,}", "", style="bold")
    if counts.active != counts.total:
        parts.add_row("used by one token", f"{counts.active:,}", f"{counts.active / counts.total:.1%}")
    kind = f"{counts.spec.family}, {counts.spec.layout}"
    screen.show(parts, f"{asked} ({kind})" if asked in NAMED else kind)


def _caches(counts: Count, positions: int, batch: int, dtype: str, source: int) -> dict[Literal["self", "cross"], int]:
    """Bytes of the caches in whole pages, as an engine has them."""
    from triptych.native.step import PAGE_POSITIONS

    return counts.caches_bytes(positions, batch=batch, dtype=dtype, source=source, page=PAGE_POSITIONS)


def _costs(counts: Count, positions: int, batch: int, dtypes: tuple[str, str], source: int) -> list[Row]:
    dtype, cache_dtype = dtypes
    size, decodes = f"{batch:,} × {positions:,} positions", counts.spec.decoder is not None
    rows = [_bytes(f"bytes of weights, {dtype}", counts.weight_bytes(dtype))]
    if decodes:
        caches = counts.caches_bytes(positions, batch=batch, dtype=cache_dtype, source=source)
        pages = _caches(counts, positions, batch, cache_dtype, source)
        rows += [_bytes(f"bytes of cache, {cache_dtype}, {size}", sum(pages.values()))]
        if pages["cross"]:
            rows += [_bytes(f"  of {name}-attention", number) for name, number in pages.items()]
    prompt = counts.prefill_flops(positions, source=source)
    rows += [(f"FLOPs to read {size}", f"{batch * prompt:,}", "")]
    if decodes:
        step = counts.decode_flops(positions, source=source)
        rows += [("FLOPs to generate one more token each", f"{batch * step:,}", "")]
        read = counts.step_bytes(dtype) + sum(caches.values())
        rows += [("FLOPs a byte read: a prompt", f"{batch * prompt / counts.step_bytes(dtype):,.1f}", "")]
        rows += [("FLOPs a byte read: one more token each", f"{batch * step / read:,.1f}", "")]
    return rows


def _stored(stored: dict[str, int]) -> list[Row]:
    total = _bytes("bytes of weights in the file", sum(stored.values()))
    return [total, *(_bytes(f"  {name}", number) for name, number in sorted(stored.items()))] if stored else []


def _training(counts: Count, positions: int, batch: int, source: int) -> list[Row]:
    size = f"{batch:,} × {positions:,} positions"
    rows = [(f"FLOPs to train on {size}", f"{batch * counts.training_flops(positions, source=source):,}", "")]
    memory = counts.training_memory(positions, batch=batch, source=source)
    again = counts.training_memory(positions, batch=batch, source=source, recompute=True)
    parts = {name: number for name, number in memory.to_dict().items() if name != "peak"}
    rows += [_bytes(f"bytes of {name.replace('_', ' ')}", number) for name, number in parts.items()]
    rows += [_bytes("bytes of activations, with recompute", again.activations)]
    return [*rows, _bytes("bytes at the peak", memory.peak), _bytes("bytes at the peak, with recompute", again.peak)]


def _speed(predicted: Prediction, positions: int) -> list[Row]:
    rows = [(f"tokens a second, a prompt of {positions:,}", f"{predicted.prefill:,.0f}", "")]
    if predicted.decode is not None:
        rows += [(f"tokens a second, decoding after {positions:,}", f"{predicted.decode:,.1f}", "")]
    return [*rows, ("FLOPs a byte of the machine", f"{predicted.machine_intensity:,.1f}", "")]


def _bytes(name: str, number: int) -> Row:
    return name, f"{number:,}", mib(number)


def _show(title: str, rows: Sequence[Row]) -> None:
    screen.show_rows((title, "number", "size"), rows, right=["number", "size"])
