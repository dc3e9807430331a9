"""Random cases of every training objective: a model of the reference library, rows with what is to be predicted, and
the recipe of a few steps, all drawn from a seed.

`draw(objective, seed)` gives a `Case`.  `compare(case)` trains it here with the `Trainer` and beside it the reference
with PyTorch's own AdamW, and tells how far losses, gradients and weights are apart.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import configurations
import random_encoders
import triptych
from references import SPARE
from test_configurations_encoders import build, write
from triptych import nn
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.families import save_plan
from triptych.train import Example, Optimizer, OptimizerSettings, RunSettings, Schedule, Trainer, collate, loss

STEPS = 3
Theirs = Callable[[Any], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """A reference model and the same weights here, rows for here, the reference's mean loss, and how both train.

    `whole` is the loss of all rows at once where that of micro-batches is another."""

    reference: Any
    module: nn.Transformer
    examples: list[Example]
    theirs: Theirs
    optimizer: OptimizerSettings
    schedule: Schedule
    accumulate: int
    whole: Theirs | None = None


@dataclass(frozen=True, eq=False)
class SameRows:
    """Data that give the same rows in each step."""

    examples: list[Example]

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return self.examples

    def held_out_rows(self) -> Iterator[Example]:
        return iter(self.examples)

    def targets(self) -> Any:
        return np.concatenate([one.targets for one in self.examples])


def case_of(
    random: Random, reference: Any, module: nn.Transformer, examples: Sequence[Example], theirs: Theirs
) -> Case:
    """The case with a drawn optimizer, schedule and number of micro-batches."""
    optimizer = OptimizerSettings(
        name="adamw", lr=random.choice([1e-3, 1e-2]), betas=random.choice([(0.9, 0.95), (0.8, 0.999)]),
        eps=random.choice([1e-3, 1e-2]), weight_decay=random.choice([0.0, 0.1, 0.5]),
        clip=random.choice([0.0, 0.05, 1.0]),
    )  # fmt: skip
    schedule = Schedule(
        shape=random.choice(["cosine", "linear", "constant"]), warmup=random.choice([0.0, 0.5, 0.9]),
        floor=random.choice([0.0, 0.3]),
    )  # fmt: skip
    return Case(reference, module, list(examples), theirs, optimizer, schedule, random.randint(1, 4))


# ---------------------------------------------------------------- models


def without_dropout(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: 0.0 if "drop" in key or "pdrop" in key else value for key, value in keys.items()}


_DROPOUTS = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"), "gptj": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"), "phi": ("attention_dropout", "embd_pdrop", "resid_pdrop"),
    "phi3": ("attention_dropout", "embd_pdrop", "resid_pdrop"),
    "starcoder2": ("attention_dropout", "embedding_dropout", "residual_dropout"),
}  # fmt: skip


def decoder(family: str, seed: int, **changes: Any) -> tuple[Any, nn.Transformer]:
    """A random decoder of `family` in the reference and here."""
    config = without_dropout(configurations.draw(family, seed)) | changes
    config |= dict.fromkeys(_DROPOUTS.get(family, ("attention_dropout",)), 0.0)
    reference = configurations.reference(config, seed)
    with tempfile.TemporaryDirectory() as folder:
        configurations.write(reference, config, Path(folder) / "model", Random(seed))
        module = triptych.load(Path(folder) / "model", dtype="float32").module
    return reference.train(), module


_ENCODER_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout", "attention_dropout",
    "activation_dropout", "qa_dropout", "seq_classif_dropout", "embedding_dropout", "mlp_dropout", "dropout_rate",
    "encoder_layerdrop", "decoder_layerdrop", "summary_last_dropout", "pooler_dropout",
)  # fmt: skip


def other(
    family: str, kind: str, seed: int, accept: Callable[[Any], bool] = lambda drawn: True, **file: Any
) -> tuple[Any, Any]:
    """A random model of a family that `random_encoders` draws, of the class that ends in `kind`; `file` is what else
    its config.json says."""
    import transformers

    number = 1000 * seed
    while not (drawn := random_encoders.draw(family, number)).model.endswith(kind) or not accept(drawn):
        number += 1
    known = getattr(transformers, drawn.config)().to_dict()
    zeros = {key: 0.0 for key in _ENCODER_DROPOUTS if key in known}
    # A second copy of what is one tensor there would be a head of its own in a file of mT5.
    whole = drawn.whole and family != "mt5"
    drawn = replace(drawn, keys={**without_dropout(drawn.keys), **zeros}, whole=whole, file={**drawn.file, **file})
    reference = build(drawn, seed)
    return reference.train(), opened(reference, drawn)


def vision(seed: int) -> dict[str, Any]:
    """The keys of a ViT that GPT-2 or BERT reads, of random sizes, without dropout."""
    dice = random_encoders.Dice(f"vision {seed}")
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    patch, vocab, context = dice.int(2, 5), dice.int(29, 43), dice.int(26, 40)
    heads, other_heads = dice.int(1, 4), dice.int(1, 4)
    width = heads * dice.int(3, 9)
    image = dice.of([patch * dice.int(2, 4)] * 2, [patch * 2, patch * 3])
    encoder = {
        "model_type": "vit", "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": dice.int(1, 3),
        "intermediate_size": dice.int(11, 47), "hidden_act": dice.of("gelu", "relu"), "patch_size": patch,
        "image_size": image if image[0] != image[1] else image[0], "num_channels": dice.int(1, 4),
        "qkv_bias": dice.maybe(0.7), "layer_norm_eps": dice.of(1e-12, 0.05), **drop,
    }  # fmt: skip
    # Of equal widths the reference leaves out the projection of the encoder's vectors.
    inner = width if dice.maybe(0.3) and width % other_heads == 0 else other_heads * dice.int(3, 9)
    gpt2 = {
        "model_type": "gpt2", "n_embd": inner, "n_head": other_heads, "n_layer": dice.int(1, 3),
        "n_inner": dice.of(None, 37),
        "n_positions": context, "activation_function": dice.of("gelu_new", "relu"),
        "layer_norm_epsilon": dice.of(1e-5, 0.05),
        "scale_attn_by_inverse_layer_idx": dice.maybe(0.3), "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    bert = {
        "model_type": "bert", "hidden_size": inner, "num_attention_heads": other_heads,
        "num_hidden_layers": dice.int(1, 3), "intermediate_size": dice.int(11, 47), "max_position_embeddings": context,
        "type_vocab_size": dice.int(1, 3),
        "hidden_act": dice.of("gelu", "silu"), "layer_norm_eps": dice.of(1e-12, 0.05), **drop,
    }  # fmt: skip
    both = {"vocab_size": vocab, "tie_word_embeddings": dice.maybe(0.6), "is_decoder": True,
            "add_cross_attention": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    ids = {"decoder_start_token_id": dice.of(1, 3), "eos_token_id": 2, "pad_token_id": 0}
    return {"encoder": encoder, "decoder": dice.of(gpt2, bert) | both, **ids}


def vision_reference(seed: int) -> Any:
    """The reference's model of `vision(seed)`; every tensor is random, norms too."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.VisionEncoderDecoderModel(transformers.VisionEncoderDecoderConfig(**vision(seed))).float()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


