"""Counts the numbers that a forward in training keeps for its backward, by part, from the spec.

Each operation keeps what its derivative needs: a linear map its input, a norm its input and the statistics of each
vector (RMSNorm also the normalized vector), a gated MLP four vectors of its hidden width, attention its queries, keys,
values and output and one log-sum-exp a head and query, since the fused kernel computes its pattern again (Dao et al.
2022).  Dropout, a softcap and a bias that is learned need the pattern itself, `[H, T, S]`: it is kept; with dropout
also the noise and their product, with a softcap the scores, with such a bias the masked scores and the masked pattern.
Under a window as many keys are counted as a query sees, which is the least that blocks of queries keep; beside a
learned bias there are no such blocks.  Masks, tables of positions and what a kernel needs while it runs are not
counted.  This is what torch keeps; the native kernels of a training step keep less (of a gated MLP two vectors of its
hidden width, of RMSNorm no normalized vector, and no pattern beside a learned bias).
"""

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
from triptych.spec.parts import BlockSpec, FeedForward, GLUSpec, ParallelBlockSpec

AnyBlock = BlockSpec | ParallelBlockSpec
PER_EXPERT_TOKEN = 2  # of the model's width: the output of an expert, and the same weighted


def activation_numbers(
    spec: ModelSpec, tokens: int, source: int = 0, *, recompute: bool = False, trained: int | None = None
) -> dict[str, int]:
    """Of one row of `tokens` with `source` tokens for the encoder of an encoder-decoder, by part; `blocks` are the
    inputs of blocks, and `logits` the log-probabilities that a head of tokens gives for the `trained` tokens of the
    row, all of them when None.

    `recompute` keeps the input of each block alone, and while the backward passes a block what this block keeps.
    """
    total = Counter(embedding=0, blocks=0, attention=0, mlp=0, norms=0, head=0, logits=0)
    for name, stack in spec.stacks.items():
        rows = source if name == "encoder" and spec.decoder is not None else tokens
        total["embedding"] += _embedding(stack, rows)
        blocks = [_block(stack, block, rows, source) for block in stack.blocks]
        if recompute and blocks:
            total["blocks"] += len(blocks) * rows * stack.embed.outputs
            blocks = [max(blocks, key=Counter.total)]
        for numbers in blocks:
            total.update(numbers)
        total["norms"] += _norm(stack.final_norm, rows)
        total["head"] += 0 if stack.project is None else rows * stack.project.inputs
    total.update(_head(spec, tokens if trained is None else trained))
    return dict(total)


def _block(stack: StackSpec, block: AnyBlock, tokens: int, source: int) -> Counter[str]:
    position = stack.kinds[block.attn.kind].position
    seen = span_of(stack, block.attn.kind, tokens)
    around = [norm for name, part in block.children() if "norm" in name for _, norm in part.walk()]
    noise = tokens * stack.embed.outputs if block.dropout else 0  # of each sum with the residual stream
    total = Counter(
        attention=_attention(block.attn, tokens, tokens, position, seen) + noise,
        mlp=0 if block.mlp is None else _mlp(block.mlp, tokens) + noise,
        norms=sum(_norm(norm, tokens) for norm in around),
    )
    if block.cross is not None:
        total["attention"] += _attention(block.cross, tokens, source) + noise
    return total


def _attention(
    attn: AttentionSpec, queries: int, keys: int, position: Part | None = None, seen: int | None = None
) -> int:
    """Of attention that lets each query see the last `seen` keys, all of them when None."""
    q_and_out = queries * attn.heads * (attn.head_width + attn.value_width)
    inputs = queries * attn.q.inputs + (keys * attn.k.inputs if attn.kind == "cross" else 0)
    normed = _norm(attn.q_norm, queries * attn.heads) + _norm(attn.k_norm, keys * attn.kv_heads)
    learned = isinstance(position, T5BucketsSpec | DisentangledSpec)
    beside_softmax = 2 if attn.dropout else int(learned)  # what is multiplied with the values, and what made it
    patterns = beside_softmax + learned + (attn.softcap is not None)
    width = keys if learned or seen is None else min(seen, keys)
    pattern = attn.heads * queries * ((1 + patterns) * width if patterns else 1)
    return inputs + normed + q_and_out + keys * kv_width(attn) + pattern + _distances(position, attn, queries)


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
    if isinstance(mlp, MoESpec):
        expert = _mlp(mlp.expert, tokens) + PER_EXPERT_TOKEN * tokens * mlp.router.inputs
        return tokens * (mlp.router.inputs + 2 * mlp.experts) + mlp.top_k * expert
    kept = (4 if isinstance(mlp, GLUSpec) else 2) + (2 if mlp.dropout else 0)
    return tokens * (mlp.up.inputs + kept * mlp.up.outputs)


def _norm(norm: object, vectors: int) -> int:
    if isinstance(norm, RMSNormSpec):
        return vectors * (2 * norm.width + 1)
    return vectors * (norm.width + 2) if isinstance(norm, LayerNormSpec) else 0


def _embedding(stack: StackSpec, tokens: int) -> int:
    embed = stack.embed
    noise = tokens * embed.outputs if embed.dropout else 0
    if isinstance(embed, FramesSpec):  # frames, and both convolutions before and after their activations
        frames = embed.stride * tokens
        return frames * (embed.conv1.inputs + 2 * embed.conv1.outputs) + tokens * embed.outputs + noise
    if isinstance(embed, PatchesSpec):
        return tokens * embed.channels * embed.patch**2 + noise
    maps = sum(tokens * part.inputs for part in (embed.widen, embed.project) if part is not None)
    return _norm(embed.norm, tokens) + maps + noise


def _head(spec: ModelSpec, trained: int) -> dict[str, int]:
    """The input of each of its maps and its output; of a head over rows, for one vector."""
    maps = [] if spec.head is None else [part for _, part in spec.head.walk() if isinstance(part, LinearSpec)]
    if not maps:
        return {}
    vectors = 1 if isinstance(spec.head, ClassHeadSpec | PoolingSpec) else trained
    return {"head": vectors * sum(part.inputs for part in maps), "logits": vectors * maps[-1].outputs}


def visible(mask: Mask) -> int | None:
    """The most keys that a query can see under a window, None when nothing bounds it."""
    if isinstance(mask, Window):
        return mask.back + mask.ahead
    if isinstance(mask, And):
        return min((span for part in mask.parts if (span := visible(part)) is not None), default=None)
    return None


def span_of(stack: StackSpec, kind: str, keys: int) -> int:
    """The most of `keys` that a query of this kind of layer sees."""
    span = visible(stack.kinds[kind].mask)
    return keys if span is None else min(keys, span)


def kv_width(attn: AttentionSpec) -> int:
    """Numbers in the keys and values of one position."""
    return attn.kv_heads * (attn.head_width + attn.value_width)
