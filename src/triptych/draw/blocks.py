"""A block of a transformer as nodes of the drawing: what its spec has, and nothing else."""

from __future__ import annotations

from math import isclose, sqrt

from triptych.draw.shapes import Box, Column, Frame, Node, Residual, Row, Start, Sum, stack
from triptych.spec import (
    AdditiveSpec,
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    ConvSpec,
    DisentangledSpec,
    GLUSpec,
    KindSpec,
    LayerNormSpec,
    LinearKernelSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    NormsSpec,
    ParallelBlockSpec,
    RopeSpec,
    ScaleSpec,
    T5BucketsSpec,
    full,
)
from triptych.spec.masks import mask_text
from triptych.spec.norms import Norm
from triptych.spec.part import part_name

MOST_HEADS = 128  # that are drawn as squares
_GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU", "relu": "ReGLU"}
AnyBlock = BlockSpec | ParallelBlockSpec


def factor_text(factor: float) -> str:
    """`× √768`, `/ √64` where the square of the factor or its inverse is a whole number, else `× 0.22`."""
    square = factor**2
    if square > 1 and not float(factor).is_integer() and isclose(square, round(square), rel_tol=1e-6):
        return f"× √{square:.0f}"
    if 0 < square < 1 and isclose(1 / square, round(1 / square), rel_tol=1e-6):
        return f"/ √{1 / square:.0f}"
    return f"× {factor:.4g}"


def linear_box(label: str, part: LinearSpec, name: str, *more: str) -> Box:
    """`x @ weight.T + bias` with its widths; `more` are lines below."""
    bias = " + bias" if part.bias else ""
    stored = f"weight ({part.outputs:,}, {part.inputs:,})" + (f", bias ({part.outputs:,})" if part.bias else "")
    return Box((label, f"{part.inputs:,} → {part.outputs:,}{bias}", *more), "linear", name, f"{name}: {stored}")


def norm_box(norm: Norm | ScaleSpec, name: str) -> Box:
    """RMSNorm or LayerNorm with its width; a fixed factor in the place of a norm."""
    if isinstance(norm, ScaleSpec):
        return Box((f"× {norm.factor:g}",), "norm", name, f"{name}: multiplied by {norm.factor:g}")
    more = ""
    if isinstance(norm, LayerNormSpec):
        label, more = "LayerNorm", "" if norm.bias else ", no bias"
    else:
        label, more = "RMSNorm", f", weight + {norm.offset:g}" if norm.offset else ""
    return Box(
        (label, f"{norm.width:,}{more}"), "norm", name, f"{name}: {label} of width {norm.width:,}, eps {norm.eps:g}"
    )


def conv_box(label: str, part: ConvSpec, name: str) -> Box:
    """A convolution with its widths and its kernel."""
    note = f"{name}: weight ({part.outputs:,}, {part.inputs:,}, {part.kernel})"
    stride = f", stride {part.stride}" if part.stride > 1 else ""
    return Box((label, f"{part.inputs:,} → {part.outputs:,}, kernel {part.kernel}{stride}"), "linear", name, note)


def act_box(act: str, name: str) -> Box:
    label = "GELU (tanh)" if act == "gelu_tanh" else {"silu": "SiLU", "gelu": "GELU", "relu": "ReLU"}.get(act, act)
    return Box((label,), "act", name, f"{name}: activation {act}")


def block_node(block: AnyBlock, kind: KindSpec, name: str, source_width: int = 0) -> Node:
    """One block.  `name` is the first part of the names of its parts; `source_width` is the width of what its
    cross-attention reads."""
    attn = attention_frame(block.attn, kind, f"{name}.attn")
    if isinstance(block, ParallelBlockSpec):
        return _parallel(block, attn, name)
    nodes = [*_sublayer(attn, block.attn_norm, f"{name}.attn_norm")]
    if block.cross is not None and block.cross_norm is not None:
        cross = attention_frame(block.cross, KindSpec(mask=full()), f"{name}.cross", source_width)
        nodes += _sublayer(cross, block.cross_norm, f"{name}.cross_norm")
    if block.mlp is not None and block.mlp_norm is not None:
        nodes += _sublayer(mlp_frame(block.mlp, f"{name}.mlp"), block.mlp_norm, f"{name}.mlp_norm")
    if block.branch is None:
        return stack(nodes)
    branch, own = block.branch, f"{name}.branch"
    inner = Column((conv_box("convolution", branch.conv, f"{own}.conv"), act_box(branch.act, f"{own}.act")))
    beside = Row((stack(nodes), Frame("beside the block", inner, name=own)))
    return Column((Start(), beside, Sum("the block and the convolution"), norm_box(branch.norm, f"{own}.norm")))