def vision_case(seed: int) -> tuple[Any, nn.Transformer]:
    """The same model in the reference and here."""
    reference = vision_reference(seed)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return reference.train(), triptych.load(Path(folder), dtype="float32").module


def opened(reference: Any, drawn: Any) -> nn.Transformer:
    with tempfile.TemporaryDirectory() as folder:
        write(reference, drawn, Path(folder))
        return triptych.load(Path(folder), dtype="float32").module


# ---------------------------------------------------------------- the comparison


def decayed(model: Any) -> set[str]:
    """The parameters that lose a share of themselves: matrices of linear maps, unless they are an embedding too."""
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    linear = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, torch.nn.Linear | Conv1D) and id(part.weight) not in embeddings
    }
    experts = {id(p) for name, p in model.named_parameters() if ".experts." in name or name.endswith(".gate.weight")}
    return {name for name, p in model.named_parameters() if id(p) in linear | experts}


def stored(model: Any, values: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters of the reference, or other `values` of their shapes, by their names in a file."""
    if values is not None:
        model = deepcopy(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
            for name, buffer in model.named_buffers():
                if name == "final_logits_bias":
                    buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _read(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what the reference stores beside a head or tables of its own, and does not read."""
    config, before = case.reference.config, ""
    if config.model_type == "vision-encoder-decoder":
        config, before = config.decoder, "decoder."
    tied = getattr(config, "tie_word_embeddings", True) or config.model_type not in SPARE
    return {name: tensor for name, tensor in tensors.items() if tied or name != before + SPARE[config.model_type]}


def factor_by_hand(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of step `step` of `steps`, counted from 1, as a share of its peak."""
    share = step / steps
    if share < schedule.warmup:
        return share / schedule.warmup
    after = (share - schedule.warmup) / (1 - schedule.warmup)
    low = schedule.floor
    return {
        "constant": 1.0,
        "linear": 1 - after * (1 - low),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * after)) / 2,
    }[schedule.shape]


@dataclass(frozen=True)
class Apart:
    """The largest differences: of losses and of gradient norms in all steps, relative; of the first gradients of each
    matrix, relative to its largest or a hundredth of the largest of all; of the weights after the steps, relative to
    how far any has moved; and where the last two are."""

    loss: float
    norm: float
    gradient: float
    weight: float
    where: str = ""

    @property
    def worst(self) -> float:
        values = (self.loss, self.norm, self.gradient, self.weight)
        return math.inf if any(math.isnan(value) for value in values) else max(values)


def compare(case: Case) -> Apart:
    before = _read(case, stored(case.reference))
    theirs, their_gradients = _reference_steps(case)
    their_gradients = _read(case, their_gradients)
    own_gradients = _read(case, _gradients(case))
    losses, norms = _own_steps(case)
    top = max(float(one.abs().max()) for one in their_gradients.values())
    gradient, where = 0.0, ""
    shared = own_gradients.keys() & their_gradients.keys()
    assert len(shared) >= len(own_gradients) - 2, sorted(own_gradients.keys() - their_gradients.keys())[:5]
    for name in shared:
        wanted = their_gradients[name]
        gap = float((own_gradients[name] - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-2 * top)
        if gap > gradient:
            gradient, where = gap, name
    after, own = _read(case, stored(case.reference)), _read(case, dict(to_checkpoint(case.module, {})[0]))
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    weight, at = 0.0, ""
    for name in own.keys() & after.keys():
        gap = float((own[name] - after[name]).abs().max()) / moved
        if gap > weight:
            weight, at = gap, name
    return Apart(
        max(abs(a - b[0]) / max(abs(b[0]), 0.1) for a, b in zip(losses, theirs, strict=True)),
        max(abs(a - b[1]) / b[1] for a, b in zip(norms, theirs, strict=True)),
        gradient,
        weight,
        f"{where} / {at}",
    )


def _reference_steps(case: Case) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Loss and gradient norm of each step, and the gradients of the first by their names in a file."""
    model, settings = case.reference, case.optimizer
    named = dict(model.named_parameters())
    loses = decayed(model)
    groups = [
        {
            "params": [p for name, p in named.items() if (name in loses) == loss],
            "weight_decay": loss * settings.weight_decay,
        }
        for loss in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=settings.eps)
    steps, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        value = case.theirs(model)
        value.backward()
        if not step and case.whole is not None:
            optimizer.zero_grad()
            case.whole(model).backward()
        if not step:
            zero = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
            gradients = stored(model, zero)
        if not step and case.whole is not None:
            optimizer.zero_grad()
            case.theirs(model).backward()
        norm = torch.stack([p.grad.norm() for p in named.values() if p.grad is not None]).norm()
        if settings.clip and norm > settings.clip:
            for p in named.values():
                if p.grad is not None:
                    p.grad.mul_(settings.clip / norm)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * factor_by_hand(case.schedule, step + 1, STEPS)
        optimizer.step()
        steps.append((float(value.detach()), float(norm)))
    return steps, gradients


def _gradients(case: Case) -> dict[str, Tensor]:
    """Of all rows at once, by the names in a file."""
    batch = collate(case.examples)
    nats, _ = loss(case.module, batch)
    (nats / batch.weight).backward()
    module = case.module
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = None
    return {step.source: step.to_source(own) for step in save_plan(module.spec)}


def _own_steps(case: Case) -> tuple[list[float], list[float]]:
    run = RunSettings(
        rows=len(case.examples), length=64, steps=STEPS, accumulate=case.accumulate, precision="fp32",
        evaluate_every=0.0, save_every=0.0, sample_every=0.0,
    )  # fmt: skip
    optimizer = Optimizer(case.module, case.optimizer)
    trainer = Trainer(case.module, SameRows(case.examples), optimizer, case.schedule, run)
    events: list[Any] = []
    trainer.on_step = events.append
    trainer.run()
    return [event.loss for event in events], [event.norm for event in events]
