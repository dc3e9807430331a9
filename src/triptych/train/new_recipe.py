"""The keys of a recipe with values, defaults and meaning, read from the settings that check them, and short recipes.

A new recipe is written with them, for a new model or for one that is trained further; and so is the documentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.arguments import checked
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import stores_packed
from triptych.errors import InputError, TextError
from triptych.files import exists
from triptych.shards.shard_set import holds_shards
from triptych.spec import FramesSpec, LMHeadSpec, MaskedLMHeadSpec, PatchesSpec
from triptych.text import corpus
from .new_head import HEAD_KINDS, check_layout, head_config
from .recipe import FINE_TUNING, Objective, Recipe, check_recipe, named_data, read_tables, sections
from .records import columns_of
from .settings import Config, RecipeSection
from .sources import FOLDED, SHAKESPEARE
from .task import known_by_name


@dataclass(frozen=True)
class Key:
    """One key of a recipe: which values it takes, its default as TOML ("" for none, None where it must be set), what an
    existing model has instead, and its meaning."""

    name: str
    values: str
    default: str | None
    fine_tuning: str | None
    meaning: str

    @property
    def defaults(self) -> str:
        """The defaults in words."""
        if self.default is None:
            return "must be set"
        if self.fine_tuning is None:
            return self.default or "not set"
        return f"{self.default}; {self.fine_tuning} with model.path"


def keys(name: str) -> list[Key]:
    """The keys of the table `name`; those of `model` are for an existing model."""
    section = sections()[name]
    return [_key(field, section, FINE_TUNING.get(name, {})) for field in section.model_fields]


def single_keys() -> list[Key]:
    """The keys outside any table."""
    return [_key(name, Recipe, {}) for name in Recipe.model_fields if name not in sections()]


def meaning(name: str) -> str:
    """What the table `name` is for."""
    described = Recipe.model_fields[name].description or sections()[name].__doc__ or ""
    return _one_line(described.partition("\n\n")[0])


def in_markdown() -> str:
    """All keys as tables in Markdown."""
    parts = ["\n".join(_rows(single_keys()))]
    for name in sections():
        details = _one_line((sections()[name].__doc__ or "").partition("\n\n")[2])
        about = [text for text in (meaning(name), details) if text]
        parts += [f"## `[{name}]`", *about, "\n".join(_rows(keys(name)))]
    return "\n\n".join(parts) + "\n"


def toml(value: Any) -> str:
    """A value as TOML writes it.  Raises TypeError for one that TOML has not."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case Mapping():
            names = (key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value)
            pairs = zip(names, map(toml, value.values()), strict=True)
            return f"{{{', '.join(f'{name} = {inner}' for name, inner in pairs)}}}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _rows(shown: Sequence[Key]) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for key in shown:
        yield f"| `{key.name}` | {key.values} | {key.defaults} | {key.meaning} |"


def _key(name: str, section: type[RecipeSection], fine_tuning: Mapping[str, object]) -> Key:
    info, default = section.model_fields[name], None
    if not info.is_required():
        value = info.get_default(call_default_factory=True)
        default = "" if value is None else toml(value)
    instead = toml(fine_tuning[name]) if name in fine_tuning else None
    values = _values(section.model_json_schema()["properties"][name])
    return Key(name, values, default, instead, _one_line(info.description or ""))


_KINDS = {"boolean": "true or false", "integer": "whole number", "number": "number", "string": "text"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}


