"""How many numbers a forward in training keeps for its backward, by part, from the spec.

Each operation keeps what its derivative needs: a linear map its input, a norm its input and the statistics of each
vector (RMSNorm also the normalized vector), a gated MLP four vectors of its hidden width, attention its queries, keys,
values and output and one log-sum-exp a head and query, since the fused kernel computes its pattern again (Dao et al.
2022).  Dropout, a softcap and a bias that is learned need the pattern itself, `[H, T, S]`: it is kept; with dropout
also the noise and their product, with a softcap the scores, with such a bias the masked scores and the masked pattern.
Under a window as many keys are counted as a query sees, which is the least that blocks of queries keep; beside a
learned bias there are no such blocks.  Masks, tables of positions and what a kernel needs while it runs are not
counted.
"""

from __future__ import annotations

from collections import Counter

from triptych.spec import (
    AttentionSpec,
    ClassHeadSpec,
    DisentangledSpec,
    FramesSpec,
    LayerNormSpec,
    LinearSpec,
    ModelSpec,
    MoESpec,
    Part,
    PatchesSpec,
    PoolingSpec,
    RMSNormSpec,
    StackSpec,
    T5BucketsSpec,
)
from triptych.spec.masks import And, Mask, Window
from triptych.spec.parts import BlockSpec, FeedForward, GLUSpec, MLPSpec, NormsSpec, ParallelBlockSpec

Block = BlockSpec | ParallelBlockSpec
PER_EXPERT_TOKEN = 2  # of the model's width: the output of an expert, and the same weighted


def activation_numbers(
    spec: ModelSpec, tokens: int, source: int = 0, *, recompute: bool = False, trained: int | None = None
) -> dict[str, int]:
    """Of one row of `tokens` with `source` tokens for the encoder of an encoder-decoder, by part; `blocks` are the
    inputs of blocks, and `logits` the log-probabilities that a head of tokens gives for the `trained` tokens of the
    row, all of them when None.

    `recompute` keeps the input of each block alone, and while the backward passes a block what this block keeps.
    """
    total: Counter[str] = Counter(embedding=0, blocks=0, attention=0, mlp=0, norms=0, head=0, logits=0)
    for name, stack in spec.stacks.items():
        rows = source if name == "encoder" and spec.decoder is not None else tokens
        width = stack.embed.outputs
        total["embedding"] += _embedding(stack, rows)
        blocks = [_block(stack, block, rows, source) for block in stack.blocks]
        if recompute and blocks:
            total["blocks"] += len(blocks) * rows * width
            blocks = [max(blocks, key=Counter.total)]
        for numbers in blocks:
            total.update(numbers)
        total["norms"] += _norm(stack.final_norm, rows, width)
        total["head"] += 0 if stack.project is None else rows * stack.project.inputs
    total.update(_head(spec, tokens if trained is None else trained))
    return dict(total)


def _block(stack: StackSpec, block: Block, tokens: int, source: int) -> Counter[str]:
    width, dropout = stack.embed.outputs, block.dropout
    position = stack.kinds[block.attn.kind].position
    seen = span_of(stack, block.attn.kind, tokens)
    total = Counter(attention=_attention(block.attn, tokens, tokens, position, seen), mlp=0, norms=0)
    total["norms"] += _norms(block.attn_norm, tokens, width)
    if block.cross is not None:
        total["attention"] += _attention(block.cross, tokens, source)
        total["norms"] += _norms(getattr(block, "cross_norm", None), tokens, width)
    total["norms"] += _norms(block.mlp_norm, tokens, width) + _norm(getattr(block, "norm", None), tokens, width)
    if block.mlp is not None:
        total["mlp"] += _mlp(block.mlp, tokens)
    if dropout:  # the noise of each sum with the residual stream
        total["attention"] += tokens * width * (1 if block.cross is None else 2)
        total["mlp"] += tokens * width if block.mlp is not None else 0
    return total


