"""Shared by commands that work on files of records, on this machine or on a cluster of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from triptych.errors import InputError, shown
from . import options, screen

if TYPE_CHECKING:
    from triptych.batches.journal import Summary
    from triptych.batches.ray_data import Cluster
    from triptych.batches.records import Lines, Work, WorkFunction


def cluster_of(ray: str | None, actors: int | None) -> Cluster | None:
    """The cluster of --ray and --actors, None for this machine.  Raises BadParameter for --actors alone, InputError
    without Ray and for what is no address."""
    if ray is None:
        if actors is not None:
            raise BadParameter("--actors is for --ray; give both")
        return None
    from triptych.batches.ray_data import Cluster, check_ray

    cluster = Cluster(ray, actors)
    check_ray()
    return cluster


def check_alone(texts: Sequence[object] | None, option: str) -> None:
    """Raises BadParameter for texts or files beside a file of records."""
    if texts:
        raise BadParameter(f"{option} has what to work on; leave out {shown(str(texts[0]))}")


def check_without_records(**values: object) -> None:
    """Raises BadParameter for options that only a file of records has a use for."""
    for name, value in values.items():
        if value is not None:
            raise BadParameter(f"--{name} needs --records FILE, records with an id each")


def model_options(checkpoint: options.Checkpoint) -> dict[str, Any]:
    """MODEL and its options for a process that works elsewhere: paths are absolute."""
    found = asdict(checkpoint)
    for name in ("model", "adapter"):
        found[name] = None if found[name] is None else here(found[name])
    return found


def here(path: str | Path) -> str:
    """An absolute path, where there is something; else the same, as of `hub:org/name`."""
    return str(Path(path).absolute()) if Path(path).exists() else str(path)


def work_on_records(
    start: Callable[..., WorkFunction],
    checkpoint: options.Checkpoint,
    settings: Mapping[str, Any],
    records: Path,
    out: Path | None,
    *,
    field: str = "text",
    at_once: int = 64,
    cluster: Cluster | None,
    as_json: bool,
) -> None:
    """Do the work of a command for each record of a file, and show how many there were."""
    from triptych import machine
    from triptych.batches.records import SUFFIXES, RecordInput, Work

    if out is None:
        raise BadParameter("--records needs --out FILE, a .jsonl or .parquet file of the results")
    screen.check_suffix(out, SUFFIXES, "--out")
    check_out(records, out)
    with screen.waiting(f"reading {records}"):
        lines = RecordInput(records, field, here if field == "file" else str)
    work = Work(start, {"checkpoint": model_options(checkpoint), **settings}, at_once)
    began = time.perf_counter()
    machine.use_threads()
    summary = run(work, lines, out, cluster)
    show(out, summary, time.perf_counter() - began, as_json=as_json)


def run(work: Work, lines: Lines, out: Path, cluster: Cluster | None) -> Summary:
    """Do the work on the cluster, or here, with progress."""
    try:
        if cluster is not None:
            from triptych.batches.ray_data import run_on_cluster

            return run_on_cluster(work, lines, out, cluster)
        from triptych.batches.journal import Journal
        from triptych.batches.records import run_here

        with Journal(out, work.head(lines)) as journal, screen.counting() as bar:
            task = bar.add_task("records", total=len(lines))
            return run_here(work, lines, journal, lambda done: bar.update(task, completed=done))
    except KeyboardInterrupt:
        screen.note("what is done is kept; the same command goes on from there")
        raise


def check_out(requests: Path, out: Path) -> None:
    """Raises InputError for an OUT that is the input, or a directory."""
    if out.exists() and requests.exists() and out.samefile(requests):
        raise InputError(f"{out}: is the file of the requests; give another OUT")
    if out.is_dir():
        raise InputError(f"{out}: is a directory; give a file")


def show(out: Path, summary: Summary, seconds: float, *, as_json: bool) -> None:
    """Say how many records there are."""
    if as_json:
        screen.result({"out": str(out), **asdict(summary), "seconds": round(seconds, 3)})
        return
    screen.write(f"{out}: {summary.answered:,} of {summary.requests:,} requests answered in {seconds:.1f} s\n")
    if summary.refused or summary.bad_lines:
        screen.note(f"{summary.refused:,} were refused and {summary.bad_lines:,} lines are no requests; {out} says why")
