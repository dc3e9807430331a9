"""Mistral 7B (Jiang et al. 2023): Llama whose layers see a sliding window.  In GGUF its architecture is llama."""

from triptych import spec
from triptych.mapping import ConfigKeys
from . import decoder, llama

hf_types = {"mistral"}
gguf_names = {"mistral": "llama"}
ids, prefix, weights = llama.ids, llama.prefix, llama.weights


def config(keys: ConfigKeys) -> spec.ModelSpec:
    keys.assume(num_key_value_heads=8)
    stack = llama.stack(keys, windows=keys.optional_int("sliding_window", default=4096))
    return decoder.model(keys, "Mistral", stack)
