"""How many Python functions of this package one step enters: `python bench/frames.py`.

Counted with `sys.setprofile`: every call event of a Python frame whose file lies in the package (a comprehension of
Python 3.11 is a frame; so is each resumption of a generator).  A count is made for a Llama of 2 layers and for one of
4, half of the difference is what a layer enters, and what is left of the smaller count is what is
entered outside the layers.  The steps counted are

- a greedy step of the generation engine for one row in the middle of a generation, the choice of the token included,
  without a tokenizer: by the modules ("decode"), and as the engine runs it where the native kernels are there
  ("native");
- a training step on five rows of different lengths, forward and backward, without the optimizer.

The limits are in `LIMITS`.

This counts calls and measures no time, so the numbers are the same on every machine; they differ between versions of
Python, because 3.12 runs comprehensions inside the frame around them.

PYTHONPATH chooses the checkout: `PYTHONPATH=../old/src python bench/frames.py` counts an older one.
"""

import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import triptych
from triptych import generate
from triptych.model import Model
from triptych.native import library
from triptych.train import causal, collate, loss

PACKAGE = str(Path(triptych.__file__).parent)
LAYERS = (2, 4)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TRAINED = [PROMPT[:length] for length in (8, 5, 6, 7, 4)]  # rows of different lengths, as in real text
LIMITS = {  # with Python 3.11
    "decode per layer": 50, "decode outside": 20, "native per layer": 0, "native outside": 20, "training per layer": 80,
}  # fmt: skip
WARM_UP = 3  # steps before the one that is counted


def llama(layers: int) -> Model:
    """A small Llama with random weights."""
    config = {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers,
        "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 64, "max_position_embeddings": 128,
    }  # fmt: skip
    return triptych.create(config, seed=0)


def frames(call: Callable[[], object]) -> int:
    """The frames of the package that `call` enters."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def stepper(
    model: Model, prompt: Sequence[int] = PROMPT, tokens: int = 64, *, modules: bool = False
) -> Callable[[], object]:
    """A call that makes one greedy step of the generation engine for one row, at most `tokens` times.

    This is the one place that knows how the engine is driven; `bench/decode.py` times the same step.
    """
    engine = generate.Engine(model.module, executor="modules") if modules else generate.Engine(model.module)
    engine.add(generate.Request(prompt=list(prompt), max_new_tokens=tokens))
    return engine.step


def decode_frames(layers: int, *, modules: bool) -> int:
    """The frames of one greedy step after the prompt and a few tokens."""
    step = stepper(llama(layers), modules=modules)
    for _ in range(WARM_UP):
        step()
    return frames(step)


def training_frames(layers: int) -> int:
    """The frames of a forward and a backward of a batch."""
    module, batch = llama(layers).module.train(), collate([causal(row) for row in TRAINED])

    def step() -> None:
        total, _ = loss(module, batch)
        total.backward()

    for _ in range(WARM_UP):
        step()
    return frames(step)


def per_layer_and_outside(count: Callable[[int], int]) -> tuple[int, int]:
    """Frames that a layer adds, and those of a model without layers, from two models.

    Raises ValueError if the difference is no multiple of the layers: the layers are then not counted alike.
    """
    few, many = LAYERS
    a, b = count(few), count(many)
    layer, rest = divmod(b - a, many - few)
    if rest:
        raise ValueError(f"{a} frames with {few} layers and {b} with {many}: the layers enter different numbers")
    return layer, a - few * layer


def counts() -> dict[str, int]:
    """Every number that `main` prints."""
    decode, outside = per_layer_and_outside(partial(decode_frames, modules=True))
    native = {}
    if library() is not None:
        layer, rest = per_layer_and_outside(partial(decode_frames, modules=False))
        native = {"native per layer": layer, "native outside": rest}
    training, around = per_layer_and_outside(training_frames)
    return {
        "decode per layer": decode,
        "decode outside": outside,
        **native,
        "training per layer": training,
        "training outside": around,
    }


def main() -> None:
    torch.set_num_threads(1)
    print(f"python {platform.python_version()}, torch {torch.__version__}, {PACKAGE}")
    for name, value in counts().items():
        limit = f"   (limit {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name:20} {value:4} frames{limit}")


if __name__ == "__main__":
    main()
