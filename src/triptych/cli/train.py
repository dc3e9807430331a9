"""`triptych train`: write a recipe, train from one, show its first batch, or verify that resuming changes nothing; and
`triptych quickstart`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import BadParameter, Exit, Option

from triptych.errors import ConfigError, TriptychError, counted, nearest
from . import options, screen
from .failure import ReportedExit
from .training_progress import TrainingProgress, batch_row, held_out, show_batch

if TYPE_CHECKING:
    from triptych.train import Event, Job, Recipe, Score, Trainer

SAMPLE_TOKENS = 120


def train(
    recipe: Path | None = None,
    *,
    new: Path | None = None,
    keys: bool = False,
    from_: str | None = None,
    data: str | None = None,
    adapter: bool = False,
    objective: str | None = None,
    set_: list[str] | None = None,
    resume: bool = False,
    out: options.NamedPath | None = None,
    force: bool = False,
    show_batch: bool = False,
    evaluate: bool = False,
    verify_resume: Annotated[int | None, Option(min=2)] = None,
    processes: Annotated[int | None, Option(min=1)] = None,
    as_json: options.Json = False,
) -> None:
    """Train a model from a recipe, or write one with --new.

    RECIPE: A .toml file, or the quickstart's recipe decoder, encoder or encoder-decoder.
    --new FILE: Write a short recipe that runs as it is, and stop.
    --keys: List every key of a recipe with its default, and stop.
    --from MODEL: Existing model to train further, instead of the recipe's model.
    --data PATH: Texts, a folder of them, a file of records or shards, in place of the recipe's.
    --adapter: With --new and --from: train an adapter (LoRA); the model stays as it is.
    --objective NAME: With --new and --from: what is learned (labels, tags, chat, ...); else the fields of --data
        say so.
    --set A.B=C: Change one value of the recipe. Repeatable.
    --resume: Continue from the newest checkpoint in the run directory.
    --out DIR: Run directory, for checkpoints; by default run.out of the recipe.
    --force: Delete the run that the run directory holds, and start over.
    --show-batch: Show the batch of the first step, and stop.
    --evaluate: Print the score before the first step, and stop.
    --verify-resume N: Check that N steps with an interruption give the same weights.
    --processes N: Train in N processes of this machine, as the table [parallel] of the recipe divides them.
    """
    if processes is not None and (keys or new is not None or show_batch or evaluate or verify_resume):
        raise BadParameter("--processes is for a run; leave it out")
    if keys:
        if recipe is not None or new is not None:
            raise BadParameter("--keys lists the keys of a recipe and stops; leave out RECIPE and --new")
        _list_keys(as_json=as_json)
        return
    if new is not None:
        if resume or force or show_batch or evaluate or verify_resume:
            raise BadParameter(
                "--new writes a recipe and stops;"
                " leave out --resume, --force, --show-batch, --evaluate and --verify-resume"
            )
        for option_name, given in (("--adapter", adapter), ("--objective", objective is not None)):
            if given and (from_ is None or recipe is not None):
                of_model = f"--new FILE --from MODEL {option_name}"
                raise BadParameter(f"{option_name} is for a new recipe of an existing model: {of_model}")
        _new(new, recipe, from_, data, out, set_ or (), adapter=adapter, objective=objective, as_json=as_json)
        return
    if objective is not None:
        raise BadParameter("--objective is for --new, which writes a recipe; in a recipe it is objective.name")
    if adapter:
        raise BadParameter("--adapter is for --new, which writes a recipe; in a recipe it is the table [adapter]")
    if recipe is None:
        raise BadParameter("a run needs a RECIPE; --new my.toml writes one", param_hint="RECIPE")
    if resume and (from_ is not None or data is not None):
        raise BadParameter("--resume continues with the model and the data of the run; leave out --from and --data")
    if resume and (show_batch or evaluate or verify_resume):
        raise BadParameter("--resume continues a run; --show-batch, --evaluate and --verify-resume start one")
    if resume and force:
        raise BadParameter("--resume continues the run that --force deletes; give one of the two")
    from triptych import machine
    from triptych.train import read_recipe
    from triptych.train.parallel.start import own_rank
    from triptych.train.recipe import named_data

    machine.use_threads()
    values = {} if data is None else named_data(data)
    trains = not (show_batch or evaluate or verify_resume)
    if out is not None and trains:
        values["run.out"] = str(out)
    chosen = read_recipe(recipe, set_ or (), values, from_)
    if processes is not None and processes > 1:
        _in_processes(processes, chosen, resume=resume, force=force)
        return
    if show_batch:
        _show_batch(chosen.model_copy(update={"parallel": None}), as_json=as_json)
    elif evaluate:
        _evaluate(chosen.model_copy(update={"parallel": None}), as_json=as_json)
    elif verify_resume is not None:
        _verify_resume(chosen, verify_resume, as_json=as_json)
    else:
        with _as_rank(own_rank()):
            _train(chosen, recipe, set_ or (), resume=resume, force=force, as_json=as_json)


def _new(
    path: Path, recipe: Path | None, base: str | None, data: str | None, out: Path | None, changes: Sequence[str],
    *, adapter: bool, objective: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a recipe to `path`."""
    from triptych.train import OBJECTIVES, write_new_recipe

    name = next((one for one in OBJECTIVES if one == objective), None)
    if objective is not None and name is None:
        raise BadParameter(f"{objective}{nearest(objective, OBJECTIVES)}: the objectives are {', '.join(OBJECTIVES)}")

    written = write_new_recipe(
        path, recipe, base=base, data=data, out=None if out is None else str(out), changes=changes, adapter=adapter,
        objective=name,
    )  # fmt: skip
    if as_json:
        screen.result({"recipe": str(path), "out": written.run.out, "objective": written.objective.name})
        return
    learned = f"objective {written.objective.name}; train with: triptych train {path}"
    screen.console().print(f"wrote {path}, {learned}", soft_wrap=True)


