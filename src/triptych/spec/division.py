"""How a model is divided among processes that train it, as data: `train.parallel` divides modules by it, and `count`
counts memory and messages.

The processes of a tensor-parallel group share every layer (Shoeybi et al. 2019): `own_part` is what one of them has.
Of each tensor of it the processes of a shard group have rows (Zhao et al. 2023): `shard_rows`.  While it is used it is
gathered, together with the others of its part: `gathered_parts`.
"""

from dataclasses import replace

from triptych.errors import ConfigError
from .model import LMHeadSpec, MaskedLMHeadSpec, ModelSpec
from .parts import (
    AttentionSpec,
    BlockSpec,
    EmbedSpec,
    FeedForward,
    GLUSpec,
    KindSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    ParallelBlockSpec,
    StackSpec,
)
from .positions import T5BucketsSpec


def own_part(spec: ModelSpec, processes: int) -> ModelSpec:
    """The model with which each of `processes` computes: its share of the heads, of hidden numbers and of the
    vocabulary.  What is not divided (norms, routers, position tables, a vocabulary that `processes` do not divide) is
    whole in each.  A tensor is divided along the one dimension in which its shape is smaller than in `spec`.

    Raises ConfigError where a layer cannot be divided.
    """
    _check_divisible(spec, processes)
    head = spec.head
    if isinstance(head, LMHeadSpec | MaskedLMHeadSpec) and spec.vocab % processes == 0:
        head = replace(head, proj=_by_outputs(head.proj, processes))
    stacks = {name: _own_stack(stack, processes) for name, stack in spec.stacks.items()}
    return replace(spec, head=head, encoder=stacks.get("encoder"), decoder=stacks.get("decoder"))


def own_heads(attn: AttentionSpec, processes: int) -> AttentionSpec:
    """Attention with the heads of one of `processes`."""
    q, k, v = (_by_outputs(linear, processes) for linear in (attn.q, attn.k, attn.v))
    return replace(
        attn, heads=attn.heads // processes, kv_heads=attn.kv_heads // processes, q=q, k=k, v=v,
        out=_by_inputs(attn.out, processes),
        pos_q=None if attn.pos_q is None else _by_outputs(attn.pos_q, processes),
        pos_k=None if attn.pos_k is None else _by_outputs(attn.pos_k, processes),
    )  # fmt: skip


def gathered_parts(spec: ModelSpec) -> list[str]:
    """The names of the parts whose tensors are gathered together, each when it runs.  All other tensors are those of
    the model itself (embeddings, position tables, final norms, the head): they stay gathered from the beginning of a
    forward pass to the end of its backward pass."""
    return [f"{name}.blocks.{i}" for name, stack in spec.stacks.items() for i in range(len(stack.blocks))]


def shard_rows(rows: int, processes: int, index: int = 0) -> range:
    """The rows of a tensor, of `rows` in all, that number `index` of `processes` has: as many as the others, the last
    ones fewer or none (`torch.chunk`)."""
    most = -(-rows // processes)
    return range(min(rows, index * most), min(rows, (index + 1) * most))


def _check_divisible(spec: ModelSpec, processes: int) -> None:
    for name, part in spec.walk():
        sizes: dict[str, int] = {}
        if isinstance(part, AttentionSpec):
            sizes = {"heads": part.heads, "key/value heads": part.kv_heads}
        elif isinstance(part, MLPSpec | GLUSpec):
            sizes = {"hidden numbers": part.up.outputs}
        for what, size in sizes.items():
            if size % processes:
                raise ConfigError(
                    f"parallel.tensor = {processes} does not divide the {size} {what} of {name}; choose a number that "
                    "does"
                )


def _own_stack(stack: StackSpec, processes: int) -> StackSpec:
    embed = stack.embed
    if isinstance(embed, EmbedSpec) and embed.vocab % processes == 0:
        embed = replace(embed, vocab=embed.vocab // processes)
    kinds = {name: _own_kind(kind, processes) for name, kind in stack.kinds.items()}
    return replace(stack, embed=embed, kinds=kinds, blocks=tuple(_own_block(one, processes) for one in stack.blocks))


def _own_kind(kind: KindSpec, processes: int) -> KindSpec:
    position = kind.position
    if not isinstance(position, T5BucketsSpec):
        return kind
    return replace(kind, position=replace(position, heads=position.heads // processes))


def _own_block(block: BlockSpec | ParallelBlockSpec, processes: int) -> BlockSpec | ParallelBlockSpec:
    attn = own_heads(block.attn, processes)
    if isinstance(block, ParallelBlockSpec):
        return replace(block, attn=attn, mlp=_own_hidden(block.mlp, processes))
    mlp = None if block.mlp is None else _own_hidden(block.mlp, processes)
    return replace(block, attn=attn, mlp=mlp, cross=None if block.cross is None else own_heads(block.cross, processes))


def _own_hidden(mlp: FeedForward, processes: int) -> FeedForward:
    if isinstance(mlp, MoESpec):
        return replace(mlp, expert=_own_glu(mlp.expert, processes))
    if isinstance(mlp, GLUSpec):
        return _own_glu(mlp, processes)
    return replace(mlp, up=_by_outputs(mlp.up, processes), down=_by_inputs(mlp.down, processes))


def _own_glu(glu: GLUSpec, processes: int) -> GLUSpec:
    gate, up = _by_outputs(glu.gate, processes), _by_outputs(glu.up, processes)
    return replace(glu, gate=gate, up=up, down=_by_inputs(glu.down, processes))


def _by_outputs(linear: LinearSpec, processes: int) -> LinearSpec:
    return replace(linear, outputs=linear.outputs // processes)


def _by_inputs(linear: LinearSpec, processes: int) -> LinearSpec:
    """Its bias is whole: it is added once, to the sum."""
    return replace(linear, inputs=linear.inputs // processes)
