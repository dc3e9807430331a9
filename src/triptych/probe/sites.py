"""The sites at which a forward can be read and edited, under the same names in every family and layout.

    embed                                the embedding that enters block 0
    blocks.i.resid_pre                   the residual stream entering block i
    blocks.i.attn.in                     what q, k and v are projected from
    blocks.i.attn.{q, k, v}              projections, before any norm over heads       [T, H|G, K]
    blocks.i.attn.{q_rot, k_rot}         normalized and rotated; k_rot is what the cache keeps
    blocks.i.attn.{k_ctx, v_ctx}         all keys and values this forward reads, the cache's included; an edit here
                                         is never written to the cache
    blocks.i.attn.scores                 exactly what enters the softmax                [H, T, S]
    blocks.i.attn.pattern                the softmax of it, each row summing to 1       [H, T, S]
    blocks.i.attn.z                      pattern @ v_ctx, the output of each head       [T, H, Kv];
                                         zero a head here to ablate it
    blocks.i.attn.out                    what attention adds to the residual stream
    blocks.i.cross.*                     the same, where k and v come from the encoder
    blocks.i.resid_mid                   the residual stream entering the MLP; none where it is parallel to attention
    blocks.i.mlp.{in, gate, up, act, out}   act is what enters the down projection
    blocks.i.mlp.router                  scores of the experts, in place of gate, up and act          [T, E]
    blocks.i.branch.out                  what a convolution beside the block adds
    blocks.i.resid_post                  the residual stream leaving block i
    final                                after the final norm
    logits                               what the head gives

With two stacks every name begins with `encoder.` or `decoder.`, except `logits`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.arguments import as_index, checked
from triptych.errors import InputError, ProbeError, nearest, shown
from triptych.migration_hints import of_site
from triptych.spec.model import ModelSpec
from triptych.spec.parts import (
    AttentionSpec,
    BlockSpec,
    FeedForward,
    GLUSpec,
    LinearKernelSpec,
    LinearSpec,
    MoESpec,
    ParallelBlockSpec,
    StackSpec,
)

CONTEXT_SITES = ("k_ctx", "v_ctx")
MATRIX_SITES = ("scores", "pattern")
MLP_SITES = ("in", "gate", "up", "act", "router", "out")
Selection = int | slice | Sequence[int] | None
HeadName = tuple[int | str, int]
"""A head: its block (or the name of its attention, "decoder.blocks.1.cross") and its number."""

_TYPED = re.compile(r"(?:(encoder|decoder|cross)[. ])?(?:[Ll](\d{1,6})[Hh](\d{1,6})|(\d{1,6})\.(\d{1,6}))")


@dataclass(frozen=True)
class Site:
    """A site: a named value of the forward pass that can be read and edited.

    width       numbers for each token, or for each token and key (`per_key`: scores and pattern); of each head, where
                the site has `heads`.
    of_source   whether it has one vector for each token of the source: keys and values of cross-attention.
    """

    name: str
    width: int
    heads: int | None = None
    per_key: bool = False
    of_source: bool = False  # one vector a source token: keys and values of cross-attention

    @property
    def layer(self) -> int | None:
        """The number of its block in its stack, from 0; None outside of the blocks."""
        block = re.search(r"(?:^|\.)blocks\.(\d+)\.", self.name)
        return None if block is None else int(block[1])

    @property
    def leaf(self) -> str:
        """The last part of the name: "pattern" of "blocks.0.attn.pattern"."""
        return leaf_of(self.name)


def leaf_of(site: str) -> str:
    """The last part of the name of a site."""
    return site.rpartition(".")[2]


def matrix(site: str) -> bool:
    """Whether a site holds [H, T, S] instead of [T, ...]."""
    return leaf_of(site) in MATRIX_SITES


@checked
def sites(model: ModelSpec) -> dict[str, Site]:
    """Every site of a model by its name, in the order in which the forward pass computes them."""
    every: list[Site] = []
    for name, stack in model.stacks.items():
        every += _stack(stack, prefix_of(model, name))
    if model.head is not None:
        last = [part.outputs for _, part in model.head.walk() if isinstance(part, LinearSpec)]
        every.append(Site("logits", last[-1] if last else next(iter(model.stacks.values())).width))
    return {site.name: site for site in every}


def prefix_of(spec: ModelSpec, stack: str) -> str:
    """What the names of a stack's sites begin with."""
    return f"{stack}." if spec.layout == "encoder-decoder" else ""


def stack_of(spec: ModelSpec, stack: str | None) -> str:
    """The stack that is meant, by default the last.  Raises InputError for one that is not there."""
    if stack is not None and stack not in spec.stacks:
        raise InputError(f"stack={shown(stack)}: this {spec.layout} model has {' and '.join(spec.stacks)}")
    return stack or list(spec.stacks)[-1]


