"""Weights, gradients and optimizer state divided among processes by FSDP2 (Zhao et al. 2023).

`spec.division` says which parts are gathered together.  The head is called beside `forward`, so that it is the model's
own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from triptych.nn import Transformer
from triptych.nn.packed_weight import PackedWeight
from triptych.spec.division import gathered_parts


def shard(module: Transformer, mesh: DeviceMesh) -> None:
    """Divide the parameters of `module` over `mesh`, in place.  Packed weights and integers, which are not trained,
    stay whole."""
    whole = {p for p in module.parameters() if isinstance(p, PackedWeight) or not p.is_floating_point()}
    for part in (*map(module.get_submodule, gathered_parts(module.spec)), module):
        if any(parameter not in whole for parameter in part.parameters()):
            fully_shard(part, mesh=mesh, ignored_params=whole)
    for unit in sharded_parts(module):
        unit.set_gradient_divide_factor(1.0)  # losses are divided already
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum of premultiplied numbers


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """The parts whose parameters are divided together."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))