def _values(schema: Config) -> str:
    """Which values the JSON schema of a key allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_values(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum") or [schema["const"]])
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} numbers in [0, 1]"
    if schema["type"] == "array":
        return "a list of names"
    bounds = [f"{word} {schema[bound]:g}" for bound, word in _BOUNDS.items() if schema.get(bound, 2**32) < 2**32]
    return " ".join([_KINDS.get(schema["type"], "table"), *bounds])


def _one_line(text: str) -> str:
    return " ".join(text.split())


LONGEST_COMMENT = 95  # characters beside a key
LENGTH, ROWS, SECONDS = 256, 8, 600  # of a run that trains an existing model further
ADAPTER = {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
ADAPTER_RATE = 1e-3  # its matrices begin at noise and zeros, and take a higher learning rate than trained ones
_OBJECTIVE: dict[str, Objective] = {"decoder": "causal", "encoder": "masked", "encoder-decoder": "seq2seq"}
PLAIN_TEXT = ("causal", "masked", "seq2seq", "corruption", "replaced")  # what the plays can be read for
#: In this order, the fields by which the objective of records is known.
FIELDS: tuple[tuple[Objective, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("chat", ("messages",)),
    ("spans", ("question", "context", "answer", "start")),
    ("tags", ("words", "tags")),
    ("transcripts", ("audio", "text")),
    ("labels", ("image", "label")),
    ("captions", ("image", "text")),
    ("labels", ("text", "label")),
    ("contrastive", ("text", "text_b")),
    ("seq2seq", ("source", "target")),
)


@checked
def write_new_recipe(
    path: Path | str,
    recipe: Path | str | None = None,
    *,
    base: str | None = None,
    data: str | None = None,
    out: str | None = None,
    changes: Sequence[str] = (),
    adapter: bool = False,
    objective: Objective | None = None,
) -> Recipe:
    """Write a recipe to `path` with the keys that are not at their defaults; it runs as it is.

    It is that of the existing model `base`, with `adapter` of an adapter for it (LoRA), or a copy of `recipe` (a file
    or the name of a shipped one, by default "decoder"), for a new model; of a `recipe` for another model, `base` takes
    the place.  The model is saved under `out`, by default `runs/` and the name of the file.  Without an `objective` the
    fields of `data` say what a `base` learns, and for plain text its layout does.

    Raises InputError for a file that exists, for a `base` that no objective trains, for records that name no objective,
    and for an adapter or an objective without a `base` or with a `recipe`; TextError for `data` that are neither a file
    nor a folder nor known by a name; ConfigError for changes that do not fit and for a `base` that the objective does
    not train; and what reading `base` and `data` raises.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise InputError(f"{path}: a recipe is a .toml file; write --new {path.with_suffix('.toml')}")
    if exists(path):
        raise InputError(f"{path} exists and is not overwritten; choose another name")
    alone = base is not None and recipe is None  # an existing model and no other recipe
    if adapter and not alone:
        raise InputError("a new recipe of an adapter is for an existing model alone; give that one and no other recipe")
    if objective is not None and not alone:
        raise InputError("an objective is chosen for an existing model alone; in a recipe it is objective.name")
    if data is not None and not known_by_name(data) and not holds_shards(data):
        if not exists(Path(data)):
            raise TextError(f"no file or folder {data}; give a UTF-8 text file, a folder of them or a file of records")
        if not columns_of(data):
            corpus.read_documents(data)  # raises TextError where there is no text
    if base is not None and alone:
        tables = _fine_tuning_tables(base, data, objective, adapter=adapter)
    else:
        tables = read_tables(recipe or "decoder")
    values = {"run.out": out or f"runs/{path.stem}"} | ({} if data is None else named_data(data))
    checked = check_recipe(tables, changes, str(recipe or "decoder"), values, base if recipe is not None else None)
    try:
        content = recipe_text(checked, path).encode()
    except UnicodeEncodeError:
        raise InputError(f"cannot write {path}: a path in the recipe is not UTF-8; choose another name") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    return checked


