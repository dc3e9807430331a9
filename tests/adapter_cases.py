"""Random adapters of PEFT on random models of every family, beside the same here.

`draw(family, seed)` gives a `Case`: a model of the reference library, the directory of it, what it is asked, and a
configuration of LoRA whose targets are drawn from the linear maps that the reference has.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import configurations
import random_encoders
import training_cases
from test_configurations_encoders import Asked, gap, scored, write
from test_configurations_encoders import build as build_encoder
from triptych import nn
from triptych.attention import Rows
from triptych.model import Model
from triptych.nn import flat

WITHIN = 1e-5
DECODERS = tuple(name for name in configurations.FAMILIES)
OTHERS = tuple(random_encoders.FAMILIES)
FAMILIES = (*DECODERS, *OTHERS, "vision")


@dataclass(frozen=True, eq=False)
class Case:
    """`theirs` and `ours` are the outputs of a model for the same rows, a list with one tensor a row."""

    reference: Any
    base: Path
    config: dict[str, Any]
    theirs: Callable[[Any], list[Tensor]]
    ours: Callable[[Model], list[Tensor]]


def draw(family: str, seed: int, folder: Path) -> Case:
    random = Random(f"adapter {family} {seed}")
    reference, theirs, ours = _asked(family, seed, folder / "base")
    return Case(reference, folder / "base", lora(random, reference), theirs, ours)


def _asked(family: str, seed: int, base: Path) -> tuple[Any, Any, Any]:
    if family in DECODERS:
        config = configurations.draw(family, seed)
        reference = configurations.reference(config, seed)
        configurations.write(reference, config, base, Random(seed))
        rows = [[5, 6, 7, 8, 9, 10, 11], [20, 3, 4], [12, 13, 14, 15, 3]]
        return (
            reference,
            lambda model: [model(input_ids=torch.tensor([row])).logits[0] for row in rows],
            lambda model: scored(model, model.module(nn.Batch(**_flat(rows))), Rows(tuple(map(len, rows)))),
        )
    if family == "vision":
        reference = training_cases.vision_reference(seed).eval()
        reference.save_pretrained(base)
        size = reference.config.encoder.image_size
        sides = size if isinstance(size, list | tuple) else [size, size]
        random = torch.Generator().manual_seed(seed)
        pixels = torch.randn(2, reference.config.encoder.num_channels, *sides, generator=random)
        ids = [[1, 5, 9, 4], [1, 7, 3, 8]]

        def own(model: Model) -> list[Tensor]:
            inputs, where = flat(ids, torch.device("cpu"))
            batch = nn.Batch(inputs=inputs, rows=where, source=model.module.flat(list(pixels)))
            return scored(model, model.module(batch), where)

        return (
            reference,
            lambda model: list(model(pixel_values=pixels, decoder_input_ids=torch.tensor(ids)).logits),
            own,
        )
    number = 1000 * seed
    # The reference itself reads a BART with two labels, which it saves as a default, as one with three.
    left_out = ("BertForPreTraining", "BartForSequenceClassification")
    while (drawn := random_encoders.draw(family, number)).model in left_out:
        number += 1
    reference = build_encoder(drawn, seed)
    base.mkdir(parents=True)
    write(reference, drawn, base)
    asked = Asked(reference, drawn, seed)
    return reference, asked.theirs, asked.ours


def _flat(rows: list[list[int]]) -> dict[str, Any]:
    ids, where = flat(rows, torch.device("cpu"))
    return {"inputs": ids, "rows": where}


def linear_names(reference: Any) -> list[str]:
    """The linear maps of the blocks, by the names of their modules."""
    from transformers.pytorch_utils import Conv1D

    names = [name for name, part in reference.named_modules() if isinstance(part, torch.nn.Linear | Conv1D)]
    if "moe" in reference.config.model_type:  # PEFT takes maps of its dense blocks for those of its experts
        names = [name for name in names if ".mlp." not in name]
    return [name for name in names if any(piece.isdigit() for piece in name.split("."))]


def lora(random: Random, reference: Any) -> dict[str, Any]:
    """The arguments of `LoraConfig`."""
    names = linear_names(reference)
    leaves = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    config: dict[str, Any] = {"r": random.randint(1, 4), "lora_alpha": random.choice([1, 3, 8]),
                              "use_rslora": random.random() < 0.3, "init_lora_weights": False}  # fmt: skip
    how = random.random()
    if how < 0.2:
        config["target_modules"] = sorted(random.sample(names, min(len(names), 3)))
    else:
        config["target_modules"] = sorted(random.sample(leaves, random.randint(1, len(leaves))))
    chosen = [name for name in names if any(name == t or name.endswith(f".{t}") for t in config["target_modules"])]
    if random.random() < 0.4:
        # One pattern: PEFT sorts several as it saves them, and then reads its own file otherwise where two match.
        config["rank_pattern"] = {random.choice([random.choice(chosen), chosen[0].rpartition(".")[2]]): 5}
    if random.random() < 0.4:
        config["alpha_pattern"] = {random.choice(chosen).rpartition(".")[2]: 6}
    return config


def peft_model(case: Case, seed: int) -> Any:
    """The reference with random factors."""
    import peft

    made = peft.get_peft_model(copy.deepcopy(case.reference), peft.LoraConfig(**case.config)).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return made


def inner(adapted: Any) -> Any:
    """The reference's model inside PEFT's, whose class has another name."""
    return adapted.base_model.model


def apart(found: list[Tensor], expected: list[Tensor], model: Model) -> float:
    with torch.no_grad():
        return gap([one.detach() for one in found], [one.detach() for one in expected], model)
