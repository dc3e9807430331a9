"""A story in ten programs, from counts of pairs of letters to all three layouts of the transformer.

Each program imports torch and the standard library only and differs from the one before by few lines.  Its arguments
are a file to train on, a file of held-out text, a seed and, where another number than its own is wanted, the steps of
training.  It prints its loss on the held-out text, in nats for each letter, and a sample.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triptych.arguments import checked
from triptych.errors import InputError, shown
from triptych.files import tables_of

if TYPE_CHECKING:
    from triptych.model import Model

NAMES = {
    "norm": "attn_norm.pre", "q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.out",
    "mlp_norm": "mlp_norm.pre", "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down",
}  # fmt: skip
COUNT, DECODER, LAYOUTS = 10, 8, 10  # steps, the one whose model is the quickstart's decoder, and that of all layouts
LEAST_TRAIN, LEAST_HELD_OUT = 1 << 14, 1 << 11  # letters
VOWELS = frozenset("AEIOUaeiou")  # which step 10 hides
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One program of the story; its title is a name, a colon, and what the program does."""

    number: int
    title: str
    source: str

    @property
    def name(self) -> str:
        """`"4. One head"`."""
        return f"{self.number}. {self.title.partition(':')[0]}"

    def difference(self, context: int = 1000) -> list[str]:
        """The program as a difference to the one before; the first, as it is.

        Lines that are added begin with "+", those that are removed with "-", others with " ".  Around a change stand
        `context` others, and between two changes whose lines do not meet "@@".
        """
        lines = self.source.splitlines()
        if self.number == 1:
            return [f" {line}" for line in lines]
        compared = unified_diff(step(self.number - 1).source.splitlines(), lines, n=context, lineterm="")
        return ["@@" if line.startswith("@@") else line for line in compared][3:]  # without the names of two files

    def changed(self) -> tuple[int, int]:
        """How many lines are added to the program before, and how many are removed from it; none for the first."""
        marks = [line[:1] for line in self.difference()]
        return marks.count("+"), marks.count("-")


@dataclass(frozen=True)
class StepRun:
    """What a program printed.

    loss     on held-out text, in nats for each letter; None where the program prints several or none.
    curve    (step, loss) of training.
    lines    all other lines.
    names    what the program's globals are at its end.
    printed  the lines and the loss, in the order of the program.
    """

    step: Step
    loss: float | None
    curve: Sequence[tuple[int, float]]
    lines: Sequence[str]
    seconds: float
    names: Mapping[str, Any]
    printed: Sequence[str]


@checked
def step(number: int) -> Step:
    """A step of the story, from 1 on.  Raises InputError for another number."""
    if number not in range(1, COUNT + 1):
        raise InputError(f"the story has steps 1 to {COUNT}, not {shown(number)}")
    source = file_of(number).read_text("utf-8")
    return Step(number, str(ast.get_docstring(ast.parse(source))), source)


@checked
def run(
    number: int,
    train: str,
    held_out: str,
    *,
    seed: int = 0,
    steps: int | None = None,
    on_line: OnLine = lambda line: None,
) -> StepRun:
    """Run a program on these texts.  `on_line` gets each line when it is printed; `steps` replaces those of training.

    The letters of `held_out` that `train` does not have are left out.  Raises InputError where a text is too short, and
    for step 10 where it has no vowel.
    """
    import torch

    _check_texts(number, train, held_out)
    started, printed = time.perf_counter(), _Printed(on_line)
    with (
        TemporaryDirectory(prefix="story-") as folder,
        redirect_stdout(printed),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),  # which a program switches off behind its training
    ):
        files = [Path(folder) / name for name in ("train.txt", "held-out.txt")]
        for file, text in zip(files, (train, held_out), strict=True):
            file.write_text(text, "utf-8", newline="")
        arguments = [file_of(number), *files, seed, *([] if steps is None else [steps])]
        with patch.object(sys, "argv", list(map(str, arguments))):
            names = runpy.run_path(str(file_of(number)), run_name="__main__")
    curve, lines, losses, printed_lines = list[tuple[int, float]](), list[str](), list[float](), list[str]()
    for line in printed.ended():
        if found := re.fullmatch(r"step (\d+) of \d+: loss (\S+)", line):
            curve.append((int(found[1]), float(found[2])))
            continue
        if found := re.fullmatch(r"held-out loss: (\S+)", line):
            losses.append(float(found[1]))
        elif line or lines:
            lines.append(line)
        printed_lines.append(line)
    seconds = time.perf_counter() - started
    return StepRun(step(number), losses[0] if losses else None, curve, lines, seconds, names, printed_lines)


def _check_texts(number: int, train: str, held_out: str) -> None:
    letters = set(train)
    known = sum(letter in letters for letter in held_out)
    if len(train) < LEAST_TRAIN or known < LEAST_HELD_OUT:
        need = f"{LEAST_TRAIN:,} letters to train on and {LEAST_HELD_OUT:,} held out that are among them"
        raise InputError(f"the story needs {need}, not {len(train):,} and {known:,}; give a longer text")
    if number == LAYOUTS and not letters & VOWELS:
        have = f"step {LAYOUTS} hides the letters {''.join(sorted(VOWELS))}, and this text has none of them"
        raise InputError(f"{have}; leave that step out")


@checked
def layout_losses(done: StepRun) -> list[float]:
    """Of step 10: the losses of the encoder and of the decoder with a row's own source, then with another's."""
    return [float(found) for line in done.lines for found in re.findall(r"(\d+\.\d+) of the (?:en|de)coder", line)]


@cache
def recorded() -> Mapping[int, Mapping[int, float]]:
    """Step -> seed -> held-out loss on Shakespeare, as tools/story.py measured them."""
    return {
        int(number): {int(seed): float(loss) for seed, loss in of_seed.items()}
        for number, of_seed in tables_of(Path(__file__).with_name("recorded"))["loss"].items()
    }


@checked
def decoder_of(done: StepRun) -> Model:
    """The model of step 8 in this library: a Llama with the same weights.

    Its tokenizer has the letters of the training text; another letter is taken for the rarest of them.
    Raises InputError for a run of another step.
    """
    import torch

    from triptych.model import create
    from triptych.text.new_tokenizers import character_tokenizer

    if done.step.number != DECODER:
        raise InputError(f"step {DECODER} of the story is a decoder that this library has, not {done.step.number}")
    names = done.names
    tokenizer = character_tokenizer("".join(names["letters"]))
    rarest = Counter(names["train_text"]).most_common()[-1][0]
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


def file_of(number: int) -> Path:
    """The file of a program."""
    return Path(__file__).with_name(f"step{number:02}.py")
