"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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


# The help of options that several commands share, unless a command has its own (see `command`).
SHARED = """
--dtype: Dtype of the weights; by default the stored one.
--quantize FORM: Packed matrices: int8 or int4 packs them anew, file keeps those of the file or fails, none unpacks
    them; by default those of the file, where this machine can run them.
--adapter DIR: Directory of an adapter for MODEL, of triptych train or PEFT.
--device NAME: cpu, cuda or cuda:N.
--offline: With hub:, use only files that were downloaded before.
--ignore NAME: Config key or tensor pattern to ignore. Repeatable.
--at P: Measure here; by default at the last token, or at the mask.
--target TEXT: Input of an encoder-decoder's decoder, after its start token.
--max-new-tokens N: Stop after N tokens.
--temperature X: Sampling temperature; 0 always takes the most likely token.
--top-k K: Sample from the K most likely tokens; 0 means all.
--top-p P: Sample from the smallest set of tokens whose probabilities sum to P or more.
--min-p P: Drop tokens less likely than P times the most likely one.
--repetition-penalty X: Above 1 makes tokens that already occur less likely.
--stop TEXT: Stop before this text. Repeatable.
--schema FILE: Write JSON of the JSON schema in this file.
--regex TEXT: Write a text that matches this regular expression as a whole.
--choice TEXT: Write one of these texts. Repeatable.
--matmul HOW: Products with weights: in bf16, as they are stored (stored), or the faster that is as exact (auto).
--draft MODEL|ngram: Guess tokens with a smaller model, or from earlier in the text; in fp32 and with packed weights the
    result stays the same.
--draft-tokens N: Guess up to N tokens at once.
--cache TYPE: Format of stored keys and values: fp32, fp16, bf16 or int8; auto is the dtype of the model.
--ray ADDRESS: Work on the cluster of Ray at HOST:PORT; local is a cluster on this machine alone.
--actors N: With --ray, how many models there are in the cluster; by default one a machine.
--records FILE: Work on the records of a .jsonl or .parquet file, each with an id; --out gets a result of each.
--window N: Tokens read at once of a long text; by default what the model reads.
--overlap N: Tokens that two windows share.
"""

Positive = Annotated[int, typer.Option(min=1)]
Natural = Annotated[int, typer.Option(min=0)]
Port = Annotated[int, typer.Option(min=1, max=65535)]
Seed = Annotated[int, typer.Option(min=0, max=LAST_SEED)]
Share = Annotated[float, typer.Option(min=0, max=1)]
Temperature = Annotated[float, typer.Option(min=0)]
NamedPath = Annotated[Path, typer.Option(parser=path)]
Weights = Literal["fp32", "fp16", "bf16"]
Packing = Literal["int8", "int4", "file", "none"]
RecordFile = Annotated[Path | None, typer.Option(parser=path, metavar="FILE")]
Ray = Annotated[str | None, typer.Option(metavar="ADDRESS")]
Actors = Annotated[int | None, typer.Option(min=1)]
Matmul = Literal["auto", "bf16", "stored"]
CacheOption = Literal["auto", "fp32", "fp16", "bf16", "int8"]

MODEL = "A model directory, a run directory, a .gguf file, or hub:org/name."
ModelPath = Annotated[str, argument(MODEL, "MODEL")]
Text = Annotated[str | None, argument("Text to run the model on.", "[TEXT]")]
Texts = Annotated[list[str] | None, argument("Texts, or - to read one from stdin.", "[TEXT]...")]
Lines = Annotated[list[str] | None, argument("Texts, or - to read one per line from stdin.", "[TEXT]...")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
TaskLength = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Stop after N tokens; by default as the checkpoint says, or 128."),
]
TaskBeams = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Beam search with N beams; by default as the checkpoint says."),
]


def chosen(**settings: int | None) -> dict[str, int]:
    """The settings that have a value; the checkpoint's own stand in for the others."""
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """MODEL and the options for loading it, shared by all commands that run a model."""

    model: ModelPath
    dtype: Weights | None = None
    quantize: Packing | None = None
    adapter: NamedPath | None = None
    device: str = "cpu"
    offline: bool = False
    ignore: list[str] | None = None


# One entry of the help in a docstring: the option, what its value is called, and the text.
_HELP = re.compile(r"^(--[\w-]+)? ?([^\s-]\S*)?: (.*(?:\n +.*)*)", re.M)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with the signature that the parser reads: positional parameters are arguments, the others options.

    Its docstring has, below what the command does, the help of those that bring none: `VALUE: help` of the arguments in
    their order, `--name VALUE: help` of the options that are not in `SHARED`.  For a `checkpoint` stand MODEL and,
    before --json, the options of `Checkpoint`; where it may be None, MODEL may be left out, and the options with it.
    """
    about, _, help_text = (getdoc(function) or "").partition("\n\n")
    own = _parameters(function, help_text)
    opens = own[0].name == "checkpoint"
    if opens:
        model, *loading = _parameters(Checkpoint)
        if own[0].default is None:
            model = model.replace(annotation=Annotated[str | None, argument(MODEL, "[MODEL]")], default=None)
        own = [model, *own[1:-1], *loading, own[-1]]

    @wraps(function)
    def run(**arguments: Any) -> None:
        if opens:
            options = {one.name: arguments.pop(one.name) for one in (model, *loading)}
            arguments["checkpoint"] = None if options["model"] is None else Checkpoint(**options)
            left = [one.name for one in loading if options["model"] is None and options[one.name] != one.default]
            if left:
                raise typer.BadParameter(f"--{left[0]} is for a MODEL on this machine; name one")
        function(**arguments)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own]
    run.__doc__, run.__annotations__ = about, {one.name: one.annotation for one in parameters}
    setattr(run, "__signature__", Signature(parameters))  # noqa: B010 - functions do not declare this attribute
    return run


def _parameters(function: Callable[..., object], help_text: str = "") -> list[Parameter]:
    """The parameters as options and arguments with their help."""
    helps, types = _HELP.findall(help_text), get_type_hints(function)
    of_options = {name: entry for name, *entry in [*_HELP.findall(SHARED), *helps] if name}
    of_arguments = iter([entry for name, *entry in helps if not name])
    options = {name: f"--{name.rstrip('_').replace('_', '-')}" for name in types}
    assert {name for name, *_ in helps} <= {"", *options.values()}, f"{function.__name__} lacks an option of its help"
    parameters = []
    for one in signature(function, eval_str=True).parameters.values():
        plain, option = types[one.name], options[one.name]
        every = (one.annotation, *get_args(one.annotation))
        infos = [note for part in every for note in getattr(part, "__metadata__", ())]
        if Checkpoint in (plain, *get_args(plain)) or (infos and infos[0].help is not None):
            parameters.append(one)
            continue
        info = copy(infos[0]) if infos else typer.Option()
        if one.kind is Parameter.KEYWORD_ONLY:
            info.param_decls = [option]
            metavar, text = of_options.get(option, ("", ""))
        else:
            info = typer.Argument(parser=info.parser, show_default=False)
            metavar, text = next(of_arguments, ("", ""))
        info.metavar, info.help = metavar or None, " ".join(text.split())
        if float in (plain, *get_args(plain)):
            info.callback = _finite
        parameters.append(one.replace(annotation=Annotated[plain, info]))
    return parameters
