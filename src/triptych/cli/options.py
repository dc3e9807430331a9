"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

LAST_SEED = 2**31 - 1  # of the commands that compute other seeds from theirs


def argument(text: str, metavar: str) -> Any:
    """An argument whose help is `text`."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def option(text: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """An option whose help is `text`, named as its parameter unless `names` has others."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def fraction(text: str, metavar: str, **limits: float) -> Any:
    """An option that takes a number with a fraction."""
    return option(text, metavar, callback=_finite, **limits)


def _finite(value: float | None) -> float | None:
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


# Types of options whose help is in the docstring of the command.
Positive = Annotated[int, typer.Option(min=1)]
Natural = Annotated[int, typer.Option(min=0)]
Seed = Annotated[int, typer.Option(min=0, max=LAST_SEED)]
NamedPath = Annotated[Path, typer.Option(parser=path)]

MODEL = "A model directory, a run directory, a .gguf file, or hub:org/name."
ModelPath = Annotated[str, argument(MODEL, "MODEL")]
Text = Annotated[str | None, argument("Text to run the model on.", "[TEXT]")]
Texts = Annotated[list[str] | None, argument("Texts, or - to read one from stdin.", "[TEXT]...")]
Lines = Annotated[list[str] | None, argument("Texts, or - to read one per line from stdin.", "[TEXT]...")]
Json = Annotated[bool, option("Print the result as JSON on stdout.", None, "--json")]
Offline = Annotated[bool, option("With hub:, use only files that were downloaded before.", None, "--offline")]
Ignore = Annotated[list[str] | None, option("Config key or tensor pattern to ignore. Repeatable.", "NAME")]
Weights = Annotated[Literal["fp32", "fp16", "bf16"] | None, option("Dtype of the weights; by default the stored one.")]
Quantize = Annotated[
    Literal["int8", "int4", "file", "none"] | None,
    option(
        "Packed matrices: int8 or int4 packs them anew, file keeps those of the file or fails, none unpacks "
        "them; by default those of the file, where this machine can run them.",
        "FORM",
    ),
]
Adapter = Annotated[
    Path | None, option("Directory of an adapter for MODEL, of triptych train or PEFT.", "DIR", parser=path)
]
Device = Annotated[str, option("cpu, cuda or cuda:N.", "NAME")]

MeasuredAt = Annotated[int | None, option("Measure here; by default at the last token, or at the mask.", "P")]
DecoderInput = Annotated[
    str | None, option("Input of an encoder-decoder's decoder, after its start token.", "TEXT", "--target")
]
MaxNewTokens = Annotated[int, option("Stop after N tokens.", "N", min=1)]
Temperature = Annotated[float, fraction("Sampling temperature; 0 always takes the most likely token.", "X", min=0)]
TopK = Annotated[int, option("Sample from the K most likely tokens; 0 means all.", "K", min=0)]
TopP = Annotated[
    float,
    fraction("Sample from the smallest set of tokens whose probabilities sum to P.", "P", min=0, max=1),
]
MinP = Annotated[float, fraction("Drop tokens less likely than P times the most likely one.", "P", min=0, max=1)]
Penalty = Annotated[float, fraction("Above 1 makes tokens that already occur less likely.", "X")]
Stop = Annotated[list[str] | None, option("Stop before this text. Repeatable.", "TEXT")]
Matmul = Annotated[
    Literal["auto", "bf16", "stored"],
    option(
        "Products with weights: in bf16, as they are stored (stored), or the faster that is as exact (auto).", "HOW"
    ),
]
Draft = Annotated[
    str | None,
    option(
        "Guess tokens with a smaller model, or from earlier in the text; in fp32 and with packed weights the "
        "result stays the same.",
        "MODEL|ngram",
    ),
]
DraftTokens = Annotated[int, option("Guess up to N tokens at once.", "N", min=1)]
Cache = Annotated[
    Literal["auto", "fp32", "fp16", "bf16", "int8"],
    option("Format of stored keys and values: fp32, fp16, bf16 or int8; auto is the dtype of the model.", "TYPE"),
]
Window = Annotated[
    int | None, option("Tokens read at once of a long text; by default what the model reads.", "N", min=1)
]
Overlap = Annotated[int | None, option("Tokens that two windows share.", "N", min=0)]
TaskLength = Annotated[
    int | None, option("Stop after N tokens; by default as the checkpoint says, or 128.", "N", min=1)
]
TaskBeams = Annotated[int | None, option("Beam search with N beams; by default as the checkpoint says.", "N", min=0)]


def chosen(**settings: int | None) -> dict[str, int]:
    """The settings that have a value; the checkpoint's own stand in for the others."""
    return {name: value for name, value in settings.items() if value is not None}


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


# One entry of the help in a docstring: the option, what its value is called, and the text.
_HELP = re.compile(r"^(--[\w-]+)? ?([^\s-]\S*)?: (.*(?:\n +.*)*)", re.M)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with the signature that the parser reads: positional parameters are arguments, the others options.

    Its docstring has, below what the command does, the help of those that bring none: `VALUE: help` of the arguments in
    their order, `--name VALUE: help` of the options.  For a `checkpoint` stand MODEL and, before --json, the options of
    `Checkpoint`.
    """
    about, _, told = (getdoc(function) or "").partition("\n\n")
    helps, types = _HELP.findall(told), get_type_hints(function)
    of_options = {name: entry for name, *entry in helps if name}
    of_arguments = iter([entry for name, *entry in helps if not name])
    own = list(signature(function, eval_str=True).parameters.values())
    own = [_documented(one, types[one.name], of_options, of_arguments) for one in own]
    assert not of_options, f"{function.__name__} has no parameters for {list(of_options)}"
    opens = own[0].name == "checkpoint"
    if opens:
        model, *loading = signature(Checkpoint, eval_str=True).parameters.values()
        own = [model, *own[1:-1], *loading, own[-1]]

    @wraps(function)
    def run(**arguments: Any) -> None:
        if opens:
            arguments["checkpoint"] = Checkpoint(**{one.name: arguments.pop(one.name) for one in (model, *loading)})
        function(**arguments)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own]
    run.__doc__, run.__annotations__ = about, {one.name: one.annotation for one in parameters}
    setattr(run, "__signature__", Signature(parameters))  # noqa: B010 - functions do not declare this attribute
    return run


def _documented(
    parameter: Parameter, plain: Any, of_options: dict[str, list[str]], of_arguments: Iterator[list[str]]
) -> Parameter:
    """The parameter with its help, unless it brings one; `plain` is its type without limits."""
    every = (parameter.annotation, *get_args(parameter.annotation))
    found = [note for one in every for note in getattr(one, "__metadata__", ())]
    if plain is Checkpoint or (found and found[0].help is not None):
        return parameter
    info = copy(found[0]) if found else typer.Option()
    if parameter.kind is Parameter.KEYWORD_ONLY:
        info.param_decls = [f"--{parameter.name.rstrip('_').replace('_', '-')}"]
        metavar, text = of_options.pop(info.param_decls[0], ("", ""))
    else:
        info = typer.Argument(parser=info.parser, show_default=False)
        metavar, text = next(of_arguments, ("", ""))
    info.metavar, info.help = metavar or None, " ".join(text.split())
    if float in (plain, *get_args(plain)):
        info.callback = _finite
    return parameter.replace(annotation=Annotated[plain, info])
