"""The operation `experts`: a router's choice of experts for each token, and the weighted sum of what they give."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from .recording import implements, record


@implements("experts")
def experts(
    x: Tensor, scores: Tensor, parts: Sequence[Callable[[Tensor], Tensor]], top_k: int, normalize: bool
) -> Tensor:
    """Each token of `x` [N, D] through the `top_k` experts with the largest `scores` [N, E] (Shazeer et al. 2017):
    the sum of their outputs, weighted by the softmax of the scores; `normalize` divides the weights by their sum.  One
    call per expert, on all tokens it is chosen for."""
    if has_torch_function_unary(x):
        return record(experts, x, scores, parts, top_k, normalize)
    weights, chosen = scores.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1).topk(top_k)  # [N, top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    by_expert = chosen.flatten().argsort(stable=True)
    token, weights = by_expert // top_k, weights.flatten()[by_expert, None].to(x.dtype)
    counts = chosen.flatten().bincount(minlength=len(parts)).tolist()
    out = torch.zeros_like(x)
    for expert, end, count in zip(parts, accumulate(counts), counts, strict=True):
        if count:
            own = slice(end - count, end)
            out.index_add_(0, token[own], (expert(x[token[own]]) * weights[own]).to(x.dtype))
    return out
