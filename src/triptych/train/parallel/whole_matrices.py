"""Whole matrices for Muon where each process has a part of every one.

The matrices of a step are divided among the processes: each receives the parts of its own ones, computes with whole
matrices, and sends the parts of the results back.  The same numbers come out on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from triptych.spec.division import shard_rows


@dataclass(frozen=True)
class MatrixPart:
    """The rows and columns of a matrix that a process has."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def block_of(shape: Sequence[int], divided: int | None, tensor: tuple[int, int], shard: tuple[int, int]) -> MatrixPart:
    """The block of the process `index` of `count` in each dimension of the mesh, given as (index, count).

    A layer that is divided along dimension `divided` is cut evenly first; FSDP then cuts the rows as `torch.chunk`.
    """
    bounds = [slice(0, size) for size in shape]
    if divided is not None:
        part = shape[divided] // tensor[1]
        bounds[divided] = slice(tensor[0] * part, (tensor[0] + 1) * part)
    first, rows = bounds[0].start, bounds[0].stop - bounds[0].start
    own = shard_rows(rows, shard[1], shard[0])
    return MatrixPart(slice(first + own.start, first + own.stop), bounds[1])


class WholeMatrices:
    """The exchange of parts on a mesh replicate × shard × tensor."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.replicas, self.sizes = mesh["replicate"], (mesh["shard"].size(), mesh["tensor"].size())
        self.group = mesh["shard", "tensor"]._flatten("holders").get_group()
        self.rank, self.holders = dist.get_rank(self.group), dist.get_world_size(self.group)

    def map(
        self, parameters: Sequence[DTensor], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """This process' parts of `function` of the whole matrices, all of one shape and division; `parts` are its parts
        of what the function reads, [n, rows, columns] when stacked."""
        shape, divided = tuple(parameters[0].shape), self._divided(parameters[0])
        blocks = [
            block_of(shape, divided, (holder % self.sizes[1], self.sizes[1]), (holder // self.sizes[1], self.sizes[0]))
            for holder in range(self.holders)
        ]
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
                matrix[block.rows, block.columns] = part
        results = function(whole) if mine else whole
        back = self._exchange(
            parts[0],
            [[result[block.rows, block.columns] for result in results] for block in blocks],
            [[blocks[self.rank].shape] * len(of_holder) for of_holder in owned],
        )
        out = parts[0].new_zeros(len(parts), *blocks[self.rank].shape)
        for of_holder, each in zip(owned, back, strict=True):
            for i, part in zip(of_holder, each, strict=True):
                out[i] = part
        if self.replicas.size() > 1:
            dist.all_reduce(out, group=self.replicas.get_group())
        return list(out)

    @staticmethod
    def _divided(parameter: DTensor) -> int | None:
        """The dimension along which a layer is divided among processes that read the same rows."""
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name == "tensor" and not placement.is_replicate():
                return int(placement.dim)  # type: ignore[attr-defined]
        return None

    def _exchange(
        self, like: Tensor, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[Tensor]]:
        """Send a list of matrices to each process of the group; what each sends here has these shapes, and the dtype of
        `like`."""
        outgoing = torch.cat([like.new_zeros(0), *(one.flatten().to(like.dtype) for to in sent for one in to)])
        sizes = [sum(rows * columns for rows, columns in each) for each in shapes]
        incoming = like.new_empty(sum(sizes))
        counts = [sum(one.numel() for one in to) for to in sent]
        dist.all_to_all_single(incoming, outgoing, sizes, counts, group=self.group)
        return [list(_cut(part, each)) for part, each in zip(incoming.split(sizes), shapes, strict=True)]


def _cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Matrices of these shapes from their numbers end to end."""
    for part, shape in zip(flat.split([rows * columns for rows, columns in shapes]), shapes, strict=True):
        yield part.view(shape)
