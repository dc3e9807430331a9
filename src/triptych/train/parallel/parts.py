"""Which block of each weight a process holds, and the exchange of blocks for whole weights, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from triptych.nn import NamedWeights, Transformer, finish_loading
from triptych.nn.packed_weight import dense, own_part
from triptych.spec.division import shard_rows

FEW = 1000  # numbers of a weight that are compared between processes


@dataclass(frozen=True)
class WeightBlock:
    """A part of a weight: a range of each of its dimensions."""

    ranges: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.ranges)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


@dataclass(frozen=True)
class Holders:
    """The processes that have the weights together, `shard` times `tensor` of them.

    The first ranks of a mesh are those of its first replica: holder `s * tensor + t` is the process with the numbers s
    and t in these dimensions.
    """

    shard: int
    tensor: int

    @property
    def count(self) -> int:
        return self.shard * self.tensor

    def block(self, shape: Sequence[int], divided: int | None, holder: int) -> WeightBlock:
        """What a holder has of a weight of this shape.

        A layer that is divided along dimension `divided` is cut evenly first; FSDP then cuts the rows as `torch.chunk`.
        """
        s, t = divmod(holder, self.tensor)
        bounds = [slice(0, size) for size in shape]
        if divided is not None:
            part = shape[divided] // self.tensor
            bounds[divided] = slice(t * part, (t + 1) * part)
        first, rows = bounds[0].start, bounds[0].stop - bounds[0].start
        own = shard_rows(rows, self.shard, s)
        return WeightBlock((slice(first + own.start, first + own.stop), *bounds[1:]))

    def once(self, divided: int | None) -> range:
        """The holders whose blocks make up a weight, each number of it once."""
        return range(0, self.count, self.tensor if divided is None else 1)


def divided_dimension(parameter: DTensor) -> int | None:
    """The dimension along which a layer is divided among processes that read the same rows."""
    names = parameter.device_mesh.mesh_dim_names or ()
    for name, placement in zip(names, parameter.placements, strict=True):
        if name == "tensor" and isinstance(placement, Shard):
            return placement.dim
    return None


class WeightsDigest:
    """A digest of a thousand numbers of each weight that was noted, to compare processes."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def noting(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """The same `weights`."""
        for name, weight in weights:
            few = dense(weight.detach()).flatten()[:: max(1, weight.numel() // FEW)]
            self._sha.update(name.encode() + few.float().cpu().numpy().tobytes())
            yield name, weight

    def __str__(self) -> str:
        return self._sha.hexdigest()


@torch.no_grad()
def fill_parts(module: Transformer, weights: NamedWeights, holders: Holders, holder: int, device: torch.device) -> None:
    """Give a divided module on the meta device the parts of `weights` that process `holder` has, in place.

    No more than the parts and one whole weight are in memory at a time.
    """
    module.to_empty(device=device)
    for name, weight in weights:
        parameter = module.get_parameter(name)
        if isinstance(parameter, DTensor):
            weight = weight[holders.block(parameter.shape, divided_dimension(parameter), holder).ranges]
        own_part(parameter).copy_(weight)
    finish_loading(module)


@dataclass(frozen=True, eq=False)
class WeightPart:
    """What this process has of a weight of a shape; `divided` as in `Holders`, and `is_divided` says whether it has a
    part at all, or all of it."""

    own: Tensor
    shape: torch.Size
    divided: int | None = None
    is_divided: bool = False

    @staticmethod
    def of(parameter: Tensor) -> WeightPart:
        if not isinstance(parameter, DTensor):
            return WeightPart(parameter.detach(), parameter.shape)
        return WeightPart(parameter.to_local().detach(), parameter.shape, divided_dimension(parameter), True)


class WeightsOfFirst(Mapping[str, Tensor]):
    """Whole weights in rank 0 of the parts of all processes, one at a time; the others get a weight on the meta device.

    Every process of `group` must look up the same names in the same order.
    """

    def __init__(self, parts: Mapping[str, WeightPart], holders: Holders, group: dist.ProcessGroup | None) -> None:
        self.parts, self.holders, self.group = parts, holders, group

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def like(self, name: str) -> Tensor:
        """The weight on the meta device."""
        part = self.parts[name]
        return torch.empty(part.shape, dtype=part.own.dtype, device="meta")

    def __getitem__(self, name: str) -> Tensor:
        part, rank = self.parts[name], dist.get_rank()
        if not part.is_divided or self.holders.count == 1:
            return dense(part.own) if rank == 0 else self.like(name)
        sources = {
            holder: block
            for holder in self.holders.once(part.divided)
            if not (block := self.holders.block(part.shape, part.divided, holder)).is_empty
        }
        if rank != 0:
            if rank in sources:
                dist.send(part.own.cpu().contiguous(), 0, group=self.group)
            return self.like(name)
        whole = torch.empty(part.shape, dtype=part.own.dtype)
        for holder, block in sources.items():
            place = whole[block.ranges]
            if holder == 0:
                place.copy_(part.own)
            elif place.is_contiguous():
                dist.recv(place, holder, group=self.group)
            else:
                received = torch.empty(block.shape, dtype=whole.dtype)
                dist.recv(received, holder, group=self.group)
                place.copy_(received)
        return whole