def match(pattern: str, model: ModelSpec, known: dict[str, Site]) -> list[Site]:
    """The sites a glob names (`blocks.*.attn.pattern`).

    Raises ProbeError where there is none: with the reason why this model has not what others have there, with ours for
    a name of another library, or with the nearest name.
    """
    if not isinstance(pattern, str):
        raise ProbeError(f"a site is a name or a glob, not {shown(pattern)}")
    if pattern in known:
        return [known[pattern]]
    stacks = list(model.stacks)
    if len(stacks) == 1 and pattern.startswith(f"{stacks[0]}."):
        return match(pattern.removeprefix(f"{stacks[0]}."), model, known)
    matches = [site for name, site in known.items() if fnmatch.fnmatchcase(name, pattern)]
    if not matches:
        raise ProbeError(f"no site {pattern!r} in this {model.family} model{_hint(pattern, model, known)}")
    return matches


def in_layers(found: list[Site], layers: Selection, pattern: str) -> list[Site]:
    """Those of the sites that lie in some layers, which count from the end where they are negative.

    Raises ProbeError for layers that none of the sites is in.
    """
    if layers is None:
        return found
    numbers = [site.layer for site in found if site.layer is not None]
    given = f"layers={shown(layers)}"
    if not numbers:
        raise ProbeError(f"{given}: {pattern!r} names no site of a block; leave layers= out")
    count = max(numbers) + 1
    try:
        chosen = integers(range(count)[layers] if isinstance(layers, slice) else layers, given)
    except (TypeError, ValueError):  # of the slice
        chosen = integers(None, given)
    wrong = [i for i in chosen if not -count <= i < count]
    if wrong or not chosen:
        raise ProbeError(f"{given}: {pattern!r} names sites of layers 0 to {count - 1}")
    wanted = {i % count for i in chosen}
    inside = [site for site in found if site.layer in wanted]
    if not inside:
        raise ProbeError(f"{given}: none of the sites that {pattern!r} names lies in them")
    return inside


def integers(values: object, given: str) -> list[int]:
    """An integer or a list of them, as a list.  Raises ProbeError for anything else."""
    numbers = [as_index(one) for one in (values if isinstance(values, Sequence) else [values])]
    if None in numbers:
        raise ProbeError(f"{given} must be an integer, a slice or a list of integers")
    return [number for number in numbers if number is not None]


def _hint(pattern: str, model: ModelSpec, known: dict[str, Site]) -> str:
    """The range of the blocks for a block that is not there, else the nearest name."""
    block = re.search(r"(?:^|\b(encoder|decoder)\.)blocks\.(\d+)(?:\.|$)", pattern)
    if block is not None:
        stack = model.stacks.get(block[1] or "") or max(model.stacks.values(), key=lambda stack: len(stack.blocks))
        if int(block[2]) >= len(stack.blocks):
            return f": its blocks are 0 to {len(stack.blocks) - 1}"
    if reason := _missing(pattern, model):
        return f": {reason}"
    ours = of_site(pattern)
    if pattern.endswith(".mlp.hook_pre") and (gate := ours.replace(".up", ".gate")) in known:
        ours = gate  # what that hook has in a gated MLP
    return f"; write {ours!r}" if ours in known else nearest(pattern, known)


def _missing(pattern: str, model: ModelSpec) -> str:
    """Why the model has not a site that others have; "" where none has it."""
    name = re.fullmatch(r"(?:(encoder|decoder)\.)?(?:blocks\.(\d+|\*)\.)?([\w.*]+)", pattern)
    if name is None:
        return ""
    if name[1] and name[1] not in model.stacks:
        return f"this {model.layout} has no {name[1]}"
    if name[3] == "logits" and model.head is None:
        return "it has no head"
    if name[2] is None or (name[1] is None and len(model.stacks) > 1):
        return ""
    block = model.stacks[name[1] or next(iter(model.stacks))].blocks[0 if name[2] == "*" else int(name[2])]
    part, _, leaf = name[3].rpartition(".")
    attention = block.cross if part == "cross" else block.attn
    if part == "cross" and block.cross is None:
        return "its blocks have no cross-attention"
    if part in ("attn", "cross") and leaf in MATRIX_SITES and attention is not None:
        return "linear attention never forms them" if isinstance(attention.mechanism, LinearKernelSpec) else ""
    if leaf == "resid_mid" and isinstance(block, ParallelBlockSpec):
        return "attention and MLP are parallel, so that nothing stands between them"
    if part == "branch":
        return "it has no convolution beside the block"
    return _missing_of_mlp(block.mlp, leaf) if part == "mlp" and leaf in MLP_SITES else ""


def _missing_of_mlp(mlp: FeedForward | None, leaf: str) -> str:
    if mlp is None:
        return "its blocks have no MLP"
    if leaf == "router":
        return "its MLP is no mixture of experts"
    if isinstance(mlp, MoESpec):
        return "its MLP is a mixture of experts, which has the sites in, router and out"
    return "its MLP has no gate" if leaf == "gate" else ""


def _stack(stack: StackSpec, prefix: str) -> list[Site]:
    every = [Site(f"{prefix}embed", stack.width)]
    for i, block in enumerate(stack.blocks):
        every += _block(block, stack.width, f"{prefix}blocks.{i}.")
    return [*every, Site(f"{prefix}final", stack.outputs)]


