"""The same checkpoint in transformers: its outputs, and how far it is from ours site by site."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from triptych import nn
from triptych.check.case import Case, headless, max_abs_diff, measured, mixture
from triptych.check.report import Layer
from triptych.checkpoints.adapter_files import deltas
from triptych.errors import InputError
from triptych.model import Model
from triptych.nn import Row
from triptych.probe import Plan, Session
from triptych.spec import (
    ClassHeadSpec,
    EmbedSpec,
    FramesSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    PatchesSpec,
    ReplacedHeadSpec,
    SpanHeadSpec,
    TokenHeadSpec,
)

# Where a config does not name its class: the one with our head.
AUTO: dict[type, str] = {
    LMHeadSpec: "AutoModelForCausalLM",
    MaskedLMHeadSpec: "AutoModelForMaskedLM",
    ClassHeadSpec: "AutoModelForSequenceClassification",
    TokenHeadSpec: "AutoModelForTokenClassification",
    SpanHeadSpec: "AutoModelForQuestionAnswering",
    ReplacedHeadSpec: "AutoModelForPreTraining",
}
UNNORMED = {"vit"}  # families whose last hidden state, over there, comes before the final norm


def wanted(case: Case, *, required: bool) -> bool:
    """Whether to compare with transformers.  Raises InputError where it is required and cannot be done."""
    path, hf = case.model.path, case.model.hf or {}
    needs = ["transformers"] + ["gguf"] * (path is not None and path.suffix == ".gguf")
    missing = [name for name in needs if find_spec(name) is None]
    if path is None or hf.get("model_type") in (None, "triptych"):
        why = "transformers has no such model"
    elif missing:
        why = f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})"
    else:
        return True
    if required:
        raise InputError(f"cannot check against transformers: {why}")
    case.skipped.append(f"against transformers: {why}")
    return False


def against_transformers(case: Case) -> None:
    """Log-probabilities, and how the two drift max_abs_diff from site to site."""
    peer = _peer(case.model)
    spec = case.model.spec
    prefixes = {name: f"{name}." if spec.layout == "encoder-decoder" else "" for name in spec.stacks}
    read = [f"{p}{site}" for p in prefixes.values() for site in ("embed", "blocks.*.resid_post", "final")]
    layers: dict[str, Layer] = {}
    difference = 0.0
    for i, row in enumerate(case.rows):
        session = Session(Plan.of(spec, read))
        ours = case.run(slice(i, i + 1), session.taps)
        trace = session.close()
        theirs = _their(peer, row, None if case.targets is None else case.targets[i])
        out = _their_output(theirs, case.model)
        difference = max(difference, max_abs_diff(ours, list(out)))
        for name, stack in spec.stacks.items():
            states = theirs[f"{name}_hidden_states" if prefixes[name] else "hidden_states"]
            middle = [f"blocks.{b}.resid_post" for b in range(len(stack.blocks) - 1)]
            last = f"blocks.{len(stack.blocks) - 1}.resid_post" if spec.family in UNNORMED else "final"
            for site, state in zip(("embed", *middle, last), states, strict=True):
                full = prefixes[name] + site
                layer = _layer(full, trace[full][0], state[0], case.threshold)
                layers[full] = _further(layers.get(full, layer), layer)
    case.layers += layers.values()
    case.record("transformers", difference, case.threshold, f"{type(peer).__name__}, fp32")


def _layer(site: str, ours: Tensor, theirs: Tensor, threshold: float) -> Layer:
    """One row at one site, [T, D] each."""
    by_position = (ours.double() - theirs.double()).abs().amax(-1) / float(theirs.abs().max())
    apart = (~(by_position <= threshold)).nonzero().flatten().tolist()
    return Layer(site, float(by_position.max()), apart[0] if apart else None)


def _further(a: Layer, b: Layer) -> Layer:
    """Of two rows at one site the greater difference and the lower position."""
    begins = [layer.first_position for layer in (a, b) if layer.first_position is not None]
    greatest = float(torch.tensor([a.difference, b.difference], dtype=torch.float64).max())  # NaN where either is
    return Layer(a.site, greatest, min(begins, default=None))


def _peer(model: Model) -> Any:
    """The same checkpoint in transformers, from local safetensors or GGUF alone.  Raises InputError if it cannot."""
    import transformers

    assert model.path is not None
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "attn_implementation": "eager"}
    if mixture(model):
        options["experts_implementation"] = "eager"  # their grouped kernel refuses some widths
    folder = model.path
    if folder.suffix == ".gguf":
        folder, options["gguf_file"] = model.path.parent, model.path.name
    else:
        options["use_safetensors"] = True
    names = (model.hf or {}).get("architectures") or [AUTO.get(type(model.spec.head), "AutoModel")]
    name = names[0]
    if name == AUTO[LMHeadSpec] and model.spec.encoder is not None:
        inputs = {EmbedSpec: "Seq2SeqLM", FramesSpec: "SpeechSeq2Seq", PatchesSpec: "ImageTextToText"}
        name = f"AutoModelFor{inputs[type(model.spec.reads.embed)]}"
    kind = getattr(transformers, name, transformers.AutoModel)
    try:
        with redirect_stderr(io.StringIO()):  # it draws a bar of its own even when it is told not to
            peer = kind.from_pretrained(str(folder), **options).eval()
    except Exception as error:  # it raises from a dozen families
        message = str(error).strip().partition("\n")[0]
        raise InputError(
            f"transformers cannot load {model.path} ({message}); leave it out with --against none"
        ) from error
    if model.adapter is not None:
        with torch.no_grad():
            for stored, delta in deltas(model.spec, nn.factors_of(model.module)).items():
                peer.get_parameter(stored).add_(delta)
    return peer


def _their(peer: Any, row: Row, target: list[int] | None) -> Any:
    """Its outputs on one row, hidden states included; frames lie along its last axis."""
    if isinstance(row, Tensor):
        inputs = {"input_features": row.T[None]} if row.dim() == 2 else {"pixel_values": row[None]}
    else:
        inputs = {"input_ids": torch.tensor([row])}
    if target is not None:
        inputs["decoder_input_ids"] = torch.tensor([target])
    with torch.inference_mode():
        return peer(**inputs, output_hidden_states=True)


def _their_output(theirs: Any, model: Model) -> Tensor:
    """[1, T, ...] in the form of ours."""
    if headless(model):
        hidden: Tensor = theirs["last_hidden_state"]
        return hidden
    if isinstance(model.spec.head, SpanHeadSpec):
        return torch.stack((theirs["start_logits"], theirs["end_logits"]), dim=-1)
    logits = theirs["logits"]
    return measured(model, logits.unsqueeze(-1) if isinstance(model.spec.head, ReplacedHeadSpec) else logits)
