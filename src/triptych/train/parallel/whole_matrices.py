"""Whole matrices for Muon where each process has a part of every one.

The matrices of a step are divided among the processes: each receives the parts of its own ones, computes with whole
matrices, and sends the parts of the results back.  The same numbers come out on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .parts import Holders, divided_dimension


class WholeMatrices:
    """The exchange of parts on a mesh replicate × shard × tensor."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.replicas, self.sizes = mesh["replicate"], Holders(mesh["shard"].size(), mesh["tensor"].size())
        self.group = mesh["shard", "tensor"]._flatten("holders").get_group()
        self.rank, self.holders = dist.get_rank(self.group), dist.get_world_size(self.group)

    def map(
        self, parameters: Sequence[DTensor], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """This process' parts of `function` of the whole matrices, all of one shape and division; `parts` are its parts
        of what the function reads, [n, rows, columns] when stacked."""
        shape, divided = tuple(parameters[0].shape), divided_dimension(parameters[0])
        blocks = [self.sizes.block(shape, divided, holder) for holder in range(self.holders)]
        turns = [divmod(i, self.replicas.size()) for i in range(len(parts))]
        here = [i for i, (_, replica) in enumerate(turns) if replica == self.replicas.get_local_rank()]
        owned = [[i for i in here if turns[i][0] % self.holders == holder] for holder in range(self.holders)]
        mine = owned[self.rank]
        received = self._exchange(
            parts[0],
            [[parts[i] for i in of_holder] for of_holder in owned],
            [[block.shape] * len(mine) for block in blocks],
        )
        whole = parts[0].new_zeros(len(mine), *shape)
        for block, each in zip(blocks, received, strict=True):
            for matrix, part in zip(whole, each, strict=True):
                matrix[block.ranges] = part
        results = function(whole) if mine else whole
        back = self._exchange(
            parts[0],
            [[result[block.ranges] for result in results] for block in blocks],
            [[blocks[self.rank].shape] * len(of_holder) for of_holder in owned],
        )
        out = parts[0].new_zeros(len(parts), *blocks[self.rank].shape)
        for of_holder, each in zip(owned, back, strict=True):
            for i, part in zip(of_holder, each, strict=True):
                out[i] = part
        if self.replicas.size() > 1:
            dist.all_reduce(out, group=self.replicas.get_group())
        return list(out)

    def _exchange(
        self, like: Tensor, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send a list of matrices to each process of the group; what each sends here has these shapes, and the dtype of
        `like`."""
        outgoing = torch.cat([like.new_zeros(0), *(one.flatten().to(like.dtype) for to in sent for one in to)])
        sizes = [sum(map(math.prod, each)) for each in shapes]
        incoming = like.new_empty(sum(sizes))
        counts = [sum(one.numel() for one in to) for to in sent]
        dist.all_to_all_single(incoming, outgoing, sizes, counts, group=self.group)
        return [list(_cut(part, each)) for part, each in zip(incoming.split(sizes), shapes, strict=True)]


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Matrices of these shapes from their numbers end to end."""
    for part, shape in zip(flat.split(list(map(math.prod, shapes))), shapes, strict=True):
        yield part.view(shape)
