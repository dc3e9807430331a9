"""`MeshRanks`: one process of several that train one model on a mesh replicate × shard × tensor.

Sums of losses are divided by the weight of all ranks' tokens before each backward pass, and FSDP sums the gradients,
so that a step is that of one process whatever each rank's share of the tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from triptych.errors import first_line
from triptych.nn import LoraFactors, NamedWeights, Transformer
from triptych.ops import RowNoise
from ..data import micro_batches
from ..objectives import Example, TrainingBatch
from ..ranks import LostProcessError, Messages, Ranks
from .checkpoints import whole_factors, whole_module
from .collectives import gathered_rows
from .expert_use import ExpertUse
from .messages import GroupMessages
from .parts import Holders, WeightPart, WeightsDigest, WeightsOfFirst, fill_parts
from .settings import ParallelSettings
from .shard import shard, sharded_parts
from .tensor import TensorParallel
from .whole_matrices import WholeMatrices

_CONNECTION = ("gloo", "NCCL", "peer", "Connection", "Broken pipe")  # in errors of a process group


@dataclass(frozen=True, eq=False)
class IdleBatch(TrainingBatch):
    """Rows that take part in a pass and add nothing to it: a rank without a trained token makes as many passes as the
    others, so that all wait for the same messages."""

    inner: TrainingBatch = field(kw_only=True)
    counted: int = field(kw_only=True)

    @staticmethod
    def like(batch: TrainingBatch, counted: int) -> IdleBatch:
        """The rows of `batch`, of whose tokens `counted` count as read."""
        own = (batch.ids, batch.rows, batch.at, batch.targets, batch.source)
        return IdleBatch(*own, examples=batch.examples, numbers=batch.numbers, inner=batch, counted=counted)

    @property
    def tokens(self) -> int:
        return self.counted

    @property
    def numbers_of_rows(self) -> Sequence[int]:
        return self.inner.numbers_of_rows

    @property
    def weight(self) -> float:
        return 0.0

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        return 0.0 * self.inner.nats(module, max_logits, random)


class MeshRanks(GroupMessages, Ranks):
    """See `Ranks`.  The process group must exist.

    clocked   whether decisions follow the clock, which is then that of rank 0.
    """

    exact_muon = True

    def __init__(self, settings: ParallelSettings, device: torch.device, *, clocked: bool) -> None:
        self.settings, self.clocked, self.own_device = settings, clocked, device
        super().__init__()
        names, sizes = ("replicate", "shard", "tensor"), (settings.replicate, settings.shard, settings.tensor)
        self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        self.readers = self.mesh["replicate", "shard"]._flatten("readers")
        self.reader = self.readers.get_local_rank()
        self.experts, self.matrices, self._digest = ExpertUse(), WholeMatrices(self.mesh), WeightsDigest()
        self.holders = Holders(settings.shard, settings.tensor)
        self.saving = GroupMessages(dist.new_group(backend="gloo"))
        self.holder = self.index % self.holders.count
        self._parameters: dict[Tensor, DTensor] = {}  # by their parts
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gathers of 2 dimensions are meant

    @contextmanager
    def watch(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error)
            if not isinstance(error, dist.DistError) and not any(word in reason for word in _CONNECTION):
                raise
            raise LostProcessError(
                f"rank {self.index} lost another process of the run ({reason}); the checkpoints before are whole: "
                "continue with --resume"
            ) from None

    @property
    def data_mesh(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"] if self.settings.replicate > 1 else self.mesh["shard"]

    def distribute(
        self, module: Transformer, weights: NamedWeights | None = None, device: torch.device | None = None
    ) -> None:
        module.whole_copy = partial(whole_module, module)
        if any(parameter.requires_grad for parameter in module.parameters()):  # no reference of another
            self.experts = ExpertUse.of(module)
        if weights is None:
            module.to(self.own_device)
            deque(self._digest.noting(module.named_parameters()), maxlen=0)
        if self.settings.tensor > 1:
            TensorParallel(module, self.mesh["tensor"])
        shard(module, self.data_mesh)
        if weights is not None:
            fill_parts(module, self._digest.noting(weights), self.holders, self.holder, self.own_device)
        self.weights_digest = str(self._digest)

    def saved_weights(self, module: Transformer, *, copied: bool = False) -> Mapping[str, Tensor]:
        parts = {name: WeightPart.of(parameter) for name, parameter in module.named_parameters()}
        if copied:
            parts = {name: replace(part, own=part.own.clone()) for name, part in parts.items()}
        return WeightsOfFirst(parts, self.holders, self.saving.group if copied else None)

    def whole_factors(self, module: Transformer) -> Mapping[str, LoraFactors]:
        return whole_factors(module)

    @property
    def for_saving(self) -> Messages:
        return self.saving

    def batch(self, examples: Sequence[Example], numbers: Sequence[int], device: torch.device) -> TrainingBatch:
        slices = micro_batches(numbers, self.settings.readers)
        own = slices[self.reader] if self.reader < len(slices) else ()
        rows = [examples[i] for i in own or numbers[:1]]  # of an empty slice another's first row
        batch = rows[0].collated(rows, device).across(self).numbered(own or numbers[:1])
        if any(examples[i].trained.any() for i in own):
            return batch
        return IdleBatch.like(batch, batch.tokens if own else 0)

    def noise(self, seed: int, rows: Sequence[int]) -> RowNoise:
        return RowNoise(seed, rows, divided=(self.mesh["tensor"].get_local_rank(), self.settings.tensor))

    def gathered(self, vectors: Tensor) -> Tensor:
        return gathered_rows(vectors, self._counts_of_rows(len(vectors)), self.reader, self._host_group)

    def rows_before(self, count: int) -> int:
        return sum(self._counts_of_rows(count)[: self.reader])

    def _counts_of_rows(self, count: int) -> list[int]:
        counts = torch.zeros(self.settings.readers, dtype=torch.long)
        counts[self.reader] = count
        dist.all_reduce(counts, group=self._host_group)
        return [int(n) for n in counts]

    def sums(self, *values: float) -> Sequence[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._host_group)
        return [float(value) for value in total]

    @property
    def _host_group(self) -> dist.ProcessGroup:
        return self.readers.get_group()

    def clock(self) -> float:
        now = super().clock()
        if not self.clocked:
            return now
        value = torch.tensor([now], dtype=torch.float64)
        dist.broadcast(value, 0)
        return float(value)

    def before_backward(self, module: Transformer, *, last: bool) -> None:
        for part in sharded_parts(module):
            part.set_requires_gradient_sync(last, recurse=False)

    def after_backward(self, module: Transformer) -> None:
        self.experts.forget_unused(self._host_group)

    def after_evaluation(self, module: Transformer) -> None:
        for part in sharded_parts(module):
            part.reshard()

    def local(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        part: Tensor | None = parameter.__dict__.get("trained_part")
        if part is None:
            part = torch.nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            parameter.__dict__["trained_part"] = part
            self._parameters[part] = parameter
        return part

    def localize_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                self.local(parameter).grad = gradient.to_local()

    def shape(self, part: Tensor) -> torch.Size:
        return self._parameters[part].shape

    def sharing_key(self, part: Tensor) -> Hashable:
        parameter = self._parameters[part]
        return parameter.shape, parameter.device_mesh.mesh_dim_names, parameter.placements

    def map_matrices(
        self, parameters: Sequence[Tensor], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        return self.matrices.map([self._parameters[one] for one in parameters], parts, function)

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Each rank's squares are summed once: of replicas only that of the first."""
        parts, wide = list[Tensor](), torch.float32
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and self._counts(parameter):
                parts.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
                wide = torch.promote_types(wide, gradient.dtype)
        norms = [torch.linalg.vector_norm(part, dtype=wide).double().square() for part in parts]
        total = torch.stack(norms).sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total)
        return total.sqrt().to(self.own_device, wide)

    def _counts(self, parameter: Tensor) -> bool:
        """Whether this rank's part of a parameter is no replica of another rank's."""
        if not isinstance(parameter, DTensor):
            return self.index == 0
        mesh = parameter.device_mesh
        names, coordinate = mesh.mesh_dim_names or (), tuple(mesh.get_coordinate() or ())
        divided = {
            name: not placement.is_replicate() for name, placement in zip(names, parameter.placements, strict=True)
        }
        place = dict(zip(names, coordinate, strict=True))
        everywhere = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or [], strict=True)
        return all(place.get(name, at) == 0 for name, at in everywhere if not divided.get(name, False))
