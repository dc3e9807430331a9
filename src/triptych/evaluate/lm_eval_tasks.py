"""lm-eval's tasks from local files, run on a model, and on the same weights in transformers by lm-eval's own adapter.

A task is a YAML file as lm-eval writes it, with its data beside it (`dataset_path: json` and `data_files`).  In it
`!function` runs Python code from a file beside it: run tasks of people you trust.
"""

from __future__ import annotations

import io
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from triptych.arguments import checked, integer
from triptych.errors import InputError, counted, library, nearest
from triptych.generate import MAX_ROWS
from triptych.model import Model
from .lm_eval_model import TriptychLM

HUB = "hub:"  # before the name of a task that lm-eval brings, whose data comes from the network
FILES = ("json", "csv", "parquet", "text", "arrow", "xml")  # values of `dataset_path` that read local files
RESAMPLES = 1000  # of the standard errors that have no formula

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Metric:
    """One figure of a task, and its standard error where it has one; `their_value` is that of lm-eval's own adapter."""

    task: str
    metric: str
    filter: str
    shots: int | None
    samples: int
    value: float
    error: float | None
    their_value: float | None = None


@dataclass(frozen=True)
class Difference:
    """Of the requests that both answered: the largest difference of two log-likelihoods in nats and the request that
    has it, and how many greedy flags and written texts are not the same."""

    requests: int
    log_likelihood: float
    request: tuple[str, ...]
    other_greedy: int
    texts: int
    other_texts: int


@dataclass(frozen=True)
class TaskResults:
    """The figures of tasks, the seconds that the requests took, and lm-eval's whole results with its samples; against
    another adapter what differs, and its seconds."""

    metrics: tuple[Metric, ...]
    seconds: float
    their_seconds: float | None = None
    difference: Difference | None = None
    results: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but lm-eval's own results, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "results"}


@dataclass
class Answers:
    """What a model answered: it stands in place of lm-eval's cache, which is told of every request.

    seconds     that the requests took on the clock, and `cpu_seconds` of all cores.
    """

    by_request: dict[tuple[str, str], object] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add_partial(self, kind: str, request: object, answer: object) -> None:
        self.by_request[kind, repr(request)] = answer

    def timed(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(requests: Any) -> Any:
            start, cpu_start = time.perf_counter(), time.process_time()
            try:
                return method(requests)
            finally:
                self.seconds += time.perf_counter() - start
                self.cpu_seconds += time.process_time() - cpu_start

        return run


@checked
def run_tasks(
    model: Model,
    tasks: str | Sequence[str],
    *,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    max_length: int | None = None,
    max_rows: int = MAX_ROWS,
    apply_chat_template: bool = False,
    against: str | None = None,
    batch_size: int = 8,
    on_progress: OnProgress = lambda *_: None,
) -> TaskResults:
    """Run lm-eval's tasks on a model.

    tasks          names of tasks, groups or tags below the folder `include_path`, or YAML files; `hub:NAME` is a task
                   that lm-eval brings, whose data may come from the network.
    num_fewshot    examples before each question; by default what the task says.
    limit          documents of each task, or below 1 the share of them.
    max_length     tokens that the model reads at most, by default what its config says.
    against        "transformers" runs lm-eval's own adapter on the same weights too, `batch_size` requests at once.

    Raises InputError for tasks that are not known, or whose files lack something, for a model that predicts no next
    tokens, and with what lm-eval says of a task that it cannot run.
    """
    if against not in (None, "transformers"):
        raise InputError(f"against={against!r} must be 'transformers'")
    if num_fewshot is not None:
        integer("num_fewshot", num_fewshot, 0)
    if limit is not None and not limit > 0:
        raise InputError(f"limit={limit} must be above 0: a number of documents, or below 1 their share")
    names = [part for one in ([tasks] if isinstance(tasks, str) else tasks) for part in one.split(",") if part]
    if not names:
        raise InputError("there are no tasks; give names of tasks, or YAML files")
    ours = TriptychLM(model, max_length=max_length, max_rows=max_rows, on_progress=on_progress)
    settings = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": apply_chat_template}
    with quiet():
        answers, results = answers_of(ours, loaded(names, include_path), **settings)
        if against is None:
            return TaskResults(tuple(_metrics(results, {})), answers.seconds, results=results)
        on_progress("transformers", 0, 0)
        with adapter_of_transformers(model, ours.max_length, integer("batch_size", batch_size, 1)) as theirs:
            expected, other = answers_of(theirs, loaded(names, include_path), **settings)
    metrics = tuple(_metrics(results, other))
    return TaskResults(metrics, answers.seconds, expected.seconds, difference(answers, expected), results)


def answers_of(lm: Any, tasks: Sequence[Any], **settings: Any) -> tuple[Answers, dict[str, Any]]:
    """What a model of lm-eval answers to loaded tasks, and lm-eval's results."""
    answers = Answers()
    lm.set_cache_hook(answers)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, kind, answers.timed(getattr(type(lm), kind).__get__(lm)))
    with library(lambda problem: InputError(f"lm-eval cannot run these tasks: {problem}")):
        results = simple_evaluate(
            model=lm, tasks=[*tasks], bootstrap_iters=RESAMPLES, log_samples=True, random_seed=None,
            numpy_random_seed=None, torch_random_seed=None, task_manager=TaskManager(include_defaults=False),
            **settings,
        )  # fmt: skip
    return answers, results or {}


