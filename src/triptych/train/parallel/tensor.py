"""Tensor parallelism (Shoeybi et al. 2019): every layer divided among processes that read the same rows.

The parameters of a divided part are `DTensor`s, for FSDP, the optimizer and checkpoints.  Its forward computes with
this process' parts of them as plain tensors, between sums over the processes: heads of attention and columns of an MLP
need one sum a sublayer.  `spec.division` says what is divided; all else is the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.errors import ConfigError
from triptych.nn import Transformer
from triptych.nn.attention import Attention
from triptych.nn.feedforward import GLU, MLP
from triptych.nn.inputs import Embed, Table
from triptych.nn.linear import Linear
from triptych.nn.part import Module
from triptych.nn.positions import Alibi, Positioned, T5Buckets
from triptych.spec import ModelSpec
from triptych.spec.division import own_heads, own_part
from ..objectives import exact
from ..ranks import SharedError
from .collectives import entering, joined, summed, vocabulary_loss

#: The tensors that every process has whole and whose gradient is the sum of all processes', by kind of part: of an
#: adapter the factor that a map does not divide, and the norms of queries and keys.
BY_OUTPUTS, BY_INPUTS, NORM = ("down",), ("up",), ("weight", "bias")
_OF_FACTORS = {"up": 0, "down": 1}  # the dimension along which the other factor is divided


class TensorParallel:
    """The division of one model among the processes of `mesh`, which has one dimension."""

    def __init__(self, module: Transformer, mesh: DeviceMesh) -> None:
        self.module, self.mesh, self.group = module, mesh, mesh.get_group()
        self.index, self.count = mesh.get_local_rank(), mesh.size()
        self._divided: dict[nn.Parameter, nn.Parameter] = {}
        self.whole_logits = True
        try:
            own = own_part(module.spec, self.count)
        except ConfigError as error:
            raise SharedError(str(error)) from None
        self._dimensions = _divided_dimensions(module, own)
        self._divide()

    def _divide(self) -> None:
        for part in self.module.modules():
            if isinstance(part, Attention):
                self._attention(part)
            elif isinstance(part, MLP | GLU):
                self._feed_forward(part)
            elif isinstance(part, T5Buckets):
                self._wrap(part, name="prepare")
            elif isinstance(part, Alibi):
                replace_method(part, "prepare", partial(self._of_own_heads, part.prepare))
        stacks = [stack for stack in (self.module.encoder, self.module.decoder) if stack is not None]
        for stack in stacks:
            stack.group()
            if isinstance(stack.embed, Embed) and self._divides(stack.embed.tokens.spec.rows):
                self._vocabulary_table(stack.embed.tokens)
        head = self.module.head
        projection = getattr(head, "proj", None)
        if isinstance(projection, Linear) and self._divides(self.module.spec.vocab) and self._predicts(projection):
            self._wrap(projection, before=self._enter, after=self._join_logits)
            self.module.token_loss = self.token_loss

    def _predicts(self, projection: Linear) -> bool:
        return projection.spec.outputs == self.module.spec.vocab

    def _divides(self, size: int) -> bool:
        return size % self.count == 0

    def _enter(self, x: Tensor) -> Tensor:
        return entering(x, self.group)

    def _sum(self, x: Tensor) -> Tensor:
        return summed(x, self.group)

    def _attention(self, part: Attention) -> None:
        for linear in (part.q, part.k, part.v, part.pos_q, part.pos_k):
            if linear is not None:
                self._wrap(linear, BY_OUTPUTS, before=self._enter)
        self._by_inputs(part.out)
        for norm in (part.q_norm, part.k_norm):
            if isinstance(norm, Module):
                self._wrap(norm, NORM)
        part.spec = own_heads(part.spec, self.count)
        if part.sinks is not None:
            self._wrap(part)

    def _feed_forward(self, part: MLP | GLU) -> None:
        for linear in (part.up, part.gate) if isinstance(part, GLU) else (part.up,):
            self._wrap(linear, BY_OUTPUTS, before=self._enter)
        self._by_inputs(part.down)
        forward = part.forward

        def run(x: Tensor, ctx: Any, taps: Any) -> Tensor:
            if ctx.random is None:
                return forward(x, ctx, taps)
            with ctx.random.inside_layer():
                return forward(x, ctx, taps)

        replace_method(part, "forward", run)

    def _by_inputs(self, linear: Linear) -> None:
        """The bias is added once, to the sum."""
        bias = linear._parameters.get("bias")

        def after(x: Tensor) -> Tensor:
            x = self._sum(x)
            own = linear._parameters.get("bias")
            return x if own is None else x + own.to(x.dtype)

        self._wrap(linear, BY_INPUTS, after=after, without=() if bias is None else ("bias",))

    def _vocabulary_table(self, table: Table) -> None:
        own = table.spec.rows // self.count
        first = self.index * own

        def run(ids: Tensor) -> Tensor:
            local = ids - first
            elsewhere = (local < 0) | (local >= own)
            with self._parts(table):
                found = F.embedding(local.masked_fill(elsewhere, 0), table.weight)
            return self._sum(found.masked_fill(elsewhere[:, None], 0.0))

        self._distribute(table)
        replace_method(table, "forward", run)

    def _of_own_heads(self, prepare: Callable[..., Positioned], *rows: Any) -> Positioned:
        """The position biases of this process' heads."""
        at = prepare(*rows)
        every = at.bias
        assert every is not None

        def bias(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            heads = every(q_pos, k_pos)
            own = heads.shape[-3] // self.count
            return heads.narrow(-3, self.index * own, own)

        return replace(at, bias=bias)

    def _join_logits(self, x: Tensor) -> Tensor:
        return joined(x, self.group) if self.whole_logits else x

    def token_loss(self, x: Tensor, rows: Rows, targets: Tensor, smoothing: float) -> Tensor:
        """The sum of cross-entropies of vectors [M, D], each process having the logits of its part of the
        vocabulary."""
        self.whole_logits = False
        try:
            logits = exact(self.module.unembed(x, rows))
        finally:
            self.whole_logits = True
        return vocabulary_loss(logits, targets, self.index * logits.shape[1], smoothing, self.group)

    def _wrap(
        self, part: Module[Any], whole: Sequence[str] = (), *, before: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None, without: Sequence[str] = (), name: str = "forward",
    ) -> None:  # fmt: skip
        """Divide the parameters of a part, and let its method `name` compute with those of this process; `whole` are
        those that each has whole for its share of the work."""
        self._distribute(part, whole)
        method = getattr(part, name)

        def run(x: Any, *others: Any) -> Any:
            x = x if before is None else before(x)
            with self._parts(part, whole, without):
                out = method(x, *others)
            return out if after is None else after(out)

        replace_method(part, name, run)

    def _distribute(self, part: nn.Module, whole: Sequence[str] = ()) -> None:
        for name, parameter in list(part._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            placement = self._placement(name, parameter, whole)
            if placement is None:
                continue
            if parameter not in self._divided:
                parts = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
                self._divided[parameter] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            for owner in self.module.modules():  # all that are tied to it
                for own, other in owner._parameters.items():
                    if other is parameter:
                        owner._parameters[own] = self._divided[parameter]

    def _placement(self, name: str, parameter: nn.Parameter, whole: Sequence[str]) -> Placement | None:
        if name in whole:
            return Replicate()
        if name in _OF_FACTORS:
            return Shard(_OF_FACTORS[name])
        dimension = self._dimensions.get(parameter)
        return None if dimension is None else Shard(dimension)

    @contextmanager
    def _parts(self, part: nn.Module, whole: Sequence[str] = (), without: Sequence[str] = ()) -> Iterator[None]:
        """Inside, the parameters of `part` are plain tensors, those of this process; those in `without` are None."""
        saved: dict[str, Any] = part._parameters
        own: dict[str, Any] = {}
        for name, parameter in saved.items():
            if isinstance(parameter, DTensor):
                own[name] = parameter.to_local(grad_placements=[Partial()] if name in whole else None)
            else:
                own[name] = parameter
        part._parameters = own | dict.fromkeys(without)
        try:
            yield
        finally:
            part._parameters = saved


def replace_method(part: nn.Module, name: str, method: Callable[..., object]) -> None:
    """Let the method `name` of this one part be another function."""
    setattr(part, name, method)


def _divided_dimensions(module: Transformer, own: ModelSpec) -> dict[nn.Parameter, int]:
    """The dimension along which each parameter is divided, of those that are."""
    whole, parts = module.spec.shapes(), own.shapes()
    return {
        module.get_parameter(name): dimension
        for name, shape in whole.items()
        for dimension, (size, own_size) in enumerate(zip(shape, parts[name], strict=True))
        if size != own_size
    }
