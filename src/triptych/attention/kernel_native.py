"""Attention of rows of up to some hundred keys in C, with its gradient (`native/train.h`): a training step on a CPU.

The scores of some queries of one head are in memory at a time.  Sums and softmax are in fp32; where the processor
multiplies pairs of bf16 numbers, weights and gradients of scores are rounded to bf16 for the products, as by torch.  A
call that is traced or transformed, or whose gradient is differentiated, runs by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.native import Library, TrainAttention, TrainVectors, usable_threads
from triptych.native.step import LONGEST_ROW
from triptych.ops import native_training
from triptych.spec.masks import Causal
from .request import AttentionRequest, Runner


def native_cannot(request: AttentionRequest) -> list[str]:
    reasons = []
    if request.device.type != "cpu" or native_training.kernels_for(request.dtype) is None:
        reasons.append("the native kernels are not in use, or slower than torch for this device and dtype")
    if request.keys > LONGEST_ROW:
        reasons.append(f"more than {LONGEST_ROW} keys")
    options = {"softcap": request.softcap is not None, "sinks": request.sinks, "dropout": request.dropout > 0.0}
    reasons += [f"{name}: the kernel has no place for it" for name, present in options.items() if present]
    return reasons


def native_saves(request: AttentionRequest) -> bool:
    """Whether it is faster than torch: a gradient is asked for, and there is work for all threads."""
    return request.learns and request.rows * request.groups >= torch.get_num_threads() and request.queries > 1


def plan_native(request: AttentionRequest, plain: Runner) -> Runner:
    """`plain` runs where the kernel does not serve the tensors of a call."""
    causal = request.aligned and isinstance(request.mask, Causal)
    visible = None if causal or request.visible is None else request.visible.contiguous()
    if visible is not None:
        visible = visible.expand(request.rows, request.heads, request.queries, request.keys)
    return partial(_run, request, plain, causal, visible)


def _run(
    request: AttentionRequest, plain: Runner, causal: bool, visible: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    kernels = native_training.training_kernels(q, k, v) if q.dtype is request.dtype else None
    if kernels is None or (bias is not None and type(bias) is not Tensor):
        return plain(q, k, v, bias, sinks)
    if bias is not None:
        in_four = bias.float()[(None,) * (4 - bias.dim())]
        bias = in_four.expand(-1, request.heads, request.queries, request.keys)
    return _attention(request, kernels, plain, causal, visible, *map(_with_vectors, (q, k, v)), bias)


def _with_vectors(x: Tensor) -> Tensor:
    """The numbers of each vector one after another."""
    return x if x.stride(3) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """q [B, H, T, K] over k [B, G, S, K] and v [B, G, S, Kv], with a bias [B or 1, H, T, S] -> [B, H, T, Kv]."""

    @staticmethod
    def forward(
        ctx: Any, request: AttentionRequest, kernels: Library, plain: Runner, causal: bool, visible: Tensor | None,
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.decided = request, kernels, plain, causal
        out = _like_tokens(q, v.shape[3])
        lse = torch.empty(q.shape[:3])
        rows = None if bias is None else _with_vectors(bias).expand(request.rows, -1, -1, -1)
        ctx.save_for_backward(q, k, v, bias, rows, visible, out, lse)
        _call(
            kernels.functions.attention_forward, kernels, request, causal, lse, q=q, k=k, v=v, bias=rows,
            visible=visible, out=out,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, rows, visible, out, lse = ctx.saved_tensors
        request, kernels, plain, causal = ctx.decided
        by_torch = native_training.plain_gradients(lambda *inputs: plain(*inputs, None), (q, k, v, bias), gradient)
        if by_torch is not None:
            return None, None, None, None, None, *by_torch
        d_q, d_k, d_v = (_like_tokens(x, x.shape[3]) for x in (q, k, v))
        d_bias = torch.zeros(bias.shape) if bias is not None and ctx.needs_input_grad[8] else None
        _call(
            kernels.functions.attention_backward, kernels, request, causal, lse, q=q, k=k, v=v, bias=rows,
            visible=visible, out=out, d_out=_with_vectors(gradient), d_q=d_q, d_k=d_k, d_v=d_v,
            d_bias=None if d_bias is None else d_bias.expand(request.rows, -1, -1, -1),
        )  # fmt: skip
        return None, None, None, None, None, d_q, d_k, d_v, d_bias


_attention: Callable[..., Tensor] = _Attention.apply  # torch's has no annotation


def _like_tokens(x: Tensor, width: int) -> Tensor:
    """[B, H, T, width], in memory as the flat batch has it: the heads of a token side by side."""
    rows, heads, tokens, _ = x.shape
    return x.new_empty(rows, tokens, heads, width).transpose(1, 2)


def _call(
    function: Callable[..., None], kernels: Library, request: AttentionRequest, causal: bool, lse: Tensor,
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    """Call `function` on the tensors that `struct train_attention` names."""
    call = TrainAttention(
        lse=lse.data_ptr(), rows=request.rows, heads=request.heads, groups=request.groups, queries=request.queries,
        keys=request.keys, width=request.width, value_width=request.value_width,
        bf16=request.dtype is torch.bfloat16, causal=causal, scale=request.scale,
    )  # fmt: skip
    for name, x in tensors.items():
        if x is not None:
            setattr(call, name, TrainVectors(x.data_ptr(), *x.stride()[:3]))
    threads = usable_threads(torch.get_num_threads())
    scratch = torch.empty(threads * kernels.functions.attention_scratch(ctypes.byref(call)))
    call.scratch = scratch.data_ptr()
    function(ctypes.byref(call), threads)
