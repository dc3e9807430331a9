"""`triptych train`: train from a recipe, show its first batch, or verify that resuming changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit, Option

from triptych.cli import options, screen
from triptych.cli.training_progress import TrainingProgress, held_out
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.train import Event, Job, Recipe, Trainer

SAMPLE_TOKENS = 120
SHOWN_ROWS, SHOWN_TOKENS = 3, 24  # of a batch


def train(
    recipe: Annotated[
        Path,
        Argument(
            metavar="RECIPE",
            help="A .toml file, or the quickstart's recipe decoder, encoder or encoder-decoder.",
            show_default=False,
        ),
    ],
    changes: Annotated[
        list[str] | None, Option("--set", metavar="A.B=C", help="Change one value of the recipe. Repeatable.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue from the newest checkpoint in the run directory.")
    ] = False,
    out: Annotated[
        Path | None,
        Option("--out", metavar="DIR", help="Run directory, for checkpoints; by default run.out of the recipe."),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Delete the run that the run directory holds, and start over.")
    ] = False,
    show_batch: Annotated[bool, Option("--show-batch", help="Show the batch of the first step, and stop.")] = False,
    verify_resume: Annotated[
        int | None,
        Option(
            "--verify-resume", metavar="N", min=2, help="Check that N steps with an interruption give the same weights."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a model from a recipe."""
    if resume and (show_batch or verify_resume):
        raise BadParameter("--resume continues a run; --show-batch and --verify-resume start one")
    if resume and force:
        raise BadParameter("--resume continues the run that --force deletes; give one of the two")
    if show_batch:
        _show_batch(recipe, changes or (), as_json=as_json)
    elif verify_resume is not None:
        _verify_resume(recipe, changes or (), verify_resume, as_json=as_json)
    else:
        _train(recipe, changes or (), out, resume=resume, force=force, as_json=as_json)


def _train(path: Path, changes: Sequence[str], out: Path | None, *, resume: bool, force: bool, as_json: bool) -> None:
    """Run the recipe to its end, or resume the run under its `run.out`, which `out` replaces."""
    from triptych import machine
    from triptych.train import Interrupted, prepare, read_recipe

    machine.use_threads()
    recipe = read_recipe(path, changes, {} if out is None else {"run.out": str(out)})
    with TrainingProgress() as bar:
        bar.say("reading the data")
        job = _resumed(recipe, changes) if resume else prepare(recipe)
        for line in job.skipped:
            screen.note(f"skipped {line}")
        last: list[Event] = []

        def step(event: Event) -> None:
            last[:] = [event]
            bar.step(event)

        try:
            job.run(step, lambda trainer: _sample(job, trainer, bar), on_note=bar.say, force=force)
        except Interrupted as stop:
            screen.note(f"{stop}; continue with the same command and --resume")
            raise Exit(128 + stop.number) from None
    _done(job, last, as_json=as_json)


def _resumed(recipe: Recipe, changes: Sequence[str]) -> Job:
    from triptych.train import resume

    if recipe.run.out is None:
        raise ConfigError("--resume needs to know which run: give --out DIR, or run.out in the recipe")
    return resume(recipe.run.out, changes)


def _sample(job: Job, trainer: Trainer, bar: TrainingProgress) -> None:
    """Generate a sample with a decoder; the other layouts need an input and are judged by their scores."""
    from triptych.model import Model

    first = job.tokenizer.eos_id if job.tokenizer.bos_id is None else job.tokenizer.bos_id
    if trainer.module.spec.layout != "decoder" or first is None:
        return
    most_tokens = (trainer.module.spec.context or SAMPLE_TOKENS + 1) - 1
    model = Model(trainer.module, job.tokenizer, job.hf)
    (generation,) = model.generate(
        [[first]], max_new_tokens=min(SAMPLE_TOKENS, most_tokens), temperature=0.8, seed=trainer.at.step
    )
    bar.sample(f"step {trainer.at.step:,}", generation.text)


def _done(job: Job, last: Sequence[Event], *, as_json: bool) -> None:
    at, out = job.trainer.at, job.recipe.run.out
    score = last[-1].score if last else None
    if as_json:
        held_out_score: dict[str, object] | None = None
        if score is not None:
            held_out_score = {"nats_per_token": score.nats_per_token, "accuracy": score.accuracy}
            if score.metrics:
                held_out_score |= {"metrics": dict(score.metrics), "baselines": dict(score.baselines)}
        loss = last[-1].loss if last else None
        screen.result(
            {
                "steps": at.step,
                "seconds": round(at.elapsed, 1),
                "tokens": at.tokens,
                "loss": loss,
                "held_out": held_out_score,
                "out": out,
            }
        )
        return
    screen.note(
        f"{at.step:,} steps, {at.tokens:,} tokens, {at.elapsed:,.0f} s" + (f"; checkpoints in {out}" if out else "")
    )
    if score is not None:
        screen.console().print(f"held out: {held_out(score)}")


def _show_batch(path: Path, changes: Sequence[str], *, as_json: bool) -> None:
    """Show the batch of the first step: the inputs, the targets, and which tokens are trained on."""
    from triptych.train import prepare, read_recipe, show_batch

    recipe = read_recipe(path, changes)
    job = prepare(recipe)
    rows = show_batch(job.trainer.data.draw(recipe.run.seed, 0, recipe.run.rows), job.tokenizer)
    if as_json:
        screen.result({"rows": [asdict(row) for row in rows]})
        return
    for i, row in enumerate(rows[:SHOWN_ROWS]):
        title = f"row {i + 1} of {len(rows)}: {len(row.tokens):,} tokens, {row.trained:,} trained"
        table = screen.table("input", "target", "")
        for token in row.tokens[:SHOWN_TOKENS]:
            table.add_row(screen.plain(token.token), screen.plain(token.target), "trained" if token.trained else "")
        if row.source:
            screen.console().print(f"source: {screen.plain(' '.join(row.source))}", soft_wrap=True)
        screen.show(table, title)


def _verify_resume(path: Path, changes: Sequence[str], steps: int, *, as_json: bool) -> None:
    """Raises TriptychError naming the first weight that differs after resuming."""
    from triptych import machine
    from triptych.train import read_recipe, verify_resume

    machine.use_threads()
    with screen.waiting(f"{steps:,} steps, twice"):
        verify_resume(read_recipe(path, changes), steps)
    if as_json:
        screen.result({"steps": steps, "equal": True})
    else:
        screen.console().print(f"{steps:,} steps give the same weights with and without an interruption, bit for bit")