def _fine_tuning_tables(base: str, path: str | None, objective: Objective | None, *, adapter: bool) -> dict[str, Any]:
    """The tables of a recipe that trains the model `base` further: its objective by the fields of the records in
    `path`, or by its layout and what it reads, rows within its context, packed weights unpacked unless an `adapter` is
    trained.

    Raises InputError for a model without a head that the objective trains, and for records of no objective; ConfigError
    for a model that cannot have the head of the objective.
    """
    header = read_header(base)
    spec = header.spec
    chosen = objective or (None if path is None else objective_of(path))
    data: dict[str, Any] = {"path": path or "shakespeare"}
    if chosen is None and isinstance(spec.reads.embed, PatchesSpec) and isinstance(spec.head, LMHeadSpec):
        data, chosen = {"path": path or "captions.jsonl"}, "captions"  # there are no images to begin with
    elif chosen is None:
        chosen = _OBJECTIVE[spec.layout]
        if chosen == "seq2seq" and path not in (None, SHAKESPEARE, FOLDED):
            chosen, tokenizer = "corruption", header.tokenizer()  # other texts come without pairs
            if tokenizer is None or tokenizer.backend.token_to_id("<extra_id_0>") is None:
                wanted = "audio and text" if isinstance(spec.reads.embed, FramesSpec) else "source and target"
                problem = f"a {spec.family} learns from records, not from plain text"
                raise InputError(f"{problem}; give some with the fields {wanted}")
        data["held_out_limit"] = 2000 if spec.layout == "encoder-decoder" else 20000
    elif path is None and chosen not in PLAIN_TEXT:
        raise InputError(f"objective {chosen} reads records; give the file with --data")
    kind = next((one for one in HEAD_KINDS if one == chosen), None)
    if kind is not None:
        head_config(header.hf, kind)  # raises ConfigError for a model that cannot have this head
    else:
        check_layout(spec, chosen)
    if kind is None and not isinstance(spec.head, LMHeadSpec | MaskedLMHeadSpec):
        raise InputError(
            f"{base} is a {spec.family} {spec.layout} without a head that predicts tokens, which objective {chosen} "
            "needs; take a checkpoint that has one (ForCausalLM, ForMaskedLM or ForConditionalGeneration), or records "
            f"of an objective that has a head of its own: {', '.join(HEAD_KINDS)}"
        )
    model: dict[str, Any] = {"path": base}
    if not adapter and stores_packed(header.source):
        model["dequantize"] = True
    added = {"adapter": ADAPTER, "optimizer": {"lr": ADAPTER_RATE}} if adapter else {}
    return added | {
        "model": model,
        "data": data,
        "objective": {"name": chosen},
        "run": {"rows": ROWS, "length": min(LENGTH, spec.context or LENGTH), "seconds": SECONDS},
    }


def objective_of(path: str) -> Objective | None:
    """The objective that the records in `path` are for, by their fields; None for plain text and for data that come
    with the library.  Raises InputError for records with fields of no objective."""
    columns = columns_of(path) if exists(Path(path)) and not holds_shards(path) else []
    for objective, fields in FIELDS:
        if set(fields) <= set(columns):
            return objective
    if not columns or "text" in columns:
        return None
    raise InputError(
        f"{path} has the fields {', '.join(columns)}, by which no objective is known; name it with --objective, "
        "and the fields with --set 'data.columns={text = \"...\"}'"
    )


def recipe_text(recipe: Recipe, path: Path) -> str:
    """The recipe as TOML for the file `path`: the keys whose values are not their defaults, each with the first
    sentence of its meaning where that is short."""
    lines = [
        f"# triptych train {path}",
        "# A key that is left out has its default; triptych train --keys lists all of them.",
        *(_line(key, value) for key in single_keys() if (value := getattr(recipe, key.name)) is not None),
    ]
    for name in sections():
        table = recipe.base if name == "model" else getattr(recipe, name)
        entries = []
        if name == "model" and table is None:
            entries = [f"{key} = {toml(value)}" for key, value in recipe.model.items()]
        for key in keys(name) if table is not None else ():
            value, default = getattr(table, key.name), key.default
            if recipe.base is not None and key.fine_tuning is not None:
                default = key.fine_tuning
            if value is not None and toml(value) != default:
                entries.append(_line(key, value))
        if entries:
            lines += ["", f"[{name}]", *entries]
        elif name == "adapter" and table is not None:
            lines += ["", "[adapter]  # with the default rank, scale and targets"]
    return "\n".join(lines) + "\n"


def _line(key: Key, value: Any) -> str:
    meaning = key.meaning.partition(". ")[0].rstrip(".")
    comment = f"  # {meaning}" if len(meaning) <= LONGEST_COMMENT else ""
    return f"{key.name} = {toml(value)}{comment}"