def _attention(
    attn: AttentionSpec, queries: int, keys: int, position: Part | None = None, seen: int | None = None
) -> int:
    """Of attention that lets each query see the last `seen` keys, all of them when None."""
    q, out = queries * attn.heads * attn.head_width, queries * attn.heads * attn.value_width
    k, v = keys * attn.kv_heads * attn.head_width, keys * attn.kv_heads * attn.value_width
    inputs = queries * attn.q.inputs + (keys * attn.k.inputs if attn.kind == "cross" else 0)
    normed = _norm(attn.q_norm, queries * attn.heads, attn.head_width)
    normed += _norm(attn.k_norm, keys * attn.kv_heads, attn.head_width)
    learned = isinstance(position, T5BucketsSpec | DisentangledSpec)
    beside_softmax = 2 if attn.dropout else int(learned)  # what is multiplied with the values, and what made it
    patterns = beside_softmax + learned + (attn.softcap is not None)
    width = keys if learned or seen is None else min(seen, keys)
    pattern = attn.heads * queries * ((1 + patterns) * width if patterns else 1)
    return inputs + normed + q + k + v + out + pattern + _distances(position, attn, queries)


def _distances(position: Part | None, attn: AttentionSpec, tokens: int) -> int:
    """Disentangled attention: for each of its terms queries or keys of every head, the mapped distances, and the scores
    of each token against them."""
    if not isinstance(position, DisentangledSpec):
        return 0
    reached = min(2 * tokens - 1, 2 * position.span)
    width = attn.heads * attn.head_width
    return len(position.terms) * (tokens * width + reached * (width + attn.q.inputs) + attn.heads * tokens * reached)


def _mlp(mlp: FeedForward, tokens: int) -> int:
    """Its input, and of the hidden width: before and after the activation, for a gate also the other factor and the
    product.  Of a mixture the experts that a token goes through."""
    match mlp:
        case MoESpec():
            expert = _mlp(mlp.expert, tokens) + PER_EXPERT_TOKEN * tokens * mlp.router.inputs
            return tokens * (mlp.router.inputs + 2 * mlp.experts) + mlp.top_k * expert
        case GLUSpec() | MLPSpec():
            hidden = (4 if isinstance(mlp, GLUSpec) else 2) * mlp.up.outputs
            noise = 2 * mlp.up.outputs if mlp.dropout else 0
            return tokens * (mlp.up.inputs + hidden + noise)
    raise AssertionError(mlp)


def _norms(norms: NormsSpec | None, tokens: int, width: int) -> int:
    """All that stand around one part of a block."""
    return 0 if norms is None else sum(_norm(norm, tokens, width) for norm in (norms.pre, norms.out, norms.post))


def _norm(norm: object, vectors: int, width: int) -> int:
    if isinstance(norm, RMSNormSpec):
        return vectors * (2 * width + 1)
    return vectors * (width + 2) if isinstance(norm, LayerNormSpec) else 0


def _embedding(stack: StackSpec, tokens: int) -> int:
    embed = stack.embed
    noise = tokens * embed.outputs if embed.dropout else 0
    match embed:
        case FramesSpec():  # frames, and both convolutions before and after their activations
            frames = embed.stride * tokens
            return frames * (embed.conv1.inputs + 2 * embed.conv1.outputs) + tokens * embed.outputs + noise
        case PatchesSpec():
            return tokens * embed.channels * embed.patch**2 + noise
    maps = sum(tokens * part.inputs for part in (embed.widen, embed.project) if part is not None)
    return _norm(embed.norm, tokens, embed.outputs) + maps + noise


def _head(spec: ModelSpec, trained: int) -> dict[str, int]:
    """The input of each of its maps and its output; of a head over rows, for one vector."""
    maps = [] if spec.head is None else [part for _, part in spec.head.walk() if isinstance(part, LinearSpec)]
    if not maps:
        return {}
    vectors = 1 if isinstance(spec.head, ClassHeadSpec | PoolingSpec) else trained
    return {"head": vectors * sum(part.inputs for part in maps), "logits": vectors * maps[-1].outputs}


def visible(mask: Mask) -> int | None:
    """How many keys a query can see at most under a window, None when nothing bounds it."""
    if isinstance(mask, Window):
        return mask.back + mask.ahead
    if isinstance(mask, And):
        return min((span for part in mask.parts if (span := visible(part)) is not None), default=None)
    return None


def span_of(stack: StackSpec, kind: str, keys: int) -> int:
    """How many of `keys` a query of this kind of layer sees at most."""
    span = visible(stack.kinds[kind].mask)
    return keys if span is None else min(keys, span)


def kv_width(attn: AttentionSpec) -> int:
    """Numbers in the keys and values of one position."""
    return attn.kv_heads * (attn.head_width + attn.value_width)
