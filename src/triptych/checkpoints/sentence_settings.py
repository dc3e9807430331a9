"""How sentence-transformers prepares texts for a model.

Its directories have a `modules.json`; `sentence_bert_config.json` beside it may give `max_seq_length` and
`do_lower_case`, and without the first the tokenizer's `model_max_length` holds, up to the positions of the model.
Hugging Face configs have no key for either, so they travel under one of ours (`KEY`).
How vectors are pooled is not here but in `tasks/encode.py::pooling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.checkpoints.source import file_size, read_json
from triptych.errors import CheckpointError, shown

KEY = "triptych_sentences"
_FILE = "sentence_bert_config.json"
_GGUF = "triptych."


@dataclass(frozen=True)
class SentenceSettings:
    """`max_seq_length` tokens of a text are read, special ones included, and the rest is cut off; all where it is None.
    `do_lower_case` makes texts lower case first."""

    max_seq_length: int | None = None
    do_lower_case: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> SentenceSettings:
        """The settings of a JSON object; its other keys configure how sentence-transformers loads the model.

        Raises CheckpointError for values that are not a length above 2 and a truth value.
        """
        length, lower = config.get("max_seq_length"), config.get("do_lower_case") or False
        if length is not None and (type(length) is not int or length < 3):
            raise CheckpointError(f"{where}: max_seq_length must be an integer above 2 or null, not {shown(length)}")
        if not isinstance(lower, bool):
            raise CheckpointError(f"{where}: do_lower_case must be true or false, not {shown(lower)}")
        return cls(length, lower)

    @classmethod
    def of_directory(cls, directory: Path, context: int | None) -> SentenceSettings | None:
        """The settings of a directory of sentence-transformers whose model has `context` positions; None for others."""
        own = directory / _FILE
        if file_size(own) is None and file_size(directory / "modules.json") is None:
            return None
        settings = cls() if file_size(own) is None else cls.of(read_json(own), str(own))
        if settings.max_seq_length is not None:
            return settings
        tokenizer = directory / "tokenizer_config.json"
        length = None if file_size(tokenizer) is None else read_json(tokenizer).get("model_max_length")
        lengths = [n for n in (length, context) if isinstance(n, int | float) and 3 <= n < math.inf]
        return cls(int(min(lengths)) if lengths else None, settings.do_lower_case)

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], where: str) -> SentenceSettings:
        """The settings that `to_gguf` wrote; the defaults for files of other programs."""
        return cls.of({name: metadata.get(_GGUF + name) for name in ("max_seq_length", "do_lower_case")}, where)

    def to_gguf(self) -> dict[str, Any]:
        """GGUF metadata, under keys of ours: the format has none."""
        return {_GGUF + name: value for name, value in asdict(self).items() if value}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `KEY` of a config."""
        return asdict(self)

    def truncated(self, ids: Sequence[int], around: Sequence[int]) -> list[int]:
        """The ids of a text cut to `max_seq_length`; the special tokens at its end stay.  `around` are the ids of the
        empty text: what stands before and after every text."""
        most = self.max_seq_length
        if most is None or len(ids) <= most:
            return list(ids)
        after = 0
        while after < len(around) and around[-1 - after] == ids[-1 - after]:
            after += 1
        return [*ids[: most - after], *ids[len(ids) - after :]]
