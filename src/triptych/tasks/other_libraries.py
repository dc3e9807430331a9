"""Names that users of transformers, TransformerLens and PyTorch try on a Model, and what Triptych has for each."""

from __future__ import annotations

_NAMES = {
    "config": "model.spec, or model.hf for the checkpoint's own config",
    "sites": "triptych.probe.sites(model.spec)",
    "to": "load(..., dtype=, device=), or model.module.to(...)",
    "eval": "nothing: a loaded model is in evaluation mode, and model.module.train() is the other one",
    "save_pretrained": "model.save(path)",
    "from_pretrained": "triptych.load(path)",
    "run_with_cache": "model.trace(texts, read=[...])",
    "run_with_hooks": "model.trace(texts, edit=[...])",
    "to_tokens": "model.ids(texts)",
    "forward": "model.logits(texts), or model.module(triptych.nn.Batch(...)) for hidden vectors with a graph",
}
_OF_MODULE = (
    "cuda", "double", "dtype", "float", "half", "load_state_dict", "modules", "named_modules", "named_parameters",
    "parameters", "requires_grad_", "state_dict", "train",
)  # fmt: skip


def instead_of(name: str) -> str:
    """ "; write ..." for an attribute that another library's model has; "" for any other name."""
    if name in _OF_MODULE:
        return f"; write model.module.{name}"
    return f"; write {_NAMES[name]}" if name in _NAMES else ""
