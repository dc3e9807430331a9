"""A checkpoint in transformers, for `triptych check`: its states and outputs in the form of ours."""

import io
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor

from triptych import nn
from triptych.check.comparison import headless, measured, mixture
from triptych.checkpoints.adapter_targets import slots_of, stored_modules
from triptych.errors import InputError
from triptych.model import Model
from triptych.nn import InputRow
from triptych.nn.packed_weight import dense
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


class TransformersReference:
    """See `triptych.check.peer.Reference`."""

    def __init__(self, model: Model) -> None:
        self.model, self.peer = model, _peer(model)

    @property
    def name(self) -> str:
        return type(self.peer).__name__

    def run(self, row: InputRow, target: list[int] | None) -> tuple[dict[str, Tensor], Tensor]:
        spec, theirs = self.model.spec, _their(self.peer, row, target)
        states: dict[str, Tensor] = {}
        for name, stack in spec.stacks.items():
            both = spec.layout == "encoder-decoder"
            middle = [f"blocks.{b}.resid_post" for b in range(len(stack.blocks) - 1)]
            last = f"blocks.{len(stack.blocks) - 1}.resid_post" if spec.family in UNNORMED else "final"
            hidden = theirs[f"{name}_hidden_states" if both else "hidden_states"]
            for site, state in zip(("embed", *middle, last), hidden, strict=True):
                states[f"{name}.{site}" if both else site] = state[0]
        return states, _their_output(theirs, self.model)


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
            for stored, delta in _deltas(model.module).items():
                peer.get_parameter(stored).add_(delta)
    return peer


def _their(peer: Any, row: InputRow, target: list[int] | None) -> Any:
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


def _deltas(module: nn.Transformer) -> dict[str, Tensor]:
    """What the adapter adds to each stored tensor, by its name in an HF checkpoint and in its layout, in fp32."""
    added: dict[str, Tensor] = {}
    factors = nn.factors_of(module)
    weights = {slot: dense(module.get_parameter(f"{slot}.weight")).float() for slot in factors}
    for load in stored_modules(module.spec).values():
        slots = slots_of(load)
        if any(slot in factors for slot in slots):
            parts = {
                name: factors[slot].merged(weights[slot]) - weights[slot] if slot in factors else torch.zeros(shape)
                for name, slot, shape in zip(load.ours, slots, load.shapes, strict=True)
            }
            added[load.source] = load.to_source(parts)
    return added