def _sublayer(node: Node, norms: NormsSpec, name: str) -> list[Node]:
    """The sublayer with its residual, and the norm after it where there is one."""
    before = None if norms.pre is None else norm_box(norms.pre, f"{name}.pre")
    after = None if norms.out is None else norm_box(norms.out, f"{name}.out")
    residual = Residual(stack((before, node, after)))
    return [residual] if norms.post is None else [residual, norm_box(norms.post, f"{name}.post")]


def _parallel(block: ParallelBlockSpec, attn: Node, name: str) -> Node:
    """Attention and MLP side by side, behind one norm or each its own, and one sum."""
    sides = []
    for node, norms, own in (
        (attn, block.attn_norm, f"{name}.attn_norm"),
        (mlp_frame(block.mlp, f"{name}.mlp"), block.mlp_norm, f"{name}.mlp_norm"),
    ):
        before = None if norms.pre is None else norm_box(norms.pre, f"{own}.pre")
        after = None if norms.out is None else norm_box(norms.out, f"{own}.out")
        sides.append(stack((before, node, after)))
    shared = None if block.norm is None else norm_box(block.norm, f"{name}.norm")
    return Residual(stack((shared, Row(tuple(sides)))))


def attention_frame(part: AttentionSpec, kind: KindSpec, name: str, source_width: int = 0) -> Frame:
    """Self-attention, or with a `source_width` the cross-attention that reads vectors of that width."""
    rope = kind.position if isinstance(kind.position, RopeSpec) else None
    q = _projected("q", part.q, part.q_norm, rope, name, part.head_width)
    k = _projected("k", part.k, part.k_norm, rope, name, part.head_width)
    v = _projected("v", part.v, None, None, name, part.value_width)
    if source_width:
        lines = ("encoder output", f"[S, {source_width:,}]")
        source = Box(lines, "value", f"{name}.source", f"{name}: keys and values are those of the encoder", source=True)
        inputs = Row((q, Column((source, Row((k, v))))))
    else:
        inputs = Row((q, k, v))
    columns = (inputs, _core_box(part, kind, name), linear_box("out", part.out, f"{name}.out"))
    label = "cross-attention" if source_width else "self-attention"
    return Frame(label, Column(columns), name=name, note=f"{name}: {label}, {heads_text(part)}")


def _projected(label: str, part: LinearSpec, norm: Norm | None, rope: RopeSpec | None, name: str, width: int) -> Node:
    """Queries, keys or values: projected, normalized for each head, rotated."""
    turned = None if rope is None else _rope_box(rope, f"{name}.{label}_rot", width)
    return stack((
        linear_box(label, part, f"{name}.{label}"),
        None if norm is None else norm_box(norm, f"{name}.{label}_norm"),
        turned,
    ))  # fmt: skip


def _rope_box(rope: RopeSpec, name: str, width: int) -> Box:
    lines = ["RoPE", f"base {rope.theta:,.0f}"]
    if rope.width != width:
        lines.append(f"{rope.width} of {width}")
    if rope.scaling is not None:
        factor = getattr(rope.scaling, "factor", None)
        lines.append(part_name(rope.scaling) + ("" if factor is None else f" × {factor:g}"))
    note = f"{name}: rotated by position, pairs {rope.pairing}, over {rope.width} of {width} dimensions"
    return Box(tuple(lines), "position", name, note)


