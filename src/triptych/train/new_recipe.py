"""Writes a recipe with every key explained: for a new model, or for one that is trained further."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import stores_packed
from triptych.errors import InputError
from triptych.files import exists
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec, PatchesSpec
from triptych.train.recipe import Recipe, check_recipe, read_tables, sections
from triptych.train.recipe_keys import Key, details, keys, meaning, single_keys, toml

WIDTH = 100  # columns of a comment
LENGTH, ROWS, SECONDS = 256, 8, 600  # of a run that trains an existing model further
ADAPTER = {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
ADAPTER_RATE = 1e-3  # its matrices begin at noise and zeros, and take a higher learning rate than trained ones
_OBJECTIVE = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "seq2seq"}


def write_new_recipe(
    path: Path | str,
    recipe: Path | str | None = None,
    *,
    base: str | None = None,
    data: str | None = None,
    out: str | None = None,
    changes: Sequence[str] = (),
    adapter: bool = False,
) -> Recipe:
    """Write a recipe to `path` in which every key is explained; it runs as it is.

    It is that of the existing model `base`, with `adapter` of an adapter for it (LoRA), or a copy of `recipe` (a file
    or the name of a shipped one, by default "decoder"), for a new model; of a `recipe` for another model, `base` takes
    the place.  The model is saved under `out`, by default `runs/` and the name of the file.

    Raises InputError for a file that exists, for a `base` that no objective trains, and for an adapter without a `base`
    or with a `recipe`; ConfigError for changes that do not fit, and what reading `base` raises.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise InputError(f"{path}: a recipe is a .toml file; write --new {path.with_suffix('.toml')}")
    if exists(path):
        raise InputError(f"{path} exists and is not overwritten; choose another name")
    if adapter and (base is None or recipe is not None):
        raise InputError("a new recipe of an adapter is for an existing model alone; give that one and no other recipe")
    if base is not None and recipe is None:
        tables = fine_tuning_tables(base, adapter=adapter)
    else:
        tables = read_tables(recipe or "decoder")
    values = {"run.out": out or f"runs/{path.stem}"} | ({} if data is None else {"data.path": data})
    checked = check_recipe(tables, changes, str(recipe or "decoder"), values, base if recipe is not None else None)
    try:
        content = recipe_text(checked).encode()
    except UnicodeEncodeError:
        raise InputError(f"cannot write {path}: a path in the recipe is not UTF-8; choose another name") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    return checked


def fine_tuning_tables(base: str, *, adapter: bool = False) -> dict[str, Any]:
    """The tables of a recipe that trains the model `base` further: its objective by its layout and what it reads, rows
    within its context, packed weights unpacked unless an `adapter` is trained.

    Raises InputError for a model without a head that an objective trains.
    """
    header = read_header(base)
    spec = header.spec
    if not isinstance(spec.head, LMHeadSpec | MaskedLMHeadSpec):
        raise InputError(f"{base} is a {spec.family} {spec.layout} without a head that predicts tokens; {_HEADS}")
    if isinstance(spec.reads.embed, PatchesSpec):
        data, objective = dict[str, Any](path="captions.jsonl"), "captions"  # there are no images to begin with
    else:
        limit = 2000 if spec.layout == "encoder-decoder" else 20000
        data, objective = {"path": "shakespeare", "held_out_limit": limit}, _OBJECTIVE[spec.layout]
    unpacked = not adapter and stores_packed(header.source)
    model: dict[str, Any] = {"path": base} | ({"dequantize": True} if unpacked else {})
    added = {"adapter": ADAPTER, "optimizer": {"lr": ADAPTER_RATE}} if adapter else {}
    return added | {
        "model": model,
        "data": data,
        "objective": {"name": objective},
        "run": {"rows": ROWS, "length": min(LENGTH, spec.context or LENGTH), "seconds": SECONDS},
    }


_HEADS = "take a checkpoint that has one (ForCausalLM, ForMaskedLM or ForConditionalGeneration)"


def recipe_text(recipe: Recipe) -> str:
    """The recipe as TOML: keys that were set are set, the others stand as comments with their defaults."""
    lines = [
        "# A recipe of `triptych train`: what is set here holds; a key in a comment has the value shown there.",
        "",
    ]
    for key in single_keys():
        lines += _entry(key, getattr(recipe, key.name), wanted=getattr(recipe, key.name) is not None)
    for name in sections():
        about = f"{meaning(name)}  {details(name)}".strip()
        lines += ["", *_comment(about), f"[{name}]"]
        if name == "model" and recipe.base is None:
            lines += [f"{key} = {toml(value)}" for key, value in recipe.model.items()]
            continue
        table = recipe.base if name == "model" else getattr(recipe, name)
        lines[-1] = f"[{name}]" if table is not None else f"# [{name}]"
        for key in keys(name):
            wanted = table is not None and key.name in table.model_fields_set
            lines += _entry(key, getattr(table, key.name, None), wanted=wanted)
    return "\n".join(lines) + "\n"


def _entry(key: Key, value: Any, *, wanted: bool) -> Iterator[str]:
    """A key under its explanation: set if `wanted`, otherwise as a comment."""
    default = "" if key.default is None else f"  Default: {key.defaults}."
    yield from _comment(f"{key.meaning}{default}")
    if isinstance(value, Mapping) or (value is not None and (wanted or key.default is None)):
        yield f"{key.name} = {toml(value)}"
    else:
        yield f"# {key.name} = {key.default or ''}".rstrip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