def _block(block: BlockSpec | ParallelBlockSpec, width: int, prefix: str) -> list[Site]:
    every = [Site(f"{prefix}resid_pre", width), *_attention(block.attn, width, f"{prefix}attn.", cross=False)]
    if block.cross is not None:
        every += _attention(block.cross, width, f"{prefix}cross.", cross=True)
    if isinstance(block, BlockSpec):
        every.append(Site(f"{prefix}resid_mid", width))
    if block.mlp is not None:
        every += _mlp(block.mlp, width, f"{prefix}mlp.")
    if isinstance(block, BlockSpec) and block.branch is not None:
        every.append(Site(f"{prefix}branch.out", width))
    return [*every, Site(f"{prefix}resid_post", width)]


def _mlp(mlp: FeedForward, width: int, prefix: str) -> list[Site]:
    if isinstance(mlp, MoESpec):
        inner = [Site(f"{prefix}router", mlp.experts)]
    else:
        gate = [Site(f"{prefix}gate", mlp.gate.outputs)] if isinstance(mlp, GLUSpec) else []
        inner = [*gate, Site(f"{prefix}up", mlp.up.outputs), Site(f"{prefix}act", mlp.down.inputs)]
    return [Site(f"{prefix}in", width), *inner, Site(f"{prefix}out", width)]


def _attention(attn: AttentionSpec, width: int, prefix: str, *, cross: bool) -> list[Site]:
    h, g, k, v = attn.heads, attn.kv_heads, attn.head_width, attn.value_width
    of_keys = {"k": k, "v": v, "k_rot": k, "k_ctx": k, "v_ctx": v}
    matrices = () if isinstance(attn.mechanism, LinearKernelSpec) else MATRIX_SITES  # it never forms them
    return [
        Site(f"{prefix}in", width),
        *(Site(f"{prefix}{leaf}", h * k, h) for leaf in ("q", "q_rot")),
        *(Site(f"{prefix}{leaf}", g * size, g, of_source=cross) for leaf, size in of_keys.items()),
        *(Site(f"{prefix}{leaf}", h, h, per_key=True) for leaf in matrices),
        Site(f"{prefix}z", h * v, h),
        Site(f"{prefix}out", width),
    ]


def attention_head(spec: ModelSpec, head: HeadName) -> tuple[str, int]:
    """The name of a head's attention, and its number.  Raises InputError or ProbeError for one that is not there."""
    known = _attentions(spec)
    if not isinstance(head, Sequence) or isinstance(head, str) or len(head) != 2:
        raise InputError(f"{shown(head)} is not a head; give (block, head)")
    where, number = head
    block = as_index(where)
    if block is not None and len(spec.stacks) > 1:
        raise InputError(f'{shown(head)}: in which stack? give a name, ("decoder.blocks.{block}.cross", {number})')
    name = str(where) if block is None else f"blocks.{block}.attn"
    if name not in known:
        raise ProbeError(f"no attention {shown(name)} in this {spec.family} model{nearest(name, known)}")
    index = as_index(number)
    if index is None or not 0 <= index < known[name]:
        raise ProbeError(f"{name} has heads 0..{known[name] - 1}, not {shown(number)}")
    return name, index


def typed_head(spec: ModelSpec, text: str) -> HeadName:
    """The head of `L4H2` or `4.2`; beside an encoder of `encoder.L4H2`, `decoder.L4H2` or `cross.L4H2`.

    Raises InputError for other texts, and with the nearest head that there is for a layer or head out of range.
    """
    found, both = _TYPED.fullmatch(text.strip()), len(spec.stacks) > 1
    stack = found[1] if found else None
    if found is None or (both and stack is None):
        how = "encoder.L4H2, decoder.L4H2 or cross.L4H2" if both else "L4H2"
        raise InputError(f"{shown(text)} is not a head; write {how}, layer and head counted from 0")
    if not both and stack not in (None, spec.layout):
        raise InputError(f"{shown(text)}: this {spec.family} model is {spec.layout} alone; write L4H2")
    layer, number = int(found[2] or found[4]), int(found[3] or found[5])
    prefix = "" if not both else "encoder." if stack == "encoder" else "decoder."
    kind = "cross" if stack == "cross" else "attn"
    heads = [of for name, of in _attentions(spec).items() if re.fullmatch(rf"{prefix}blocks\.\d+\.{kind}", name)]
    near = min(layer, len(heads) - 1)
    if layer > near or number >= heads[near]:
        typed = f"{f'{stack}.' if both else ''}L{near}H{min(number, heads[near] - 1)}"
        there = f"layers 0..{len(heads) - 1} and heads 0..{heads[near] - 1}"
        raise InputError(f"no head {shown(text)}: there are {there}; the nearest is {typed}")
    return f"{prefix}blocks.{layer}.{kind}", number


def _attentions(spec: ModelSpec) -> dict[str, int]:
    """The name of each attention and how many heads it has."""
    return {name.removesuffix(".z"): site.heads or 1 for name, site in sites(spec).items() if name.endswith(".z")}
