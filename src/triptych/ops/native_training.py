"""Functions of a training step on a CPU that run natively (`native/train.h`), and the decision where they do.

They take the place of torch's own where a gradient will be asked for, on plain tensors of fp32, or of bf16 where the
kernels have AVX-512.  Everywhere else, under torch.compile, torch.func, forward-mode differentiation or a mode that
watches calls, and where a gradient is itself differentiated, torch computes.  TRIPTYCH_KERNELS=none switches them off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from triptych.native import Library, TrainActivation, TrainRotation, library, usable_threads
from triptych.native.step import NORM_TOKENS, Function, TrainNorm

FEWEST = 1 << 14  # numbers below which a call from Python costs more than the kernel saves
PLAIN = (Tensor, nn.Parameter)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}
KERNELS = {"gelu": Function.GELU, "gelu_tanh": Function.GELU_TANH, "silu": Function.SILU}  # as `vector.h` numbers them


def _watched() -> bool:
    """Whether more than the numbers of a call matters: it is traced, transformed, or looked at by a mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def kernels_for(dtype: torch.dtype) -> Library | None:
    """The library, where its functions of a training step are faster than torch's for numbers of `dtype`."""
    known = dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling()
    kernels = library() if known else None
    if kernels is None or kernels.level == "portable" or (dtype is torch.bfloat16 and not kernels.wide):
        return None
    return kernels


