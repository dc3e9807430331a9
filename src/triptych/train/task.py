"""The base classes of all objectives, and what those with records share: splitting, row lengths, held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from triptych.checkpoints.header import label_names
from triptych.errors import ConfigError, InputError, TextError, shown
from triptych.families import read_config
from triptych.generate import Engine, Generation, Request, Scheduler, generate
from triptych.nn import InputRow, Transformer
from triptych.spec import LMHeadSpec, ModelSpec
from triptych.text import Encoded, Tokenizer, shakespeare_labels
from . import sources
from .base_model import StartingModel
from .data import Data, EpochRows
from .evaluate import HeldOut, Score, batched
from .labelled import LabelledBatch, LabelledExample
from .new_head import HEADS, HeadKind, head_config, with_head
from .objectives import Example, TrainingBatch, exact
from .ranks import Ranks
from .recipe import DataSettings, Recipe
from .records import DataRecord, read_records, split
from .settings import Config
from .shard_rows import ShardDocuments

SHAKESPEARE: dict[str, shakespeare_labels.LabelKind] = {
    "shakespeare:genres": "genres",
    "shakespeare:speakers": "speakers",
}
TURNS = "shakespeare:turns:"  # and the name of a person: conversations


Prepared = tuple[Data, HeldOut]  # rows to train on, and those held out


class ObjectiveTask:
    """An objective with its data.  `texts` are those that a new tokenizer is trained on, `notes` what a user should
    know of how they were read, `head` the class of the head that the model needs.  `words` and `files` are those of the
    model once it is made: its tokenizer, and what stands beside its weights and says how other inputs than text are
    prepared; `shards` are the documents on the disk, where they are in no memory, and `ranks` the processes that train
    the model."""

    head: type = LMHeadSpec

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.objective = recipe, recipe.objective
        self.length, self.device = recipe.run.length, recipe.run.device
        self.texts: list[str] = []
        self.notes: list[str] = []
        self.files: Mapping[str, bytes] = {}
        self.words: Tokenizer | None = None
        self.shards: ShardDocuments | None = None
        self.ranks = Ranks()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.  Raises TextError where it has none."""
        if self.words is None:
            raise TextError(f"objective {self.objective.name} needs a model with a tokenizer; add its tokenizer.json")
        return self.words

    @property
    def folders(self) -> tuple[Path, Path]:
        """From where the files lie that the records to train on name, and those held out."""
        data = self.recipe.data
        return Path(data.path).parent, Path(data.held_out_path or data.path).parent

    def new(self, hf: Config) -> tuple[ModelSpec, Config]:
        """What a fresh model of the config `hf` is, and the config to save with it."""
        return read_config(hf, where="model"), hf

    def completed(self, tokenizer: Tokenizer) -> Tokenizer:
        """A new tokenizer with the tokens that the objective needs."""
        return tokenizer

    def adapted(self, base: StartingModel) -> StartingModel:
        """A saved model with the head that the objective needs."""
        return base

    def saved_files(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """The files that are saved beside the weights, from the `files` of the model that is trained further."""
        return files

    def check_labels(self, module: Transformer, hf: Mapping[str, Any]) -> None:
        """Raises ConfigError where a run to be resumed has other labels than its data."""

    def data(self, module: Transformer, tokens: int) -> Prepared:
        """Rows to train on, and those held out in batches of about `tokens` tokens."""
        raise NotImplementedError

    def row_length(self, record: DataRecord, tokens: int) -> int | None:
        """How many of the `tokens` tokens of a row stay: longer rows than `run.length` are cut, left out (None), or an
        InputError, as the recipe says."""
        if tokens <= self.length or self.recipe.data.cut_longer:
            return min(tokens, self.length)
        if self.recipe.data.drop_longer:
            return None
        raise InputError(
            f"{record.location} has {tokens} tokens, more than run.length = {self.length}; raise run.length, or set "
            "data.cut_longer or data.drop_longer to true"
        )

    def fitted(self, record: DataRecord, text: str, second: str | None = None) -> Encoded | None:
        """The row of a text or a pair, of at most `run.length` tokens; see `row_length`."""
        (row,) = self.tokenizer.encode_with_offsets(text, second)
        length = self.row_length(record, len(row.ids))
        if length is None or length == len(row.ids):
            return None if length is None else row
        sides = [[i for i, of in enumerate(row.sequence_ids) if of == side] for side in (0, 1)]
        excess = len(row.ids) - length
        if sum(map(len, sides)) - excess < sum(map(bool, sides)):
            raise InputError(f"run.length = {self.length} leaves no token for a text beside the special ones")
        for _ in range(excess):
            max(sides, key=len).pop()  # of the longer text, of the first where both are as long
        keep = [i for i, of in enumerate(row.sequence_ids) if of is None or i <= sides[of][-1]]
        return Encoded(
            [row.ids[i] for i in keep],
            [row.token_types[i] for i in keep],
            [row.offsets[i] for i in keep],
            [row.sequence_ids[i] for i in keep],
        )


class HeadTask(ObjectiveTask):
    """An objective that trains a head of its own."""

    kind: ClassVar[HeadKind]

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.head, _ = HEADS[self.kind]
        self.labels: list[str] = []
        self.several = False

    def new(self, hf: Config) -> tuple[ModelSpec, Config]:
        config = self._config(hf)
        # Without stored tensors a bare encoder has no pooler, which no objective here would train.
        return read_config(config, stored=() if self.kind == "contrastive" else None, where="model"), config

    def adapted(self, base: StartingModel) -> StartingModel:
        known = label_names(base.module.spec, base.hf) if isinstance(base.module.spec.head, self.head) else []
        if known and self.labels and set(self.labels) <= set(known):
            self.labels = known  # the head is trained on, also where the data lack one of its labels
        return with_head(base, self._config(base.hf), self.kind, self.recipe.run.seed)

    def check_labels(self, module: Transformer, hf: Mapping[str, Any]) -> None:
        known = label_names(module.spec, hf)
        if new := [label for label in self.labels if known and label not in known]:
            problem = f"the data have the label {shown(new[0])}, which the checkpoint lacks ({', '.join(known[:9])})"
            raise ConfigError(f"{problem}; resume with the data that the run began with")
        self.labels = known

    def _config(self, hf: Mapping[str, Any]) -> Config:
        return head_config(hf, self.kind, self.labels, several=self.several)

    def judged(self, held_out: Iterable[Example], judge: Judge, tokens: int) -> JudgedRows:
        """The held-out rows in batches of about `tokens` tokens."""
        return JudgedRows(batched(held_out, tokens, self.device), judge=judge)


def read_split(
    data: DataSettings, needed: Sequence[str], optional: Sequence[str] = ()
) -> tuple[list[DataRecord], list[DataRecord]]:
    """The records to train on and those held out: of `held_out_path`, or drawn at random."""
    if known_by_name(data.path):
        train, held_out = _of_plays(data, set(needed))
    else:
        train, apart = read_records(data.path, needed, optional, data.columns), data.held_out_path
        if apart is None:
            train, held_out = split(train, data.held_out, data.path)
        else:
            held_out = read_records(apart, needed, optional, data.columns)
    return train, sources.limited(held_out, data)


def known_by_name(path: str) -> bool:
    """Whether `path` names data that come with the library."""
    return path in (sources.SHAKESPEARE, sources.FOLDED, *SHAKESPEARE) or path.startswith(TURNS)


def _of_plays(data: DataSettings, needed: set[str]) -> Sequence[list[DataRecord]]:
    """Texts with labels, conversations of one answer with a person, or lines of the First Folio beside those of the
    modern edition (or pieces of `data.words` words), each pair once."""
    name = data.path.removeprefix(TURNS)
    fields, has = {"text", "text_b"}, "pairs of texts; use objective contrastive or seq2seq"
    if data.path in SHAKESPEARE:
        fields, has = {"text", "label"}, "texts with a label each; use objective labels"
    elif data.path.startswith(TURNS):
        fields, has = {"messages"}, "conversations; use objective chat"
        if name not in shakespeare_labels.SPEAKERS:
            known = ", ".join(shakespeare_labels.SPEAKERS)
            raise ConfigError(f"data.path = {data.path!r} names no person whose turns are known; they are {known}")
    if needed != fields:
        raise ConfigError(f"data.path = {data.path!r} has {has}")
    if data.columns or data.held_out_path is not None:
        raise ConfigError(f"data.path = {data.path!r} has its own fields and held-out texts; remove the other keys")
    if data.path in SHAKESPEARE:
        labelled = shakespeare_labels.labelled(SHAKESPEARE[data.path])
        return [[DataRecord({"text": one.text, "label": one.label}, one.where) for one in side] for side in labelled]
    if data.path.startswith(TURNS):
        return [[_conversation(name, turn) for turn in side] for side in shakespeare_labels.turns(name)]
    return [
        [
            DataRecord({"text": folio, "text_b": modern}, f"{data.path}, pair {number}")
            for number, (folio, modern) in enumerate(dict.fromkeys(side), 1)
        ]
        for side in sources.pairs(data)
    ]


def _conversation(name: str, turn: shakespeare_labels.Turn) -> DataRecord:
    contents = {"system": shakespeare_labels.system_message(name), "user": turn.asked, "assistant": turn.answer}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    return DataRecord({"messages": messages}, turn.where)


#: Rows and what the head gave for each, and what makes a score of these, of the sum of their losses and of its weight.
Outputs = Sequence[tuple[LabelledExample, Tensor]]
Judge = Callable[[float, int, Outputs], Score]


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedRows(HeldOut):
    """Held-out rows with labels, whose loss is without smoothing and weights."""

    judge: Judge

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        nats, count, rows = 0.0, 0.0, list[tuple[LabelledExample, Tensor]]()
        for batch, outputs in computed(module, batches):
            plain = batch.head.plain()
            nats += float(plain(outputs, batch.goals, batch.rows))
            count += plain.weight(batch.goals)
            rows += each_row(batch, outputs)
        return self.judge(nats, round(count), rows)


def computed(module: Transformer, batches: Iterable[TrainingBatch]) -> Iterator[tuple[LabelledBatch, Tensor]]:
    """What the head gives for each batch."""
    for batch in batches:
        assert isinstance(batch, LabelledBatch)
        yield batch, exact(batch.outputs(module))


def each_row(batch: LabelledBatch, outputs: Tensor) -> list[tuple[LabelledExample, Tensor]]:
    """The rows of a batch, and what the head gave for each."""
    each = outputs if len(outputs) == len(batch.examples) else batch.rows.split(outputs)
    return list(zip(batch.examples, [one.cpu() for one in each], strict=True))


def epoch_rows(examples: Iterable[Example | None]) -> EpochRows:
    """The rows that are left.  Raises InputError if there is none."""
    every = tuple(example for example in examples if example is not None)
    if not every:
        raise InputError("every record is longer than run.length; raise it, or set data.cut_longer = true")
    return EpochRows(every)


def trained_at(length: int, *positions: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[length], true at `positions`."""
    mask = np.zeros(length, dtype=bool)
    mask[list(positions)] = True
    return mask


def written(
    module: Transformer, prompt: Sequence[int], sources: Sequence[InputRow], most: int, ends: Sequence[int],
    tokenizer: Tokenizer | None = None,
) -> list[Generation]:  # fmt: skip
    """An encoder-decoder's text after `prompt` for each source, the likeliest token each time, at most `most`."""
    requests = [
        Request(prompt=prompt, source=one, max_new_tokens=most, ends=ends, number=i) for i, one in enumerate(sources)
    ]
    return generate(Scheduler(Engine(module.whole())), requests, tokenizer)
