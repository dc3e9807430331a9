"""What `triptych train` calls: a run, a look at its first rows, the proof that resuming changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from triptych.cli import screen
from triptych.cli.training_bar import TrainingBar, held_out
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.train import Event, Job, Recipe, Trainer

SAMPLE_TOKENS = 120
ROWS, PLACES = 3, 24  # of a batch that is shown


def train(path: Path, changes: Sequence[str], out: Path | None, *, resume: bool, as_json: bool) -> None:
    """Run the recipe to its end, or resume the run under its `run.out`, which `out` replaces."""
    from triptych import machine
    from triptych.train import Interrupted, prepare, read_recipe

    machine.use_threads()
    recipe = read_recipe(path, changes, {} if out is None else {"run.out": str(out)})
    with TrainingBar() as bar:
        bar.say("reading the data")
        job = _resumed(recipe, changes) if resume else prepare(recipe)
        for line in job.skipped:
            screen.note(f"skipped {line}")
        last: list[Event] = []

        def step(event: Event) -> None:
            last[:] = [event]
            bar.step(event)

        try:
            job.run(on_step=step, on_sample=lambda trainer: _sample(job, trainer, bar))
        except Interrupted as stop:
            screen.note(f"{stop}; continue with the same command and --resume")
            raise Exit(128 + stop.number) from None
    _done(job, last, as_json=as_json)


def _resumed(recipe: Recipe, changes: Sequence[str]) -> Job:
    from triptych.train import resume

    if recipe.run.out is None:
        raise ConfigError("--resume needs to know which run: give --out DIR, or run.out in the recipe")
    return resume(recipe.run.out, changes)


def _sample(job: Job, trainer: Trainer, bar: TrainingBar) -> None:
    """A decoder writes from its begin; the other layouts need an input and are told by their scores."""
    from triptych.model import Model

    first = job.tokenizer.eos_id if job.tokenizer.bos_id is None else job.tokenizer.bos_id
    if trainer.module.spec.layout != "decoder" or first is None:
        return
    room = (trainer.module.spec.context or SAMPLE_TOKENS + 1) - 1
    model = Model(trainer.module, job.tokenizer, job.hf)
    (made,) = model.generate([[first]], max_new_tokens=min(SAMPLE_TOKENS, room), temperature=0.8, seed=trainer.at.step)
    bar.sample(f"step {trainer.at.step:,}", made.text)


def _done(job: Job, last: Sequence[Event], *, as_json: bool) -> None:
    at, out = job.trainer.at, job.recipe.run.out
    score = last[-1].score if last else None
    if as_json:
        told = None if score is None else {"nats_per_token": score.nats_per_token, "accuracy": score.accuracy}
        loss = last[-1].loss if last else None
        screen.result(
            {
                "steps": at.step,
                "seconds": round(at.elapsed, 1),
                "tokens": at.tokens,
                "loss": loss,
                "held_out": told,
                "out": out,
            }
        )
        return
    screen.note(
        f"{at.step:,} steps, {at.tokens:,} tokens, {at.elapsed:,.0f} s" + (f"; checkpoints in {out}" if out else "")
    )
    if score is not None:
        screen.console().print(f"held out: {held_out(score)}")


def show_batch(path: Path, changes: Sequence[str], *, as_json: bool) -> None:
    """The rows of the first step: what goes in, what should come out, and which places count."""
    from triptych.train import prepare, read_recipe
    from triptych.train import show_batch as shown

    recipe = read_recipe(path, changes)
    job = prepare(recipe)
    rows = shown(job.trainer.data.draw(recipe.run.seed, 0, recipe.run.rows), job.tokenizer)
    if as_json:
        screen.result({"rows": [asdict(row) for row in rows]})
        return
    for i, row in enumerate(rows[:ROWS]):
        title = f"row {i + 1} of {len(rows)}: {len(row.tokens):,} tokens, {row.trained:,} trained"
        table = screen.table("reads", "should say", "")
        for token in row.tokens[:PLACES]:
            table.add_row(screen.plain(token.token), screen.plain(token.target), "trained" if token.trained else "")
        if row.source:
            screen.console().print(f"source: {screen.plain(' '.join(row.source))}", soft_wrap=True)
        screen.show(table, title)


def verify(path: Path, changes: Sequence[str], steps: int, *, as_json: bool) -> None:
    """Raises TriptychError naming the first weight that resuming would change."""
    from triptych import machine
    from triptych.train import read_recipe, verify_resume

    machine.use_threads()
    with screen.waiting(f"{steps:,} steps, twice"):
        verify_resume(read_recipe(path, changes), steps)
    if as_json:
        screen.result({"steps": steps, "equal": True})
    else:
        screen.console().print(f"{steps:,} steps at once and stopped half-way end in the same weights, bit for bit")
