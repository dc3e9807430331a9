"""The training loop: draw, forward, backward, update; everything else is a hook.

After step s the weights are a function of the recipe, the seed and s alone (given the same machine and threads): data
order, dropout and hidden tokens come from (seed, step).  With a time budget the learning rate follows the clock, so
two runs differ; resuming one goes on from the time it had used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from triptych.nn import Transformer
from triptych.train import objectives
from triptych.train.data import Data, Use, micro_batches, stream
from triptych.train.evaluate import HeldOut, Score, evaluate
from triptych.train.nonfinite import DivergedError, first_nonfinite
from triptych.train.objectives import Batch, collate
from triptych.train.optim import Optimizer, Schedule
from triptych.train.precision import Precision, autocast
from triptych.train.settings import Positive, Rate, Section, Share


class RunSettings(Section):
    """`rows` of at most `length` tokens a step, in `accumulate` parts, until `steps` or `seconds` are over, whichever
    comes first.  `evaluate_every`, `save_every` and `sample_every` are shares of the run, so that they mean the same
    under both; 0 is never.  `recompute` trades one more forward for the memory of activations.  `threads` bounds the
    cores of a step: a small model gains nothing from a second one, and waits for it when it is busy elsewhere."""

    rows: Positive
    length: Annotated[int, Field(gt=1)]
    steps: Positive | None = None
    seconds: Rate | None = None
    accumulate: Positive = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Precision = "auto"
    compile: bool = False
    recompute: bool = False
    threads: Positive | None = None
    device: str = "cpu"
    evaluate_every: Share = 0.1
    save_every: Share = 0.1
    sample_every: Share = 0.2
    out: str | None = None

    @model_validator(mode="after")
    def _ends(self) -> RunSettings:
        if self.steps is None and self.seconds is None:
            raise ValueError("needs an end; give run.steps, run.seconds or both")
        return self

    def progress(self, step: int, elapsed: float) -> float:
        """The share of the run that is done after `step` steps and `elapsed` seconds, in [0, 1]."""
        by_step = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_step, by_time))

    def left(self, step: int, elapsed: float) -> float:
        """Seconds still to go at the pace so far."""
        by_time = math.inf if self.seconds is None else self.seconds - elapsed
        by_step = math.inf if self.steps is None or not step else (self.steps - step) * elapsed / step
        return max(0.0, min(by_time, by_step))


@dataclass(frozen=True)
class Event:
    """One finished step: nats per token, tokens a second (source tokens included), seconds left, learning-rate
    factor, gradient norm before clipping; `score` where this step was followed by an evaluation."""

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    progress: float
    lr: float
    norm: float
    score: Score | None = None


@dataclass
class Progress:
    """Where a run stands: what a checkpoint keeps beside weights and optimizer.  The data cursor is `step`."""

    step: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains `module` in place.

    Hooks: `on_step(event)` after every step, `on_save(trainer)` for checkpoints, the first before step 1,
    `on_sample(trainer)` now and then, in evaluation mode.
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
        self.on_step: Callable[[Event], None] = _ignore
        self.on_save: Callable[[Trainer], None] = _ignore
        self.on_sample: Callable[[Trainer], None] = _ignore
        autocast(run.precision, self.device)  # refuse a precision the device lacks before the first step
        for stack in filter(None, (module.encoder, module.decoder)):
            stack.recompute = run.recompute
            if run.compile:
                for block in stack.blocks:
                    block.compile()

    @property
    def done(self) -> float:
        return self.settings.progress(self.at.step, self.at.elapsed)

    def run(self, until: int | None = None) -> None:
        """Train to the end of the budget, or stop early after step `until`, as if interrupted there.

        Raises DivergedError, naming a module, when the loss or a gradient is not finite; the weights are then still
        those before the step.
        """
        if self.at.step == 0:
            self.on_save(self)
        with _threads(self.settings.threads):
            self._loop(until)
        self.module.eval()

    def _loop(self, until: int | None) -> None:
        began, tokens = time.monotonic() - self.at.elapsed, self.at.tokens
        since = time.monotonic()
        self.module.train()
        while self.done < 1.0 and self.at.step != until:
            before = self.done
            loss, norm, factor = self.step()
            now = time.monotonic()
            self.at.elapsed = now - began
            pace = (self.at.tokens - tokens) / max(now - since, 1e-9)
            score = self._evaluate(before)
            left = self.settings.left(self.at.step, self.at.elapsed)
            self._record(Event(self.at.step, loss, pace, left, self.done, factor, norm, score))
            if self._due(before, self.settings.sample_every):
                self._aside(self.on_sample)
            if self._due(before, self.settings.save_every):
                self._aside(self.on_save)
            self.at.elapsed = time.monotonic() - began

    def step(self) -> tuple[float, float, float]:
        """One optimizer step: nats per token, gradient norm, learning-rate factor."""
        run, seed, step = self.settings, self.settings.seed, self.at.step
        parts = micro_batches(self.data.draw(seed, step, run.rows), run.accumulate)
        batches = [collate(part, self.device) for part in parts]
        total, nats = sum(batch.trained for batch in batches), 0.0
        with torch.random.fork_rng():
            torch.manual_seed(int(stream(seed, Use.DROPOUT, step).integers(2**63)))
            for batch in batches:
                nats += self._backward(batch, total)
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            raise self._diverged("a gradient", batches)
        factor = self.schedule.factor(run.progress(step + 1, self.at.elapsed))
        self.optimizer.step(factor)
        self.at.step += 1
        self.at.tokens += sum(batch.tokens for batch in batches)
        return nats / total, norm, factor

    def _backward(self, batch: Batch, total: int) -> float:
        """Add this batch's share of the mean over all `total` tokens of the step to the gradients."""
        with autocast(self.settings.precision, self.device):
            nats, _ = objectives.loss(self.module, batch)
        value = float(nats.detach())
        if not math.isfinite(value):
            raise self._diverged("the loss", [batch])
        (nats / total).backward()
        return value

    def _diverged(self, what: str, batches: list[Batch]) -> DivergedError:
        def forward() -> None:
            with torch.no_grad(), autocast(self.settings.precision, self.device):
                for batch in batches:
                    objectives.loss(self.module, batch)

        where = first_nonfinite(self.module, forward)
        self.optimizer.zero()
        return DivergedError(
            f"step {self.at.step + 1}: {what} is not finite; {where}; "
            "lower the learning rate, lengthen the warm-up, or look at the data of this step"
        )

    def _due(self, before: float, every: float) -> bool:
        """Whether the last step crossed a multiple of `every`, the end of the run included."""
        return every > 0 and (self.done >= 1.0 or int(before / every) != int(self.done / every))

    def _evaluate(self, before: float) -> Score | None:
        if self.held is None or not self._due(before, self.settings.evaluate_every):
            return None
        held = self.held if self.done >= 1.0 else self.held.sample(8)
        return evaluate(self.module, held, autocast(self.settings.precision, self.device))

    def _record(self, event: Event) -> None:
        kept: dict[str, Any] = {"step": event.step, "loss": event.loss, "lr": event.lr}
        if event.score is not None:
            kept["held_out"] = event.score.nats_per_token
        self.at.history.append(kept)
        self.on_step(event)

    def _aside(self, hook: Callable[[Trainer], None]) -> None:
        self.module.eval()
        hook(self)
        self.module.train()


@contextmanager
def _threads(most: int | None) -> Iterator[None]:
    """At most so many threads of torch inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, most or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ignore(_: Any) -> None:
    """The hook nobody set."""
