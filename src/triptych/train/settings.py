"""`RecipeSection`, the base class of every table of a recipe, the table `run`, and suggestions for misspelt keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from triptych.errors import ConfigError, nearest
from triptych.migration_hints import RECIPE_KEYS
from .precision import Precision

LogKind = Literal["jsonl", "tensorboard"]
Config = dict[str, Any]  # of a model, as Hugging Face has it, or of a recipe


def _no_text(value: object) -> object:
    if isinstance(value, str | bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


NO_TEXT = BeforeValidator(_no_text)  # 8.0 is an integer, which strict ones refuse
Real = Annotated[float, Field(strict=True)]
Positive = Annotated[int, Field(gt=0), NO_TEXT]
Share = Annotated[Real, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[Real, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[Real, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[Real, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[Real, Field(allow_inf_nan=False)]
Rate = Annotated[Real, Field(gt=0.0, allow_inf_nan=False)]


class RecipeSection(BaseModel):
    """The text under a key is its description in recipes that `triptych train --new` writes and in the documentation
    (`triptych.train.new_recipe`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            (problem, *_) = error.errors()
            where = ": ".join(map(str, (error.title, *problem["loc"])))
            raise ConfigError(f"{where}: {problem['msg'].removeprefix('Value error, ')}") from None

    #: So pydantic calls it for what is made directly and not for a table inside a recipe, whose errors it collects.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class RunSettings(RecipeSection):
    """How long, in what batches and where a run trains, and what it writes.

    `seconds` counts from the first step: steps, and the evaluations, samples and checkpoints between and after them.
    No step begins that would end later than that, going by those before it, with what follows the last one; the first
    step is always taken.  Before the end, evaluations, samples and checkpoints take at most a tenth of `seconds` each,
    and are left out beyond.  The evaluation at the end takes at most a tenth too, and uses evenly spaced parts of the
    held-out data, at least one batch, if all of it would take longer."""

    rows: Positive
    """Number of rows in a step."""
    length: Annotated[int, Field(gt=1), NO_TEXT]
    """Largest number of tokens in a row."""
    steps: Positive | None = None
    """The run ends after this many optimizer steps; with `seconds` too, at whichever comes first."""
    seconds: Rate | None = None
    """The run ends after this many seconds of training, evaluations, samples and checkpoints included."""
    accumulate: Positive = 1
    """Number of micro-batches into which a step is divided: more need less memory, and the step is the same."""
    seed: Annotated[int, Field(ge=0, lt=2**63), NO_TEXT] = 0
    """Seed of the order of the data, of dropout, of hidden tokens and of a new model's weights."""
    precision: Precision = "auto"
    """Of the arithmetic: `bf16`, `fp32`, or `auto`, which is bf16 where the processor has it and the model is at least
    128 wide; narrower ones gain nothing by it, and lose where rows have many lengths.  Weights are fp32."""
    compile: bool = False
    """Compile the blocks with torch, which takes minutes at first and makes long runs faster."""
    recompute: bool = False
    """Compute activations again in the backward pass, which needs less memory and one more forward."""
    threads: Annotated[Positive, Field(le=2**16)] | None = None
    """Largest number of CPU threads, by default those of the machine; a small model is no faster with more than one."""
    device: str = "cpu"
    """`cpu`, or `cuda` or `cuda:N` for a GPU.  A process uses one device."""
    evaluate_every: Share = 0.1
    """Evaluate on the held-out data each time this share of the run is done, in [0, 1]; 0 is never."""
    save_every: Share = 0.1
    """Write a checkpoint each time this share of the run is done, in [0, 1]; 0 is never, at the end neither."""
    save_in_background: bool = False
    """Train on while a checkpoint is written, from a copy of weights and optimizer state in memory."""
    sample_every: Share = 0.2
    """Show a sample of a decoder each time this share of the run is done, in [0, 1]; 0 is never."""
    out: str | None = None
    """Directory for checkpoints, and for the finished model in `model/`.  Without it nothing is saved."""

    logs: list[LogKind] = Field(default_factory=list)
    """What is written of each step in `run.out`: `jsonl` is a line of JSON in `steps.jsonl`, `tensorboard` event files
    in `tensorboard/` (`pip install tensorboard`)."""

    @model_validator(mode="after")
    def _ends(self) -> RunSettings:
        if self.steps is None and self.seconds is None:
            raise ValueError("needs an end; give run.steps, run.seconds or both")
        if self.out == "":  # Field(min_length=1) would refuse a path that is not UTF-8
            raise ValueError("has out = ''; name a directory, or leave run.out away to save nothing")
        return self

    def progress(self, step: int, elapsed: float, reserved: float = 0.0) -> float:
        """The share of the run that is done after `step` steps and `elapsed` seconds, in [0, 1]; `reserved` seconds at
        the end are for what follows the last step."""
        by_step = step / self.steps if self.steps else 0.0
        by_time = 0.0 if self.seconds is None else elapsed / max(self.seconds - reserved, 1e-9)
        return min(1.0, max(by_step, by_time))

    def seconds_left(self, step: int, elapsed: float) -> float:
        """Seconds until the end at the average speed so far."""
        by_time = math.inf if self.seconds is None else self.seconds - elapsed
        by_step = math.inf if self.steps is None or not step else (self.steps - step) * elapsed / step
        return max(0.0, min(by_time, by_step))


def suggestion(path: Sequence[str], siblings: Sequence[str], all_keys: Sequence[tuple[str, ...]]) -> str:
    """`" (did you mean 'run.seconds'?)"` for the unknown key at `path`, or the empty string.

    `siblings` are the keys of its table, `all_keys` all keys of a recipe with their tables.
    """
    name = path[-1]
    same = [".".join(key) for key in all_keys if key[-1] == name]
    if name in RECIPE_KEYS or same:
        return f" (did you mean {RECIPE_KEYS.get(name) or ' or '.join(same)!r}?)"
    return nearest(name, siblings) or nearest(".".join(path), [".".join(key) for key in all_keys])
