"""A teacher's largest logits on the disk, so that it runs once for all runs on the same rows.

    STORE/part-00003-of-00012.safetensors
        log_probabilities  fp16 [tokens, top + 1]  of the `top` largest at the temperature, and of the rest together
        ids                int32 [tokens, top]     which tokens these are

Where `top` is the whole vocabulary there is no rest.  Only trained tokens are stored, in the order of the rows.  The
metadata of each part are digests of the teacher, of the tokenizer and of the rows, with `top` and the temperature; a
part with others is refused.  A part is written under another name and renamed, so that a run that was killed goes on
with the parts that are missing, and two that write at once write the same.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.checkpoints.safetensors import open_file
from triptych.checkpoints.save import replacing, target_of, write_safetensors
from triptych.count import MAX_LOGITS
from triptych.count.training import size
from triptych.errors import CheckpointError, ConfigError, counted, shown
from .data import groups
from .distill_loss import DistilledExample, Entries, TeacherModel
from .objectives import Example, TrainingBatch
from .ranks import Ranks

PART = 1 << 16  # trained tokens of a part, about; a teacher that is killed computes at most so many again
MOST_PARTS = 512  # of a store: each is a mapped file
TOKENS = 1 << 12  # that the teacher reads at once, about
_NAME = re.compile(r"part-\d{5}-of-\d{5}\.safetensors")
_FORMAT = "triptych teacher 1"
Part = tuple[Tensor, Tensor]


def digest_of_rows(examples: Sequence[Example]) -> str:
    """The SHA-256 of the tokens of rows, of their sources, and of which are trained."""
    digest = hashlib.sha256()
    for one in examples:
        for array in (one.ids, one.targets, one.trained, one.source):
            content = b"" if array is None else np.ascontiguousarray(array).tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class TeacherStore:
    """The entries of a teacher for the trained tokens of `examples`, `top` of `vocab` ones each.

    `facts` are what the parts must agree with, by name (`teacher`, `tokenizer`, `rows`, `top`, `temperature`), and
    `load` gives the teacher, where parts are missing.  Raises ConfigError for a directory of something else or of other
    facts, CheckpointError for a part that is damaged.
    """

    def __init__(
        self, path: str, facts: Mapping[str, str], examples: Sequence[Example], top: int, vocab: int,
        load: Callable[[], TeacherModel],
    ) -> None:  # fmt: skip
        self.path, self.facts, self.examples, self.load = target_of(path), {"format": _FORMAT, **facts}, examples, load
        self.top, self.vocab, self.columns = top, vocab, top + (top < vocab)
        self.ends = np.cumsum([int(one.trained.sum()) for one in examples])
        self.tokens = int(self.ends[-1])
        part = max(PART, -(-self.tokens // MOST_PARTS))
        starts = np.searchsorted(self.ends, np.arange(0, self.tokens, part), side="right").tolist()
        self.edges = sorted({0, *starts, len(examples)})  # the first row of each part, and the end
        self._parts: dict[int, Part] = {}
        self._teacher: TeacherModel | None = None
        self._check_directory()
        for number in range(self.count):
            if self._file(number).exists():
                self._part(number)

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.edges) - 1

    def complete(self, ranks: Ranks, note: Callable[[str], None]) -> None:
        """Write the parts that are missing, each process of a run its share of them, and tell `note` how far it is.

        Raises CheckpointError where the disk refuses one; those before it stay.
        """
        own = [number for number in range(ranks.index, self.count, ranks.count) if number not in self._parts]
        if own:
            nbytes = size(self.tokens * (2 * self.columns + 4 * self.top))
            note(f"the teacher computes its logits of {counted(self.tokens, 'token')} once: {nbytes} in {self.path}")
        for done, number in enumerate(own, 1):
            self._part(number)
            if done * 10 // len(own) != (done - 1) * 10 // len(own):
                note(f"the teacher has computed {done:,} of {counted(len(own), 'part')} of {self.path}")
        self._teacher = None  # its memory is free for the steps
        ranks.any(False)  # waits for the parts of the others

    def known(self, batch: TrainingBatch) -> tuple[Tensor, ...]:
        """`log_probabilities` and `ids` of the trained tokens of a batch.  Raises CheckpointError for what no teacher
        wrote."""
        pieces = []
        for example in batch.examples:
            assert isinstance(example, DistilledExample)
            assert example.number is not None
            number = int(np.searchsorted(self.edges, example.number, side="right")) - 1
            first, end = self._first(self.edges[number]), int(self.ends[example.number])
            place = slice(self._first(example.number) - first, end - first)
            pieces.append([tensor[place] for tensor in self._part(number)])
        logs, ids = (torch.cat(side) for side in zip(*pieces, strict=True))
        if not (logs.isfinite().all() and (logs <= 0).all() and ((ids >= 0) & (ids < self.vocab)).all()):
            raise CheckpointError(f"{self.path} holds numbers that no teacher wrote; delete it, and it is made again")
        return logs.to(batch.ids.device), ids.to(batch.ids.device)

    def entries(self, rows: Rows, *known: Tensor) -> Entries:
        """What is `known`, whose rounded probabilities are divided by their sum."""
        logs, ids = known
        return logs.float().log_softmax(-1), ids.long()

    def _first(self, row: int) -> int:
        """How many trained tokens come before a row."""
        return int(self.ends[row - 1]) if row else 0

    def _file(self, number: int) -> Path:
        return self.path / f"part-{number:05}-of-{self.count:05}.safetensors"

    def _check_directory(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"distill.store = {shown(str(self.path))} is a file; name a directory")
        for name in sorted(os.listdir(self.path)):
            if not name.startswith(".") and not _NAME.fullmatch(name):
                raise ConfigError(f"{self.path} holds {shown(name)}, which no teacher wrote; name a new directory")
            if not name.startswith("."):
                self._check_facts(self.path / name, open_file(self.path / name).metadata)

    def _check_facts(self, file: Path, metadata: Mapping[str, str]) -> None:
        """Raises ConfigError for a part of another store."""
        other = next((name for name, value in self.facts.items() if metadata.get(name) != value), None)
        if other is not None:
            what = {
                "format": "is not a part of a teacher's logits",
                "teacher": "has the logits of another teacher",
                "tokenizer": "has the logits of a teacher with another tokenizer",
                "rows": "has the logits of other rows: the data, run.length or the objective are not the same",
            }.get(other, f"has distill.{other} = {shown(metadata.get(other))}, and not {self.facts[other]}")
            raise ConfigError(f"{file} {what}; name another distill.store, or delete this one")

    def _part(self, number: int) -> Part:
        """`log_probabilities` and `ids` of a part, mapped from its file, which is written where it is missing."""
        if number not in self._parts:
            file = self._file(number)
            if not file.exists():
                self._write(number, file)
            source = open_file(file)
            self._check_facts(file, source.metadata)
            tokens = self._first(self.edges[number + 1]) - self._first(self.edges[number])
            wanted = {"log_probabilities": ("F16", (tokens, self.columns)), "ids": ("I32", (tokens, self.top))}
            if {name: (info.dtype, info.shape) for name, info in source.infos.items()} != wanted:
                raise CheckpointError(f"{file} has not the {tokens:,} x {self.top} logits of this part; delete it")
            self._parts[number] = source.read("log_probabilities"), source.read("ids")
        return self._parts[number]

    def _write(self, number: int, file: Path) -> None:
        if self._teacher is None:
            self._teacher = self.load()
        teacher, rows = self._teacher, self.examples[self.edges[number] : self.edges[number + 1]]
        longest = max(len(one.ids) + (0 if one.source is None else len(one.source)) for one in rows)
        logs, ids = list[Tensor](), list[Tensor]()
        for group in groups(rows, max(1, TOKENS // longest)):
            batch = TrainingBatch.of(group, teacher.module.device)
            for x in torch.split(teacher.known(batch)[0], max(1, MAX_LOGITS // teacher.module.spec.vocab)):
                entries, which = teacher.entries(batch.rows, x)
                assert which is not None
                logs.append(entries.clamp(max=0.0).half().cpu())
                ids.append(which.int().cpu())
        tensors = {"log_probabilities": torch.cat(logs), "ids": torch.cat(ids)}
        with replacing(file) as content:
            write_safetensors(content, tensors, self.facts)
