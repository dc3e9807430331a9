"""Runs of one prompt with changes in different blocks.  The blocks below the first change of a run give what they gave
for the prompt as it is, so they are run once for all runs: a grid of layers and positions costs about half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from triptych.attention import AttendPlan, ContentBias, Rows
from triptych.nn import Taps
from triptych.probe.prompts import EditedRun, ProbedModel, chunks, forward
from triptych.program.changes import refusal
from triptych.spec.model import ModelSpec

TOGETHER = 256  # tokens: as many are run together, though some of them begin in a later block than others

Begins = tuple[tuple[str, int], ...]
"""For each stack its prefix, and the first of its blocks that gives something else; the number of blocks if none."""


@dataclass(frozen=True, eq=False)
class KnownBlocks:
    """What blocks gave for a prompt as it is: `[T, D]` by name, "decoder.blocks.3" for example."""

    spec: ModelSpec
    outputs: Mapping[str, Tensor]

    @staticmethod
    def of(model: ProbedModel, runs: Sequence[EditedRun]) -> KnownBlocks:
        """From one forward of the prompt that all runs have.  Nothing is known where they have several, where that
        would spare nothing, and where a block may give something else the next time: in training, under hooks and
        replaced forwards."""
        nothing = KnownBlocks(model.spec, {})
        if len(runs) < 2 or any(run.prompt is not runs[0].prompt for run in runs):
            return nothing
        places = {place for run in runs for place in begins(model.spec, run)}
        wanted = {f"{prefix}blocks.{first - 1}" for prefix, first in places if first > 0}
        if not wanted or refusal(model.module) is not None:
            return nothing
        kept: dict[str, Tensor] = {}
        forward(model, [EditedRun(runs[0].prompt, runs[0].at)], wrap=lambda taps: _Blocks(taps, "", {}, wanted, kept))
        return KnownBlocks(model.spec, kept)

    def groups(self, runs: Sequence[EditedRun], batch_tokens: int) -> Iterator[list[int]]:
        """Numbers of runs that are run together, of up to `batch_tokens` tokens: those that begin in the same block,
        and with few tokens those of the blocks behind it."""
        order = list(range(len(runs)))
        if self.outputs:
            order.sort(key=lambda i: begins(self.spec, runs[i]))
        done = 0
        for chunk in chunks([runs[i] for i in order], batch_tokens):
            numbers = order[done : done + len(chunk)]
            yield from self._alike(runs, numbers) if self.outputs else [numbers]
            done += len(chunk)

    def _alike(self, runs: Sequence[EditedRun], numbers: list[int]) -> Iterator[list[int]]:
        """The numbers in pieces, each of which ends with a block or has less than `TOGETHER` tokens."""
        some, tokens = numbers[:1], sum(runs[numbers[0]].prompt.lengths)
        for before, i in pairwise(numbers):
            if tokens >= TOGETHER and begins(self.spec, runs[i]) != begins(self.spec, runs[before]):
                yield some
                some, tokens = [], 0
            some.append(i)
            tokens += sum(runs[i].prompt.lengths)
        yield some

    def below(self, taps: Taps, runs: Sequence[EditedRun]) -> Taps:
        """The taps of one forward of these runs, in which blocks below all of their changes are not run."""
        if not self.outputs:
            return taps
        given: dict[str, Tensor | None] = {}
        first = {prefix: min(dict(begins(self.spec, run))[prefix] for run in runs) for prefix in _stacks(self.spec)}
        for prefix, block in first.items():
            given |= {f"{prefix}blocks.{i}": None for i in range(block)}
            if block:
                name = f"{prefix}blocks.{block - 1}"
                given[name] = torch.cat([self.outputs[name]] * len(runs))
        return _Blocks(taps, "", given, set(), {})


def begins(spec: ModelSpec, run: EditedRun) -> Begins:
    """The first block of each stack that a run changes.  What changes in an encoder changes the whole decoder."""
    first = _stacks(spec)
    for site in run.changes:
        prefix = next(prefix for prefix in sorted(first, reverse=True) if site.startswith(prefix))
        block = re.match(r"blocks\.(\d+)\.", site.removeprefix(prefix))
        if block is not None:
            first[prefix] = min(first[prefix], int(block[1]))
        elif site.removeprefix(prefix) == "embed":
            first[prefix] = 0
    if "encoder." in first and any(site.startswith("encoder.") for site in run.changes):
        first["decoder."] = 0
    return tuple(first.items())


def _stacks(spec: ModelSpec) -> dict[str, int]:
    """The number of blocks of each stack, by its prefix."""
    both = spec.layout == "encoder-decoder"
    return {f"{name}." if both else "": len(stack.blocks) for name, stack in spec.stacks.items()}


class _Blocks(Taps):
    """The taps `inner`, in whose forward some blocks give what is `given` instead of running (None is what enters them,
    because the next one does not run either), and what the `wanted` blocks give is kept."""

    def __init__(
        self, inner: Taps, name: str, given: Mapping[str, Tensor | None], wanted: set[str], kept: dict[str, Tensor]
    ) -> None:
        self.inner, self.name, self.given, self.wanted, self.kept = inner, name, given, wanted, kept
        self.provenance = inner.provenance

    def at(self, name: str) -> Taps:
        own = f"{self.name}.{name}" if self.name and name else self.name or name
        return _Blocks(self.inner.at(name), own, self.given, self.wanted, self.kept)

    def run(self, block: Callable[..., Tensor], x: Tensor, ctx: object, layer: int) -> Tensor:
        if self.name in self.given:
            known = self.given[self.name]
            return x if known is None else known
        out = self.inner.run(block, x, ctx, layer)
        if self.name in self.wanted:
            self.kept[self.name] = out.detach()
        return out

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        return self.inner(site, value, rows)

    def attend(
        self, plan: AttendPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None
    ) -> Tensor:
        return self.inner.attend(plan, q, k, v, sinks, content)
