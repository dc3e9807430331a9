"""Recipes: which model to train on which data, as TOML; every key is checked before anything starts.

`--set optimizer.lr=0.01` changes one key from the command line; its value is TOML, or a string without quotes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from triptych.errors import ConfigError, nearest
from triptych.train.loop import RunSettings
from triptych.train.optim import OptimizerSettings, Schedule
from triptych.train.settings import Positive, Rate, Section

Objective = Literal[
    "causal", "masked", "seq2seq", "labels", "tags", "spans", "contrastive", "chat", "corruption", "replaced"
]
SHIPPED = ("decoder", "encoder", "encoder-decoder")  # the recipes in this package, those of the quickstart's panels
RECIPES = Path(__file__).with_name("recipes")


class DataSettings(Section):
    """`path`: a UTF-8 text file, a folder of them (each file a document), a `.jsonl` of `{"source", "target"}` for
    pairs, or `shakespeare`.  `held_out` is the share reserved for evaluation, from the end of the data; Shakespeare
    has whole plays for that.  Of the held-out data, at most `held_out_limit` characters (or pairs) are used.
    `drop_longer` leaves out pairs and records of more than `run.length` tokens, which are an error otherwise, and
    `cut_longer` cuts the ends of a record's texts instead.  With `words`, pairs whose two sides have equally many words
    are cut into pieces of 1 to `words` words (held-out pairs into pieces of `words`), and all other pairs are left out.

    Objectives with records (docs/concepts/objectives.md) read `.jsonl`, `.csv`, `.tsv` or `.parquet`.  `columns` gives
    the column of a field where it is called otherwise; the records held out are drawn at random, or are those of the
    file `held_out_path`.  `shakespeare:genres` and `shakespeare:speakers` are texts of the plays with labels."""

    path: str
    columns: dict[str, str] = Field(default_factory=dict)
    held_out_path: str | None = None
    cut_longer: bool = False
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    held_out_limit: Positive | None = None
    drop_longer: bool = False
    words: Positive | None = None


class ObjectiveSettings(Section):
    """`causal` predicts the next token.  `masked` predicts hidden tokens: a share `rate` of all tokens, or only of the
    `commonest` N tokens of the training text.  `seq2seq` predicts the target from the source.  `labels` predicts the
    label of a text or a pair of texts (`several` labels each), `tags` those of words, `spans` an answer's place in its
    context, `contrastive` which texts belong together, by the cosine of their vectors times `scale`.  `chat` predicts
    the assistant's turns.  `corruption` predicts what spans of mean length `span` were removed, a share `rate` of all
    tokens.  `replaced` predicts which tokens, of a share `rate`, were replaced by samples: of the masked language model
    `generator`, or by the frequency of tokens.

    Labels and tags: `smoothing` of the labels in [0, 1), and `class_weights`, a weight by label or "balanced", with
    which every label weighs the same in sum."""

    name: Objective
    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    commonest: Positive | None = None
    several: bool = False
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    class_weights: Literal["balanced"] | dict[str, Rate] | None = None
    scale: Rate = 20.0
    span: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 3.0
    generator: str | None = None


class Recipe(Section):
    """`model` holds the keys of a `config.json` (`vocab_size` and the ids of special tokens come from the tokenizer),
    or `{path = DIRECTORY}` to continue training a saved model.  `tokenizer`: `byte`, `characters`, `bpe:4096`,
    `words:4096`, or a directory with a tokenizer.json; leave it out with `model.path`, which has its own."""

    model: dict[str, Any]
    data: DataSettings
    objective: ObjectiveSettings
    run: RunSettings
    tokenizer: str | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Schedule = Schedule()


def read_recipe(path: Path | str, changes: Sequence[str] = (), values: Mapping[str, object] | None = None) -> Recipe:
    """The recipe in the file `path`, or the one of that name in `SHIPPED`.

    `changes` are texts such as "run.seconds=90", parsed as TOML; `values` are Python values by dotted key, taken as
    they are, for paths and other text that no parser may change.  Raises ConfigError, one line with the dotted key,
    for a key that is missing or unknown, or a value of the wrong type.
    """
    path = RECIPES / f"{path}.toml" if str(path) in SHIPPED else Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe {path}; give the path of a .toml file, or one of {', '.join(SHIPPED)}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{str(path)!r} is a directory; give a .toml file, or one of {', '.join(SHIPPED)}; "
            "a run continues with the recipe it began with, --out DIR and --resume"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    return check_recipe(tables, changes, str(path), values)


def check_recipe(
    tables: Mapping[str, Any],
    changes: Sequence[str] = (),
    where: str = "recipe",
    values: Mapping[str, object] | None = None,
) -> Recipe:
    """The recipe of already parsed `tables`, which come from `where`; see `read_recipe`."""
    tables = _copy(tables)
    changed: dict[tuple[str, ...], str] = {}
    for change in changes:
        key, value = _parse_change(change)
        _set(tables, key, value, f"--set {change}")
        changed[tuple(key)] = f"--set {change}"
    for dotted, value in (values or {}).items():
        _set(tables, dotted.split("."), value, dotted)
        changed.pop(tuple(dotted.split(".")), None)
    try:
        recipe = Recipe.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error, where, changed))) from None
    if ("path" in recipe.model) == (recipe.tokenizer is not None):
        raise ConfigError(f"{where}: a new model needs a tokenizer, and model.path has its own; give one of the two")
    return recipe


def _parse_change(change: str) -> tuple[list[str], object]:
    """Key and value of `a.b=c`."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {change}: write it as section.key=value, for example run.seconds=90")
    return path, _parse_value(text.strip())


def _parse_value(text: str) -> object:
    """`text` as a TOML value, or as a string where it is not TOML (a path, a word)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(tables: dict[str, Any], path: Sequence[str], value: object, where: str) -> None:
    """Set the key at `path` in place; missing tables are created, and validated with the rest."""
    table = tables
    for name in path[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {name} is a value, not a table")
        table = inner
    table[path[-1]] = value


def _problems(error: ValidationError, where: str, changed: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Pydantic's errors by source: `where`, or the option in `changed` that set the key."""
    by_source: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        source = _source(problem, changed) or where
        by_source.setdefault(source, []).append(_problem(problem))
    return (f"{source}: {'; '.join(texts)}" for source, texts in by_source.items())


def _source(problem: ErrorDetails, changed: Mapping[tuple[str, ...], str]) -> str | None:
    """The option that set the value with the problem, a part of it, or a key below one that does not exist."""
    path = tuple(str(part) for part in problem["loc"])
    for key, option in reversed(list(changed.items())):
        within = path[: len(key)] == key
        if within or (problem["type"] not in ("missing", "value_error") and key[: len(path)] == path):
            return option
    return None


def _problem(problem: ErrorDetails) -> str:
    """One of pydantic's errors in a few words, with the dotted key and the nearest key that exists."""
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path)
    match problem["type"]:
        case "extra_forbidden":
            return f"{name} is not a key of a recipe{nearest(path[-1], _keys(path[:-1]))}"
        case "missing":
            return f"{name} is missing"
        case "value_error":
            return f"{name} {problem['ctx']['error']}"
        case _:
            return f"{name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _keys(path: Sequence[str]) -> list[str]:
    """The keys of the section at `path`."""
    section: type[BaseModel] = Recipe
    for name in path:
        inner = section.model_fields[name].annotation
        assert _is_section(inner)
        section = inner
    return list(section.model_fields)


def _is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _copy(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
