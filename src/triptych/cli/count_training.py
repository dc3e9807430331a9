"""`triptych count --train`: how to divide a model's training among processes, and what that costs each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import typer

from . import screen

if TYPE_CHECKING:
    from triptych.count import TrainingPlan
    from triptych.spec import ModelSpec

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SENT = {
    "gather_forward": "weights, gathered in forward passes",
    "gather_backward": "weights, gathered in backward passes",
    "scatter": "gradients, summed among shards",
    "replicate": "gradients, summed among replicas",
    "tensor": "vectors of tokens, summed in layers",
    "muon": "matrices for Muon, and their updates",
}


def amount(typed: str) -> float:
    """The parser of 80G, 1.5T or 400000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", typed)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{typed!r} is no number above 0 with K, M, G, T or P, like 80G")
    return float(match[1]) * _PREFIXES[match[2]]


@dataclass(frozen=True)
class PlanOptions:
    """What `triptych count --train` is asked; `length` of None is the model's context, at most `LENGTH`."""

    gpus: int | None
    memory: float | None
    length: int | None
    rows: int | None
    precision: Literal["bf16", "fp32"]
    optimizer: Literal["adamw", "muon"]
    flops: float | None
    bandwidth: float | None
    between: float | None
    per_node: int | None


LENGTH = 4096


def show_plan(spec: ModelSpec, options: PlanOptions, *, as_json: bool) -> None:
    """Print the plan and the recipe's tables that follow from it."""
    from triptych.count import ClusterRates, plan

    if options.gpus is None or options.memory is None:
        raise typer.BadParameter("--train needs --gpus N and --memory BYTES of each, like --gpus 8 --memory 80G")
    rates = None
    if options.flops is not None and options.bandwidth is not None:
        rates = ClusterRates(options.flops, options.bandwidth, options.between, options.per_node)
    elif (options.flops, options.bandwidth, options.between, options.per_node) != (None,) * 4:
        raise typer.BadParameter("a time follows from --flops and --bandwidth together; give both")
    length = options.length or min(spec.context or LENGTH, LENGTH)
    if spec.context and length > spec.context:
        screen.note(f"--length {length:,} is beyond the {spec.context:,} positions that this model reads")
    proposed = plan(
        spec, options.gpus, options.memory, length=length, rows=options.rows, precision=options.precision,
        optimizer=options.optimizer, rates=rates,
    )  # fmt: skip
    if as_json:
        screen.result(proposed.to_dict())
        return
    _show_memory(proposed)
    _show_sent(proposed)
    print("\n".join(_tables(proposed.recipe())))


def _show_memory(plan: TrainingPlan) -> None:
    step = plan.step
    rows = [(name.replace("_", " "), *_numbers(nbytes)) for name, nbytes in plan.memory.to_dict().items() if nbytes]
    how = f"{step.accumulate:,} x {step.rows:,} rows of {step.length:,} tokens"
    title = f"{plan.mesh}, {how} a process{', recompute' if step.recompute else ''}"
    screen.show_rows(("memory of a process", "bytes", "size"), rows, title, right=["bytes", "size"])


def _show_sent(plan: TrainingPlan) -> None:
    kinds, seconds = plan.sent.to_dict(), plan.sent_seconds
    columns = ["bytes", "size", *(["seconds", "share of a step"] if seconds is not None else [])]
    rows: list[tuple[str, ...]] = []
    for kind, nbytes in kinds.items():
        if nbytes:
            rows.append((_SENT[kind], *_numbers(nbytes), *_times(plan, None if seconds is None else seconds[kind])))
    every = None if seconds is None else sum(seconds.values())
    rows.append(("all", *_numbers(plan.sent.total), *_times(plan, every)))
    if plan.compute_seconds is not None:
        rows.append(("matmuls", "", "", *_times(plan, plan.compute_seconds)))
    screen.show_rows(("sent by a process in a step", *columns), rows, right=columns)


def _numbers(nbytes: float) -> tuple[str, str]:
    from triptych.count.training import size

    return f"{nbytes:,.0f}", size(round(nbytes))


def _times(plan: TrainingPlan, seconds: float | None) -> tuple[str, ...]:
    """The share is of a step in which nothing is sent while a process computes."""
    whole = plan.seconds
    return () if seconds is None or not whole else (f"{seconds:,.3g}", f"{seconds / whole:.1%}")


def _tables(recipe: dict[str, dict[str, Any]]) -> list[str]:
    """The tables in TOML."""
    lines: list[str] = []
    for table, values in recipe.items():
        own = (f'"{v}"' if isinstance(v, str) else str(v).lower() for v in values.values())
        lines += [f"[{table}]", *(f"{key} = {value}" for key, value in zip(values, own, strict=True)), ""]
    return lines[:-1]
