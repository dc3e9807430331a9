"""Recipes: what to train on what, as TOML, every key known and checked before anything starts.

`--set optimizer.lr=0.01` changes one key from outside; its value is TOML too, or a plain word.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from triptych.errors import ConfigError, nearest
from triptych.train.loop import RunSettings
from triptych.train.optim import OptimizerSettings, Schedule
from triptych.train.settings import Positive, Section

SHIPPED = ("decoder", "encoder", "encoder-decoder")  # recipes that come along: the quickstart's panels
RECIPES = Path(__file__).with_name("recipes")


class Data(Section):
    """`path`: a UTF-8 text file, a folder of them (each file a document), a `.jsonl` of `{"source", "target"}` for
    pairs, or `shakespeare`.  `held_out` is the share kept for evaluation, from the end of the data; Shakespeare has
    plays of its own for that.  Of it, at most `held_out_limit` characters (or pairs) are used.  `drop_longer` leaves
    out pairs of more than `run.length` tokens, which are refused otherwise.  With `words`, pairs whose sides have
    equally many words are cut into pieces of 1 to `words` of them, held-out ones of `words`, and others left out."""

    path: str
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    held_out_limit: Positive | None = None
    drop_longer: bool = False
    words: Positive | None = None


class Objective(Section):
    """`causal`: the next token.  `masked`: the hidden ones, `rate` of all, or of the `commonest` so many tokens of the
    training text where that is given.  `seq2seq`: the target from the source."""

    name: Literal["causal", "masked", "seq2seq"]
    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    commonest: Positive | None = None


class Recipe(Section):
    """`model` is a `config.json` in its own keys (`vocab_size` and the ids of special tokens come from the tokenizer),
    or `{path = DIRECTORY}` to go on training what is there.  `tokenizer`: `byte`, `characters`, `bpe:4096`,
    `words:4096`, or a directory with a tokenizer.json; with `model.path` it is the model's and is left out."""

    model: dict[str, Any]
    data: Data
    objective: Objective
    run: RunSettings
    tokenizer: str | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Schedule = Schedule()


def read_recipe(path: Path | str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in the file `path`, or the one of that name in `SHIPPED`, with `changes` ("run.seconds=90") made.

    Raises ConfigError, one line with the path to the key, for what is missing, unknown or of the wrong kind.
    """
    path = RECIPES / f"{path}.toml" if str(path) in SHIPPED else Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe {path}; give the path of a .toml file, or one of {', '.join(SHIPPED)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    return check_recipe(tables, changes, str(path))


def check_recipe(tables: Mapping[str, Any], changes: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """The recipe of already parsed `tables`; see `read_recipe`."""
    tables = _copy(tables)
    for change in changes:
        _change(tables, change)
    try:
        recipe = Recipe.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(_problems(error))}") from None
    return _consistent(recipe, where)


def _consistent(recipe: Recipe, where: str) -> Recipe:
    if ("path" in recipe.model) == (recipe.tokenizer is not None):
        raise ConfigError(f"{where}: tokenizer belongs to a new model, and model.path brings its own; give one of them")
    return recipe


def _change(tables: dict[str, Any], change: str) -> None:
    """Apply `a.b=c` in place; the last table is made if it is not there, and judged with the rest."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {change}: write it as section.key=value, for example run.seconds=90")
    at: Any = tables
    for name in path[:-1]:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {change}: {name} is a value, not a table")
    at[path[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """`text` as a TOML value; what is none (a path, a word) is a string."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def _problems(error: ValidationError) -> Iterator[str]:
    """Each of pydantic's findings in a few words, with the path to the key and the nearest name that exists."""
    for found in error.errors(include_url=False):
        place = [str(part) for part in found["loc"]]
        name = ".".join(place)
        if found["type"] == "extra_forbidden":
            known = _keys(place[:-1])
            yield f"{name} is not a key of a recipe{nearest(place[-1], known)}"
        elif found["type"] == "missing":
            yield f"{name} is missing"
        elif found["type"] == "value_error":
            yield f"{name} {found['ctx']['error']}"
        else:
            given = found["input"]
            yield f"{name} = {given!r}: {found['msg'][0].lower()}{found['msg'][1:]}"


def _keys(path: Sequence[str]) -> list[str]:
    """The keys of the section at `path`."""
    section: Any = Recipe
    for name in path:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _copy(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
