"""Dropout whose random numbers depend on the seed of the step alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from triptych.nn import Transformer


def has_dropout(module: Transformer) -> bool:
    """Whether a forward in training mode draws random numbers."""
    in_spec = any(getattr(part, "dropout", 0.0) > 0.0 for _, part in module.spec.walk())
    return in_spec or any(isinstance(part, nn.Dropout) and part.p > 0.0 for part in module.modules())


@contextmanager
def seeded_dropout(seed: int, recomputed: Iterable[nn.Module] = ()) -> Iterator[SeededDropout]:
    """Inside, dropout of this thread on the CPU draws its masks from a generator seeded with `seed`.

    torch's own dropout draws from the global generator, which any thread may advance at any time.  Here that generator
    is neither read nor changed, and the masks are those that `F.dropout` draws after `torch.manual_seed(seed)`.

    `recomputed` are the modules that run a second time in the backward pass, to compute their activations again.  Run
    the backward pass inside `backward()` of the result, so that they draw the masks of their first run.
    """
    mode = SeededDropout(seed)
    hooks = []
    for module in recomputed:
        hooks.append(module.register_forward_pre_hook(mode.begin))
        hooks.append(module.register_forward_hook(mode.end, always_call=True))
    try:
        with mode:
            yield mode
    finally:
        for hook in hooks:
            hook.remove()


class SeededDropout(TorchFunctionMode):
    """Replaces `F.dropout` while it is active; see `seeded_dropout`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self._states: defaultdict[nn.Module, list[Tensor]] = defaultdict(list)  # of the generator, before each run
        self._in_backward = False
        self._reentered = ExitStack()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward pass: modules that run here run for the second time."""
        after_forward = self.generator.get_state()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._states.clear()
            self.generator.set_state(after_forward)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0.0 < p < 1.0:
            return F.dropout(input, p, training, inplace)
        scaled_mask = torch.empty_like(input).bernoulli_(1.0 - p, generator=self.generator).div_(1.0 - p)
        return input.mul_(scaled_mask) if inplace else input * scaled_mask

    def begin(self, module: nn.Module, _: tuple[object, ...]) -> None:
        """The forward pre-hook of recomputed modules."""
        if not self._in_backward:
            self._states[module].append(self.generator.get_state())
            return
        self.generator.set_state(self._states[module].pop())  # the backward pass begins with the last run
        self._reentered.enter_context(self)  # torch turns the mode off while it runs `Tensor.backward`

    def end(self, module: nn.Module, _: tuple[object, ...], __: object) -> None:
        """The forward hook of recomputed modules."""
        self._reentered.close()


@contextmanager
def global_dropout(seed: int) -> Iterator[None]:
    """The same through torch's global generator, for compiled code and GPU kernels, which read no other.

    Other threads must not draw from it inside; its state is restored at the end.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
