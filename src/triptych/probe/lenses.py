"""The logit lens (nostalgebraist 2020): what the model would answer if its residual stream ended after each block.

The vectors that leave a block go through the final norm and the head, `head(final_norm(resid_post))`: for decoders the
unembedding, for encoders the masked-LM head.  The last block's row is what the model itself answers.

The encoder of an encoder-decoder is never unembedded by the model.  Where its token table is also the unembedding (T5,
BART, Marian), its vectors can be compared with that table all the same: `head(encoder_final_norm(resid_post))` says
which tokens of the shared table a vector is near to, not what the model would write.  Elsewhere (untied tables,
Whisper's frames) the two spaces have nothing in common, and that lens is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.errors import InputError, ProbeError, shown
from triptych.nn.stack import Stack
from triptych.probe.ablation import values_at
from triptych.probe.display import Displayed
from triptych.probe.prompts import (
    BATCH_TOKENS,
    ProbedModel,
    PromptInput,
    check_list,
    check_position,
    index_below,
    name_tokens,
    prompt_of,
    token_names,
)
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec
from triptych.spec.model import ModelSpec

StackName = Literal["encoder", "decoder"]
SHOWN_TOKENS = 3  # per cell of a printed lens
UNEMBEDDED = 512  # rows of one product with the unembedding


@dataclass(frozen=True, eq=False)
class Lens(Displayed):
    """The likeliest tokens after each layer at each position.

    layers         L names: the embedding, then each block.
    positions      the T positions; `tokens`, the text of the token at each.
    ids            [L, T, K] the K likeliest tokens, best first; `names[l][t][k]` are their names.
    probabilities  [L, T, K], of the softmax over all tokens.
    """

    layers: tuple[str, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    ids: Tensor
    names: tuple[tuple[tuple[str, ...], ...], ...]
    probabilities: Tensor

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "layers": list(self.layers), "positions": list(self.positions), "tokens": list(self.tokens),
            "ids": self.ids.tolist(), "names": [[list(cell) for cell in row] for row in self.names],
            "probabilities": self.probabilities.tolist(),
        }  # fmt: skip

    def __str__(self) -> str:
        lines, width = [], max(map(len, self.layers))
        for t, (position, token) in enumerate(zip(self.positions, self.tokens, strict=True)):
            lines.append(f"position {position}, {token!r}")
            for layer, names, p in zip(self.layers, self.names, self.probabilities.tolist(), strict=True):
                best = zip(names[t][:SHOWN_TOKENS], p[t], strict=False)
                lines.append(f"  {layer:<{width}}  " + "  ".join(f"{name!r} {chance:.3f}" for name, chance in best))
        return "\n".join(lines)

    __repr__ = __str__


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
    name = _stack(model.spec, stack)
    prompt = prompt_of(model, text, target)
    width = vocabulary(model.spec)
    if not index_below(width + 1, top):
        raise InputError(f"top={shown(top)} must be from 1 to {width}, the size of the vocabulary")
    of_text = name == "encoder" or model.spec.layout != "encoder-decoder"
    length = prompt.lengths[0 if of_text else 1]
    if positions is not None:
        check_list(positions, "positions")
    chosen = tuple(check_position(p, length, "positions") for p in (range(length) if positions is None else positions))
    layers = layer_sites(model.spec, name)
    values = values_at(model, [prompt], layers, BATCH_TOKENS, max_bytes)
    ids, chances = [], []
    for site in layers:
        logits = unembedded(model, name, values[site][0][list(chosen)])
        best = logits.softmax(-1).topk(top)
        ids.append(best.indices)
        chances.append(best.values)
    every = torch.stack(ids).cpu()
    named = tuple(tuple(tuple(name_tokens(model, cell)) for cell in row) for row in every.tolist())
    tokens = token_names(model, prompt, of_text)
    return Lens(tuple(layers), chosen, tuple(tokens[p] for p in chosen), every, named, torch.stack(chances).cpu())


def layer_sites(spec: ModelSpec, stack: str) -> list[str]:
    """The embedding of a stack and the residual stream after each of its blocks."""
    prefix = f"{stack}." if spec.layout == "encoder-decoder" else ""
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


def _stack(spec: ModelSpec, stack: StackName | None) -> str:
    """The stack whose vectors are unembedded.  Raises InputError or ProbeError where it is not there or cannot be."""
    vocabulary(spec)
    if stack is not None and stack not in spec.stacks:
        raise InputError(f"stack={shown(stack)}: this {spec.layout} model has {' and '.join(spec.stacks)}")
    name = stack or list(spec.stacks)[-1]
    if spec.layout == "encoder-decoder" and name == "encoder":
        table = "encoder.embed.tokens.weight"
        if spec.ties.get("head.proj.weight", "head.proj.weight") != spec.ties.get(table, table):
            raise ProbeError(
                "the encoder's token table is not the unembedding of this model, so that no head reads the encoder's "
                'vectors; use stack="decoder"'
            )
    return name
