"""Arguments and options that commands share, so that one name means one thing everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated

import typer

RUN, LOOK, LEARN = "Run", "Look inside", "Train"


class DType(StrEnum):
    """Names for the dtypes weights may be kept in."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, or hub:org/name.", show_default=False)
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts, or - to read one from stdin.", show_default=False),
]
Lines = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts, or - to read stdin, one a line.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
Offline = Annotated[bool, typer.Option("--offline", help="With hub:, use what was downloaded before and nothing else.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="NAME", help="Config key or tensor pattern to give up. Repeatable."),
]
Weights = Annotated[
    DType | None,
    typer.Option("--dtype", help="Keep weights in this dtype instead of the stored one.", show_default=False),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N.")]

MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Stop after so many.")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="X", min=0, help="0 always takes the likeliest token.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", min=0, help="Choose among the K likeliest; 0 is all.")]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", min=0, max=1, help="Choose among the likeliest with this much mass.")
]
MinP = Annotated[
    float, typer.Option("--min-p", metavar="P", min=0, max=1, help="Drop tokens under this share of the likeliest.")
]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", metavar="X", help="Above 1 pushes down tokens already there.")
]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. Repeatable.")]
Chunk = Annotated[
    int | None,
    typer.Option("--chunk", metavar="N", min=1, help="Read prompts so many tokens at a time.", show_default=False),
]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """MODEL and how it is opened: what every command takes that runs one."""

    model: ModelPath
    dtype: Weights = None
    device: Device = "cpu"
    offline: Offline = False
    ignore: Ignore = None


def opens(command: Callable[..., None]) -> Callable[..., None]:
    """`command(checkpoint, *own, as_json)` as the parser is to see it: MODEL, its own, how to open, and --json."""
    _, *own, as_json = signature(command, eval_str=True).parameters.values()
    model, *how = signature(Checkpoint, eval_str=True).parameters.values()

    @wraps(command)
    def run(**given: object) -> None:
        checkpoint = Checkpoint(**{one.name: given.pop(one.name) for one in (model, *how)})  # type: ignore[arg-type]
        command(checkpoint, **given)

    shown = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (model, *own, *how, as_json)]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    return run
