"""Work for many records on a cluster of Ray, by Ray Data: all that this package knows of Ray.

    OUT.part/run.json        what the run is of; written when `input` is whole
    OUT.part/input/          the lines, with their numbers
    OUT.part/data/           records, a file for each group of lines, as Ray Data writes them
    OUT.part/checkpoint/     the numbers of those in `data`: Ray Data renames each file here when its data is whole

Actors hold a loaded model each.  What a checkpoint does not have is done again by the next run, and only records that a
checkpoint has come into OUT, which appears whole when all are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych import errors, machine
from triptych.errors import CheckpointError, ConfigError, InputError, TriptychError, counted, first_line, shown
from triptych.files import exists, writable_name
from triptych.run_lock import RunLock
from .journal import RAY_RUN, Summary, encoded, part_directory, write_results
from .records import Lines, Work

if TYPE_CHECKING:
    import pyarrow

LOCAL = "local"  # in place of an address: a cluster that is this machine, and ends with the run
_GROUPS = 10_000  # that the lines are cut into at most, unless they have more than `_MOST_LINES` each
_MOST_LINES = 1 << 14
_NO_CORES = 0  # that reading and writing ask for, so that they never wait for the models, which have all but one
_PENDING = ".pending.parquet"


@dataclass(frozen=True)
class Cluster:
    """The address of a cluster of Ray, or `LOCAL`, and how many actors there hold a model; None is one a machine."""

    address: str = LOCAL
    actors: int | None = None

    def __post_init__(self) -> None:
        if self.address != LOCAL and not re.fullmatch(r"auto|[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5}", self.address):
            raise InputError(f"{shown(self.address)} is no address of a cluster of Ray; write HOST:PORT, or {LOCAL}")
        if self.actors is not None and self.actors < 1:
            raise InputError(f"actors={self.actors} is less than 1")


@dataclass(frozen=True)
class _Share:
    """What each of `actors` has of the cluster: cores as Ray counts them, GPUs, and threads."""

    actors: int
    cores: int
    gpus: int
    threads: int


class Actor:
    """A loaded model in a process of the cluster."""

    def __init__(self, work: Work, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.function = work.start(**work.options)

    def __call__(self, lines: pyarrow.Table) -> pyarrow.Table:
        import pyarrow

        answers = self.function(lines["line"].to_pylist())
        statuses, records = zip(*answers, strict=True)
        values = [pyarrow.array(statuses, "int64"), pyarrow.array(map(encoded, records), "binary")]
        return pyarrow.table([lines["number"], *values], names=["number", "status", "record"])


def run_on_cluster(work: Work, lines: Lines, out: Path, cluster: Cluster) -> Summary:
    """Do `work` for all lines and write OUT, in their order; what an earlier run did is not done again.

    OUT, and the files that the work reads, are where all machines see them.  Raises
    InputError without Ray, where OUT cannot be written or is of another run, and for an address without a cluster;
    ConfigError where another process has it; CheckpointError where the cluster failed.
    """
    check_ray()
    writable_name(out)
    directory = Path(os.path.abspath(part_directory(out)))
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror}); give another OUT") from None
    with RunLock(directory) as lock:
        try:
            places = _places(directory)
            before = len(places)
            if exists(out) and before < len(lines):
                raise InputError(f"{out}: exists already; remove it, or give another OUT")
            _prepare(directory, work.head(lines), lines, work.at_once)
            if before < len(lines):
                _compute(directory, work, cluster)
                places = _places(directory)
            if missing := len(lines) - len(places):
                raise CheckpointError(f"{counted(missing, 'record')} of {out} are not there; run the command again")
            write_results(out, lambda: _records(places), directory)
            (directory / RAY_RUN).unlink()
        finally:
            if not exists(directory / RAY_RUN):  # nothing has begun, or all is done
                _clear(directory, lock)
    return Summary.of([status for _, _, status in places.values()], before)


def _clear(directory: Path, lock: RunLock) -> None:
    """Remove what a run with Ray writes, and the directory where it holds nothing else."""
    for name in ("input", "data", "checkpoint"):
        shutil.rmtree(directory / name, ignore_errors=True)
    lock.path.unlink(missing_ok=True)
    with suppress(OSError):  # files of others
        directory.rmdir()


def check_ray() -> None:
    """Raises InputError where Ray Data is not installed."""
    if missing := [name for name in ("ray", "pyarrow") if find_spec(name) is None]:  # not imported, see `_connected`
        raise InputError(f"--ray needs {missing[0]}; run: pip install -e '.[ray]' in the clone")


def _prepare(directory: Path, head: Mapping[str, Any], lines: Lines, at_once: int) -> None:
    """Write the lines where all machines see them.  Raises InputError where the directory is of another run."""
    import pyarrow
    from pyarrow import parquet

    if exists(directory / RAY_RUN):
        if json.loads((directory / RAY_RUN).read_text("utf-8")) != head:
            problem = f"{directory}: is of other records, models or options"
            raise InputError(f"{problem}; finish those, remove the directory, or give another OUT")
        return
    if others := sorted(set(os.listdir(directory)) - {".lock", "input"}):
        raise InputError(f"{directory}: holds {shown(others[0])} of a run without --ray; finish that, or remove it")
    shutil.rmtree(directory / "input", ignore_errors=True)
    (directory / "input").mkdir()
    waiting = iter(enumerate(lines))
    size = max(at_once, min(_MOST_LINES, len(lines) // _GROUPS))
    while group := list(islice(waiting, size)):
        numbers, texts = zip(*group, strict=True)
        table = pyarrow.table({"number": pyarrow.array(numbers, "int64"), "line": pyarrow.array(texts, "binary")})
        parquet.write_table(table, directory / "input" / f"{numbers[0]:012}.parquet")
    (directory / "run.tmp").write_text(json.dumps(head), "utf-8")
    os.replace(directory / "run.tmp", directory / RAY_RUN)


def _compute(directory: Path, work: Work, cluster: Cluster) -> None:
    """Have Ray Data do what its checkpoint does not have."""
    with _connected(cluster, gpu=str(work.options.get("checkpoint", {}).get("device", "")).startswith("cuda")) as share:
        from ray import data
        from ray.data.checkpoint import CheckpointConfig

        context = data.DataContext.get_current()
        context.use_datasource_v2 = False  # which reads small files together, and so commits them together
        context.checkpoint_config = CheckpointConfig(
            "number", str(directory / "checkpoint"), delete_checkpoint_on_success=False
        )
        groups = len(os.listdir(directory / "input"))
        lines = data.read_parquet(
            str(directory / "input"), override_num_blocks=groups, num_cpus=_NO_CORES, concurrency=share.actors
        )
        pool = data.ActorPoolStrategy(
            size=share.actors, max_concurrent_calls_per_actor=work.calls, enable_true_multi_threading=work.calls > 1
        )
        records = lines.map_batches(
            Actor, fn_constructor_args=(work, share.threads), batch_format="pyarrow", compute=pool,
            num_cpus=share.cores, num_gpus=share.gpus or None,
        )  # fmt: skip
        try:
            records.write_parquet(
                str(directory / "data"), concurrency=share.actors, ray_remote_args={"num_cpus": _NO_CORES}
            )
        except Exception as error:  # of Ray, or of a model that cannot be loaded
            raise _of_ours(error) from None
        finally:
            context.checkpoint_config = None


@contextmanager
def _connected(cluster: Cluster, *, gpu: bool) -> Iterator[_Share]:
    """Inside, this process is the driver of the cluster.  One that is this machine listens on 127.0.0.1 alone."""
    here = cluster.address == LOCAL
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if here:  # before Ray is imported; it is Ray's name for: nothing listens beyond loopback
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    try:
        if here:
            share = _share(cluster.actors or 1, 1, machine.threads(), gpu=gpu)
            ray.init(LOCAL, num_cpus=share.actors * share.cores + 1, include_dashboard=False, log_to_driver=False)
            if ray.util.get_node_ip_address() != "127.0.0.1":
                raise ConfigError("Ray was imported before, for a network; use --ray in a process of its own")
        else:
            ray.init(cluster.address, log_to_driver=False)
            share = _share_of_cluster(ray.nodes(), cluster.actors, gpu=gpu)
        yield share
    except (ConnectionError, TimeoutError) as error:
        problem = f"{cluster.address}: no cluster of Ray answers there ({first_line(error)})"
        raise InputError(f"{problem}; start one, or set RAY_AUTH_MODE=token where it asks for a token") from None
    finally:
        ray.shutdown()


def _share(actors: int, machines: int, threads: int, *, gpu: bool) -> _Share:
    """Of machines with `threads` cores each."""
    each = max(1, threads // -(-actors // machines))
    return _Share(actors, each, int(gpu), each)


def _share_of_cluster(nodes: list[dict[str, Any]], actors: int | None, *, gpu: bool) -> _Share:
    """Of the machines of a cluster, as Ray lists them.  Raises InputError where they have no core beside the models."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    cores = [one for one in cores if one]
    wanted = actors or len(cores)
    if sum(cores) <= wanted:
        raise InputError(f"the cluster has {counted(sum(cores), 'core')}, and --actors {wanted} needs one more")
    share = _share(wanted, len(cores), min(cores), gpu=gpu)
    return _Share(share.actors, max(1, share.cores - 1), share.gpus, share.threads)


