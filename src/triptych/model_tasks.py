"""Tasks that combine several steps: search in a folder, translation, summaries; `Model` adds what these run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from triptych import tasks
from triptych.checkpoints.sentence_settings import KEY, SentenceSettings
from triptych.errors import InputError
from triptych.generate import Generation
from triptych.model_inside import ModelInside
from triptych.spec import PoolingSpec


class ModelTasks(ModelInside):
    """Whole tasks of a model that reads text."""

    encode: Callable[..., Tensor]
    generate: Callable[..., list[Generation]]

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

    def summarize(self, texts: Sequence[str], **options: Any) -> list[Generation]:
        """A summary of each text, by an encoder-decoder or a decoder (`tasks.summary`).

        The files of the checkpoint set beams and limits; `options` are those of `generate` and replace them.  Raises
        InputError for a model that writes no text, and for an empty text.
        """
        return self._written([tasks.summary(self.inputs, self.hf or {}, text) for text in _texts(texts)], options)

    def translate(
        self, texts: Sequence[str], source: str | None = None, target: str | None = None, **options: Any
    ) -> list[Generation]:  # fmt: skip
        """Each text in the language `target`; `source` and `target` as the checkpoint names them (`tasks.translation`).

        `options` as in `summarize`.  Raises InputError for a language that the checkpoint does not know, with those
        that it does, for a model that does not translate, and for an empty text.
        """
        hf = self.hf or {}
        return self._written([tasks.translation(self.inputs, hf, text, source, target) for text in _texts(texts)],
                             options)  # fmt: skip

    def answer_in_words(self, question: str, context: str, **options: Any) -> Generation:
        """An answer from `context` in the model's own words (`tasks.written_answer`); `options` as in `summarize`.

        `answer` finds a piece of the context instead.  Raises InputError for a model that writes no text, and for an
        empty question or context.
        """
        return self._written([tasks.written_answer(self.inputs, self.hf or {}, question, context)], options)[0]

    def _written(self, asked: Sequence[tasks.WritingTask], options: Mapping[str, Any]) -> list[Generation]:
        settings = {**asked[0].options, **options}
        if not settings.get("beams"):
            for name in ("length_penalty", "early_stopping"):
                if name not in options:
                    settings.pop(name, None)
        prompts = [one.prompt for one in asked]
        return self.generate(prompts, **{"decoder_prefix": asked[0].decoder_prefix, **settings})

    def note_on_vectors(self) -> str | None:
        """A line for the user where the checkpoint was not made for comparing texts by their vectors."""
        if isinstance(self.spec.head, PoolingSpec):
            return None
        return (
            f"this {self.spec.family} checkpoint says nothing about pooling: its mean vectors rank texts less well "
            "than those of a model for sentence embeddings, such as hub:sentence-transformers/all-MiniLM-L6-v2"
        )


def _texts(texts: Sequence[str]) -> Sequence[str]:
    """Raises InputError for anything but a list of texts."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts) or not len(texts):
        raise InputError("give a list of texts: [text]")
    return texts
