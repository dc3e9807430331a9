"""The training loop: draw rows, forward, backward, update; everything else is a hook.

After step s the weights are a function of the recipe, the seed and s alone (on the same machine, with the same number
of threads): data order, dropout and hidden tokens come from (seed, step).  With a time budget the learning rate follows
the clock, so that two runs differ; a resumed run continues from the time it had used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field, model_validator

from triptych import machine
from triptych.nn import Stack, Transformer
from triptych.train import objectives
from triptych.train.budget import Budget, Part
from triptych.train.data import Data, Use, micro_batches, random_numbers
from triptych.train.dropout import draws_globally, global_dropout, has_dropout
from triptych.train.evaluate import FEWEST, HeldOut, Score, evaluate
from triptych.train.nonfinite import LOWER, DivergedError, first_nonfinite, nonfinite_parameter
from triptych.train.objectives import TrainingBatch, collate
from triptych.train.optim import Optimizer, Schedule
from triptych.train.precision import Precision, autocast, chosen
from triptych.train.settings import Finite, Positive, Rate, Section, Share

TRIM_EVERY = 100  # steps; batches of other sizes leave gaps between allocations, of several times the memory in use


class RunSettings(Section):
    """How long, in what batches and where a run trains, and what it writes.

    `seconds` counts from the first step: steps, and the evaluations, samples and checkpoints between and after them.
    No step begins that would end later than that, going by those before it, with what follows the last one; the first
    step is always taken.  Before the end, evaluations, samples and checkpoints take at most a tenth of `seconds` each,
    and are left out beyond.  The evaluation at the end takes at most a tenth too, and uses evenly spaced parts of the
    held-out data, at least one batch, if all of it would take longer."""

    rows: Positive
    """Number of rows in a step."""
    length: Annotated[int, Field(gt=1)]
    """Largest number of tokens in a row."""
    steps: Positive | None = None
    """The run ends after this many optimizer steps; with `seconds` too, at whichever comes first."""
    seconds: Rate | None = None
    """The run ends after this many seconds of training, evaluations, samples and checkpoints included."""
    accumulate: Positive = 1
    """Number of micro-batches into which a step is divided: more need less memory, and the step is the same."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of the data, of dropout, of hidden tokens and of a new model's weights."""
    precision: Precision = "auto"
    """Of the arithmetic: `bf16`, `fp32`, or `auto`, which is bf16 where the processor has it and the model is at least
    128 wide; narrower ones gain nothing by it, and lose where rows have many lengths.  Weights are fp32."""
    compile: bool = False
    """Compile the blocks with torch, which takes minutes at first and makes long runs faster."""
    recompute: bool = False
    """Compute activations again in the backward pass, which needs less memory and one more forward."""
    threads: Positive | None = None
    """Largest number of CPU threads, by default those of the machine; a small model is no faster with more than one."""
    device: str = "cpu"
    """`cpu`, or `cuda` or `cuda:N` for a GPU.  A run uses one device."""
    evaluate_every: Share = 0.1
    """Evaluate on the held-out data each time this share of the run is done, in [0, 1]; 0 is never."""
    save_every: Share = 0.1
    """Write a checkpoint each time this share of the run is done, in [0, 1]; 0 is never, at the end neither."""
    sample_every: Share = 0.2
    """Show a sample of a decoder each time this share of the run is done, in [0, 1]; 0 is never."""
    out: str | None = None
    """Directory for checkpoints, and for the finished model in `model/`.  Without it nothing is saved."""

    @model_validator(mode="after")
    def _ends(self) -> RunSettings:
        if self.steps is None and self.seconds is None:
            raise ValueError("needs an end; give run.steps, run.seconds or both")
        return self

    def progress(self, step: int, elapsed: float, reserved: float = 0.0) -> float:
        """The share of the run that is done after `step` steps and `elapsed` seconds, in [0, 1]; `reserved` seconds at
        the end are for what follows the last step."""
        by_step = step / self.steps if self.steps else 0.0
        by_time = 0.0 if self.seconds is None else elapsed / max(self.seconds - reserved, 1e-9)
        return min(1.0, max(by_step, by_time))

    def left(self, step: int, elapsed: float) -> float:
        """Seconds until the end at the average speed so far."""
        by_time = math.inf if self.seconds is None else self.seconds - elapsed
        by_step = math.inf if self.steps is None or not step else (self.steps - step) * elapsed / step
        return max(0.0, min(by_time, by_step))


