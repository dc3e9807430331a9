"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer


class DType(StrEnum):
    """The dtypes in which weights may be kept."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class PackedForm(StrEnum):
    """Packed forms of the matrices of a model."""

    int8 = "int8"
    int4 = "int4"
    file = "file"
    none = "none"


class Products(StrEnum):
    """The choices of --matmul (`triptych.program.native_encoder.Matmul`)."""

    AUTO = "auto"
    BF16 = "bf16"
    STORED = "stored"


class CacheForm(StrEnum):
    """The number format of the keys and values that a generation stores."""

    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


LAST_SEED = 2**31 - 1  # of the commands that compute other seeds from theirs


def finite(value: float | None) -> float | None:
    """The callback of every option that takes a number with a fraction: NaN passes the limits that the parser checks,
    and infinity most of them."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def path(typed: str | Path) -> Path:
    """The parser of paths: the empty string is none, and would be the current directory.  A default is a path."""
    if not str(typed):
        raise typer.BadParameter("the path is empty")
    return Path(typed)


ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model directory, a run directory, a .gguf file, or hub:org/name.", show_default=False
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts, or - to read one from stdin.", show_default=False),
]
Lines = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts, or - to read one per line from stdin.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Offline = Annotated[bool, typer.Option("--offline", help="With hub:, use only files that were downloaded before.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="NAME", help="Config key or tensor pattern to ignore. Repeatable."),
]
Weights = Annotated[
    DType | None,
    typer.Option("--dtype", help="Dtype of the weights; by default the stored one.", show_default=False),
]
Quantize = Annotated[
    PackedForm | None,
    typer.Option(
        "--quantize",
        metavar="FORM",
        help="Packed matrices: int8 or int4 packs them anew, file keeps those of the file or fails, none unpacks "
        "them; by default those of the file, where this machine can run them.",
        show_default=False,
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter", metavar="DIR", parser=path, help="Directory of an adapter for MODEL, of triptych train or PEFT.",
        show_default=False,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N.")]

MeasuredAt = Annotated[
    int | None, typer.Option("--at", metavar="P", help="Measure here; by default at the last token, or at the mask.")
]
DecoderInput = Annotated[
    str | None,
    typer.Option("--target", metavar="TEXT", help="Input of an encoder-decoder's decoder, after its start token."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Stop after N tokens.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="X",
        min=0,
        callback=finite,
        help="Sampling temperature; 0 always takes the most likely token.",
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Sample from the K most likely tokens; 0 means all.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        min=0,
        max=1,
        callback=finite,
        help="Sample from the smallest set of tokens whose probabilities sum to P.",
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        min=0,
        max=1,
        callback=finite,
        help="Drop tokens less likely than P times the most likely one.",
    ),
]
Penalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        callback=finite,
        help="Above 1 makes tokens that already occur less likely.",
    ),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text. Repeatable.")]
Chunk = Annotated[
    int | None,
    typer.Option("--chunk", metavar="N", min=1, help="Process prompts N tokens at a time.", show_default=False),
]
Matmul = Annotated[
    Products,
    typer.Option(
        "--matmul",
        metavar="HOW",
        help="Products with weights: in bf16, as they are stored (stored), or the faster that is as exact (auto).",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL|ngram",
        help="Guess tokens with a smaller model, or from earlier in the text; in fp32 and with packed weights the "
        "result stays the same.",
        show_default=False,
    ),
]
DraftTokens = Annotated[int, typer.Option("--draft-tokens", metavar="N", min=1, help="Guess up to N tokens at once.")]

Cache = Annotated[
    CacheForm,
    typer.Option(
        "--cache",
        metavar="TYPE",
        help="Format of stored keys and values: fp32, fp16, bf16 or int8; auto is the dtype of the model.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window", metavar="N", min=1, help="Tokens read at once of a long text; by default what the model reads.",
        show_default=False,
    ),
]  # fmt: skip
Overlap = Annotated[
    int | None,
    typer.Option("--overlap", metavar="N", min=0, help="Tokens that two windows share.", show_default=False),
]
TaskLength = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, help="Stop after N tokens; by default as the checkpoint says, or 128.",
        show_default=False,
    ),
]  # fmt: skip
TaskBeams = Annotated[
    int | None,
    typer.Option(
        "--beams", metavar="N", min=0, help="Beam search with N beams; by default as the checkpoint says.",
        show_default=False,
    ),
]  # fmt: skip


def chosen(**settings: int | None) -> dict[str, int]:
    """The settings that have a value; the checkpoint's own stand in for the others."""
    return {name: value for name, value in settings.items() if value is not None}


class SamplingSettings(TypedDict):
    """The options of `generate` and `chat` as the library takes them."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """MODEL and the options for loading it, shared by all commands that run a model."""

    model: ModelPath
    dtype: Weights = None
    quantize: Quantize = None
    adapter: Adapter = None
    device: Device = "cpu"
    offline: Offline = False
    ignore: Ignore = None


def opens(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(checkpoint, *own, as_json)` the signature that the parser reads: MODEL, its own options, those of
    `Checkpoint`, and --json."""
    _, *own, as_json = signature(command, eval_str=True).parameters.values()
    model, *loading = signature(Checkpoint, eval_str=True).parameters.values()

    @wraps(command)
    def run(**arguments: Any) -> None:
        checkpoint = Checkpoint(**{one.name: arguments.pop(one.name) for one in (model, *loading)})
        command(checkpoint, **arguments)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (model, *own, *loading, as_json)]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    setattr(run, "__signature__", Signature(parameters))  # noqa: B010 - functions do not declare this attribute
    return run