def _of_ours(error: BaseException) -> TriptychError:
    """The error of this package that ended the work in another process; else one that names what Ray says.  Ray hands
    on the text of its traceback and not the exception."""
    if ours := re.findall(r"^triptych\.errors\.(\w+): (.+)$", str(error), re.M):
        name, message = ours[-1]
        kind = getattr(errors, name, None)
        return (kind if isinstance(kind, type) and issubclass(kind, TriptychError) else CheckpointError)(message)
    return CheckpointError(f"the cluster failed: {type(error).__name__}: {first_line(error)}; run the command again")


def _places(directory: Path) -> dict[int, tuple[Path, int, int]]:
    """Of each record that a checkpoint has, by its number: its file, its row there, and its status."""
    from pyarrow import parquet

    checkpoint, places = directory / "checkpoint", dict[int, tuple[Path, int, int]]()
    names = sorted(os.listdir(checkpoint)) if checkpoint.is_dir() else []
    for name in (one.removesuffix(".parquet") for one in names if not one.endswith(_PENDING)):
        for file in sorted((directory / "data").glob(f"{name}-*.parquet")):
            table = parquet.read_table(file, columns=["number", "status"])
            rows = zip(table["number"].to_pylist(), table["status"].to_pylist(), strict=True)
            for row, (number, status) in enumerate(rows):
                places.setdefault(number, (file, row, status))  # of a record that was done twice, the first
    return places


def _records(places: Mapping[int, tuple[Path, int, int]]) -> Iterator[bytes]:
    """The records in the order of their lines."""
    from pyarrow import parquet

    @lru_cache(maxsize=8)  # neighbours are mostly of one file
    def records(file: Path) -> pyarrow.ChunkedArray:
        return parquet.read_table(file, columns=["record"])["record"]

    for number in range(len(places)):
        file, row, _ = places[number]
        yield records(file)[row].as_py()