def heads_text(part: AttentionSpec) -> str:
    """`32 heads of width 128, 4 to each of 8 key/value heads`."""
    values = f" (values {part.value_width})" if part.value_width != part.head_width else ""
    own = f"{part.heads} head{'s' * (part.heads > 1)} of width {part.head_width}{values}"
    if part.kv_heads == part.heads:
        return own
    if part.kv_heads == 1:
        return f"{own}, one key/value head for all"
    return f"{own}, {part.heads // part.kv_heads} to each of {part.kv_heads} key/value heads"


def _core_box(part: AttentionSpec, kind: KindSpec, name: str) -> Box:
    """Scores, mask, softmax and the mean of values, in the terms of this layer."""
    lines = [_scores_text(part, kind), heads_text(part)]
    lines.append(f"q [{part.heads}, T, {part.head_width}], k [{part.kv_heads}, S, {part.head_width}]")
    lines.append(f"mask: {mask_text(kind.mask)}")
    if part.softcap is not None:
        lines.append(f"scores capped at ± {part.softcap:g}")
    lines += _bias_lines(part, kind)
    if part.sinks:
        lines.append("one learned sink a head")
    grouped = f"head h reads key/value head h · {part.kv_heads} // {part.heads}"
    heads = (part.heads, part.kv_heads) if part.heads <= MOST_HEADS else None
    return Box(tuple(lines), "core", f"{name}.scores", f"{name}: {lines[0]}; {grouped}", heads)


def _scores_text(part: AttentionSpec, kind: KindSpec) -> str:
    if isinstance(part.mechanism, LinearKernelSpec):
        return "weights in proportion to φ(q)·φ(k), φ = elu + 1"
    scores = "q·k"
    if isinstance(part.mechanism, AdditiveSpec):
        scores = "w·tanh(q + k)"
    scale = 1 / sqrt(part.head_width) if part.scale is None else part.scale
    if scale != 1:
        scores += f" {factor_text(scale)}"
    bias = "" if kind.position is None or isinstance(kind.position, RopeSpec) else " + bias"
    return f"softmax({scores}{bias}) v"


def _bias_lines(part: AttentionSpec, kind: KindSpec) -> list[str]:
    match kind.position:
        case AlibiSpec():
            return ["bias: ALiBi, a slope a head"]
        case T5BucketsSpec() as one:
            return [f"bias: {one.buckets} buckets of distance up to {one.max_distance}, shared by the layers"]
        case DisentangledSpec() as one:
            own = "by pos_q, pos_k" if part.pos_q or part.pos_k else "by q and k"
            return [f"bias: {' and '.join(one.terms)} of {2 * one.span} distances", f"mapped {own} of this layer"]
    return []


def mlp_frame(part: MLPSpec | GLUSpec | MoESpec, name: str) -> Frame:
    """The MLP, plain or gated, or a mixture of experts."""
    if isinstance(part, MoESpec):
        router = linear_box("router", part.router, f"{name}.router", f"the best {part.top_k} of {part.experts}")
        weights = "divided by their sum" if part.normalize else "as the router gives them"
        expert = mlp_frame(part.expert, f"{name}.experts")
        mixed = Box(("weighted sum", f"of {part.top_k} experts, weights {weights}"), "core", f"{name}.mix")
        inner = Column((router, Frame(f"× {part.experts} experts", expert.node, name=f"{name}.experts"), mixed))
        return Frame("mixture of experts", inner, name=name, note=f"{name}: {part.top_k} of {part.experts} experts")
    up, down = (linear_box(label, getattr(part, label), f"{name}.{label}") for label in ("up", "down"))
    act = act_box(part.act, f"{name}.act")
    if isinstance(part, MLPSpec):
        return Frame("MLP", Column((up, act, down)), name=name, note=f"{name}: down(act(up(x)))")
    gate = Column((linear_box("gate", part.gate, f"{name}.gate"), act))
    product = Box((f"× [T, {part.up.outputs:,}]",), "core", f"{name}.product", f"{name}: act(gate) times up")
    label = f"gated MLP ({_GATED[part.act]})" if part.act in _GATED else "gated MLP"
    return Frame(label, Column((Row((gate, up)), product, down)), name=name, note=f"{name}: down(act(gate(x)) · up(x))")
