"""`GroupMessages`: what the processes of a run tell one another, over one group of gloo."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from triptych.errors import TriptychError
from ..ranks import Messages, SharedError


class GroupMessages(Messages):
    """See `Messages`.  Every process of the group makes each call, in one order; `group` None is that of all.

    Two threads of a process need two groups.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def any(self, flag: bool) -> bool:
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value)

    def texts(self, text: str) -> list[str]:
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [torch.zeros((), dtype=torch.long) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor(len(own)), group=self.group)
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded, group=self.group)
        return [bytes(one[:length].tolist()).decode() for one, length in zip(every, lengths, strict=True)]

    def on_first(self, function: Callable[[], object]) -> None:
        error: TriptychError | None = None
        if self.index == 0:
            try:
                function()
            except TriptychError as problem:
                error = problem
        problem_text = self.texts("-" if error is None else f"!{error}")[0]
        if error is not None:
            raise error
        if problem_text[0] == "!":
            raise SharedError(problem_text[1:])
