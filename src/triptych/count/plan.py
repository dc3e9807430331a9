"""How to divide the training of a model among processes: meshes, micro-batches and recomputation, by what fits into the
memory of a process and by what takes least time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from triptych.arguments import checked, integer, number
from triptych.errors import ConfigError, InputError
from triptych.spec import ModelSpec
from .counts import count
from .divided import DividedModel, Mesh, RankMemory, SentBytes, TrainingStep
from .training import size

FREE = 0.1  # of the memory, for what is not counted: work space of operations, gaps, the libraries themselves
MOST_PROCESSES = 1 << 14  # that a plan may have, and to which one that does not fit is tried with more


@dataclass(frozen=True)
class ClusterRates:
    """What a cluster does in a second.

    flops       matmul FLOPs of a process.
    bandwidth   bytes that a process sends to others on its machine.
    between     bytes that a process sends to another machine while all on its machine do; `bandwidth` when None.
    per_node    processes on a machine; all when None.
    """

    flops: float
    bandwidth: float
    between: float | None = None
    per_node: int | None = None

    def check(self, processes: int) -> None:
        """Raises InputError for a rate that is not above 0, and where `processes` leave a part of a machine unused."""
        rates = {"flops": self.flops, "bandwidth": self.bandwidth, "between": self.between}
        for name, rate in rates.items():
            if rate is not None:
                number(name, rate, sys.float_info.min, sys.float_info.max, "above 0 and finite")
        per_node = processes if self.per_node is None else integer("per_node", self.per_node, 1)
        if processes > per_node and processes % per_node:
            raise InputError(
                f"{processes} processes are no whole number of machines of {per_node} (per_node); change one"
            )

    def sending(self, processes: int, stride: int) -> float:
        """Bytes a second that each of a group of `processes` sends in a ring, each the number `stride` after the last:
        those of one machine that are in the group share what it sends to others."""
        if self.between is None or self.per_node is None or processes * stride <= self.per_node:
            return self.bandwidth
        return min(self.bandwidth, self.between * max(1, self.per_node // stride))


@dataclass(frozen=True)
class TrainingPlan:
    """A step of `rows` rows on `mesh`, whose processes each compute `step`.

    compute_seconds   what the matmuls of a process take, and
    sent_seconds      what it sends, by the kinds of `SentBytes`; None without `ClusterRates`.
    """

    mesh: Mesh
    step: TrainingStep
    rows: int
    memory: RankMemory
    sent: SentBytes
    compute_seconds: float | None = None
    sent_seconds: Mapping[str, float] | None = None

    @property
    def seconds(self) -> float | None:
        """A step's time where nothing is sent while a process computes, which is the most."""
        if self.compute_seconds is None or self.sent_seconds is None:
            return None
        return self.compute_seconds + sum(self.sent_seconds.values())

    def recipe(self) -> dict[str, dict[str, int | bool | str]]:
        """The tables of a recipe that follow from the plan."""
        step = self.step
        run: dict[str, int | bool | str] = {"rows": self.rows, "length": step.length, "accumulate": step.accumulate}
        run |= {"recompute": step.recompute, "precision": "bf16" if step.bf16 else "fp32"}
        return {"parallel": asdict(self.mesh), "run": run, "optimizer": {"name": step.optimizer}}

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON: bytes of a process and a step, seconds of a step."""
        return {
            "recipe": self.recipe(), "micro_batch_rows": self.step.rows, "memory": self.memory.to_dict(),
            "sent": self.sent.to_dict() | {"total": self.sent.total}, "compute_seconds": self.compute_seconds,
            "sent_seconds": self.sent_seconds and dict(self.sent_seconds), "seconds": self.seconds,
        }  # fmt: skip


@checked
def plan(
    spec: ModelSpec, processes: int, memory: float, *, length: int, rows: int | None = None,
    precision: Literal["bf16", "fp32"] = "bf16", optimizer: Literal["adamw", "muon"] = "adamw",
    rates: ClusterRates | None = None,
) -> TrainingPlan:  # fmt: skip
    """How `processes` that have `memory` bytes each train `spec` on steps of `rows` rows of `length` tokens, a row for
    each process when None; an encoder-decoder's encoder reads as many.  Nine tenths of the memory are used.

    With `rates` the plan is what takes least time.  Without them it divides layers among as few processes as it can,
    computes nothing again where it need not, takes as few micro-batches as it can, and sends least, in this order.
    FLOPs, of which the time follows, need torch.

    Raises InputError where nothing fits, with what would, and for numbers that are not above 0.
    """
    number("memory", memory, 1.0, sys.float_info.max, "of bytes, at least 1")
    if integer("processes", processes, 1) > MOST_PROCESSES:
        raise InputError(f"processes={processes:,} is more than the {MOST_PROCESSES:,} for which meshes are tried")
    rows = processes if rows is None else integer("rows", rows, 1)
    if rates is not None:
        rates.check(processes)
    search = _PlanSearch(spec, integer("length", length, 1), precision == "bf16", optimizer)
    fitting = [one for one in search.plans(processes, rows) if one.memory.peak <= (1.0 - FREE) * memory]
    if not fitting:
        raise InputError(search.refusal(processes, rows, memory))
    if rates is None:
        return min(fitting, key=_simplest)
    flops = _row_flops(spec, search.step(1, 1, recompute=False)), _row_flops(spec, search.step(1, 1, recompute=True))
    return min((_timed(one, flops[one.step.recompute], rates) for one in fitting), key=lambda one: one.seconds or 0.0)


class _PlanSearch:
    """The plans for steps of one model."""

    def __init__(self, spec: ModelSpec, length: int, bf16: bool, optimizer: Literal["adamw", "muon"]) -> None:
        self.spec, self.length, self.bf16, self.optimizer = spec, length, bf16, optimizer
        self._models: dict[int, DividedModel | None] = {}

    def step(self, rows: int, accumulate: int, *, recompute: bool) -> TrainingStep:
        source = self.length if self.spec.layout == "encoder-decoder" else 0
        return TrainingStep(self.length, source, rows, accumulate, recompute, self.bf16, self.optimizer)

    def plans(self, processes: int, rows: int) -> Iterator[TrainingPlan]:
        """All plans, those that do not fit too."""
        for tensor in _divisors(processes):
            model = self._divided(tensor)
            if model is None:
                continue
            for shard in _divisors(processes // tensor):
                mesh = Mesh(processes // tensor // shard, shard, tensor)
                for accumulate in _micro_batches(rows // mesh.readers):
                    for recompute in (False, True):
                        step = self.step(-(-rows // (mesh.readers * accumulate)), accumulate, recompute=recompute)
                        yield TrainingPlan(mesh, step, rows, model.memory(mesh, step), model.sent(mesh, step))

    def _divided(self, tensor: int) -> DividedModel | None:
        if tensor not in self._models:
            try:
                self._models[tensor] = DividedModel(self.spec, tensor)
            except ConfigError:  # heads or hidden numbers that so many processes cannot share
                self._models[tensor] = None
        return self._models[tensor]

    def refusal(self, processes: int, rows: int, memory: float) -> str:
        """Why no plan fits, and what would."""
        least = min(self.plans(processes, rows), key=lambda one: one.memory.peak, default=None)
        step = f"a step of {rows:,} x {self.length:,} tokens"
        if least is None:
            return f"{step} has fewer rows than {processes:,} processes need; give more rows, or fewer processes"
        parts = {name: nbytes for name, nbytes in least.memory.to_dict().items() if nbytes and name != "peak"}
        listed = ", ".join(f"{name.replace('_', ' ')} {size(nbytes)}" for name, nbytes in parts.items())
        again = ", recompute" if least.step.recompute else ""
        needed = (
            f"{step} needs {size(least.memory.peak)} a process on {least.mesh} (micro-batches of {least.step.rows:,}"
            f"{again}: {listed}), and nine tenths of the memory are {size(int((1.0 - FREE) * memory))}"
        )
        more = processes * 2
        while more <= MOST_PROCESSES:
            if any(one.memory.peak <= (1.0 - FREE) * memory for one in self.plans(more, max(rows, more))):
                return f"{needed}; it fits on {more:,} processes{f', with {more:,} rows' if more > rows else ''}"
            more *= 2
        return f"{needed}; more processes are not enough, take fewer tokens in a row or processes with more memory"


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _micro_batches(rows: int) -> list[int]:
    """Numbers of micro-batches of a process that reads so many rows in a step."""
    return sorted({min(rows, 1 << k) for k in range(rows.bit_length() + 1)}) if rows else []


def _simplest(one: TrainingPlan) -> tuple[float, ...]:
    return one.mesh.tensor, one.step.recompute, one.step.accumulate, one.sent.total


def _row_flops(spec: ModelSpec, step: TrainingStep) -> int:
    """FLOPs to train on a row; where blocks are computed again, with one more forward pass but for the head."""
    counts = count(spec)
    forward = counts.flops(step.length, source=step.source)
    again = sum(forward.values()) - forward["head"] if step.recompute else 0
    return counts.training_flops(step.length, source=step.source) + again


def _timed(one: TrainingPlan, row_flops: int, rates: ClusterRates) -> TrainingPlan:
    mesh, step = one.mesh, one.step
    compute = step.accumulate * step.rows * row_flops / mesh.tensor / rates.flops
    shard = rates.sending(mesh.shard, mesh.tensor)
    pace = {
        "gather_forward": shard, "gather_backward": shard, "scatter": shard,
        "replicate": rates.sending(mesh.replicate, mesh.shard * mesh.tensor),
        "tensor": rates.sending(mesh.tensor, 1), "muon": rates.sending(mesh.shard * mesh.tensor, 1),
    }  # fmt: skip
    seconds = {kind: nbytes / pace[kind] for kind, nbytes in one.sent.to_dict().items()}
    return replace(one, compute_seconds=compute, sent_seconds=seconds)
