"""`triptych bench`: how fast a model runs here, what the machine allows, and how fast other libraries run it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import options, screen
from .screen import mib

if TYPE_CHECKING:
    from triptych.measure import BenchReport


class BenchPeer(StrEnum):
    """The libraries to measure beside this one."""

    transformers = "transformers"
    llama_cpp = "llama.cpp"
    ik_llama_cpp = "ik_llama.cpp"
    sentence_transformers = "sentence-transformers"
    onnxruntime = "onnxruntime"
    ctranslate2 = "ctranslate2"


def bench(
    checkpoint: options.Checkpoint,
    *,
    against: list[BenchPeer] | None = None,
    peer_dtype: Literal["fp32", "bf16", "int8"] | None = None,
    executor: Literal["auto", "modules", "static", "compiled"] = "auto",
    matmul: options.Matmul = "auto",
    cache: options.CacheOption = "auto",
    prompt_tokens: list[int] | None = None,
    context: list[int] | None = None,
    new_tokens: int | None = None,
    requests: int | None = None,
    texts: int | None = None,
    beams: int | None = None,
    repeat: int = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024)] = None,
    as_json: options.Json = False,
) -> None:
    """Measure the speed and memory of a model, the limit of this machine beside it, and other libraries.

    --against: Library to measure on the same file, in turn. Repeatable.
    --peer-dtype: Dtype of the peers' weights; by default ours.
    --executor: What computes our steps: native code where possible (auto), the modules, steps of fixed shapes (CUDA
        graphs on a GPU), or those compiled by torch.
    --prompt-tokens N: Length of a prompt to read; by default 128 and 512. Repeatable.
    --context N: Tokens before decoding is timed; by default 8 and 512. Repeatable.
    --new-tokens N: Tokens to decode; by default 64, of an encoder-decoder 48 from texts and 128 from sound.
    --requests N: Requests that run at once; by default 8.
    --texts N: Texts to encode; by default 512.
    --beams N: Width of an encoder-decoder's beam search; by default 4.
    --repeat N: Runs, of which the median is shown.
    --threads N: Threads; by default one for each usable core.
    """
    if checkpoint.adapter is not None:
        raise typer.BadParameter("bench measures whole models; write one with triptych convert MODEL OUT --adapter DIR")
    with screen.stages() as stage:
        stage("loading torch")
        from triptych.measure import Settings
        from triptych.measure import bench as measure

        settings = Settings(
            prompt_tokens=prompt_tokens, contexts=context, new_tokens=new_tokens, texts=texts, requests=requests,
            beams=beams, repeat=repeat,
        )  # fmt: skip
        report = measure(
            checkpoint.model, against=[peer.value for peer in dict.fromkeys(against or ())], settings=settings,
            threads=threads, dtype=checkpoint.dtype, peer_dtype=peer_dtype, quantize=checkpoint.quantize,
            executor=executor, matmul=matmul, cache=cache, device=checkpoint.device, offline=checkpoint.offline,
            ignore=checkpoint.ignore or (), progress=stage,
        )  # fmt: skip
    if as_json:
        screen.result(report.to_dict())
    else:
        _show(report)


def _show(report: BenchReport) -> None:
    rates, out = report.rates, screen.console()
    rows = [
        ("processor", f"{report.processor}, {report.cores} cores, {report.threads} threads, {report.device}"),
        ("machine", f"reads {rates.read / 1e9:.1f} GB/s; matmuls {_flops(rates.fp32)} fp32, {_flops(rates.bf16)} bf16"),
    ]
    for side in report.sides:
        if not side.versions:
            rows.append((side.name, "not measured; the reason is below"))
            continue
        versions = ", ".join(f"{name} {number}" for name, number in side.versions.items())
        memory = "" if side.memory is None else f"; at most {mib(side.memory)} beyond imports"
        rows.append((side.name, f"{versions}; {side.dtype}{memory}"))
    if report.step_bytes is not None:
        rows.append(("weights", f"{report.step_bytes / 1e6:,.1f} MB read by a decoding step"))
    rows += [
        (f"cosine to {name}", f"at least {least:.5f}, on average {mean:.5f}")
        for name, (least, mean) in report.agreement.items()
    ]
    screen.show(screen.facts(rows), report.model)
    numbers = ["median", "limit", "reached", "ours / peer"]
    table = screen.table("", "median", "unit", "limit", "reached", "by", "ours / peer", right=numbers)
    for figure in report.figures:
        limit = figure.limit
        bound = ("", "", "") if limit is None else (_number(limit.value), f"{figure.reached:.0%}", limit.by)
        table.add_row(figure.name, _number(figure.value), figure.unit, *bound, style="bold" if figure.peers else "")
        for name, peer in figure.peers.items():
            if peer.value is not None:
                table.add_row(f"  {name}", _number(peer.value), figure.unit, "", "", "", f"{figure.ratio(name):.2f}")
    screen.show(table, f"medians of {report.repeat}")
    refused = {(name, peer.note) for figure in report.figures for name, peer in figure.peers.items() if peer.note}
    for name, why in sorted(refused):
        out.print(f"{name}: {why}", style="dim", soft_wrap=True)
    for note in report.notes:
        out.print(note, soft_wrap=True)


def _flops(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
