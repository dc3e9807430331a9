"""Measures a model beside the limits of the machine, and peers that run the same work in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from triptych import machine
from triptych.arguments import checked, integer
from triptych.attention import CacheType, check_cache_type
from triptych.checkpoints.header import read_header
from triptych.count import count
from triptych.errors import InputError, shown
from triptych.generate import Executor
from triptych.program.native_encoder import Matmul
from triptych.spec import FramesSpec, ModelSpec
from . import limits, peers
from .bench_results import BenchReport, Figure, Limit, MeasuredSide, PeerFigure, Rates
from .jobs import BenchJob, JobKind, Settings, jobs
from .process import Runner, SameProcess, SeparateProcess
from .side import Options

ENOUGH = 20.0  # seconds that the runs of one job by one side may take; at least one run is made
TOLERATED = 0.15  # of a core, that other processes may use
PAUSE = 0.05  # seconds before a side's turn, in which the idle threads of the others fall asleep


@dataclass
class _Runs:
    """The results of one side: values of each job and figure, and what it could not do."""

    runner: Runner
    values: dict[str, list[list[float]]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@checked
def bench(
    model: str | Path,
    *,
    against: Sequence[str] = (),
    settings: Settings = Settings(),  # noqa: B008
    kinds: Collection[JobKind] | None = None,
    threads: int | None = None,
    dtype: str | None = None,
    peer_dtype: str | None = None,
    quantize: str | None = None,
    executor: Executor = "auto",
    matmul: Matmul = "auto",
    cache: CacheType = "auto",
    device: str = "cpu",
    offline: bool = False,
    ignore: Sequence[str] = (),
    apart: bool = True,
    rates: Rates | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure a model, and each of the peers `against` on the same file, in turn.

    against     names of peers; `name:dtype` asks for the dtype of its weights.
    kinds       kinds of jobs to measure; None measures all of the layout.
    dtype       of our weights: fp32, bf16 or fp16; None takes the stored one.
    quantize    int8 or int4 packs our weights, "file" keeps the packed types of the file or fails, "none" dequantizes
                them; None does what `load` does by itself.
    executor    what computes our steps, as `generate.Engine` says.
    matmul      what our encoder multiplies in, or our prompts are (`Model.encode`, `Model.generate`).
    cache       what our cache keeps (`Model.generate`).
    peer_dtype  of the peers' weights; None takes ours.
    apart       every side runs in a process of its own; False runs all of them in this one, where they disturb each
                other.
    rates       of the machine, where they were measured before; None measures them.

    A peer that fails has no figure, and its note says why.  Raises InputError for an unknown type of cache, for
    settings that do not fit the model, for a peer that is not installed or does not run such models, and where our own
    side fails; the errors of `load` for the file.
    """
    check_cache_type(cache)
    if not set(get_args(JobKind)).issuperset(kinds or ()):
        raise InputError(f"kinds={shown(kinds)} must be a list of some of {', '.join(get_args(JobKind))}")
    header = read_header(model, tuple(ignore), offline=offline, weights=False)
    spec, path = header.spec, str(header.path)
    work = jobs(spec, settings, where=str(model))
    for name in against:
        peers.check(*_named(name, peer_dtype), device)
    measured = [job for job in work if kinds is None or job.kind in kinds]
    wanted = [job for job in work if job.kind == "first" or job in measured]  # loading comes first in any case
    machine.device(device)
    threads = machine.threads() if threads is None else integer("threads", threads, 1)
    torch.set_num_threads(threads)
    if rates is None:
        progress("rates of the machine")
        rates = limits.measure_rates(device)
    options = Options(
        model=path, threads=threads, layout=spec.layout, sound=isinstance(spec.reads.embed, FramesSpec), dtype=dtype,
        device=device, quantize=quantize, executor=executor, matmul=matmul, cache=cache, offline=offline,
        ignore=tuple(ignore),
    )  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, _Runs] = {}
        facts: dict[str, dict[str, Any]] = {}
        for name in (peers.OURS, *against):
            progress(f"{name}: first runs")
            library, form = _named(name, peer_dtype)
            mine = options if name == peers.OURS else _peer_options(options, facts[peers.OURS], form)
            runner: Runner  # idle threads of peers spin as they do by themselves
            if apart:
                runner = SeparateProcess(library, mine, spin=library != peers.OURS)
            else:
                runner = SameProcess(peers.side(library)(mine))
            stack.callback(runner.close)
            sides[name] = _Runs(runner)
            facts[name] = _first_runs(sides[name], wanted, name, folder)
        before = processor_use(sides.values())
        for job in measured:
            progress(job.name)
            _take_turns(sides, job, settings.repeat)
        after = processor_use(sides.values())
        busy = None if before is None or after is None else after.by_others(before)
        agreement = _agreement(folder, against)
    return _report(spec, options, settings, measured, sides, facts, rates, busy, agreement)


def processor_use(sides: Iterable[_Runs]) -> machine.Usage | None:
    """The use of the processors so far, that of the measured processes as our own."""
    use = machine.usage()
    return None if use is None else replace(use, own=use.own + sum(runs.runner.cpu_seconds() for runs in sides))


def verdict(cores: float | None, usable: int, threads: int) -> str | None:
    """One line where others left fewer than `threads` of the `usable` cores; None on a quiet machine."""
    if cores is None or cores <= usable - threads + TOLERATED:
        return None
    return f"the machine is busy: other processes used {cores:.1f} of {usable} cores, so the figures are low"


