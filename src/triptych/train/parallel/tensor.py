"""Tensor parallelism (Shoeybi et al. 2019): every layer divided among processes that read the same rows.

The parameters of a divided part are `DTensor`s, for FSDP, the optimizer and checkpoints.  Its forward computes with
this process' parts of them as plain tensors, between sums over the processes: heads of attention and columns of an MLP
need one sum a sublayer.  `LAYOUT` says how each kind of part is divided; all else is the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.nn import Transformer
from triptych.nn.attention import Attention
from triptych.nn.feedforward import GLU, MLP
from triptych.nn.inputs import Embed, Table
from triptych.nn.linear import Linear
from triptych.nn.part import Module
from triptych.nn.positions import Alibi, Positioned, T5Buckets
from triptych.spec.parts import AttentionSpec
from ..objectives import exact
from ..ranks import SharedError
from .collectives import entering, joined, summed, vocabulary_loss

ROWS, COLUMNS, EVERYWHERE = Shard(0), Shard(1), Replicate()


@dataclass(frozen=True)
class Division:
    """How the parameters of a part are divided, by name.  `partial` are those that every process has and whose gradient
    is the sum of all processes'."""

    divided: dict[str, Placement]
    partial: tuple[str, ...] = ()


#: A linear map whose outputs are divided, and one whose inputs are; with the factors of an adapter.
BY_OUTPUTS = Division({"weight": ROWS, "bias": ROWS, "up": ROWS}, ("down",))
BY_INPUTS = Division({"weight": COLUMNS, "down": COLUMNS}, ("up",))
BY_VOCABULARY = Division({"weight": ROWS, "bias": ROWS})
SINKS, BUCKETS, NORM = Division({"sinks": ROWS}), Division({"weight": COLUMNS}), Division({}, ("weight", "bias"))


class TensorParallel:
    """The division of one model among the processes of `mesh`, which has one dimension."""

    def __init__(self, module: Transformer, mesh: DeviceMesh) -> None:
        self.module, self.mesh, self.group = module, mesh, mesh.get_group()
        self.index, self.count = mesh.get_local_rank(), mesh.size()
        self._divided: dict[nn.Parameter, nn.Parameter] = {}
        self.whole_logits = True
        check_divisible(module, self.count)
        self._divide()

    def _divide(self) -> None:
        for part in self.module.modules():
            if isinstance(part, Attention):
                self._attention(part)
            elif isinstance(part, MLP | GLU):
                self._feed_forward(part)
            elif isinstance(part, T5Buckets):
                self._wrap(part, BUCKETS, name="prepare")
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
            self._wrap(projection, BY_VOCABULARY, before=self._enter, after=self._join_logits)
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
            self._wrap(part, SINKS)

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
            with self._parts(table, BY_VOCABULARY):
                found = F.embedding(local.masked_fill(elsewhere, 0), table.weight)
            return self._sum(found.masked_fill(elsewhere[:, None], 0.0))

        self._distribute(table, BY_VOCABULARY)
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
        self, part: Module[Any], division: Division, *, before: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None, without: Sequence[str] = (), name: str = "forward",
    ) -> None:  # fmt: skip
        """Divide the parameters of a part, and let its method `name` compute with those of this process."""
        self._distribute(part, division)
        method = getattr(part, name)

        def run(x: Any, *others: Any) -> Any:
            x = x if before is None else before(x)
            with self._parts(part, division, without):
                out = method(x, *others)
            return out if after is None else after(out)

        replace_method(part, name, run)

    def _distribute(self, part: nn.Module, division: Division) -> None:
        for name, parameter in list(part._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            placement = division.divided.get(name, EVERYWHERE if name in division.partial else None)
            if placement is None:
                continue
            if parameter not in self._divided:
                parts = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
                self._divided[parameter] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            for owner in self.module.modules():  # all that are tied to it
                for own, other in owner._parameters.items():
                    if other is parameter:
                        owner._parameters[own] = self._divided[parameter]

    @contextmanager
    def _parts(self, part: nn.Module, division: Division, without: Sequence[str] = ()) -> Iterator[None]:
        """Inside, the parameters of `part` are plain tensors, those of this process; those in `without` are None."""
        saved: dict[str, Any] = part._parameters
        own: dict[str, Any] = {}
        for name, parameter in saved.items():
            if isinstance(parameter, DTensor):
                own[name] = parameter.to_local(grad_placements=[Partial()] if name in division.partial else None)
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


def own_heads(spec: AttentionSpec, count: int) -> AttentionSpec:
    """Attention with the heads of one of `count` processes."""
    q, k, v = (replace(linear, outputs=linear.outputs // count) for linear in (spec.q, spec.k, spec.v))
    out = replace(spec.out, inputs=spec.out.inputs // count)
    return replace(spec, heads=spec.heads // count, kv_heads=spec.kv_heads // count, q=q, k=k, v=v, out=out)


def check_divisible(module: Transformer, count: int) -> None:
    """Raises ConfigError where a layer cannot be divided among `count` processes."""
    for name, part in module.named_modules():
        sizes: dict[str, int] = {}
        if isinstance(part, Attention):
            sizes = {"heads": part.spec.heads, "key/value heads": part.spec.kv_heads}
        elif isinstance(part, MLP | GLU):
            sizes = {"hidden numbers": part.up.spec.outputs}
        for what, size in sizes.items():
            if size % count:
                raise SharedError(
                    f"parallel.tensor = {count} does not divide the {size} {what} of {name}; choose a number that does"
                )
