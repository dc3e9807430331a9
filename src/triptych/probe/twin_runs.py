"""Runs of one prompt, each with a change of its own, beside a *twin*: the same forward without the changes.

The product of a row of numbers may round differently in batches of other sizes, and at other places of one batch.
What a change does is therefore compared, in bits, with the row at the same place of a forward with as many rows: its
twin.  All forwards of a call have the same number of rows, and their values pass the same sites, so that one twin
serves all of them; it costs one forward.  What another prompt has is likewise read in a forward of this shape.

The blocks below the first change of a run give what they gave in the twin, so they are not run again: a grid of layers
and positions costs about half.

In a mixture of experts the batch of an expert, and with it the rounding, depends on the other tokens: there differences
up to a margin are none.  It is measured in the same call, between the twin and a forward with one row more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.attention import AttendPlan, ContentBias, Rows
from triptych.nn import Taps
from triptych.nn.feedforward import MoE
from triptych.nn.packed_weight import PackedWeight
from triptych.program.module_changes import refusal
from triptych.spec.model import ModelSpec
from .metric import MetricFunction
from .prompts import Change, EditedRun, ProbedModel, differ, forward
from .sites import prefix_of

TOGETHER = 128  # tokens of a forward on a CPU, where more are hardly faster; elsewhere `batch_tokens`
#: The margin of a mixture: so many roundings of the largest number, or so many times what was measured if that is more,
#: since each change makes other batches.
LEAST_ROUNDINGS, TIMES_MEASURED = 16, 8

Begins = tuple[tuple[str, int], ...]
"""For each stack its prefix, and the first of its blocks that gives something else; the number of blocks if none."""
Parts = Sequence[Mapping[str, Change]]  # for each run, by site, what is taken of the value there


@dataclass(eq=False)
class Observed:
    """A change that changes nothing, and keeps what `part` takes of the value that passes."""

    part: Change
    taken: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, value: Tensor) -> Tensor:
        self.taken = self.part(value).detach().clone()
        return value


@dataclass(frozen=True, eq=False)
class Compared:
    """Some runs beside their twin.

    numbers        of the runs.
    logits, twin   [R, V] at the measured position, with the changes and without.
    fired          [R], whether a change changed a value.
    moved          [R], whether it changed a logit.
    """

    numbers: list[int]
    logits: Tensor
    twin: Tensor
    fired: Tensor
    moved: Tensor

    def effect(self, metric: MetricFunction) -> Tensor:
        """[R]: by how much the changes change a metric; exactly 0 where they changed no logit."""
        after, before = (metric(logits).float().cpu() for logits in (self.logits, self.twin))
        return torch.where(self.moved & (after != before), after - before, 0.0)


class TwinRuns:
    """Runs of one prompt with changes at sites, as the rows of forwards that all have as many rows.

    run      the prompt, and the changes that all rows have, the twin's too.
    sites    of each run, the names of the sites that it changes or of which it takes values.

    Blocks below all changes are run once for all, unless a block may give something else the next time: in training,
    under hooks and replaced forwards.
    """

    def __init__(self, model: ProbedModel, run: EditedRun, sites: Sequence[Collection[str]], batch_tokens: int) -> None:
        integer("batch_tokens", batch_tokens, 1)
        self.model, self.run = model, run
        self.touched = {site for of_run in sites for site in of_run}.union(run.changes)
        if model.module.device.type == "cpu":
            batch_tokens = min(batch_tokens, TOGETHER)
        self.rows = max(1, min(len(sites), batch_tokens // sum(run.prompt.lengths)))
        self.begins = [begins(model.spec, {*of_run, *run.changes}) for of_run in sites]
        order = sorted(range(len(sites)), key=self.begins.__getitem__)
        self.forwards = [order[first : first + self.rows] for first in range(0, len(order), self.rows)]
        self.place = {number: place for numbers in self.forwards for place, number in enumerate(numbers)}
        wanted = {f"{prefix}blocks.{block - 1}" for numbers in self.forwards for prefix, block in self._below(numbers)}
        #: What the blocks just below all changes gave in the twin, by name; {} where they must run each time.
        self.outputs = dict.fromkeys(wanted, torch.empty(0)) if wanted and refusal(model.module) is None else {}

    def _below(self, numbers: Sequence[int]) -> list[tuple[str, int]]:
        """The prefixes of the stacks with blocks below all changes of some runs, and how many these are."""
        first = [min(each) for each in zip(*(self.begins[number] for number in numbers), strict=True)]
        return [(prefix, block) for prefix, block in first if block]

    def observe(
        self, run: EditedRun, parts: Parts, wrap: Callable[[Taps], Taps] = lambda taps: taps
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """What `run`, whose changes all rows have, has at the place of each run: `parts` of the values at its sites;
        and its logits [rows, V]."""
        observed = [{site: Observed(part) for site, part in of_run.items()} for of_run in parts]
        rows = [dict(run.changes) for _ in range(self.rows)]
        for number, of_run in enumerate(observed):
            own = rows[self.place[number]]
            for site, one in of_run.items():
                own[site] = partial(_both, own[site], one) if site in own else one
        result = forward(self.model, [replace(run, changes=row) for row in rows], wrap=wrap, touched=self.touched)
        return [{site: one.taken for site, one in of_run.items()} for of_run in observed], result.logits

    def twin(self, parts: Parts = ()) -> list[dict[str, Tensor]]:
        """Run the prompt without the changes of its own, and give what it has at the place of each run."""
        taken, self.twin_logits = self.observe(self.run, parts, lambda taps: _Blocks(taps, "", {}, self.outputs))
        self.margin = margin_of(self.model, self.run, self.twin_logits, self.touched)
        return taken

    def compare(self, changes: Parts, *, foreign: bool) -> Iterator[Compared]:
        """Run the prompt with the changes of each run, after `twin`.  Values that are put there are `foreign` where
        another forward gave them, so that a mixture of experts may have rounded them otherwise."""
        for numbers in self.forwards:
            own = [{**self.run.changes, **changes[number]} for number in numbers]
            own += [dict(self.run.changes)] * (self.rows - len(numbers))
            result = forward(
                self.model, [replace(self.run, changes=row) for row in own], wrap=self._without_below(numbers),
                touched=self.touched, margin=self.margin if foreign else 0.0,
            )  # fmt: skip
            logits, twin = result.logits[: len(numbers)], self.twin_logits[: len(numbers)]
            moved = torch.stack([differ(*pair, self.margin).any() for pair in zip(logits, twin, strict=True)]).cpu()
            yield Compared(numbers, logits, twin, torch.tensor(result.fired[: len(numbers)]), moved)

    def _without_below(self, numbers: Sequence[int]) -> Callable[[Taps], Taps]:
        """What puts those taps around others that give what is known instead of running blocks below all changes."""
        known: dict[str, Tensor | None] = {}
        for prefix, block in self._below(numbers) if self.outputs else ():
            known |= {f"{prefix}blocks.{i}": None for i in range(block - 1)}
            known[f"{prefix}blocks.{block - 1}"] = self.outputs[f"{prefix}blocks.{block - 1}"]
        return lambda taps: _Blocks(taps, "", known, {}) if known else taps


def _both(first: Change, second: Change, value: Tensor) -> Tensor:
    return second(first(value))


def margin_text(margin: float) -> str:
    """The margin as results print it; nothing where there is none."""
    return f"; up to {margin:.1g} of the largest is no difference" if margin else ""


def margin_of(model: ProbedModel, run: EditedRun, twin: Tensor, touched: Collection[str]) -> float:
    """The margin of `differ` beside `twin`, the logits [R, V] of R equal runs, from these and those of R + 1 runs."""
    experts = [expert for one in model.module.modules() if isinstance(one, MoE) for expert in one.experts]
    weights = [weight for expert in experts for weight in expert.parameters() if weight.dim() == 2]
    if all(isinstance(weight, PackedWeight) for weight in weights):  # our kernels multiply each row as if alone
        return 0.0
    every = torch.cat([twin, forward(model, [run] * (len(twin) + 1), touched=touched).logits])
    measured = float((every - twin[0]).abs().max() / twin.abs().max())
    return max(LEAST_ROUNDINGS * torch.finfo(model.module.dtype).eps, TIMES_MEASURED * measured)


def begins(spec: ModelSpec, changed: Collection[str]) -> Begins:
    """The first block of each stack that changes at these sites; a change in an encoder changes the whole decoder."""
    first = {prefix_of(spec, name): len(stack.blocks) for name, stack in spec.stacks.items()}
    for site in changed:
        prefix = next(prefix for prefix in sorted(first, reverse=True) if site.startswith(prefix))
        block = re.match(r"blocks\.(\d+)\.", site.removeprefix(prefix))
        if block is not None:
            first[prefix] = min(first[prefix], int(block[1]))
        elif site.removeprefix(prefix) == "embed":
            first[prefix] = 0
    if "encoder." in first and any(site.startswith("encoder.") for site in changed):
        first["decoder."] = 0
    return tuple(first.items())


class _Blocks(Taps):
    """The taps `inner`, in whose forward the `skipped` blocks give these values instead of running (None is what enters
    them, because the next one does not run either), and what the blocks named in `outputs` give is kept there."""

    def __init__(
        self, inner: Taps, name: str, skipped: Mapping[str, Tensor | None], outputs: dict[str, Tensor]
    ) -> None:
        self.inner, self.name, self.skipped, self.outputs = inner, name, skipped, outputs
        self.provenance = inner.provenance

    def at(self, name: str) -> Taps:
        own = f"{self.name}.{name}" if self.name and name else self.name or name
        return _Blocks(self.inner.at(name), own, self.skipped, self.outputs)

    def run(self, block: Callable[..., Tensor], x: Tensor, ctx: object, layer: int) -> Tensor:
        if self.name in self.skipped:
            output = self.skipped[self.name]
            return x if output is None else output
        out = self.inner.run(block, x, ctx, layer)
        if self.name in self.outputs:
            self.outputs[self.name] = out.detach()
        return out

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        return self.inner(site, value, rows)

    def attend(
        self, plan: AttendPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None
    ) -> Tensor:
        return self.inner.attend(plan, q, k, v, sinks, content)
