"""`triptych bench`: how fast a model runs here, what the machine allows, and how fast other libraries run it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.screen import mib

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


class PeerDType(StrEnum):
    """Forms of the weights that peers can be asked for."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class ExecutorChoice(StrEnum):
    """What computes the steps of a generation."""

    auto = "auto"
    modules = "modules"
    static = "static"
    compiled = "compiled"


Against = Annotated[
    list[BenchPeer] | None,
    typer.Option("--against", help="Library to measure on the same file, in turn. Repeatable.", show_default=False),
]
PeerWeights = Annotated[
    PeerDType | None,
    typer.Option("--peer-dtype", help="Dtype of the peers' weights; by default ours.", show_default=False),
]
OurExecutor = Annotated[
    ExecutorChoice,
    typer.Option(
        "--executor",
        help="What computes our steps: native code where possible (auto), the modules, steps of fixed shapes (CUDA "
        "graphs on a GPU), or those compiled by torch.",
    ),
]
PromptTokens = Annotated[
    list[int] | None,
    typer.Option(
        "--prompt-tokens", metavar="N", help="Length of a prompt to read; by default 128 and 512. Repeatable."
    ),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option("--context", metavar="N", help="Tokens before decoding is timed; by default 8 and 512. Repeatable."),
]
NewTokens = Annotated[
    int | None,
    typer.Option(
        "--new-tokens",
        metavar="N",
        help="Tokens to decode; by default 64, of an encoder-decoder 48 from texts and 128 from sound.",
    ),
]
Requests = Annotated[
    int | None, typer.Option("--requests", metavar="N", help="Requests that run at once; by default 8.")
]
TextCount = Annotated[int | None, typer.Option("--texts", metavar="N", help="Texts to encode; by default 512.")]
SearchWidth = Annotated[
    int | None, typer.Option("--beams", metavar="N", help="Width of an encoder-decoder's beam search; by default 4.")
]
Repeat = Annotated[int, typer.Option("--repeat", metavar="N", help="Runs, of which the median is shown.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=1024,
        help="Threads; by default one for each usable core.",
        show_default=False,
    ),
]


@options.opens
def bench(
    checkpoint: options.Checkpoint,
    against: Against = None,
    peer_dtype: PeerWeights = None,
    executor: OurExecutor = ExecutorChoice.auto,
    matmul: options.Matmul = options.Products.AUTO,
    cache: options.Cache = options.CacheForm.auto,
    prompt_tokens: PromptTokens = None,
    context: Contexts = None,
    new_tokens: NewTokens = None,
    requests: Requests = None,
    texts: TextCount = None,
    beams: SearchWidth = None,
    repeat: Repeat = 5,
    threads: Threads = None,
    as_json: options.Json = False,
) -> None:
    """Measure the speed and memory of a model, the limit of this machine beside it, and other libraries."""
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
            threads=threads, dtype=checkpoint.dtype and checkpoint.dtype.value,
            peer_dtype=peer_dtype and peer_dtype.value, quantize=checkpoint.quantize and checkpoint.quantize.value,
            executor=executor.value, matmul=matmul.value, cache=cache.value, device=checkpoint.device,
            offline=checkpoint.offline, ignore=checkpoint.ignore or (), progress=stage,
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