# -- tasks --------------------------------------------------------------------------------------------------------


def loaded(names: Sequence[str], include_path: str | Path | None) -> list[Any]:
    """The tasks, whose data is read.  Raises InputError as `run_tasks`."""
    folder = None if include_path is None else Path(include_path).expanduser()
    if folder is not None and not folder.is_dir():
        raise InputError(f"{folder}: is no folder of tasks")
    tasks: list[Any] = []
    for name in names:
        path, hub = Path(name).expanduser(), name.startswith(HUB)
        is_file = path.suffix in (".yaml", ".yml") and not hub
        if is_file and not path.is_file():
            raise InputError(f"{name}: there is no such file")
        with library(lambda problem: InputError(f"lm-eval cannot read these tasks: {problem}")):
            manager = TaskManager(include_path=path.parent if is_file else folder, include_defaults=hub)
        own = name.removeprefix(HUB)
        if is_file:
            entries = manager.task_index.values()
            own = next((one.name for one in entries if one.yaml_path and one.yaml_path.samefile(path)), "")
            if not own:
                raise InputError(f"{name}: is no task; a task's YAML file has a name under `task`")
        tasks += _of(manager, own, name, hub, folder)
    return tasks


def _of(manager: Any, name: str, typed: str, hub: bool, folder: Path | None) -> list[Any]:
    """The tasks that a name stands for.  A task's data files that are not found from here are looked for beside it."""
    if name not in manager.task_index:
        where = "" if folder is None else f" below {folder}"
        if not manager.all_tasks:
            hint = "" if folder else "; give include_path, the folder of its YAML file, that file itself, or hub:NAME"
            raise InputError(f"there is no task {name!r}{where or ' here'}{hint}")
        raise InputError(f"there is no task {name!r}{where}{nearest(name, manager.all_tasks)}")
    spec = name if hub else _spec(manager, name)
    with library(lambda problem: InputError(f"{typed}: lm-eval cannot use the task: {problem}")):
        made = manager.load([spec])
    group = made.get("groups", {}).get(name)
    return [*made["tasks"].values()] if group is None else [group]


def _spec(manager: Any, name: str) -> dict[str, Any]:
    """A task, the tasks of a tag, or a group, as lm-eval takes them inline, with data files by where they are."""
    entry = manager.task_index[name]
    if entry.cfg is not None and "group" in entry.cfg:
        return {**entry.cfg, "task": [_member(manager, one) for one in entry.cfg.get("task") or ()]}
    members = sorted(entry.tags) if entry.cfg is None else [name]
    return {"group": "local", "task": [_member(manager, one) for one in members]}


def _member(manager: Any, member: Any) -> Any:
    """A task of a group or a tag with its data files, and with what the group changes of it; other members as they are,
    once what they stand for was checked."""
    changes = dict(member) if isinstance(member, Mapping) else {"task": member}
    name = changes.get("task")
    entry = manager.task_index.get(name) if isinstance(name, str) else None
    if entry is None:
        return member
    if entry.cfg is None or "group" in entry.cfg:
        _spec(manager, entry.name)
        return member
    return {**changes, **_checked({**entry.cfg, **changes}, entry.yaml_path)}


