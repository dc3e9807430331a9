"""Every family trains: a gradient for every parameter, and a step along it that lowers the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import references
import triptych
from parity import ROWS, TARGETS, rows_of
from triptych.model import Model
from triptych.train import causal, collate, loss, seq2seq
from triptych.train.objectives import Example, TrainingBatch

# Base models and labelled ones have another loss than text gives.
TRAINED = [
    name
    for name, (_, kind, _) in references.VARIANTS.items()
    if kind.endswith(
        ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "MarianMTModel", "EncoderDecoderModel")
    )
]


def batch(model: Model) -> TrainingBatch:
    module = model.module
    if module.spec.layout == "encoder-decoder":
        given = collate([seq2seq(a, b, start=0) for a, b in zip(ROWS, TARGETS, strict=True)])
        return replace(given, source=module.flat(rows_of(model)))
    if module.spec.layout == "decoder":
        return collate([causal(row) for row in ROWS if len(row) > 1])
    rows = [np.asarray(row, dtype=np.int32) for row in ROWS]
    return collate([Example(row, row[::-1].copy(), np.arange(len(row)) % 2 == 0) for row in rows])


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_training_lowers_the_loss(name: str) -> None:
    model = triptych.load(references.saved(name)[1])
    module, given = model.module, batch(model)
    before, _ = loss(module, given)
    before.backward()
    idle = [name for name, p in module.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert [name for name in idle if ".experts." not in name] == []  # an expert that no token chose learns nothing
    with torch.no_grad():
        norm = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
        for p in module.parameters():
            if p.grad is not None:
                p.copy_(p - p.grad * (1e-3 / norm))
        after, _ = loss(module, given)
    assert float(after) < float(before.detach())
