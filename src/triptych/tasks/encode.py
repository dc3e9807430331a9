"""Vectors of whole texts: the mode of pooling is chosen here, `nn/heads.py::Pooling` pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.errors import InputError
from triptych.generate import Executor
from triptych.native import library
from triptych.nn import Batch, Pooling, Transformer
from triptych.probe.prompts import check_numbers
from triptych.program.native_encoder import Matmul, NativeEncoder, encoder_binding, multiplies_in_bf16
from triptych.program.native_executor import prompts_in_bf16
from triptych.program.not_served import NotServed
from triptych.quantize import kernel_matrix
from triptych.spec import model as spec
from .labels import BATCH_TOKENS, batches
from .model_inputs import TaskModel, Texts

Mode = Literal["mean", "first", "dense"]


def pooling_of(module: Transformer, mode: str | None = None, normalize: bool | None = None) -> spec.PoolingSpec:
    """The pooling of the model's vectors: as the checkpoint says, else by their mean; `mode` and `normalize` replace
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
    model: TaskModel, texts: Texts, *, pooling: str | None = None, normalize: bool | None = None,
    batch_tokens: int = BATCH_TOKENS, matmul: Matmul = "auto",
) -> Tensor:  # fmt: skip
    """One vector for each text, `[B, D]` in the dtype of the model, in the order of the texts (`.float().numpy()` is a
    NumPy array): an encoder's output, or a decoder's last hidden states, pooled.

    `pooling` is "mean" (over the tokens), "first" (the [CLS] token) or "dense" (BERT's pooler), and `normalize`
    scales each vector to length 1; without them, both are as the checkpoint says.  Texts of similar length run together
    in batches of at most `batch_tokens` tokens.

    `matmul` is the arithmetic of an encoder's matrix products: "bf16", whatever its weights are stored as (sums and
    all else stay fp32; with MiniLM the least cosine to fp32 is above 0.9999); "stored", that of the stored weights;
    "auto", bf16 for a model of bf16, and for packed weights on a processor with AMX.

    A checkpoint of sentence-transformers also says how many tokens of a text it reads (`max_seq_length`): the rest
    of a text is cut off, as there.  Rows of ids are read whole.

    The result carries no graph, and is an ordinary tensor that training may use.  Raises InputError for pooling that
    the model does not have, for `batch_tokens` below 1, for "bf16" where the processor or the model does not allow it,
    and where a vector is NaN.
    """
    how, module, executor = pooling_of(model.module, pooling, normalize), model.module, model.executor
    rows = model.inputs.sentences(texts)
    if executor not in get_args(Executor):
        raise InputError(f"executor must be one of {list(get_args(Executor))}, not {executor!r}")
    integer("batch_tokens", batch_tokens, 1)
    bf16 = multiplies_in_bf16(module, matmul)
    pool = module.head
    if not isinstance(pool, Pooling) or how != pool.spec:
        pool = Pooling(replace(how, dense=None))
        pool.dense = module.head.dense if isinstance(module.head, Pooling) else None
    vectors: dict[int, Tensor] = {}
    native = NativeEncoder(module, matrix_of=kernel_matrix, bf16=bf16) if executor == "auto" else None
    for group in batches([module.length(row) for row in rows], batch_tokens):
        inputs, where = module.flat([rows[i] for i in group])
        hidden = None if native is None else native.hidden(inputs, where)
        if hidden is None:
            if matmul == "bf16":
                reason = "executor='modules'" if native is None else native.why_modules or "the model reads no ids"
                raise InputError(f"matmul='bf16' needs the native executor, which does not run here: {reason}")
            both = module.spec.layout == "encoder-decoder"  # the encoder alone
            hidden = module(Batch(source=(inputs, where)) if both else Batch(inputs=inputs, rows=where))
        elif pool.spec.mode == "dense":
            hidden = hidden.to(module.dtype)
        vectors.update(zip(group, pool(hidden, where).to(module.dtype), strict=True))
    stacked = torch.stack([vectors[i] for i in range(len(rows))])
    check_numbers("the vector of a text", [stacked])
    return stacked


def note_on_products(module: Transformer, matmul: Matmul) -> str | None:
    """A line for the user where the native encoder multiplies in another form than the weights are stored in."""
    packed = module.has_packed_weights
    if not multiplies_in_bf16(module, matmul) or (module.dtype == torch.bfloat16 and not packed):
        return None
    try:
        with torch.no_grad():
            encoder_binding(module, True, False, kernel_matrix, 1)
    except NotServed:
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


def note_on_vectors(model: TaskModel) -> str | None:
    """A line to print where the checkpoint was not trained to compare texts by their vectors; else None."""
    if isinstance(model.spec.head, spec.PoolingSpec):
        return None
    return (
        f"this {model.spec.family} checkpoint says nothing about pooling: its mean vectors rank texts less well "
        "than those of a model for sentence embeddings, such as hub:sentence-transformers/all-MiniLM-L6-v2"
    )