def _list_keys(*, as_json: bool) -> None:
    """The keys of all tables of a recipe: their values, defaults and meaning."""
    from triptych.train.new_recipe import keys, meaning, single_keys
    from triptych.train.recipe import sections

    tables = {"": single_keys()} | {name: keys(name) for name in sections()}
    if as_json:
        screen.result({name: {key.name: asdict(key) for key in of_table} for name, of_table in tables.items()})
        return
    for name, of_table in tables.items():
        rows = [(key.name, key.values, key.defaults, key.meaning) for key in of_table]
        title = f"[{name}]  {meaning(name)}" if name else "outside any table"
        screen.show_rows(("key", "values", "default", "meaning"), rows, title)


def _in_processes(processes: int, recipe: Recipe, *, resume: bool, force: bool) -> None:
    """Run this command in so many processes, after what can be checked before."""
    from triptych import train
    from triptych.train.parallel.launch import launch
    from triptych.train.parallel.start import check_mesh

    if not resume:
        check_mesh(recipe.parallel, processes)
        train.check_start(recipe, force=force)
    arguments = shlex.split(screen.COMMAND.get())[1:]
    at = next(i for i, one in enumerate(arguments) if one.partition("=")[0] == "--processes")
    del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    if code := launch(arguments, processes):
        raise Exit(ReportedExit(code))


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    """Inside, a process other than rank 0 shows nothing but its own errors."""
    if not rank:
        yield
        return
    from triptych.train import DivergedError
    from triptych.train.ranks import SharedError

    shown = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        except (SharedError, DivergedError):  # rank 0 reports it
            raise Exit(ReportedExit(1)) from None
        except TriptychError as error:
            print(f"rank {rank}: {error}", file=shown[1], flush=True)
            raise Exit(ReportedExit(1)) from None
        finally:
            sys.stdout, sys.stderr = shown


def _train(recipe: Recipe, file: Path, changes: Sequence[str], *, resume: bool, force: bool, as_json: bool) -> None:
    """Run the recipe to its end, or resume the run under its `run.out`."""
    from triptych import train

    if not resume:
        train.check_start(recipe, force=force)
    if recipe.run.out is None:
        screen.note("the model will not be saved; --out DIR saves it")
    with TrainingProgress() as bar:
        bar.say("reading the data")
        if resume and recipe.run.out is None:
            raise ConfigError("--resume needs to know which run: give --out DIR, or run.out in the recipe")
        job = train.resume(recipe.run.out or "", changes) if resume else train.prepare(recipe)
        for line in job.skipped:
            screen.note(f"skipped {line}")
        bar.say(f"computing in {job.trainer.precision}")
        last: list[Event] = []

        def step(event: Event) -> None:
            last[:] = [event]
            bar.step(event)

        try:
            job.run(step, lambda trainer: _sample(job, trainer, bar), on_note=bar.say, force=force)
        except train.Interrupted as stop:
            command = ["triptych", "train", str(file), "--out", str(recipe.run.out), "--resume"]
            screen.note(f"{stop}; continue with: {shlex.join(command)}")
            raise Exit(ReportedExit(128 + stop.number)) from None
    _done(job, last, as_json=as_json)


def _sample(job: Job, trainer: Trainer, bar: TrainingProgress) -> None:
    """Generate a sample with a decoder; the other layouts need an input and are judged by their scores."""
    from triptych.model import Model

    prompt = job.sample_prompt
    if trainer.module.spec.layout != "decoder" or not prompt:
        return
    most_tokens = (trainer.module.spec.context or SAMPLE_TOKENS + len(prompt)) - len(prompt)
    model = Model(trainer.module, job.tokenizer, job.hf)
    (generation,) = model.generate(
        [prompt], max_new_tokens=min(SAMPLE_TOKENS, most_tokens), temperature=0.8, seed=trainer.at.step
    )
    bar.sample(f"step {trainer.at.step:,}", job.tokenizer.decode(prompt) + generation.text)


