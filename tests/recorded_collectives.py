"""Records what the collectives of torch's process groups send."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

#: Parts of 1 / n that each of n processes sends in a ring, by the name of the call, and which argument is the whole.
KINDS = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "sum", "alltoall_base_": "all"}


class RecordedCollectives(TorchDispatchMode):
    """Inside, `sent` counts the bytes that this process sends by a ring, by kind and by the processes of the group.
    Integers and fp64, which are flags, counts and norms, are left out; any other call is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = str(function).partition(".")
        if space == "c10d":
            self._note(name.partition(".")[0], args)
        elif space == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            assert name.startswith("all_reduce"), function
            group = dist.distributed_c10d._resolve_process_group(args[2])
            self._add("sum", group.size(), args[0], 2 * (group.size() - 1) / group.size())
        return function(*args, **kwargs or {})

    def _note(self, name: str, args: Any) -> None:
        kind, tensors = KINDS[name], args[0] if isinstance(args[0], list) else [args[0]]
        n = dist.ProcessGroup.unbox(next(one for one in args if isinstance(one, torch.ScriptObject))).size()
        if kind == "all":
            sizes, own = args[4], dist.get_rank(dist.ProcessGroup.unbox(args[2]))
            self._add(kind, n, args[1], 1 - sizes[own] / max(1, sum(sizes)))
            return
        whole = args[1] if kind == "scatter" else tensors[0]
        self._add(kind, n, whole, (2 if kind == "sum" else 1) * (n - 1) / n)

    def _add(self, kind: str, processes: int, tensor: torch.Tensor, parts: float) -> None:
        if tensor.dtype in (torch.float32, torch.bfloat16):
            self.sent[kind, processes] += parts * tensor.nbytes