@dataclass(frozen=True)
class Event:
    """One finished step: loss in nats per token, tokens a second (source tokens included), seconds left, share of the
    run that is done, learning-rate factor, gradient norm before clipping; `score` if an evaluation followed it."""

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    progress: float
    lr: float
    norm: float
    score: Score | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step: loss in nats per token, learning-rate factor, and the held-out nats per token if it was evaluated."""

    step: int
    loss: Finite
    lr: Finite
    held_out: Finite | None = None


@dataclass
class Progress:
    """How far a run is, which a checkpoint stores beside weights and optimizer: finished steps, seconds and tokens
    used, and a record of each step.  The data of the next step follow from `step`.

    A run that ends because another step would not fit into its budget of seconds has used all of them.
    """

    step: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    history: list[StepRecord] = field(default_factory=list)


class Trainer:
    """Trains `module` in place.

    Hooks: `on_step(event)` after every step; `on_save(trainer)` when a checkpoint is due, the first before step 1;
    `on_sample(trainer)` when a sample is due, in evaluation mode; `on_note(text)` with lines about the run.
    """

    def __init__(
        self,
        module: Transformer,
        data: Data,
        optimizer: Optimizer,
        schedule: Schedule,
        run: RunSettings,
        held: HeldOut | None = None,
        at: Progress | None = None,
    ) -> None:
        self.module, self.data, self.optimizer, self.schedule = module, data, optimizer, schedule
        self.settings, self.held = run, held
        self.at = at or Progress()
        self.device = module.device
        self._last_score: tuple[int, Score] | None = None  # of the evaluation at the end, and after which step
        self.budget = Budget(run.seconds)
        self.on_step: Callable[[Event], None] = _ignore_event
        self.on_save: Callable[[Trainer], None] = _ignore_trainer
        self.on_sample: Callable[[Trainer], None] = _ignore_trainer
        self.on_note: Callable[[str], None] = _ignore_note
        self._stop_requested = False
        width = max(stack.width for stack in (module.spec.encoder, module.spec.decoder) if stack is not None)
        self.precision = chosen(run.precision, self.device, width)
        autocast(self.precision, self.device)  # raises before the first step if the device lacks this precision
        self._has_dropout = has_dropout(module)
        for stack in self._stacks:
            stack.recompute = run.recompute
            if run.compile:
                for block in stack.blocks:
                    block.compile()

    @property
    def _stacks(self) -> list[Stack]:
        return [stack for stack in (self.module.encoder, self.module.decoder) if stack is not None]

    @property
    def done(self) -> float:
        """The share of the run that is done, in [0, 1]."""
        return self._progress(self.at.step)

    def _progress(self, step: int) -> float:
        used = self.settings.seconds is not None and self.at.elapsed >= self.settings.seconds
        return 1.0 if used else self.settings.progress(step, self.at.elapsed, self._reserved())

    def _reserved(self) -> float:
        """The seconds that what follows the last step will take: evaluation, sample and checkpoint."""
        run = self.settings
        if run.seconds is None:
            return 0.0
        whole = 0.0 if self.held is None else self.budget.expected("evaluation") * len(self.held.batches) / FEWEST
        parts = (
            (run.evaluate_every, min(self.budget.limit() or 0.0, whole)),
            (run.sample_every, self.budget.expected("sample")),
            (run.save_every, self.budget.expected("checkpoint")),
        )
        return sum(seconds for every, seconds in parts if every)

    def _fits(self) -> bool:
        """Whether another step, and what follows the last one, end within the budget of seconds."""
        if self.settings.seconds is None:
            return True
        return self.at.elapsed + self.budget.expected("step") + self._reserved() <= self.settings.seconds

    def run(self, until: int | None = None) -> None:
        """Train to the end of the budget, or stop early after step `until`, as if interrupted there.

        Raises DivergedError, naming a module, when the loss or a gradient is not finite; the weights are then still
        those before the step.  A step after which a weight or the held-out loss is not finite raises it too, before
        anything of it is saved.
        """
        try:
            if self.at.step == 0:
                began = time.monotonic()
                self.on_save(self)
                written = 1.0 + self.optimizer.state_bytes / max(self.optimizer.weight_bytes, 1)
                self.budget.add("checkpoint", (time.monotonic() - began) * written)
            with _threads(self.settings.threads):
                self._loop(until)
        finally:
            self._stop_requested = False
        self.module.eval()

    def stop(self) -> None:
        """Make `run` return after the present step.  Hooks, other threads and signal handlers may call this."""
        self._stop_requested = True

    def _loop(self, until: int | None) -> None:
        began, tokens = time.monotonic() - self.at.elapsed, self.at.tokens
        since = time.monotonic()
        self._has_dropout = has_dropout(self.module)  # parts may have been replaced since `__init__`
        self.module.train()
        while self.done < 1.0 and self.at.step != until and not self._stop_requested:
            before, start = self.done, time.monotonic()
            loss, norm, factor = self.step()
            now = time.monotonic()
            self.at.elapsed = now - began
            self.budget.add("step", now - start)
            if not self._fits():
                assert self.settings.seconds is not None
                self.at.elapsed = max(self.at.elapsed, self.settings.seconds)
            pace = (self.at.tokens - tokens) / max(now - since, 1e-9)
            score = self._evaluate(before)
            if score is not None and not math.isfinite(score.nats):
                raise self._not_saved("the loss on the held-out data")
            left = self.settings.left(self.at.step, self.at.elapsed)
            self._record(Event(self.at.step, loss, pace, left, self.done, factor, norm, score))
            if self._due(before, self.settings.sample_every, "sample") and self._has_time_for_sample(began):
                with self.budget.timed("sample"):
                    self._in_evaluation_mode(self.on_sample)
            if self._due(before, self.settings.save_every, "checkpoint"):
                with self.budget.timed("checkpoint"):
                    self._in_evaluation_mode(self.on_save)
            self.at.elapsed = max(self.at.elapsed, time.monotonic() - began)
            if self.at.step % TRIM_EVERY == 0:
                machine.give_back_memory()
        self._check_weights()

    def _has_time_for_sample(self, began: float) -> bool:
        """Whether a sample and a checkpoint end within the budget of seconds; of a run too short, the sample is left
        out."""
        then = time.monotonic() - began + self.budget.expected("sample") + self.budget.expected("checkpoint")
        return self.settings.seconds is None or then <= self.settings.seconds

    def step(self) -> tuple[float, float, float]:
        """One optimizer step: nats per token, gradient norm, learning-rate factor."""
        run, step = self.settings, self.at.step
        batches = self.next_batches()
        total = sum(batch.weight for batch in batches)
        seed = int(random_numbers(run.seed, Use.DROPOUT, step).integers(2**63))
        nats = self._gradients(batches, total, seed)
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            raise self._diverged("a gradient", batches)
        factor = self.schedule.factor(self._progress(step + 1))
        self.optimizer.step(factor)
        self.at.step += 1
        self.at.tokens += sum(batch.tokens for batch in batches)
        return nats / total, norm, factor

    def next_batches(self) -> list[TrainingBatch]:
        """The micro-batches of the next step.  One without a trained token adds nothing to the gradient and is left
        out; raises InputError if all are such."""
        run = self.settings
        examples = self.data.draw(run.seed, self.at.step, run.rows)
        parts = micro_batches(examples, run.accumulate)
        trained = [part for part in parts if any(example.trained.any() for example in part)]
        return [collate(part, self.device) for part in trained or [examples]]

    def _gradients(self, batches: list[TrainingBatch], total: float, seed: int) -> float:
        """Add the gradients of the mean loss of all `total` trained tokens; the sum of their losses in nats.

        Dropout draws from `seed`.
        """
        if draws_globally(self.module) or self.settings.compile or self.device.type != "cpu":
            with global_dropout(seed) if self._has_dropout else nullcontext():
                return sum(self._backward(batch, total, None) for batch in batches)
        random = torch.Generator().manual_seed(seed) if self._has_dropout else None
        return sum(self._backward(batch, total, random) for batch in batches)

    def _backward(self, batch: TrainingBatch, total: float, random: torch.Generator | None) -> float:
        """Forward and backward pass of one micro-batch, dropout drawing from `random`; its loss in nats."""
        with autocast(self.precision, self.device):
            nats, _ = objectives.loss(self.module, batch, random=random)
        value = float(nats.detach())
        if not math.isfinite(value):
            raise self._diverged("the loss", [batch])
        (nats / total).backward()
        return value

    def _check_weights(self) -> None:
        """Raises DivergedError for a weight that is inf or NaN.  It reads all of them, and so is for what is saved or
        shown, and for the end; in between, the loss of the next step tells."""
        if name := nonfinite_parameter(self.module):
            raise self._not_saved(f"parameter {name}")

    def _not_saved(self, what: str) -> DivergedError:
        return DivergedError(
            f"step {self.at.step} made {what} inf or NaN, and is not saved; {LOWER}, or look at the data"
        )

    def _diverged(self, what: str, batches: list[TrainingBatch]) -> DivergedError:
        def forward() -> None:
            with torch.no_grad(), autocast(self.precision, self.device):
                for batch in batches:
                    objectives.loss(self.module, batch)

        where = first_nonfinite(self.module, forward)
        self.optimizer.zero()
        return DivergedError(
            f"step {self.at.step + 1}: {what} is not finite; {where}; {LOWER}, or look at the data of this step"
        )

    def _due(self, before: float, every: float, part: Part) -> bool:
        """Whether the last step crossed a multiple of `every` and there is time for `part`, or it ended the run."""
        if not every or self.done >= 1.0:
            return every > 0
        return _multiples(before, every) != _multiples(self.done, every) and self.budget.allows(part)

    def _evaluate(self, before: float) -> Score | None:
        if self.held is None or not self._due(before, self.settings.evaluate_every, "evaluation"):
            return None
        if self.done >= 1.0:
            return self.last_score()
        context = autocast(self.precision, self.device)
        with self.budget.timed("evaluation"):
            limit = self.budget.limit(self.settings.evaluate_every)
            return evaluate(self.module, self.held.sample(FEWEST), context, seconds=limit)

    def last_score(self) -> Score:
        """The score on the held-out data at the end of the run, computed once.  Raises ValueError without such data."""
        if self.held is None:
            raise ValueError("the trainer has no held-out data")
        if self._last_score is None or self._last_score[0] != self.at.step:
            context = autocast(self.precision, self.device)
            score = evaluate(self.module, self.held, context, seconds=self.budget.limit())
            self._last_score = self.at.step, score
        return self._last_score[1]

    def _record(self, event: Event) -> None:
        held_out = None if event.score is None else event.score.nats_per_token
        self.at.history.append(StepRecord(event.step, event.loss, event.lr, held_out))
        self.on_step(event)

    def _in_evaluation_mode(self, hook: Callable[[Trainer], None]) -> None:
        self._check_weights()
        self.module.eval()
        hook(self)
        self.module.train()


def _multiples(done: float, every: float) -> int:
    """How many times `every` goes into `done`, which are rounded: 0.3 / 0.1 is a little below 3."""
    return math.floor(done / every + 1e-9)


@contextmanager
def _threads(most: int | None) -> Iterator[None]:
    """At most `most` threads of torch inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, most or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ignore_event(_: Event) -> None:
    """The default of `on_step`."""


def _ignore_note(_: str) -> None:
    """The default of `on_note`."""


def _ignore_trainer(_: Trainer) -> None:
    """The default of `on_save` and `on_sample`."""
