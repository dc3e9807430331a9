"""What a model is, as plain data.  Nothing here imports torch."""

from triptych.spec.json import from_json, to_json
from triptych.spec.masks import (
    Mask,
    block_sparse,
    causal,
    dense,
    full,
    keys,
    prefix,
    same_document,
    window,
)
from triptych.spec.model import ClassHead, LMHead, MaskedLMHead, Model, Pooling, SpecialIds, TokenHead
from triptych.spec.part import Part
from triptych.spec.parts import (
    GLU,
    MLP,
    Attention,
    Block,
    Embed,
    Kind,
    LayerNorm,
    Linear,
    Norms,
    RMSNorm,
    Stack,
    attention,
    glu,
    mlp,
)
from triptych.spec.positions import Alibi, Learned, Rope, Sinusoidal, T5Buckets

__all__ = [
    "GLU", "MLP", "Alibi", "Attention", "Block", "ClassHead", "Embed", "Kind", "LMHead", "LayerNorm", "Learned",
    "Linear", "Mask", "MaskedLMHead", "Model", "Norms", "Part", "Pooling", "RMSNorm", "Rope", "Sinusoidal",
    "SpecialIds", "Stack", "T5Buckets", "TokenHead", "attention", "block_sparse", "causal", "dense", "from_json",
    "full", "glu", "keys", "mlp", "prefix", "same_document", "to_json", "window",
]  # fmt: skip
