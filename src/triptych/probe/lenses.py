"""The logit lens (nostalgebraist 2020), attention rollout, and attention weighted by what each head moves.

The logit lens shows what the model would answer if its residual stream ended after each block.

The vectors that leave a block go through the final norm and the head, `head(final_norm(resid_post))`: for decoders the
unembedding, for encoders the masked-LM head.  The last block's row is what the model itself answers.

The encoder of an encoder-decoder is never unembedded by the model.  Where its token table is also the unembedding (T5,
BART, Marian), its vectors can be compared with that table all the same: `head(encoder_final_norm(resid_post))` says
which tokens of the shared table a vector is near to, not what the model would write.  Elsewhere (untied tables,
Whisper's frames) the two spaces have nothing in common, and that lens is refused.

`rollout` follows attention weights through the layers (Abnar & Zuidema 2020); `value_weighted` weights them by the norm
of what each head moves (Kobayashi et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.arguments import checked
from triptych.attention import Rows
from triptych.errors import InputError, ProbeError, shown
from triptych.nn.attention import Attention
from triptych.nn.stack import Stack
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec
from triptych.spec.model import ModelSpec
from .display import Displayed, JsonResult
from .prompts import (
    ProbedModel,
    PromptInput,
    check_positions,
    index_below,
    name_tokens,
    prompt_of,
    token_names,
    values_at,
)
from .sites import prefix_of, sites, stack_of

StackName = Literal["encoder", "decoder"]
SHOWN_TOKENS = 3  # per cell of a printed lens
UNEMBEDDED = 512  # rows of one product with the unembedding


@dataclass(frozen=True, eq=False)
class Lens(JsonResult, Displayed):
    """The likeliest tokens after each layer at each position.

    layers         L names: the embedding, then each block.
    positions      the T positions; `tokens`, the text of the token at each.
    ids            [L, T, K] the K likeliest tokens, best first; `names[l][t][k]` are their names.
    probabilities  [L, T, K], of the softmax over all tokens.
    """

    in_json = ("layers", "positions", "tokens", "ids", "names", "probabilities")
    layers: tuple[str, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    ids: Tensor
    names: tuple[tuple[tuple[str, ...], ...], ...]
    probabilities: Tensor

    def __repr__(self) -> str:
        lines, width = [], max(map(len, self.layers))
        for t, (position, token) in enumerate(zip(self.positions, self.tokens, strict=True)):
            lines.append(f"position {position}, {token!r}")
            for layer, names, p in zip(self.layers, self.names, self.probabilities.tolist(), strict=True):
                best = zip(names[t][:SHOWN_TOKENS], p[t], strict=False)
                lines.append(f"  {layer:<{width}}  " + "  ".join(f"{name!r} {chance:.3f}" for name, chance in best))
        return "\n".join(lines)


@checked
def lens(
    model: ProbedModel,
    text: PromptInput,
    *,
    top: int = 5,
    positions: Sequence[int] | None = None,
    stack: StackName | None = None,
    target: PromptInput = None,
    max_bytes: int = 1 << 30,
) -> Lens:
    """The logit lens (nostalgebraist 2020): the `top` likeliest tokens after each block at `positions` (by default
    all), from `head(final_norm(resid_post))`.

    `stack` is that of an encoder-decoder whose lens it is, the decoder by default; `target` is what its decoder reads
    (a text after the start token, or all its ids), the start token alone by default.

    Raises InputError for positions and `top` out of range; ProbeError for a model whose head is not over the
    vocabulary, for an encoder whose table is not the unembedding, and for values of more than `max_bytes`.
    """
    width, name = vocabulary(model.spec), stack_of(model.spec, stack)
    table, unembedding = (model.spec.ties.get(one, one) for one in ("encoder.embed.tokens.weight", "head.proj.weight"))
    if name == "encoder" and model.spec.layout == "encoder-decoder" and table != unembedding:
        raise ProbeError(
            "the encoder's token table is not the unembedding of this model, so that no head reads the encoder's "
            'vectors; use stack="decoder"'
        )
    prompt = prompt_of(model, text, target)
    if not index_below(width + 1, top):
        raise InputError(f"top={shown(top)} must be from 1 to {width}, the size of the vocabulary")
    of_text = name == "encoder" or model.spec.layout != "encoder-decoder"
    length = prompt.lengths[0 if of_text else 1]
    chosen = check_positions(positions, length)
    layers = layer_sites(model.spec, name)
    (values,) = values_at(model, [prompt], layers, max_bytes)
    ids, chances = [], []
    for site in layers:
        logits = unembedded(model, name, values[site][chosen])
        best = logits.softmax(-1).topk(top)
        ids.append(best.indices)
        chances.append(best.values)
    every = torch.stack(ids).cpu()
    named = tuple(tuple(tuple(name_tokens(model, cell)) for cell in row) for row in every.tolist())
    tokens = token_names(model, prompt, of_text)
    return Lens(
        tuple(layers), tuple(chosen), tuple(tokens[p] for p in chosen), every, named, torch.stack(chances).cpu()
    )


def layer_sites(spec: ModelSpec, stack: str) -> list[str]:
    """The embedding of a stack and the residual stream after each of its blocks."""
    prefix = prefix_of(spec, stack)
    return [f"{prefix}embed", *(f"{prefix}blocks.{i}.resid_post" for i in range(len(spec.stacks[stack].blocks)))]


@torch.no_grad()
def unembedded(model: ProbedModel, stack: str, x: Tensor) -> Tensor:
    """Vectors of the residual stream [T, D] -> fp32 logits [T, V], by the stack's final norm and the head."""
    module = getattr(model.module, stack)
    assert isinstance(module, Stack)
    pieces = []
    for piece in x.split(UNEMBEDDED):
        rows = Rows((1,) * len(piece))
        pieces.append(model.module.unembed(module.finish(piece, rows), rows).float())
    return torch.cat(pieces)


