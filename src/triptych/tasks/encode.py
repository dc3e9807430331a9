"""Vectors of whole texts: the hidden states of a stack, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.generate import Executor
from triptych.native import library
from triptych.nn import Batch, Pooling, Row, Transformer
from triptych.nn.weights import PackedWeight
from triptych.program.native_encoder import Matmul, NativeEncoder, PreparedEncoder, multiplies_in_bf16
from triptych.program.native_executor import prompts_in_bf16
from triptych.program.native_values import NotNative
from triptych.quantize import kernel_matrix
from triptych.spec import model as spec
from triptych.tasks.batching import BATCH_TOKENS, batches

Mode = Literal["mean", "first", "dense"]


def pooling(module: Transformer, mode: str | None = None, normalize: bool | None = None) -> spec.PoolingSpec:
    """How the model's vectors are pooled: as the checkpoint says, else by their mean; `mode` and `normalize` replace
    that.  `cls`, as sentence-transformers calls it, is `first`.

    Raises InputError for an unknown mode, and for `dense` without the checkpoint's pooler.
    """
    how = module.spec.head if isinstance(module.spec.head, spec.PoolingSpec) else spec.PoolingSpec()
    if mode is not None:
        chosen: Mode | None = next((m for m in get_args(Mode) if m == ("first" if mode == "cls" else mode)), None)
        if chosen is None:
            raise InputError(f"pooling={mode!r} must be 'mean', 'first' (also called 'cls') or 'dense'")
        if chosen == "dense" and how.dense is None:
            raise InputError("this checkpoint has no pooler; use pooling='mean' or 'first'")
        how = replace(how, mode=chosen)
    return how if normalize is None else replace(how, normalize=normalize)


@torch.no_grad()
def encode(
    module: Transformer, rows: Sequence[Row], pooling: spec.PoolingSpec, *, batch_tokens: int = BATCH_TOKENS,
    executor: Executor = "auto", matmul: Matmul = "auto",
) -> Tensor:  # fmt: skip
    """One vector a row, [B, D] in the dtype of the model: an encoder's output, or a decoder's last hidden states,
    pooled.  Rows of similar length run together and nothing is padded.  With the executor "auto", an encoder runs
    natively where its weights are packed or its products are in bf16, as `matmul` says (`Matmul`).

    The result carries no graph, and is an ordinary tensor that training may use.  Raises InputError for another
    executor or `matmul`, for `batch_tokens` below 1, and where products in bf16 were asked for and cannot be had.
    """
    if executor not in get_args(Executor):
        raise InputError(f"executor must be one of {list(get_args(Executor))}, not {executor!r}")
    integer("batch_tokens", batch_tokens, 1)
    bf16 = multiplies_in_bf16(module, matmul)
    pool = module.head if isinstance(module.head, Pooling) else Pooling(replace(pooling, dense=None))
    if isinstance(module.head, Pooling) and pooling != module.head.spec:
        pool = Pooling(replace(pooling, dense=None))
        pool.dense = module.head.dense
    vectors: dict[int, Tensor] = {}
    native = NativeEncoder(module, matrix_of=kernel_matrix, bf16=bf16) if executor == "auto" else None
    for group in batches([module.length(row) for row in rows], batch_tokens):
        inputs, where = module.flat([rows[i] for i in group])
        hidden = None if native is None else native.hidden(inputs, where)
        if hidden is None:
            if matmul == "bf16":
                reason = "executor='modules'" if native is None else native.why_modules or "the model reads no ids"
                raise InputError(f"matmul='bf16' needs the native executor, which does not run here: {reason}")
            hidden = module(_reading(module, inputs, where))
        elif pool.spec.mode == "dense":
            hidden = hidden.to(module.dtype)
        vectors.update(zip(group, pool(hidden, where).to(module.dtype), strict=True))
    return torch.stack([vectors[i] for i in range(len(rows))])


def _reading(module: Transformer, inputs: Tensor, rows: Rows) -> Batch:
    """The encoder alone of an encoder-decoder, else the whole model."""
    if module.spec.layout == "encoder-decoder":
        return Batch(source=(inputs, rows))
    return Batch(inputs=inputs, rows=rows)


def note_on_products(module: Transformer, matmul: Matmul) -> str | None:
    """A line for the user where the native encoder multiplies in another form than the weights are stored in."""
    packed = any(isinstance(weight, PackedWeight) for weight in module.parameters())
    if not multiplies_in_bf16(module, matmul) or (module.dtype == torch.bfloat16 and not packed):
        return None
    try:
        with torch.no_grad():
            PreparedEncoder.bound(module, (True,), kernel_matrix, 1)
    except NotNative:
        return None
    kernels = library()
    isa = None if kernels is None else kernels.bf16
    form = "packed" if packed else str(module.dtype).removeprefix("torch.")
    return f"{form} weights are multiplied in bf16 ({isa}); matmul='stored' (--matmul stored) multiplies as stored"


def note_on_prompts(module: Transformer, matmul: Matmul) -> str | None:
    """A line for the user where the tokens of prompts are multiplied with packed weights in bf16.

    Raises InputError as `Engine` for a `matmul` that cannot be had.
    """
    kernels = library()
    if not prompts_in_bf16(module, matmul) or kernels is None:
        return None
    return (
        f"prompts are multiplied with packed weights in bf16 ({kernels.bf16}), generated tokens by integers; "
        "matmul='stored' (--matmul stored) takes integers for both"
    )