def training_kernels(*tensors: Tensor) -> Library | None:
    """The library, where it serves a call on these tensors, all of one dtype, in a training step; else None."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    dtype = tensors[0].dtype
    learns = False
    for x in tensors:
        plain = type(x) in PLAIN and torch._C._has_storage(x) and x.layout is torch.strided
        if not plain or x.dtype is not dtype or x.device.type != "cpu":
            return None
        learns |= x.requires_grad
    return kernels_for(dtype) if learns and not _watched() else None


def plain_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor
) -> list[Tensor | None] | None:
    """The gradients of `function(*inputs)` as torch computes them, where the gradient may be differentiated again or is
    not a plain tensor; None elsewhere."""
    again = torch.is_grad_enabled()
    if not again and torch._C._has_storage(gradient) and not _watched():
        return None
    with torch.enable_grad():
        # Aliases: one tensor may stand in several places.
        aliases = [
            x if x is None else x.view_as(x) if again else x.detach().requires_grad_(x.requires_grad) for x in inputs
        ]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(function(*aliases), wanted, gradient, create_graph=again))
    return [next(gradients) if x is not None and x.requires_grad else None for x in aliases]


class _Activation(torch.autograd.Function):
    """`f(x)`, or `f(x) * gate`."""

    @staticmethod
    def forward(ctx: Any, kernels: Library, name: str, x: Tensor, gate: Tensor | None) -> Tensor:
        ctx.kernels, ctx.name = kernels, name
        ctx.save_for_backward(x, gate)
        y = torch.empty_like(x)
        call = _call(name, x, gate)
        call.y = y.data_ptr()
        kernels.functions.activation_forward(ctypes.byref(call), usable_threads(torch.get_num_threads()))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        x, gate = ctx.saved_tensors
        plain = ACTIVATIONS[ctx.name]
        by_torch = plain_gradients(lambda x, gate: plain(x) if gate is None else plain(x) * gate, (x, gate), gradient)
        if by_torch is not None:
            return None, None, by_torch[0], by_torch[1]
        gradient, d_x = gradient.contiguous(), torch.empty_like(x)
        call, d_gate = _call(ctx.name, x, gate), None
        call.d_y, call.d_x = gradient.data_ptr(), d_x.data_ptr()
        if gate is not None:
            d_gate = torch.empty_like(gate)
            call.d_gate = d_gate.data_ptr()
        ctx.kernels.functions.activation_backward(ctypes.byref(call), usable_threads(torch.get_num_threads()))
        return None, None, d_x, d_gate


_activation: Callable[..., Tensor] = _Activation.apply  # torch's has no annotation


def _call(name: str, x: Tensor, gate: Tensor | None) -> TrainActivation:
    call = TrainActivation(x=x.data_ptr(), count=x.numel(), bf16=x.dtype is torch.bfloat16, function=KERNELS[name])
    if gate is not None:
        call.gate = gate.data_ptr()
    return call


def activated(name: str, x: Tensor) -> Tensor:
    """The activation `name` of x, in a training step."""
    large = name in KERNELS and type(x) in PLAIN and x.numel() >= FEWEST and x.is_contiguous()
    kernels = training_kernels(x) if large else None
    return ACTIVATIONS[name](x) if kernels is None else _activation(kernels, name, x, None)


def gated(name: str, x: Tensor, gate: Tensor) -> Tensor:
    """`act(x) * gate` of x and gate, of one shape, in a training step: gated linear units (Shazeer 2020)."""
    large = name in KERNELS and type(x) in PLAIN and x.numel() >= FEWEST and x.shape == gate.shape
    kernels = training_kernels(x, gate) if large and x.is_contiguous() and gate.is_contiguous() else None
    return ACTIVATIONS[name](x) * gate if kernels is None else _activation(kernels, name, x, gate)


class _Rotated(torch.autograd.Function):
    """The first numbers of each vector of x [N, H, K] turned with those half of their number away."""

    @staticmethod
    def forward(ctx: Any, kernels: Library, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(cos, sin)
        return _turned(kernels, x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if not torch.is_grad_enabled() and torch._C._has_storage(gradient) and not _watched():
            return None, _turned(ctx.kernels, gradient.contiguous(), cos, sin, back=True), None, None
        width = cos.shape[2]
        whole = width == gradient.shape[2]
        wide = (gradient if whole else gradient[..., :width]).to(cos.dtype)
        turned = (wide * cos + (wide * sin).roll(width // 2, -1)).to(gradient.dtype)
        return None, turned if whole else torch.cat((turned, gradient[..., width:]), -1), None, None


_rotated: Callable[..., Tensor] = _Rotated.apply  # torch's has no annotation


def _turned(kernels: Library, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    y = torch.empty_like(x)
    tokens, heads, width = x.shape
    call = TrainRotation(
        x=x.data_ptr(), y=y.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(), tokens=tokens, heads=heads,
        width=width, half=cos.shape[2] // 2, bf16=x.dtype is torch.bfloat16, back=back,
    )  # fmt: skip
    kernels.functions.rotation(ctypes.byref(call), usable_threads(torch.get_num_threads()))
    return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """x [N, H, K], the first numbers turned with those half of the width of cos and sin away; None where the kernels do
    not serve."""
    plain = type(x) in PLAIN and x.is_contiguous() and cos.dtype is torch.float32 and cos.shape == sin.shape
    fixed = plain and not (cos.requires_grad or sin.requires_grad) and cos.is_contiguous() and sin.is_contiguous()
    kernels = training_kernels(x) if fixed and cos.shape[:2] == (len(x), 1) else None
    return None if kernels is None else _rotated(kernels, x, cos, sin)


class _Normed(torch.autograd.Function):
    """RMS norm of x [..., D] in fp32."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Library, x: Tensor, weight: Tensor, offset: float, eps: float
    ) -> Tensor:  # fmt: skip
        ctx.decided = kernels, offset, eps
        y, inverse = torch.empty_like(x), torch.empty(x.shape[:-1])
        ctx.save_for_backward(x, weight, inverse)
        call = _norm(x, weight, inverse, offset, eps)
        call.y = y.data_ptr()
        kernels.functions.norm_forward(ctypes.byref(call), usable_threads(torch.get_num_threads()))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        kernels, offset, eps = ctx.decided
        by_torch = plain_gradients(lambda x, w: F.rms_norm(x, w.shape, w + offset, eps), (x, weight), gradient)
        if by_torch is not None:
            return None, by_torch[0], by_torch[1], None, None
        gradient, d_x, d_weight = gradient.contiguous(), torch.empty_like(x), None
        call = _norm(x, weight, inverse, offset, eps)
        call.d_y, call.d_x = gradient.data_ptr(), d_x.data_ptr()
        if ctx.needs_input_grad[2]:
            d_weight = torch.empty(-(-inverse.numel() // NORM_TOKENS), len(weight))
            call.d_weight = d_weight.data_ptr()
        kernels.functions.norm_backward(ctypes.byref(call), usable_threads(torch.get_num_threads()))
        return None, d_x, None if d_weight is None else d_weight[0], None, None


_normed: Callable[..., Tensor] = _Normed.apply  # torch's has no annotation


def _norm(x: Tensor, weight: Tensor, inverse: Tensor, offset: float, eps: float) -> TrainNorm:
    return TrainNorm(
        x=x.data_ptr(), weight=weight.data_ptr(), inverse=inverse.data_ptr(), tokens=inverse.numel(),
        width=len(weight), eps=eps, offset=offset,
    )  # fmt: skip


def normed(x: Tensor, weight: Tensor, offset: float, eps: float | None) -> Tensor | None:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` in fp32; None where the kernels do not serve."""
    plain = type(x) in PLAIN and x.dtype is torch.float32 and eps is not None and x.is_contiguous()
    kernels = training_kernels(x, weight) if plain and weight.is_contiguous() else None
    return None if kernels is None else _normed(kernels, x, weight, offset, eps)
