"""The teacher of a recipe with `[distill]`: what fits it, and the rows to train on with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from triptych.checkpoints import open_source
from triptych.checkpoints.adapter_files import WEIGHTS, base_digest, read_adapter
from triptych.checkpoints.adapters import with_base
from triptych.checkpoints.header import Header, read_header
from triptych.checkpoints.load_weights import read_weights
from triptych.count.training import size
from triptych.errors import ConfigError
from triptych.nn import Transformer, attach
from triptych.quantize import packing_for
from triptych.text import Tokenizer
from .data import CausalText, Data, EpochRows, HiddenWords
from .distill_loss import Distillation, DistilledRows, DistillSettings, TeacherModel
from .objectives import Example
from .recipe import Objective, Recipe
from .task import ObjectiveTask
from .teacher_store import TeacherStore, digest_of_rows

DISTILLED: tuple[Objective, ...] = ("causal", "masked", "seq2seq", "corruption", "chat")
STORED_TOP = 64  # entries of a token in a store, unless the recipe says


def check_objective(recipe: Recipe) -> None:
    """Raises ConfigError for an objective that learns from no teacher."""
    if recipe.distill is not None and recipe.objective.name not in DISTILLED:
        known = ", ".join(DISTILLED)
        raise ConfigError(f"distill is for {known}; objective {recipe.objective.name} learns from no teacher")


def distilled(recipe: Recipe, task: ObjectiveTask, module: Transformer, data: Data) -> tuple[Data, TeacherStore | None]:
    """The rows of `data` with the teacher of the recipe, if it has one, and the store of its logits, if it has one.

    Raises ConfigError for a teacher that does not fit the model, and for a store of other facts or for rows that are
    other ones each time; what reading a model raises for a teacher that cannot be read.
    """
    settings = recipe.distill
    if settings is None:
        return data, None
    source = TeacherSource(settings)
    source.check(module, task.tokenizer, task.length)
    vocab = min(module.spec.vocab, source.header.spec.vocab)
    top = settings.top
    if top is not None and top > vocab:
        raise ConfigError(f"distill.top = {top} is more than the {vocab} tokens of the vocabulary; lower it")
    heat, weight = settings.temperature, settings.weight
    if settings.store is None:
        teacher = TeacherModel(source.read(module), vocab, heat, top)
        nbytes = size(sum(p.nbytes for p in teacher.module.parameters()))
        task.notes.append(f"the teacher {settings.teacher} runs in each step and takes {nbytes} of memory")
        return DistilledRows(data, Distillation(teacher, vocab, heat, weight)), None
    rows, kept = fixed_rows(data, recipe.objective.name), min(STORED_TOP, vocab) if top is None else top
    facts = {
        "teacher": source.digest, "tokenizer": _digest(task.tokenizer.backend.get_vocab()),
        "rows": digest_of_rows(rows), "top": str(kept), "temperature": repr(heat),
    }  # fmt: skip
    model = partial(TeacherModel, vocab=vocab, temperature=heat, top=kept)
    store = TeacherStore(settings.store, facts, rows, kept, vocab, lambda: model(source.read(module)))
    distillation = Distillation(store, vocab, heat, weight)
    return EpochRows(tuple(distillation.row(one, number) for number, one in enumerate(rows))), store


def fixed_rows(data: Data, objective: Objective) -> tuple[Example, ...]:
    """Every row of `data` once: texts in windows one after the other.

    Raises ConfigError for rows of which something else is hidden each time, and for those of shards.
    """
    if isinstance(data, CausalText) or (isinstance(data, EpochRows) and not isinstance(data, HiddenWords)):
        return tuple(data.held_out_rows())
    drawn = f"those of objective {objective} with these data are drawn anew in each step"
    raise ConfigError(f"distill.store is for rows that stay the same, and {drawn}; leave it out")


@dataclass(frozen=True, eq=False)
class TeacherSource:
    """The files of a teacher, of which only the header is read before its weights are needed."""

    settings: DistillSettings

    @cached_property
    def _places(self) -> tuple[str | Path, Path | None]:
        """Where the model lies, and an adapter for it."""
        return with_base(self.settings.teacher)

    @cached_property
    def header(self) -> Header:
        return read_header(self._places[0])

    @property
    def digest(self) -> str:
        """The SHA-256 of the config and the weights; of large files of pieces of them (`base_digest`)."""
        adapter = self._places[1]
        sources = [open_source(self.header.path), *([] if adapter is None else [open_source(adapter / WEIGHTS)])]
        return _digest([dict(self.header.hf), *map(base_digest, sources)])

    def check(self, module: Transformer, tokenizer: Tokenizer, length: int) -> None:
        """Raises ConfigError unless the teacher predicts the same tokens from the same rows of `length` tokens."""
        name, spec, own = f"distill.teacher = {self.settings.teacher!r}", self.header.spec, module.spec
        if spec.layout != own.layout or type(spec.head) is not type(own.head):
            raise ConfigError(f"{name} is no {own.layout} that predicts tokens as the trained model does; give one")
        words = self.header.tokenizer()
        if words is None or words.backend.get_vocab() != tokenizer.backend.get_vocab():
            other = "no tokenizer" if words is None else "another vocabulary than the trained model"
            raise ConfigError(f"{name} has {other}; give a teacher whose tokens are the same")
        if own.layout == "encoder-decoder" and spec.ids.start != own.ids.start:
            starts = f"{spec.ids.start}, and the trained model with {own.ids.start}"
            raise ConfigError(f"{name} begins its texts with the token {starts}; give one that begins alike")
        if spec.context is not None and length > spec.context:
            raise ConfigError(f"{name} has {spec.context} positions, fewer than run.length = {length}; lower it")

    def read(self, module: Transformer) -> Transformer:
        """The teacher in evaluation mode, in its stored dtype, on the device of `module`."""
        source, adapter = open_source(self.header.path), self._places[1]
        packing = packing_for(source, device=module.device)
        teacher, _ = read_weights(
            self.header.spec, source, device=module.device, dequantize=packing.dequantize, packer=packing.packer
        )
        if adapter is not None:
            attach(teacher, read_adapter(adapter, self.header.spec).factors)
        return teacher.eval().requires_grad_(False)


def _digest(value: object) -> str:
    """The SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
