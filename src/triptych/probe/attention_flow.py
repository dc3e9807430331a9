"""Attention weights followed through layers, and weighed by what they carry."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.errors import InputError, ProbeError, shown
from triptych.nn.attention import Attention
from triptych.probe.ablation import values_at
from triptych.probe.lenses import StackName
from triptych.probe.logit_attribution import per_head
from triptych.probe.prompts import BATCH_TOKENS, ProbedModel, PromptInput, prompt_of
from triptych.probe.sites import sites


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
    prompt = prompt_of(model, text, target)
    values = values_at(model, [prompt], names, BATCH_TOKENS, max_bytes)
    mixed, layers = None, []
    for name in names:
        pattern = values[name][0].float().mean(0)  # [T, T]
        step = 0.5 * pattern + 0.5 * torch.eye(len(pattern), device=pattern.device)
        mixed = step if mixed is None else step @ mixed
        layers.append(mixed)
    return torch.stack(layers)


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
    names = _patterns(model, stack, "attn") + _patterns(model, stack, "cross", optional=True)
    places = [name.removesuffix(".pattern") for name in names]
    prompt = prompt_of(model, text, target)
    values = values_at(model, [prompt], [*names, *(f"{place}.v_ctx" for place in places)], BATCH_TOKENS, max_bytes)
    weighed = {}
    for name, place in zip(names, places, strict=True):
        pattern, v = values[name][0], values[f"{place}.v_ctx"][0]  # [H, T, S], [S, G, Kv]
        attn = model.module.get_submodule(
            place if model.spec.layout == "encoder-decoder" else f"{_only(model)}.{place}"
        )
        assert isinstance(attn, Attention)
        with torch.no_grad():
            carried = per_head(attn, v.repeat_interleave(len(pattern) // v.shape[1], dim=1))  # [H, S, D]
        weighed[place] = pattern.float() * carried.norm(dim=-1).float()[:, None]
    return weighed


def _only(model: ProbedModel) -> str:
    return next(iter(model.spec.stacks))


def _patterns(model: ProbedModel, stack: StackName | None, kind: str, *, optional: bool = False) -> list[str]:
    """The pattern sites of one stack, layer by layer."""
    spec = model.spec
    if stack is not None and stack not in spec.stacks:
        raise InputError(f"stack={shown(stack)}: this {spec.layout} model has {' and '.join(spec.stacks)}")
    name = stack or list(spec.stacks)[-1]
    prefix = f"{name}." if spec.layout == "encoder-decoder" else ""
    known = sites(spec)
    wanted = [f"{prefix}blocks.{i}.{kind}.pattern" for i in range(len(spec.stacks[name].blocks))]
    missing = next((one for one in wanted if one not in known), None)
    if missing is not None and not optional:
        raise ProbeError(f"there is no {missing}: linear attention forms no pattern")
    return [one for one in wanted if one in known]
