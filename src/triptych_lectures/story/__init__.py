"""A story in ten programs, from counts of pairs of letters to all three layouts of the transformer.

Each program imports torch and the standard library only, differs from the one before by few lines, and is run with two
texts and a seed.  It prints its loss on held-out text, in nats for each letter, and a sample.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from triptych.arguments import checked
from triptych.errors import InputError, shown

if TYPE_CHECKING:
    from triptych.model import Model

NAMES = {
    "norm": "attn_norm.pre", "q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.out",
    "mlp_norm": "mlp_norm.pre", "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down",
}  # fmt: skip
COUNT, DECODER = 10, 8  # steps, and that whose model is the quickstart's decoder
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One program of the story."""

    number: int
    title: str
    source: str

    def difference(self) -> list[str]:
        """The lines of the program: those added begin with "+", those removed with "-", all others with " "."""
        before = step(self.number - 1).source if self.number > 1 else ""
        compared = unified_diff(before.splitlines(), self.source.splitlines(), n=1000, lineterm="")
        return [line for line in compared if not line.startswith(("---", "+++", "@@"))]


@dataclass(frozen=True)
class StepRun:
    """What a program printed.

    loss     on held-out text, in nats for each letter; None where the program prints several or none.
    curve    (step, loss) of training.
    lines    all other lines.
    names    what the program's globals are at its end.
    """

    step: Step
    loss: float | None
    curve: Sequence[tuple[int, float]]
    lines: Sequence[str]
    seconds: float
    names: Mapping[str, Any]


@checked
def step(number: int) -> Step:
    """A step of the story, from 1 on.  Raises InputError for another number."""
    if number not in range(1, COUNT + 1):
        raise InputError(f"the story has steps 1 to {COUNT}, not {shown(number)}")
    source = _file(number).read_text("utf-8")
    return Step(number, str(ast.get_docstring(ast.parse(source))), source)


@checked
def run(number: int, train: str, held_out: str, *, seed: int = 0, on_line: OnLine = lambda line: None) -> StepRun:
    """Run a program on these texts.  `on_line` gets each line when it is printed.

    The letters of `held_out` that `train` does not have are left out.  Raises InputError where a text is too short.
    """
    if len(train) < 1 << 14 or len(held_out) < 1 << 17:
        need = f"{1 << 14:,} letters to train on and {1 << 17:,} to be measured on"
        raise InputError(f"the story needs {need}, not {len(train):,} and {len(held_out):,}; give longer texts")
    started, printed = time.perf_counter(), _Printed(on_line)
    with TemporaryDirectory(prefix="story-") as folder, redirect_stdout(printed):
        files = [Path(folder) / name for name in ("train.txt", "held-out.txt")]
        for file, text in zip(files, (train, held_out), strict=True):
            file.write_text(text, "utf-8", newline="")
        with _arguments(_file(number), *files, seed):
            names = runpy.run_path(str(_file(number)), run_name="__main__")
    curve, lines, losses = [], [], []
    for line in printed.ended():
        if found := re.fullmatch(r"step (\d+) of \d+: loss (\S+)", line):
            curve.append((int(found[1]), float(found[2])))
        elif found := re.fullmatch(r"held-out loss: (\S+)", line):
            losses.append(float(found[1]))
        elif line or lines:
            lines.append(line)
    return StepRun(step(number), losses[0] if losses else None, curve, lines, time.perf_counter() - started, names)


@checked
def decoder_of(names: Mapping[str, Any]) -> Model:
    """The model of step 8 in this library, from the names of its run: a Llama with the same weights.

    Its tokenizer has the letters of the training text; another letter is taken for the rarest of them.
    Raises InputError for the names of another step.
    """
    import torch

    from triptych.model import create
    from triptych.text.new_tokenizers import character_tokenizer

    if names.get("LAYERS") != 4 or "FlopCounterMode" in names:
        raise InputError(f"only step {DECODER} of the story is a decoder that this library has")
    tokenizer = character_tokenizer("".join(names["letters"]))
    rarest = Counter(names["text"]).most_common()[-1][0]
    tokens = [str(tokenizer.backend.id_to_token(i)) for i in range(tokenizer.vocab_size)]
    rows = [names["number"].get(token, names["number"][rarest]) for token in tokens]
    weights, last = names["model"].state_dict(), names["LAYERS"] + 1
    config = {
        "model_type": "llama", "vocab_size": len(rows), "hidden_size": names["D"], "intermediate_size": 344,
        "num_hidden_layers": names["LAYERS"], "num_attention_heads": names["HEADS"], "max_position_embeddings": 1024,
        "rms_norm_eps": torch.finfo(torch.float32).eps, "tie_word_embeddings": False,
    }  # fmt: skip
    stored = {
        "decoder.embed.tokens.weight": weights["0.weight"][rows],
        "decoder.final_norm.weight": weights[f"{last}.weight"],
        "head.proj.weight": weights[f"{last + 1}.weight"][rows],
    }
    for layer in range(names["LAYERS"]):
        for part, ours in NAMES.items():
            stored[f"decoder.blocks.{layer}.{ours}.weight"] = weights[f"{layer + 1}.{part}.weight"]
    model = create(config, tokenizer)
    model.module.load_state_dict(stored)
    return model


class _Printed(io.TextIOBase):
    """Takes what a program prints apart into lines, where a carriage return ends one too."""

    def __init__(self, on_line: OnLine) -> None:
        self.on_line, self.lines, self.open = on_line, list[str](), ""

    def write(self, text: str) -> int:
        *lines, self.open = re.split(r"[\r\n]", self.open + text)
        for line in lines:
            self.lines.append(line)
            self.on_line(line)
        return len(text)

    def ended(self) -> list[str]:
        """All lines, when nothing more comes."""
        return [*self.lines, self.open]


@contextmanager
def _arguments(*arguments: object) -> Iterator[None]:
    """The arguments of a program that runs in this process."""
    kept, sys.argv = sys.argv, list(map(str, arguments))
    try:
        yield
    finally:
        sys.argv = kept


def _file(number: int) -> Path:
    return Path(__file__).with_name(f"step{number:02}.py")
