"""A recipe prepared as a job, run, and resumed."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from triptych import machine, nn
from triptych.arguments import checked
from triptych.checkpoints.adapters import AdapterSettings, new_factors
from triptych.checkpoints.header import read_header
from triptych.checkpoints.save import target_of
from triptych.errors import CheckpointError, ConfigError, TextError, TriptychError, counted
from triptych.run_lock import Interrupted, RunLock, on_signal
from triptych.spec import PatchesSpec
from triptych.text import Tokenizer
from .audio_records import TranscriptTask
from .base_model import BaseSettings, StartingModel, read_base, with_saved_adapter
from .chat_task import ChatTask
from .checkpoint_writer import CheckpointWriter
from .checkpoints import Checkpoints, read_checkpoint, read_progress, restore_optimizer
from .contrastive import ContrastiveTask
from .data import Windows
from .disk_and_memory import DiskSpace, check_recipe_memory, check_step_memory
from .distill import check_objective, distilled
from .image_tasks import CaptionTask, ImageLabelTask
from .label_tasks import LabelTask, SpanTask, TagTask
from .loop import Event, Progress, Trainer
from .model_of_recipe import check_fit, completed_config, smallest, tokenizer_of
from .optimizer import Optimizer
from .parallel.start import check_agreement, check_parallel, check_started, join, own_rank, run_facts
from .preference import PreferenceTask
from .recipe import IMAGE_MODELS, Objective, ObjectiveSettings, Recipe, check_recipe
from .settings import Config
from .sources import FOLDED, SHAKESPEARE
from .step_logs import check_logs, step_logs
from .task import HeadTask, ObjectiveTask
from .teacher_store import TeacherStore
from .text_tasks import CausalTask, CorruptionTask, MaskedTask, PairsTask, PlainTextTask, ReplacedTask

PROMPT_TOKENS = 16  # of a sample that an existing model writes

_TASKS: dict[Objective, type[ObjectiveTask]] = {
    "causal": CausalTask, "masked": MaskedTask, "seq2seq": PairsTask, "labels": LabelTask, "tags": TagTask,
    "spans": SpanTask, "contrastive": ContrastiveTask, "chat": ChatTask, "captions": CaptionTask,
    "corruption": CorruptionTask, "replaced": ReplacedTask, "transcripts": TranscriptTask, "preference": PreferenceTask,
}  # fmt: skip
#: The objectives that read a key of `objective`; for all others it must have its default.
_READ_BY: dict[str, tuple[Objective, ...]] = {
    "rate": ("masked", "corruption", "replaced"),
    "commonest": ("masked",),
    "several": ("labels",),
    "smoothing": ("labels", "tags", "spans", "captions"),
    "hidden": ("captions", "seq2seq"),
    "class_weights": ("labels", "tags"),
    "scale": ("contrastive",),
    "span": ("corruption",),
    "generator": ("replaced",),
    "language": ("transcripts",),
    "translate": ("seq2seq",),
    "beta": ("preference",),
}


@dataclass(eq=False)
class Job:
    """Everything of one run.  `words` is the tokenizer, None for a model that reads no text; `files` are what its
    checkpoints hold beside weights, config and tokenizer, `origin` the checkpoint it was resumed from, `skipped` the
    newer ones that are not valid, with the reason, `notes` what a user should know of the data, `store` where a
    teacher's logits are, and `lock` the lock on `run.out`, which a resumed job holds until it has run."""

    recipe: Recipe
    trainer: Trainer
    words: Tokenizer | None
    hf: Config
    files: Mapping[str, bytes] = field(default_factory=dict)
    origin: Path | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    store: TeacherStore | None = None
    lock: RunLock | None = field(default=None, repr=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.  Raises TextError for a model that reads no text."""
        if self.words is None:
            raise TextError(f"a {self.trainer.module.spec.family} reads no text and has no tokenizer")
        return self.words

    @property
    def model(self) -> Path | None:
        """The directory of the finished model, or of the newest one of a run that goes on; None without `run.out`."""
        return None if self.recipe.run.out is None else Checkpoints(self.recipe.run.out).model

    @property
    def sample_prompt(self) -> list[int]:
        """What a decoder writes on from, to be judged during the run: BOS (else EOS) with a new model, the first tokens
        of the held-out data with an existing one."""
        words = self.tokenizer
        first = words.eos_id if words.bos_id is None else words.bos_id
        if self.recipe.base is None or self.trainer.held_out is None:
            return [] if first is None else [first]
        batch = self.trainer.held_out.batches[0]
        count = min(PROMPT_TOKENS, max(1, batch.rows.lengths[0] // 2))
        return list(batch.ids[:count].tolist())

    def run(
        self,
        on_step: Callable[[Event], None] | None = None,
        on_sample: Callable[[Trainer], None] | None = None,
        until: int | None = None,
        on_note: Callable[[str], None] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Train to the end of the budget, or to step `until`, with checkpoints under `run.out` if it is set.

        With `run.out`, the first SIGINT (Ctrl-C) or SIGTERM finishes the present step, saves a checkpoint and raises
        Interrupted, a KeyboardInterrupt.  A run that begins deletes the checkpoints of another one in `run.out` with
        `force`, before it writes its first; without it, that is a ConfigError.

        Raises InputError where a step does not fit into memory, DivergedError for a loss that is not finite,
        CheckpointError when a checkpoint cannot be written, ConfigError when another process uses `run.out`.
        """
        trainer = self.trainer
        trainer.on_step, trainer.on_sample = on_step or trainer.on_step, on_sample or trainer.on_sample
        trainer.on_note = on_note or trainer.on_note
        for note in self.notes:
            trainer.on_note(note)
        if trainer.ranks.count > 1 and self.recipe.run.sample_every:
            trainer.on_sample = lambda _: None
            trainer.on_note("no samples are shown while several processes train")
        self.check_memory()
        with trainer.ranks.watch():
            self._run(until, force=force)

    def _run(self, until: int | None, *, force: bool) -> None:
        """`run` once everything is set."""
        trainer, out = self.trainer, self.recipe.run.out
        if out is None:
            self._complete_store()
            trainer.run(until)
            return
        self.lock = self.lock or RunLock(out)
        with ExitStack() as held:
            checkpoints = Checkpoints(out)

            def enter() -> None:
                target_of(out)
                try:
                    Path(out).mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from None
                assert self.lock is not None
                held.enter_context(self.lock)
                self._check_directory(checkpoints, force)

            trainer.ranks.on_first(enter)
            logs = self.recipe.run.logs if trainer.ranks.index == 0 else []
            log, on_step = held.enter_context(step_logs(logs, Path(out), trainer.at.step)), trainer.on_step
            held.callback(setattr, trainer, "on_step", on_step)

            def logged(event: Event) -> None:
                log(event)
                on_step(event)

            def save(trainer: Trainer) -> None:
                writer.save(trainer, self.hf, self.words, self.recipe.model_dump(), self.files)

            def stop() -> None:
                trainer.stop()
                with suppress(RuntimeError):  # the signal came while a line was written, and a file takes one at a time
                    trainer.on_note("the run stops after this step and is saved; a second Ctrl-C stops it at once")

            self._complete_store()
            trainer.on_save, trainer.on_step = save, logged
            in_background = self.recipe.run.save_in_background
            writer = held.enter_context(CheckpointWriter(checkpoints, trainer.stop, in_background=in_background))
            with on_signal(stop) as received:
                trainer.run(until)
                writer.wait()
                stopped = trainer.ranks.any(bool(received))
                finished = trainer.done >= 1.0 and checkpoints.exist()
                if stopped or trainer.ranks.any(finished and not checkpoints.model.exists()):
                    save(trainer)
                    writer.wait()
            if stopped:
                raise Interrupted((*received, signal.SIGTERM)[0], trainer.at.step, Path(out))

    def _complete_store(self) -> None:
        """Let the teacher compute what its store lacks, before the seconds of the run begin."""
        if self.store is not None and self.trainer.done < 1.0:
            self.store.complete(self.trainer.ranks, self.trainer.on_note)

    def check_memory(self) -> None:
        """Raises InputError where the next step does not fit into the memory that is free."""
        if self.trainer.done < 1.0:
            check_step_memory(self.trainer)

    def _check_directory(self, checkpoints: Checkpoints, force: bool) -> None:
        """Raises ConfigError if the directory holds another run, which `force` deletes, or this one further on, and
        CheckpointError if its disk cannot hold the checkpoints, whose size is a note."""
        out, step = checkpoints.directory, self.trainer.at.step
        begins = self.origin is None and step == 0
        if begins:
            checkpoints.check_new_run(force=force)
        space = DiskSpace.of(self.trainer, out, checkpoints.keep, checkpoints.nbytes)
        space.check()
        self.trainer.on_note(str(space))
        if begins and checkpoints.exist():
            checkpoints.remove()
        later = checkpoints.later(step)
        if later is not None:
            raise ConfigError(f"{out} has a checkpoint of step {later}, this run is at step {step}; resume it again")


@checked
def check_start(recipe: Recipe, *, force: bool = False) -> None:
    """What would stop a new run and can be known before its data are read.

    Raises ConfigError where `run.out` holds another run, which `force` would delete, and InputError where a step does
    not fit into the memory that is free.
    """
    if recipe.run.out is not None:
        Checkpoints(recipe.run.out).check_new_run(force=force)
    check_recipe_memory(recipe, smallest)


@checked
def prepare(recipe: Recipe) -> Job:
    """Texts, tokenizer, model and data of a recipe, checked, before the first step.

    Raises ConfigError where parts of the recipe do not fit together, TextError and InputError for the data.
    """
    check_started(recipe.parallel)
    task = read_task(recipe)
    if recipe.base is not None:
        base = _base(recipe, recipe.base, task)
    else:
        tokenizer, hf = None, recipe.model
        if recipe.tokenizer is not None or task.shards is not None:
            own = None if task.shards is None else task.shards.tokenizer()
            tokenizer = task.completed(own or tokenizer_of(recipe, recipe.tokenizer or "", task.texts))
            hf = completed_config(recipe, tokenizer)
        spec, hf = task.new(hf)
        nn.check_weights_fit(spec, processes=1 if recipe.parallel is None else recipe.parallel.holders)
        base = StartingModel(
            nn.empty(spec), tokenizer, hf, task.files, nn.initial_weights(spec, recipe.run.seed)
        )  # fmt: skip
    return _job(recipe, task, replace(base, files=task.saved_files(base.files)))


def _base(recipe: Recipe, settings: BaseSettings, task: ObjectiveTask) -> StartingModel:
    """The existing model that is trained further, with the head that the objective trains and the recipe's adapter.

    Raises ConfigError for an adapter beside a head that the model does not have: its file holds no head.
    """
    if recipe.adapter is None:
        return task.adapted(read_base(settings))
    if isinstance(task, HeadTask):
        raise ConfigError(
            f"objective {recipe.objective.name} trains a head, which the file of an adapter does not hold; leave "
            "adapter out, or train the head first"
        )
    base = read_base(settings, packed=True)
    factors = new_factors(base.module, AdapterSettings(**recipe.adapter.model_dump(), seed=recipe.run.seed))
    return base.with_adapter(factors, recipe.adapter.dropout)


@checked
def resume(out: Path | str, changes: Sequence[str] = ()) -> Job:
    """The run under `out` from its newest valid checkpoint, by the recipe stored in it, with `changes` made to that.

    With a budget of steps it continues bit for bit as if it had not been stopped; with a budget of seconds it has
    those left that it had not used.  Raises CheckpointError when no checkpoint is valid, ConfigError while another
    process uses `out`.
    """
    lock = RunLock(out)
    if own_rank() == 0:  # of several processes one
        lock.acquire()
    try:
        saved = Checkpoints(out).newest()
        progress, tables = read_progress(saved.path)
        recipe = check_recipe(tables, changes, str(saved.path), {"run.out": str(out)})
        check_started(recipe.parallel)
        check_recipe_memory(recipe, smallest)
        task = read_task(recipe)
        if recipe.adapter is not None and recipe.base is not None:
            base = with_saved_adapter(recipe.base, recipe.adapter, saved.path)
        else:
            base = read_checkpoint(saved.path)
            if recipe.base is None:
                base.module.requires_grad_(True)  # a new model trains what a loaded one keeps as it is
        task.check_labels(base.module, base.hf)
        job = _job(recipe, task, base, progress)
        restore_optimizer(saved.path, job.trainer.optimizer, job.trainer.ranks)
    except BaseException:
        lock.release()
        raise
    job.origin, job.skipped, job.lock = saved.path, saved.skipped, lock
    return job


@checked
def verify_resume(recipe: Recipe, steps: int) -> None:
    """Train `steps` steps at once, and half of them, a checkpoint, and the other half: the weights must be bit-equal.

    Raises TriptychError naming the first parameter that differs.
    """

    if recipe.parallel is not None and recipe.parallel.processes > 1:
        raise ConfigError("--verify-resume is for one process; leave out the table parallel")

    def saved_in(out: str | None) -> Recipe:
        run = recipe.run.model_copy(update={"steps": steps, "seconds": None, "out": out})
        return recipe.model_copy(update={"run": run})

    with tempfile.TemporaryDirectory() as out:
        check_start(saved_in(None))
        whole = prepare(saved_in(None))
        whole.run()
        half = prepare(saved_in(out))
        half.run(until=steps // 2)
        Checkpoints(out).save(half.trainer, half.hf, half.words, half.recipe.model_dump())
        resumed = resume(out)
        resumed.run()
        for name, parameter in whole.trainer.module.named_parameters():
            if not torch.equal(parameter, resumed.trainer.module.get_parameter(name)):
                at = f"stopped after {steps // 2} of {steps} steps"
                raise TriptychError(f"cannot resume: {name} differs from the run that was not interrupted ({at})")


def read_task(recipe: Recipe) -> ObjectiveTask:
    """The task of the recipe's objective with its data read and checked.

    Raises ConfigError, TextError and InputError, one line each, for a recipe and data that do not fit.
    """
    settings, data, name = recipe.objective, recipe.data, recipe.objective.name
    check_logs(recipe.run.logs)
    check_objective(recipe)
    if data.shards and not issubclass(_TASKS[name], PlainTextTask):
        known = [one for one, task in _TASKS.items() if issubclass(task, PlainTextTask)]
        raise ConfigError(f"data.shards are plain text, for {', '.join(known)}; objective {name} reads no such data")
    for key, names in _READ_BY.items():
        if name not in names and getattr(settings, key) != ObjectiveSettings.model_fields[key].default:
            raise ConfigError(f"objective.{key} is for {', '.join(names)}; objective {name} does not read it")
    cut = name == "seq2seq" or (name == "contrastive" and data.path in (SHAKESPEARE, FOLDED))
    if data.words is not None and not cut:
        raise ConfigError(
            f"data.words cuts pairs of texts, for seq2seq, and for contrastive on {SHAKESPEARE!r} or {FOLDED!r}; "
            f"objective {name} does not read it here"
        )
    images = recipe.model.get("model_type") in IMAGE_MODELS
    if name == "labels" and recipe.base is not None:
        images = isinstance(read_header(recipe.base.path).spec.reads.embed, PatchesSpec)
    return (ImageLabelTask if name == "labels" and images else _TASKS[name])(recipe)


def _job(recipe: Recipe, task: ObjectiveTask, base: StartingModel, at: Progress | None = None) -> Job:
    """The job that trains the model `base`."""
    check_fit(recipe, base.module, base.tokenizer, task.head)
    run = recipe.run
    ranks = join(recipe.parallel, run.device, clocked=run.seconds is not None)
    module = base.module
    check_parallel(recipe, module)
    ranks.distribute(module, base.weights, machine.device(recipe.run.device))
    task.words, task.files, task.ranks = base.tokenizer, base.files, ranks
    data, held_out = task.data(module, max(run.length, run.rows * run.length // run.accumulate))
    check_agreement(ranks, recipe.model_dump(mode="json"), run_facts(data, recipe, ranks, at))
    rows, store = distilled(recipe, task, module, data)
    optimizer = Optimizer(module, recipe.optimizer, ranks)
    trainer = Trainer(module, rows, optimizer, recipe.schedule, run, held_out, at, ranks)
    if isinstance(data, Windows) and len(data.stream) < data.length:
        size = counted(len(data.stream), "token")
        task.notes.append(f"the training text has {size}, fewer than a row may have, so that each row is all of it")
    return Job(recipe, trainer, base.tokenizer, base.hf, base.files, notes=tuple(task.notes), store=store)
