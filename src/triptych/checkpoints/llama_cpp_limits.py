"""Which GGUF files llama.cpp refuses (its `llama_model::load_tensors`): all tensors that it needs for an architecture
must be there, and no other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_BLOCK = re.compile(r"^blk\.\d+\.")
_UNKNOWN_ARCHITECTURES = ("gptj",)
#: Tensors that an architecture must have, and what a model without them has.
_NEEDED = {
    "phi2": {"output.weight": "tied embeddings"},
    "gptneox": {"output.weight": "tied embeddings", "attn_qkv.bias": "no biases"},
    "starcoder2": {"attn_output.bias": "no biases"},
}
#: Tensors that an architecture must not have, and what a model with them has.
_REFUSED = {
    "gemma": {"attn_q.bias": "biases in its attention", "output.weight": "an untied head"},
    "gemma2": {"attn_q.bias": "biases in its attention", "output.weight": "an untied head"},
    "gemma3": {"attn_q.bias": "biases in its attention"},
    "qwen3moe": {"attn_output.bias": "a bias in the output projection of its attention"},
}
_FREQUENCIES = "rope_freqs.weight"
_READ_FREQUENCIES = ("llama", "granite")


def refusals(architecture: str, tensors: Collection[str]) -> Iterator[str]:
    """A note for each reason why llama.cpp does not open a file of this architecture with these tensors."""
    names = {_BLOCK.sub("", name) for name in tensors}
    problems = []
    if architecture in _UNKNOWN_ARCHITECTURES:
        problems.append("is of an architecture that it does not have")
    problems += [f"has {what}" for name, what in _NEEDED.get(architecture, {}).items() if name not in names]
    problems += [f"has {what}" for name, what in _REFUSED.get(architecture, {}).items() if name in names]
    if _FREQUENCIES in names and architecture not in _READ_FREQUENCIES:
        problems.append("has frequencies of rotation of its own (rope_type llama3)")
    for problem in problems:
        yield f"llama.cpp does not open this file: the {architecture} model {problem}"