def vocabulary(spec: ModelSpec) -> int:
    """V of the head.  Raises ProbeError for a head over anything else."""
    if not isinstance(spec.head, LMHeadSpec | MaskedLMHeadSpec):
        head = "no head" if spec.head is None else f"a {type(spec.head).__name__.removesuffix('Spec')}"
        raise ProbeError(f"a lens needs a head over the vocabulary; this {spec.family} model has {head}")
    return spec.head.proj.outputs


@checked
def rollout(
    model: ProbedModel,
    text: PromptInput,
    *,
    stack: StackName | None = None,
    target: PromptInput = None,
    max_bytes: int = 1 << 30,
) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020): [L, T, T], how much of position s stands in position t after layer l.

        R_l = (0.5 A_l + 0.5 I) R_(l-1),    R_(-1) = I

    where A_l is the mean of the heads' patterns [T, T] of the self-attention of one stack (of an encoder-decoder the
    decoder by default) and I stands for the residual stream.  Each row sums to 1.  It takes a vector for the mix of
    inputs that the weights say: values, MLPs and norms are not in it.

    Raises ProbeError for attention without a pattern, InputError for a stack that is not there.
    """
    names = _patterns(model, stack, "attn")
    (values,) = values_at(model, [prompt_of(model, text, target)], names, max_bytes)
    mixed, layers = None, []
    for name in names:
        pattern = values[name].float().mean(0)  # [T, T]
        step = 0.5 * pattern + 0.5 * torch.eye(len(pattern)).to(pattern)
        mixed = step if mixed is None else step @ mixed
        layers.append(mixed)
    return torch.stack(layers)


@checked
def value_weighted(
    model: ProbedModel,
    text: PromptInput,
    *,
    stack: StackName | None = None,
    target: PromptInput = None,
    max_bytes: int = 1 << 30,
) -> dict[str, Tensor]:
    """Attention weighed by what it moves (Kobayashi et al. 2020): for each attention layer `blocks.i.attn` (and
    `blocks.i.cross`) [H, T, S], the length of what head h carries from key s to query t,

        || pattern[h, t, s] * W_o[:, h] v[s, h // (H / G)] ||

    without biases of the output and without a norm behind it.  A key with a large weight and a short value, as the
    first token often is, carries little.

    Raises ProbeError for attention without a pattern, InputError for a stack that is not there.
    """
    names = _patterns(model, stack, "attn") + _patterns(model, stack, "cross")
    places = [name.removesuffix(".pattern") for name in names]
    wanted = [*names, *(f"{place}.v_ctx" for place in places)]
    (values,) = values_at(model, [prompt_of(model, text, target)], wanted, max_bytes)
    root = model.module if model.spec.layout == "encoder-decoder" else getattr(model.module, stack_of(model.spec, None))
    weighed = {}
    for name, place in zip(names, places, strict=True):
        pattern, v = values[name], values[f"{place}.v_ctx"]  # [H, T, S], [S, G, Kv]
        attn = root.get_submodule(place)
        assert isinstance(attn, Attention)
        with torch.no_grad():
            carried = per_head(attn, v.repeat_interleave(len(pattern) // v.shape[1], dim=1))  # [H, S, D]
        weighed[place] = pattern.float() * carried.norm(dim=-1).float()[:, None]
    return weighed


def _patterns(model: ProbedModel, stack: StackName | None, kind: str) -> list[str]:
    """The pattern sites of one stack, layer by layer; those of cross-attention where it has it."""
    spec, name = model.spec, stack_of(model.spec, stack)
    known = sites(spec)
    wanted = [f"{prefix_of(spec, name)}blocks.{i}.{kind}.pattern" for i in range(len(spec.stacks[name].blocks))]
    missing = next((one for one in wanted if one not in known), None)
    if missing is not None and kind == "attn":
        raise ProbeError(f"there is no {missing}: linear attention forms no pattern")
    return [one for one in wanted if one in known]


def per_head(attn: Attention, z: Tensor) -> Tensor:
    """`W_o[:, h] z[:, h]`: [T, H, Kv] -> [H, T, D] in fp64, what each head would add without the bias."""
    weight = attn.out.matrix().double()  # [D, H * Kv]
    by_head = weight.view(len(weight), z.shape[1], z.shape[2])
    return torch.einsum("dhk,thk->htd", by_head, z.double())
