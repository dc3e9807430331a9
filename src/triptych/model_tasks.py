"""Tasks that combine several steps: search in a folder, translation, summaries; `Model` adds what these run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from triptych import tasks
from triptych.checkpoints.sentence_settings import KEY, SentenceSettings
from triptych.errors import InputError
from triptych.model_inside import ModelInside
from triptych.spec import PoolingSpec


class ModelTasks(ModelInside):
    """Whole tasks of a model that reads text."""

    encode: Callable[..., Tensor]

    def search(
        self,
        folder: str | Path,
        query: str,
        *,
        k: int = 5,
        tokens: int | None = None,
        overlap: int | None = None,
        follow_links: bool = False,
        index: Path | None = None,
        on_embedded: tasks.OnEmbedded | None = None,
    ) -> tasks.SearchResult:
        """The `k` passages of the text files below `folder` nearest to `query`; see `tasks.search`.

        Vectors are pooled as the checkpoint says (`encode`).  Raises InputError for a model that reads no text, an
        empty query, settings out of range, and a folder without text; TextError without a tokenizer.
        """
        self.check_words("search()")
        tokenizer, how = self.inputs.words, tasks.pooling(self.module)
        settings = SentenceSettings.of((self.hf or {}).get(KEY, {}), f"{self.path or 'config'}: {KEY}")
        lengths = [n for n in (settings.max_seq_length, self.spec.context) if n is not None]
        most = min(lengths) - len(tokenizer.encode("")) if lengths else None
        if most is not None and most < 1:
            raise InputError(f"the model reads {min(lengths)} tokens at once, which leaves none for a passage")

        identity = tasks.identity_of(self.module, self.inputs, [settings, how])
        embedder = tasks.Embedder(self.encode, tokenizer, identity, most)
        return tasks.search(
            folder, query, embedder, k=k, tokens=tokens, overlap=overlap, follow_links=follow_links, index=index,
            on_embedded=on_embedded,
        )  # fmt: skip

    def note_on_vectors(self) -> str | None:
        """A line for the user where the checkpoint was not made for comparing texts by their vectors."""
        if isinstance(self.spec.head, PoolingSpec):
            return None
        return (
            f"this {self.spec.family} checkpoint says nothing about pooling: its mean vectors rank texts less well "
            "than those of a model for sentence embeddings, such as hub:sentence-transformers/all-MiniLM-L6-v2"
        )
