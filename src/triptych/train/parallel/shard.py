"""Weights, gradients and optimizer state divided among processes by FSDP2 (Zhao et al. 2023).

Each block is gathered when it runs.  What a forward reads elsewhere (embeddings, position tables, final norms, the
head, which is called beside `forward`) belongs to the model itself, and stays gathered until the end of the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from triptych.nn import Transformer
from triptych.nn.packed_weight import PackedWeight


def shard(module: Transformer, mesh: DeviceMesh) -> None:
    """Divide the parameters of `module` over `mesh`, in place.  Packed weights and integers, which are not trained,
    stay whole."""
    whole = {p for p in module.parameters() if isinstance(p, PackedWeight) or not p.is_floating_point()}
    stacks = [stack for stack in (module.encoder, module.decoder) if stack is not None]
    for part in (*(block for stack in stacks for block in stack.blocks), module):
        if any(parameter not in whole for parameter in part.parameters()):
            fully_shard(part, mesh=mesh, ignored_params=whole)
    for unit in sharded_parts(module):
        unit.set_gradient_divide_factor(1.0)  # losses are divided already
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum of premultiplied numbers


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """The parts whose parameters are divided together."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))
