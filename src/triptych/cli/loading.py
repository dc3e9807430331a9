"""Shared by commands: load the model, read the texts of the arguments or of stdin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from triptych.errors import InputError
from triptych.files import read_regular
from .options import Checkpoint
from .options import path as path_of
from .screen import check_suffix, note, waiting

if TYPE_CHECKING:
    from triptych.checkpoints.header import Header
    from triptych.generate import Constraint
    from triptych.model import Model

MOST_BYTES = 16 << 20  # of a document that is read whole


def load_model(checkpoint: Checkpoint) -> Model:
    """Load the model, with torch on as many threads as there are usable cores."""
    with waiting(f"loading {checkpoint.model}"):
        from triptych import machine
        from triptych.batches.works import load_checkpoint

        machine.use_threads()
        model = load_checkpoint(**asdict(checkpoint))
    if model.report is not None:
        asked = [model.report.packed] if checkpoint.quantize is not None and model.report.packed else []
        for line in (*asked, *model.report.notes):
            note(line)
    return model


def load_measured(checkpoint: Checkpoint) -> Model:
    """`load_model` for commands that measure what is inside, with a note on which weights of a packed file multiply.
    Raises InputError where a weight is NaN or infinite."""
    model = load_model(checkpoint)
    if model.report is not None and model.report.packed:
        note("weights: packed, with activations rounded to 8 bits; full weights (--quantize none) give other digits")
    elif model.report is not None and checkpoint.quantize == "none" and model.report.unpacked:
        note("weights: full, unpacked from the file; packed ones, the default of other commands, give other digits")
    for name, parameter in model.module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise InputError(
                f"{checkpoint.model}: {name} holds numbers that are NaN or infinite, and then so is all that is "
                "measured; take a checkpoint from before the weights diverged"
            )
    return model


def base_of(model: str, *, shown: bool = False) -> str:
    """MODEL; of a run that trained an adapter, and of the adapter itself, the path of the base that it names, if that
    is there.  `shown` says on stderr that it is the base which is shown."""
    from triptych.checkpoints.locate import base_of_adapter, is_adapter, model_in_run

    where = model_in_run(Path(model))
    base = base_of_adapter(where) if is_adapter(where) else None
    if base is None or not Path(base).exists():
        return model
    if shown:
        note(f"{model} is an adapter of {base}, which is shown without it")
    return base


def base_header(checkpoint: Checkpoint, *, shown: bool = False) -> Header:
    """The header of `base_of`."""
    from triptych.checkpoints.header import read_header

    model = base_of(checkpoint.model, shown=shown)
    return read_header(model, checkpoint.ignore or (), offline=checkpoint.offline)


def header_of(model: str, ignore: Sequence[str], *, offline: bool) -> Header:
    """What a model is, without its weights; MODEL may be a `config.json` or the name of a known model besides.

    Raises CheckpointError with the nearest name where there is neither a file nor a known model.
    """
    from triptych import families
    from triptych.checkpoints.header import Header, read_header
    from triptych.errors import CheckpointError, nearest
    from triptych.families.named_configs import NAMED

    if model in NAMED and not Path(model).exists():
        config = dict(NAMED[model])
        return Header(Path(model), families.read_config(config, where=model), config, None)
    try:
        return read_header(base_of(model, shown=True), ignore, offline=offline, weights=False)
    except CheckpointError as error:
        if similar := nearest(model, NAMED) if "/" not in model and not Path(model).exists() else "":
            raise CheckpointError(f"{error}{similar}") from None
        raise


def load_draft(checkpoint: Checkpoint, draft: str | None) -> Model | str | None:
    """What `--draft` names, as `Model.generate` takes it: a model loaded with the options of the other one, or
    "ngram"."""
    return draft if draft in (None, "ngram") else load_model(replace(checkpoint, model=draft, adapter=None))


def check_file(path: Path, suffixes: Sequence[str], option: str) -> None:
    """Refuse a file that cannot be written, or that Triptych did not write, before anything is read or run."""
    from triptych.page.render import check_place, check_replaced

    check_suffix(path, suffixes, option)
    check_place(path)
    check_replaced(path)


def read_constraint(schema: Path | None, regex: str | None, choices: Sequence[str] | None) -> Constraint | None:
    """The constraint of --schema, --regex or --choice.  Raises BadParameter for several, InputError for what would not
    be kept."""
    given = [name for name, value in (("schema", schema), ("regex", regex), ("choice", choices)) if value is not None]
    if len(given) > 1:
        raise BadParameter(f"--{given[0]} and --{given[1]} do not go together; give one")
    if not given:
        return None
    from triptych.generate import Constraint

    if schema is not None:
        try:
            return Constraint.schema(read_document(str(schema)))
        except InputError as error:
            raise InputError(f"{schema}: {error}") from None
    return Constraint.regex(regex) if regex is not None else Constraint.choices(list(choices or ()))


def check_generates(model: Model, path: str) -> None:
    """Raises InputError for an encoder, with the commands that take one."""
    if model.spec.layout == "encoder":
        raise InputError(f"{path} is an encoder, which does not generate; use triptych fill, classify or encode")


def read_texts(arguments: Sequence[str] | None, kind: str = "text", *, lines: bool = False) -> list[str]:
    """The texts of the arguments; `-` is all of stdin without its last line break, or with `lines` each of its lines.

    Raises BadParameter for no texts or a second `-`, InputError when stdin is empty or not UTF-8.
    """
    if not arguments:
        raise BadParameter(f"no {kind} given; write it after MODEL, or - to read stdin")
    if arguments.count("-") > 1:
        raise BadParameter("- stands for stdin, which can be read only once")
    texts: list[str] = []
    for argument in arguments:
        if argument != "-":
            texts.append(argument)
        elif lines:
            texts += [line.removesuffix("\r") for line in _read_stdin().split("\n") if line.strip()]  # not at U+2028
        else:
            texts += [text] if (text := _read_stdin().removesuffix("\n").removesuffix("\r")) else []
    if not texts:
        raise InputError(f"stdin contains no {kind}")
    return texts


def read_document(argument: str) -> str:
    """The text of the file `argument`, or of stdin for `-`.

    Raises InputError for a file that cannot be read, is larger than `MOST_BYTES`, is not UTF-8, or has no words.
    """
    if argument == "-":
        text = _read_stdin()
    else:
        data = read_regular(path_of(argument), MOST_BYTES, InputError)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{argument}: is not UTF-8 (byte {error.start}); give a text file") from None
    if not text.strip():
        raise InputError(f"{'stdin' if argument == '-' else argument}: holds no text")
    return text


def _read_stdin() -> str:
    return decode_stdin(sys.stdin.buffer.read())


def decode_stdin(raw: bytes) -> str:
    """Bytes of stdin as text, without a byte order mark.  Raises InputError when they are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None
