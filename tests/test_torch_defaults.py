"""Under another default dtype or default device of torch everything is computed as without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cli_models
from triptych.model import Model, create, load
from triptych.probe import Trace

pytestmark = pytest.mark.usefixtures("unchecked")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3}
TEXTS = ["ab", "the old mill"]


def model(layout: str) -> Model:
    return load(cli_models.checkpoint(layout))


def packed() -> Model:
    tokenizer = model("decoder").tokenizer
    assert tokenizer is not None
    path = cli_models.checkpoint("decoder").parent / "blocks"
    create({**cli_models.BLOCKS, "vocab_size": tokenizer.vocab_size}, tokenizer).save(path)
    return load(path, quantize="int8")


def traced(trace: Trace) -> list[Tensor]:
    return [value for name in trace for value in trace[name]]


CALLS: dict[str, Callable[[], Any]] = {
    "generate": lambda: [one.ids for one in model("decoder").generate(TEXTS, max_new_tokens=8)],
    "sampled": lambda: model("decoder").generate(TEXTS, max_new_tokens=8, **SAMPLED),
    "beams": lambda: model("decoder").generate(TEXTS, max_new_tokens=8, beams=3),
    "stream": lambda: "".join(model("decoder").stream("ab", max_new_tokens=8)),
    "packed": lambda: packed().generate(TEXTS, max_new_tokens=8),
    "logits": lambda: model("decoder").logits(TEXTS),
    "logits of both": lambda: model("encoder-decoder").logits(TEXTS, ["x", "yz"]),
    "encode": lambda: model("encoder").encode(["the old mill", "river"]),
    "trace": lambda: traced(model("decoder").trace(TEXTS)),
    "statistics": lambda: traced(model("decoder").statistics(TEXTS, delimiters=["a", 5])),
    "statistics of both": lambda: traced(model("encoder-decoder").statistics(TEXTS, ["x", "yz"])),
    "patch": lambda: model("decoder").patch("ab", "ac").values,
    "ablate": lambda: model("decoder").ablate(TEXTS, how="mean").values,
    "heads": lambda: [row.p for row in model("decoder").heads(["ab ab ab ab"]).rows],
    "create": lambda: list(create({**cli_models.LLAMA, "vocab_size": 40}).module.state_dict().values()),
}


def numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    return [numbers(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_default_dtype_changes_nothing(call: str, dtype: torch.dtype) -> None:
    expected = numbers(CALLS[call]())
    torch.set_default_dtype(dtype)
    try:
        result = CALLS[call]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert numbers(result) == expected


@pytest.mark.parametrize("call", ["generate", "logits of both", "encode", "trace", "patch", "create"])
def test_another_default_device_changes_nothing(call: str) -> None:
    expected = CALLS[call]()
    with torch.device("meta"):
        result = CALLS[call]()
    torch.testing.assert_close(result, expected) if isinstance(result, Tensor | list) else None
    assert isinstance(result, Tensor | list) or result == expected
