"""NaN in a weight of any family is in every logit and every hidden state, at any length and on every path: nothing is
generated or encoded from a broken model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import references
import triptych
from native_models import LLAMA, decoders, needs_native, seq2seq
from test_native_encoder import BERT
from triptych import nn
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.model import Model, create
from triptych.program.native_encoder import NativeEncoder
from triptych.program.native_executor import NativeStep
from triptych.quantize import kernel_matrix

LONGEST = 40
FEW = (1, 2, 16, LONGEST)
ENCODERS = ("bert", "roberta", "distilbert-base", "electra-base", "deberta-v2")


@contextmanager
def spoiled(weight: Tensor, *, whole: bool) -> Iterator[None]:
    """NaN in the first number of a weight, or in all of them, which some token is sure to read."""
    before = weight.detach().clone()
    with torch.no_grad():
        (weight if whole else weight.view(-1)[:1]).fill_(math.nan)
        yield
        weight.copy_(before)


def weights_of(module: nn.Transformer) -> dict[str, Tensor]:
    """The weights of the last block and those beside the blocks, without experts, of which a short row reads few."""
    blocks = [int(name.split("blocks.")[1].split(".")[0]) for name, _ in module.named_parameters() if "blocks." in name]
    last = max(blocks, default=0)
    return {
        name: weight
        for name, weight in module.named_parameters()
        if ("blocks." not in name or f"blocks.{last}." in name) and ".experts." not in name
    }


def lengths_for(name: str, context: int | None) -> list[int]:
    every = name.endswith(".q.weight")  # whose NaN is in the scores alone, which kernels of short rows have lost
    return [n for n in (range(1, LONGEST + 1) if every else FEW) if n <= (context or LONGEST)]


@torch.inference_mode()
def last_logits(module: nn.Transformer, length: int, path: str, source: list[list[int]] | None) -> Tensor:
    """[V] after `length` tokens, by the modules at once, by the modules in two steps, or natively."""
    cache = module.decoder.cache(1)
    cross = None if module.encoder is None else module.decoder.cross_cache()
    step = NativeStep(module, cache, cross, matrix_of=kernel_matrix, most_dense=LONGEST)
    flat = None if source is None else module.flat(source)
    if path == "native" and flat is not None:
        assert cross is not None
        encoder = NativeEncoder(module, matrix_of=kernel_matrix, dense=True)
        assert encoder.project(*flat, cross), encoder.why_modules
    out, past = torch.empty(0), 0
    for count in (length,) if path != "steps" or length == 1 else (length - 1, 1):
        ids, rows = [(past + i) * 7 % 19 for i in range(count)], Rows((count,), (past,))
        if path == "native":
            native = step.logits(ids, rows, range(count))
            assert native is not None, step.why_modules
            out = native
        else:
            held = {"cache": cache, "cross": cross} if path == "steps" else {}
            batch = nn.Batch(inputs=torch.tensor(ids), rows=rows, source=None if past else flat, **held)  # type: ignore[arg-type]
            out = module.logits(batch)
        past += count
    return out[-1]


def text_decoders() -> list[str]:
    return [name for name in decoders() if "whisper" not in name]


@needs_native
@pytest.mark.parametrize("name", text_decoders())
def test_nan_in_a_weight_is_in_every_logit(name: str) -> None:
    module = triptych.load(references.saved(name)[1]).module
    source = [[5, 6, 7]] if name in seq2seq() else None
    lost = []
    assert last_logits(module, 3, "native", source).isfinite().all()
    for weight_name, weight in weights_of(module).items():
        whole = "blocks." not in weight_name
        with spoiled(weight, whole=whole):
            for length in lengths_for(weight_name, module.spec.context):
                for path in ("once", "steps", "native"):
                    if not last_logits(module, length, path, source).isnan().all():
                        lost.append((weight_name, length, path))
    assert not lost


@needs_native
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_nan_in_a_weight_is_in_every_hidden_state(name: str) -> None:
    module = triptych.load(references.saved(name)[1]).module
    lost = []
    for weight_name, weight in weights_of(module).items():
        if not weight_name.startswith(("encoder.", "input.")):
            continue
        with spoiled(weight, whole="blocks." not in weight_name):
            for length in lengths_for(weight_name, module.spec.source_context):
                ids, rows = [5 + i % 9 for i in range(length)], Rows((length,))
                native = NativeEncoder(module, matrix_of=kernel_matrix, dense=True).hidden(ids, rows)
                for found in (module(nn.Batch(inputs=torch.tensor(ids), rows=rows)), native):
                    if found is not None and not found.isnan().any(-1).all():
                        lost.append((weight_name, length, found is native))
    assert not lost


def made(sizes: dict[str, object], executor: str) -> Model:
    model = create(sizes)
    model.executor = executor  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("executor", ["modules", "auto"])
def test_nothing_is_generated_or_encoded_from_a_broken_model(executor: str) -> None:
    decoder, encoder = made(LLAMA, executor), made(BERT, executor)
    q = decoder.module.decoder.blocks[0].attn.q.weight, encoder.module.encoder.blocks[0].attn.q.weight
    for length in range(1, LONGEST + 1):
        row = [1 + i % 9 for i in range(length)]
        decoder.generate([row], max_new_tokens=1)
        with spoiled(q[0], whole=False), spoiled(q[1], whole=False):
            with pytest.raises(InputError, match="not finite"):
                decoder.generate([row], max_new_tokens=1)
            assert decoder.logits([row])[0].isnan().any(-1).all()
            with pytest.raises(InputError, match="is NaN in this model"):
                encoder.encode([row])
