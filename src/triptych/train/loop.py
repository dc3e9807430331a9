"""The training loop: draws rows, updates weights and evaluates, in a budget; samples, saving and reports are hooks.

After step s the weights are a function of the recipe, the seed and s alone (on the same machine, with the same number
of threads): data order, dropout and hidden tokens come from (seed, step).  With a time budget the learning rate follows
the clock, so that two runs differ; a resumed run continues from the time it had used.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from triptych import machine
from triptych.nn import Transformer
from triptych.ops import RowNoise
from . import objectives
from .data import Data, RandomUse, micro_batches, random_numbers
from .evaluate import FEWEST, HeldOut, Score, evaluate
from .objectives import TrainingBatch
from .optimizer import Optimizer, Schedule
from .precision import (
    LOWER,
    DivergedError,
    autocast,
    chosen,
    draws_globally,
    first_nonfinite,
    global_dropout,
    has_dropout,
    nonfinite_gradient,
    nonfinite_parameter,
)
from .ranks import Ranks
from .settings import Finite, RunSettings

Phase = Literal["step", "evaluation", "sample", "checkpoint"]
REMEMBERED = 3  # times of each part; a first step is slower than the others
TRIM_EVERY = 100  # steps; batches of other sizes leave gaps between allocations, of several times the memory in use
PHASE_TIME_FRACTION = 0.1  # of the seconds: for all of one part before the end of a run, and for its last evaluation


class Budget:
    """The time that the parts of a run took, in seconds, out of `seconds` in all (infinity: no limit)."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds = math.inf if seconds is None else seconds
        self._took: dict[Phase, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._total: dict[Phase, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: Phase) -> Iterator[None]:
        """Inside, `part` happens."""
        began = self.clock()
        yield
        self.add(part, self.clock() - began)

    def add(self, part: Phase, seconds: float) -> None:
        """`part` took `seconds`."""
        self._took[part].append(seconds)
        self._total[part] += seconds

    def expected(self, part: Phase) -> float:
        """The seconds that `part` will take: the most of those it took lately, and 0 before it first happens."""
        return max(self._took[part], default=0.0)

    def allows(self, part: Phase) -> bool:
        """Whether all of `part` before the end, with one more, take at most `PHASE_TIME_FRACTION` of the seconds."""
        return self._total[part] + self.expected(part) <= PHASE_TIME_FRACTION * self.seconds


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
    """The progress of a run, which a checkpoint stores beside weights and optimizer: finished steps, seconds and tokens
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
        held_out: HeldOut | None = None,
        at: Progress | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.module, self.data, self.optimizer, self.schedule = module, data, optimizer, schedule
        self.settings, self.held_out = run, held_out
        self.at = at or Progress()
        self.device = module.device
        self._last_score: tuple[int, Score] | None = None  # of the evaluation at the end, and after which step
        self.budget = Budget(run.seconds, self.ranks.clock)
        self.on_step: Callable[[Event], None] = _ignore
        self.on_save: Callable[[Trainer], None] = _ignore
        self.on_sample: Callable[[Trainer], None] = _ignore
        self.on_note: Callable[[str], None] = _ignore
        self._stop_requested = False
        width = max(stack.width for stack in module.spec.stacks.values())
        self.precision = chosen(run.precision, self.device, width)
        autocast(self.precision, self.device)  # raises before the first step if the device lacks this precision
        self._has_dropout = has_dropout(module)
        for stack in filter(None, (module.encoder, module.decoder)):
            stack.recompute = run.recompute
            if run.compile:
                for block in stack.blocks:
                    block.compile()

    @property
    def done(self) -> float:
        """The share of the run that is done, in [0, 1]."""
        return self._progress(self.at.step)

    def _progress(self, step: int) -> float:
        if self.at.elapsed >= self.budget.seconds:
            return 1.0
        return self.settings.progress(step, self.at.elapsed, self._reserved())

    def _reserved(self) -> float:
        """The seconds that what follows the last step will take: evaluation, sample and checkpoint."""
        run = self.settings
        if run.seconds is None:
            return 0.0
        batches = () if self.held_out is None else self.held_out.batches
        whole = self.budget.expected("evaluation") * len(batches) / FEWEST if batches else 0.0
        parts = (
            (run.evaluate_every, min(PHASE_TIME_FRACTION * run.seconds, whole)),
            (run.sample_every, self.budget.expected("sample")),
            (run.save_every, self.budget.expected("checkpoint")),
        )
        return sum(seconds for every, seconds in parts if every)

    def run(self, until: int | None = None) -> None:
        """Train to the end of the budget, or stop early after step `until`, as if interrupted there.

        Raises DivergedError, naming a module, when the loss or a gradient is not finite; the weights are then still
        those before the step.  A step after which a weight or the held-out loss is not finite raises it too, before
        anything of it is saved.
        """
        try:
            if self.at.step == 0:
                began = self.ranks.clock()
                self.on_save(self)
                written = 1.0 + self.optimizer.state_bytes / max(self.optimizer.weight_bytes, 1)
                self.budget.add("checkpoint", (self.ranks.clock() - began) * written)
            with _threads(self.settings.threads):
                self._loop(until)
        finally:
            self._stop_requested = False
        self.module.eval()

    def stop(self) -> None:
        """Make `run` return after the present step.  Hooks, other threads and signal handlers may call this."""
        self._stop_requested = True

    def _loop(self, until: int | None) -> None:
        clock = self.ranks.clock
        since = clock()
        began, tokens = since - self.at.elapsed, self.at.tokens
        self._has_dropout = has_dropout(self.module)  # parts may have been replaced since `__init__`
        self.module.train()
        while self.done < 1.0 and self.at.step != until and not self.ranks.any(self._stop_requested):
            before, start = self.done, clock()
            loss, norm, factor = self.step()
            now = clock()
            self.at.elapsed = now - began
            self.budget.add("step", now - start)
            if self.at.elapsed + self.budget.expected("step") + self._reserved() > self.budget.seconds:
                self.at.elapsed = max(self.at.elapsed, self.budget.seconds)  # another step would end too late
            pace = (self.at.tokens - tokens) / max(now - since, 1e-9)
            score = self._evaluate(before)
            if score is not None and not math.isfinite(score.nats):
                raise self._not_saved("the loss on the held-out data")
            left = self.settings.seconds_left(self.at.step, self.at.elapsed)
            held_out = None if score is None else score.nats_per_token
            self.at.history.append(StepRecord(self.at.step, loss, factor, held_out))
            self.on_step(Event(self.at.step, loss, pace, left, self.done, factor, norm, score))
            rest = self.budget.seconds - self.budget.expected("sample") - self.budget.expected("checkpoint")
            if self._due(before, self.settings.sample_every, "sample") and clock() - began <= rest:
                self._in_evaluation_mode("sample", self.on_sample)
            if self._due(before, self.settings.save_every, "checkpoint"):
                self._in_evaluation_mode("checkpoint", self.on_save)
            self.at.elapsed = max(self.at.elapsed, clock() - began)
            if self.at.step % TRIM_EVERY == 0:
                machine.give_back_memory()
        self._check_weights()

    def step(self) -> tuple[float, float, float]:
        """One optimizer step: nats per token, gradient norm, learning-rate factor."""
        run, step = self.settings, self.at.step
        batches = self.next_batches()
        total, tokens = self.ranks.sums(sum(batch.weight for batch in batches), sum(batch.tokens for batch in batches))
        seed = int(random_numbers(run.seed, RandomUse.DROPOUT, step).integers(2**63))
        nats = self._gradients(batches, total, seed)
        (nats,) = self.ranks.sums(nats)
        if not math.isfinite(nats):
            raise self._diverged("the loss", batches)
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            raise self._diverged("a gradient", batches)
        factor = self.schedule.factor(self._progress(step + 1))
        self.optimizer.step(factor)
        self.at.step += 1
        self.at.tokens += int(tokens)
        return nats / total, norm, factor

    def next_batches(self) -> list[TrainingBatch]:
        """The micro-batches of the next step.  One without a trained token adds nothing to the gradient and is left
        out; raises InputError if all are such."""
        run = self.settings
        examples = self.data.draw(run.seed, self.at.step, run.rows)
        parts = micro_batches(range(len(examples)), run.accumulate)
        trained = [part for part in parts if any(examples[i].trained.any() for i in part)]
        return [self.ranks.batch(examples, part, self.device) for part in trained or [range(len(examples))]]

    def _gradients(self, batches: list[TrainingBatch], total: float, seed: int) -> float:
        """Add the gradients of the mean loss of all `total` trained tokens; the sum of their losses in nats.

        Dropout draws from `seed`.
        """
        alone = self.ranks.count == 1 and (self.settings.compile or self.device.type != "cpu")
        drawn_globally = draws_globally(self.module) or alone
        noise = self._has_dropout and not drawn_globally
        with global_dropout(seed) if self._has_dropout and drawn_globally else nullcontext():
            nats = 0.0
            for i, batch in enumerate(batches, 1):
                random = self.ranks.noise(seed, batch.numbers_of_rows) if noise else None
                nats += self._backward(batch, total, random, last=i == len(batches))
        self.ranks.after_backward(self.module)
        return nats

    def _backward(self, batch: TrainingBatch, total: float, random: RowNoise | None, *, last: bool) -> float:
        """Forward and backward pass of one micro-batch, dropout drawing from `random`; its loss in nats."""
        with autocast(self.precision, self.device):
            nats, _ = objectives.loss(self.module, batch, random=random)
        self.ranks.before_backward(self.module, last=last)
        (nats / total).backward()
        return float(nats.detach())

    def _check_weights(self) -> None:
        """Raises DivergedError for a weight that is inf or NaN.  It reads all of them, and so is for what is saved or
        shown, and for the end; in between, the loss of the next step tells."""
        name = nonfinite_parameter(self.module)
        if self.ranks.any(name is not None):
            name = name or "of another process"
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

        where = first_nonfinite(self.module, forward) if self.ranks.count == 1 else self._nonfinite_anywhere()
        self.optimizer.zero()
        return DivergedError(
            f"step {self.at.step + 1}: {what} is not finite; {where}; {LOWER}, or look at the data of this step"
        )

    def _nonfinite_anywhere(self) -> str:
        """The weight or the gradient of any process that is not finite, in words."""
        stored, gradient = nonfinite_parameter(self.module), nonfinite_gradient(self.module)
        own = f"parameter {stored}" if stored else f"the gradient of {gradient}" if gradient else ""
        named = [text for text in self.ranks.texts(own) if text]
        return f"{named[0]} holds inf or NaN" if named else "the logits overflowed"

    def _due(self, before: float, every: float, part: Phase) -> bool:
        """Whether the last step crossed a multiple of `every` and there is time for `part`, or it ended the run."""
        if not every or self.done >= 1.0:
            return every > 0
        return _multiples(before, every) != _multiples(self.done, every) and self.budget.allows(part)

    def _evaluate(self, before: float) -> Score | None:
        every = self.settings.evaluate_every
        if self.held_out is None or not self._due(before, every, "evaluation"):
            return None
        if self.done >= 1.0:
            return self.last_score()
        with self.budget.timed("evaluation"):
            return self._score(self.held_out.sample(FEWEST), every)

    def last_score(self) -> Score:
        """The score on the held-out data at the end of the run, computed once.  Raises ValueError without such data."""
        if self.held_out is None:
            raise ValueError("the trainer has no held-out data")
        if self._last_score is None or self._last_score[0] != self.at.step:
            self._last_score = self.at.step, self._score(self.held_out)
        return self._last_score[1]

    def _score(self, held_out: HeldOut, share: float = 1.0) -> Score:
        """The score of one of 1 / `share` evaluations, which have a tenth of the seconds together."""
        seconds = None if self.settings.seconds is None else PHASE_TIME_FRACTION * share * self.settings.seconds
        context = autocast(self.precision, self.device)
        score = evaluate(self.module, held_out, context, seconds=seconds, clock=self.ranks.clock)
        self.ranks.after_evaluation(self.module)
        return score

    def _in_evaluation_mode(self, part: Phase, hook: Callable[[Trainer], None]) -> None:
        with self.budget.timed(part):
            self._check_weights()
            self.module.eval()
            hook(self)
            self.module.train()


def _multiples(done: float, every: float) -> int:
    """The number of times `every` goes into `done`, which are rounded: 0.3 / 0.1 is a little below 3."""
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


def _ignore(_: object) -> None:
    """The default of a hook."""