def _report(
    spec: ModelSpec, options: Options, settings: Settings, measured: Sequence[BenchJob], sides: dict[str, _Runs],
    facts: dict[str, dict[str, Any]], rates: Rates, busy: float | None,
    agreement: dict[str, tuple[float, float]],
) -> BenchReport:  # fmt: skip
    """The report of all sides, beside the limits of the machine."""
    look, notes = machine.look(), list(facts[peers.OURS]["notes"])
    if why := facts[peers.OURS].get("why_modules"):
        notes.append(f"steps ran as modules: {why}")
    if line := verdict(busy, look.cores.affinity, options.threads):
        notes.append(line)
    step = facts[peers.OURS].get("step")
    costs = None if step is None else limits.Costs(step, facts[peers.OURS]["cache_bytes"])
    by = "bf16" if facts[peers.OURS]["form"] != "fp32" and rates.bf16 > rates.fp32 else "fp32"
    flops, by = getattr(rates, by), f"{by} matmuls"
    figures: list[Figure] = []
    for job in measured:
        lengths = sides[peers.OURS].counts[job.name] if job.kind == "encode" else ()
        figures += _figures(job, sides, limits.limits(job, count(spec), costs, rates, flops, by, lengths))
    return BenchReport(
        model=options.model, layout=spec.layout, device=options.device, processor=look.processor,
        cores=look.cores.usable, threads=options.threads, repeat=settings.repeat, rates=rates, step_bytes=step,
        sides=tuple(MeasuredSide(name, one["versions"], one["form"], one["memory"]) for name, one in facts.items()),
        figures=tuple(figures), busy=busy, agreement=agreement, notes=tuple(notes),
    )  # fmt: skip


def _named(name: str, dtype: str | None) -> tuple[str, str | None]:
    """A peer's name and dtype from `name` or `name:dtype`."""
    library, _, form = name.partition(":")
    return library, form or dtype


def _peer_options(options: Options, ours: dict[str, Any], dtype: str | None) -> Options:
    """Those of a peer: the dtype that was asked for, else the one we compute in."""
    same = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}.get(ours["dtype"])
    return replace(options, dtype=dtype or same, quantize=None)


def _first_runs(runs: _Runs, work: Sequence[BenchJob], name: str, folder: Path) -> dict[str, Any]:
    """Every job once, which is not counted -> what the side says of itself.

    A peer that does not start, or cannot load the model, gets no figures: the note of each says why.  Raises InputError
    where our side fails.
    """
    side_facts: dict[str, Any] = {"notes": []}
    try:
        side_facts |= runs.runner.ask("versions")
        for job in work:
            begin = time.perf_counter()
            keep = str(folder / f"{name}.npy") if job.kind == "encode" else None
            try:
                runs.counts[job.name] = runs.runner.ask("perform", job=asdict(job), keep=keep)["counts"]
            except InputError as error:
                if name == peers.OURS or job.kind == "first":
                    raise
                runs.refused[job.name] = str(error)
            runs.seconds[job.name] = time.perf_counter() - begin
        return side_facts | runs.runner.ask("memory") | runs.runner.ask("facts")
    except InputError as error:
        if name == peers.OURS:
            raise InputError(f"{name}: {error}") from None
        runs.refused = {job.name: str(error) for job in work}
        return {"notes": [], "versions": {}, "form": "", "memory": None}


def _take_turns(sides: dict[str, _Runs], job: BenchJob, repeat: int) -> None:
    """`repeat` rounds, in every second of which the order is turned; a slow side makes fewer runs."""
    for turn in range(repeat):
        order = list(sides.values())
        for runs in order if turn % 2 == 0 else reversed(order):
            if job.name in runs.refused or (turn and runs.seconds[job.name] * (turn + 1) > ENOUGH):
                continue
            time.sleep(PAUSE)
            answer = runs.runner.ask("perform", job=asdict(job))
            runs.values.setdefault(job.name, []).append(answer["values"])


def _figures(job: BenchJob, sides: dict[str, _Runs], allowed: Sequence[Limit | None]) -> list[Figure]:
    ours = sides[peers.OURS]
    figures = []
    for at, (name, unit) in enumerate(job.figures):
        theirs = {peer: _peer_figure(job, ours, runs, at) for peer, runs in sides.items() if peer != peers.OURS}
        figures.append(Figure(name, unit, tuple(run[at] for run in ours.values[job.name]), allowed[at], theirs))
    return figures


def _peer_figure(job: BenchJob, ours: _Runs, theirs: _Runs, at: int) -> PeerFigure:
    """A peer's runs; none, with a note, where it did other work than ours."""
    if job.name in theirs.refused:
        return PeerFigure(note=theirs.refused[job.name])
    if theirs.counts[job.name] != ours.counts[job.name]:
        a, b = (sum(runs.counts[job.name]) for runs in (theirs, ours))
        return PeerFigure(note=f"not the same work: it counts {a:,} tokens, we count {b:,}")
    return PeerFigure(tuple(run[at] for run in theirs.values[job.name]))


def _agreement(folder: Path, against: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The smallest and the mean cosine of our vectors to each peer's."""
    ours = folder / f"{peers.OURS}.npy"
    by_name: dict[str, tuple[float, float]] = {}
    for name in against:
        if not ours.is_file() or not (theirs := folder / f"{name}.npy").is_file():
            continue
        a, b = (np.load(file, allow_pickle=False) for file in (ours, theirs))
        cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
        by_name[name] = (float(cosines.min()), float(cosines.mean()))
    return by_name