def _checked(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What replaces fields of a task so that its data is found.  Raises InputError for a task that lacks a field, or
    whose data is not here."""
    if "class" in config or "custom_dataset" in config:
        return {}
    for wanted in ("dataset_path", "doc_to_text", "doc_to_target"):
        if config.get(wanted) is None and "use_prompt" not in config:
            raise InputError(f"{path}: the task lacks {wanted}; add it, as lm-eval's guide to new tasks describes it")
    kind = config.get("output_type", "generate_until")
    if kind == "multiple_choice" and config.get("doc_to_choice") is None:
        raise InputError(f"{path}: the task lacks doc_to_choice, which output_type: multiple_choice needs")
    splits = [config.get(name) for name in ("test_split", "validation_split")]
    if not any(splits):
        raise InputError(f"{path}: the task lacks test_split or validation_split, the part of its data that is asked")
    source = str(config["dataset_path"])
    if source not in FILES and not Path(source).exists():
        raise InputError(
            f"{path}: its data comes from the network (dataset_path: {source}); write hub:{config['task']} to allow "
            f"that, or dataset_path: json with local data_files"
        )
    if any(isinstance(one, dict) and one.get("hf_evaluate") for one in config.get("metric_list") or ()):
        allow = f"write hub:{config['task']} to allow it"
        raise InputError(f"{path}: hf_evaluate fetches a metric from the network; {allow}")
    kwargs = config.get("dataset_kwargs") or {}
    files = kwargs.get("data_files")
    if source in FILES and files is None:
        raise InputError(f"{path}: the task lacks dataset_kwargs: data_files, the files of dataset_path: {source}")
    return {} if files is None else {"dataset_kwargs": {**kwargs, "data_files": _found(files, path)}}


def _found(files: Any, path: Path) -> Any:
    """Data files as a task names them, by where they are: from here, or else beside the task."""
    if isinstance(files, Mapping):
        return {name: _found(one, path) for name, one in files.items()}
    if isinstance(files, list | tuple):
        return [_found(one, path) for one in files]
    if "://" in str(files):
        raise InputError(f"{path}: data_files names {files}, an address on the network; copy the file here")
    for folder in (Path(), path.parent):
        if any(folder.glob(files)) if not Path(files).is_absolute() else Path(files).exists():
            return str(folder / files)
    raise InputError(f"{path}: data_files names {files}, which is neither here nor beside the task")


# -- results ------------------------------------------------------------------------------------------------------


def _metrics(results: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Metric]:
    """The figures of each task and group, beside those of `other` results."""
    for task, figures in results.get("results", {}).items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in figures.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{name}")
            their_value = other.get("results", {}).get(task, {}).get(key)
            yield Metric(
                task, metric, name, results.get("n-shot", {}).get(task), samples, float(value),
                float(error) if isinstance(error, int | float) else None,
                None if their_value is None else float(their_value),
            )  # fmt: skip


def difference(answers: Answers, expected: Answers) -> Difference:
    """Raises InputError where the two were asked different things."""
    ours, theirs = answers.by_request, expected.by_request
    if ours.keys() != theirs.keys():
        only = len(ours.keys() ^ theirs.keys())
        raise InputError(f"{counted(only, 'request')} went to one of the two adapters only, so they do not compare")
    largest, greedy, texts, other_texts = 0.0, 0, 0, 0
    request: tuple[str, ...] = ()
    for key, own in ours.items():
        value, their_value = own, theirs[key]
        if key[0] == "generate_until":
            texts += 1
            other_texts += value != their_value
            continue
        if isinstance(value, tuple) and isinstance(their_value, tuple):
            greedy += value[1] != their_value[1]
            value, their_value = value[0], their_value[0]
        assert isinstance(value, float)
        assert isinstance(their_value, float)
        if not abs(value - their_value) <= largest:  # NaN too
            largest, request = abs(value - their_value), key
    return Difference(len(ours), largest, request, greedy, texts, other_texts)


@contextmanager
def adapter_of_transformers(model: Model, max_length: int, batch_size: int) -> Iterator[Any]:
    """lm-eval's own adapter with the model's weights: of its directory, or of a copy in one for the time being."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise InputError(f"lm-eval's adapter needs {error.name}; run: pip install transformers accelerate") from None
    with tempfile.TemporaryDirectory(prefix="triptych-eval-") as scratch:
        model.save(scratch + "/model")
        dtype = str(model.module.dtype).removeprefix("torch.")
        with library(lambda problem: InputError(f"transformers cannot load the model: {problem}")):
            theirs = HFLM(
                pretrained=scratch + "/model", device=str(model.device), dtype=dtype, batch_size=batch_size,
                max_length=max_length,
            )  # fmt: skip
        yield theirs


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval, datasets and transformers without their bars and notes; some of them go to stdout."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers", "accelerate")]
    levels, unread = [one.level for one in loggers], io.StringIO()
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        with redirect_stdout(unread), redirect_stderr(unread):
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
