"""`triptych check`: a model's fast paths against its reference path, and against transformers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import options, screen

if TYPE_CHECKING:
    from triptych.check import Report


class Form(StrEnum):
    """Packed forms to round to."""

    int8 = "int8"
    int4 = "int4"


class CacheForm(StrEnum):
    """Number formats of the keys and values that a generation stores."""

    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


def check(
    model: options.ModelPath,
    *,
    against: Literal["transformers", "none"] | None = None,
    threshold: Annotated[float, typer.Option(min=0)] = 1e-4,
    quantize: list[Form] | None = None,
    cache: list[CacheForm] | None = None,
    data: Path | None = None,
    adapter: options.NamedPath | None = None,
    offline: bool = False,
    ignore: list[str] | None = None,
    as_json: options.Json = False,
) -> None:
    """Compare every fast path with the reference, and the model with transformers; exit 1 if they differ.

    --against: Library to compare with; by default transformers, if installed.
    --threshold: Largest allowed difference of log-probabilities.
    --quantize: Also measure the quality of this packed form. Repeatable.
    --cache TYPE: Also measure the quality with a cache of fp32, fp16, bf16 or int8. Repeatable.
    --data FILE: Text of which to measure the perplexity.
    """
    with screen.stages() as stage:
        stage("loading torch")
        from triptych import machine
        from triptych.check import check as run
        from triptych.text.corpus import read_text

        machine.use_threads()
        text = None if data is None else read_text(data)
        report = run(
            model, against=against, threshold=threshold, offline=offline, ignore=ignore or (),
            quantize=quantize or (), cache=[one.value for one in cache or ()], text=text, progress=stage,
            adapter=adapter,
        )  # fmt: skip
    _show(report, as_json=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        screen.result(report.to_dict())
        return
    out = screen.console()
    table = screen.table("check", "difference", "limit", "", "", right=["difference", "limit"])
    for finding in report.findings:
        verdict = {True: "ok", False: "FAILED", None: ""}[finding.passed]
        limit = "" if finding.limit is None else f"{finding.limit:g}"
        difference, style = f"{finding.difference:.2e}", "bold red" * (verdict == "FAILED")
        table.add_row(finding.name, difference, limit, verdict, finding.note, style=style)
    screen.show(table, report.model)
    if report.quality:
        columns = ["form", "perplexity", "KL to fp32", "tokens"]
        lines = [
            (row.form, f"{row.perplexity:.3f}", "" if row.kl is None else f"{row.kl:.5f}", f"{row.tokens:,}")
            for row in report.quality
        ]
        screen.show_rows(columns, lines, "quality", right=columns[1:])
    for line in report.skipped:
        out.print(f"skipped: {line}", style="dim")
    if (layer := report.first_layer) is not None:
        begins = "" if layer.first_position is None else f", from position {layer.first_position} on"
        out.print(f"first difference from transformers: {layer.site}{begins}", style="bold")
    elif report.layers and ("transformers", False) in [(finding.name, finding.passed) for finding in report.findings]:
        out.print("every site agrees with transformers: the difference is in the head", style="bold")
    out.print("passed" if report.passed else f"FAILED: over {report.threshold:g}", style="bold")