def _done(job: Job, last: Sequence[Event], *, as_json: bool) -> None:
    at, out = job.trainer.at, job.recipe.run.out
    score = last[-1].score if last else None
    if as_json:
        screen.result({
            "steps": at.step, "seconds": round(at.elapsed, 1), "tokens": at.tokens,
            "loss": last[-1].loss if last else None, "held_out": None if score is None else _score_values(score),
            "out": out, "model": None if job.model is None else str(job.model),
        })  # fmt: skip
        return
    saved = f"; the model is {job.model}" if job.model is not None and job.model.exists() else ""
    screen.note(f"{counted(at.step, 'step')}, {counted(at.tokens, 'token')}, {at.elapsed:,.0f} s{saved}")
    if score is not None:
        screen.console().print(f"held out: {held_out(score)}")


def _score_values(score: Score) -> dict[str, object]:
    values: dict[str, object] = {"nats_per_token": score.nats_per_token, "accuracy": score.accuracy}
    if score.metrics:
        values |= {"metrics": dict(score.metrics), "baselines": dict(score.baselines)}
    return values


def _evaluate(recipe: Recipe, *, as_json: bool) -> None:
    """The held-out score of the model that the recipe begins with.  Raises ConfigError without held-out data."""
    from triptych.train import prepare

    with screen.waiting("evaluating on the held-out data"):
        trainer = prepare(recipe).trainer
        if trainer.held_out is None:
            raise ConfigError("the recipe holds no data out, so there is nothing to evaluate on")
        score = trainer.last_score()
    if as_json:
        screen.result({"held_out": _score_values(score)})
    else:
        screen.console().print(f"held out: {held_out(score)}")


def _show_batch(recipe: Recipe, *, as_json: bool) -> None:
    """Show the batch of the first step: the inputs, the targets, and which tokens are trained on."""
    from triptych.train import prepare
    from triptych.train import show_batch as rows_of

    job = prepare(recipe)
    examples = job.trainer.data.draw(recipe.run.seed, 0, recipe.run.rows)
    rows = rows_of(examples, job.words, shifted=recipe.objective.name != "masked")
    if as_json:
        screen.result({"rows": [batch_row(row) for row in rows]})
    else:
        show_batch(rows)


def _verify_resume(recipe: Recipe, steps: int, *, as_json: bool) -> None:
    """Raises TriptychError naming the first weight that differs after resuming."""
    from triptych.train import verify_resume

    with screen.waiting(f"{steps:,} steps, twice"):
        verify_resume(recipe, steps)
    if as_json:
        screen.result({"steps": steps, "equal": True})
    else:
        screen.console().print(f"{steps:,} steps give the same weights with and without an interruption, bit for bit")


def quickstart(
    *,
    panel: Literal["decoder", "encoder", "encoder-decoder"] = "decoder",
    data: options.NamedPath | None = None,
    seconds: Annotated[float, Option(min=1)] = 90,
    out: options.NamedPath | None = None,
    resume: bool = False,
    force: bool = False,
    as_json: options.Json = False,
) -> None:
    """Train a small transformer on real text in 90 seconds, sample from it, and write a page that runs it.

    --panel: The layout to train.
    --data FILE: UTF-8 file or directory to train on instead of Shakespeare.
    --seconds S: Training time.
    --out DIR: Output directory; by default runs/quickstart or runs/quickstart-PANEL.
    --resume: Continue an interrupted run.
    --force: Delete the run that the output directory holds, and start over.
    """
    if resume and force:
        raise BadParameter("--resume continues the run that --force deletes; give one of the two")
    if data is not None and not data.exists():
        raise BadParameter(f"--data {data}: no such file or directory; give UTF-8 text")
    with TrainingProgress() as bar:
        bar.say("starting")
        from triptych import machine
        from triptych.quickstart import run
        from triptych.train import Interrupted

        machine.use_threads()
        try:
            result = run(panel=panel, data=data, seconds=seconds, out=out, resume=resume, force=force, watch=bar)
        except Interrupted as stop:
            screen.note(f"{stop}; continue with the same command and --resume")
            raise Exit(ReportedExit(128 + stop.number)) from None
    if as_json:
        screen.result(result.to_dict())
        return
    title = f"{result.steps:,} steps in {result.seconds:,.0f} s. {result.held_out.sentence}"
    page = f"{result.report}, open it in a browser: the model runs in it, offline"
    screen.show(screen.facts([("model", str(result.model)), ("page", page)]), title)
