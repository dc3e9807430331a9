"""What commands do before their one call: open the model, gather the texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typer import BadParameter

from triptych.cli.options import Checkpoint, DType
from triptych.cli.screen import note, waiting
from triptych.errors import InputError

if TYPE_CHECKING:
    import torch

    from triptych.model import Model

_TORCH = {DType.fp32: "float32", DType.fp16: "float16", DType.bf16: "bfloat16"}


def opened(asked: Checkpoint) -> Model:
    """The model, loaded, with torch on as many threads as there are usable cores."""
    with waiting(f"loading {asked.model}"):
        from triptych import machine
        from triptych.model import load

        machine.use_threads()
        where, dtype = machine.device(asked.device), torch_dtype(asked.dtype)
        loaded = load(asked.model, dtype=dtype, device=where, ignore=asked.ignore or (), offline=asked.offline)
    for line in () if loaded.report is None else loaded.report.notes:
        note(line)
    return loaded


def torch_dtype(dtype: DType | None) -> torch.dtype | None:
    import torch

    return None if dtype is None else getattr(torch, _TORCH[dtype])


def gathered(texts: Sequence[str] | None, what: str = "text", *, lines: bool = False) -> list[str]:
    """The texts of the arguments; `-` stands for all of stdin but its last line break, or with `lines` for each line.

    Raises BadParameter where there are none or stdin is wanted twice, InputError where it is empty or not UTF-8.
    """
    if not texts:
        raise BadParameter(f"no {what} given; write it after MODEL, or - to read stdin")
    if texts.count("-") > 1:
        raise BadParameter("- stands for stdin, which can be read only once")
    found: list[str] = []
    for given in texts:
        if given != "-":
            found.append(given)
        elif lines:
            found += [line for line in from_stdin().splitlines() if line.strip()]
        else:
            found += [text] if (text := from_stdin().removesuffix("\n").removesuffix("\r")) else []
    if not found:
        raise InputError(f"stdin holds no {what}")
    return found


def from_stdin() -> str:
    return decoded(sys.stdin.buffer.read())


def decoded(raw: bytes) -> str:
    """Bytes of stdin as text.  Raises InputError when they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None
