"""What people do with a model that reads text: vectors, labels, answers, search, translation, summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from triptych import tasks
from triptych.checkpoints.sentence_settings import KEY, SentenceSettings
from triptych.errors import InputError
from triptych.generate import Executor, Generation
from triptych.model_inside import ModelInside
from triptych.other_libraries import answers_arguments
from triptych.spec import PoolingSpec
from triptych.tasks.model_inputs import Texts


class ModelTasks(ModelInside):
    """Tasks of a model that reads text, or of one that labels images.

    executor   what computes the steps of a generation, and encodes: "auto", the native step wherever it may
               (`generate.Engine` says why not elsewhere), on a GPU "static"; or "modules", "static", "compiled".
    """

    executor: Executor = "auto"
    generate: Callable[..., list[Generation]]

    @answers_arguments
    def encode(
        self, texts: Texts, *, pooling: str | None = None, normalize: bool | None = None, batch_tokens: int = 4096,
        matmul: tasks.Matmul = "auto",
    ) -> Tensor:  # fmt: skip
        """One vector a text, `[B, D]`.  Pooling and normalization are the checkpoint's unless given.

        `matmul` is what an encoder multiplies in: "bf16", whatever its weights are stored as (sums and all else stay
        fp32; with MiniLM the least cosine to fp32 is above 0.9999); "stored", as they are stored; "auto", bf16 for a
        model of bf16, and for packed weights on a processor with AMX.  InputError for "bf16" where it cannot be had.

        A checkpoint of sentence-transformers also says how many tokens of a text it reads (`max_seq_length`): the rest
        of a text is cut off, as there.  Rows of ids are read whole.
        """
        how = tasks.pooling(self.module, pooling, normalize)
        rows = self.inputs.sentences(texts, self.hf or {})
        return tasks.encode(self.module, rows, how, batch_tokens=batch_tokens, executor=self.executor, matmul=matmul)

    def fill(self, texts: Texts, *, top: int = 5) -> list[list[list[tuple[str, float]]]]:
        """For each text, for each mask in it, the `top` likeliest words and their probabilities."""
        tokenizer = self.inputs.words
        if tokenizer.mask_id is None:
            raise InputError("this tokenizer has no mask token, so there is nothing to fill in")
        filled = tasks.fill(self.module, self.ids(texts), tokenizer.mask_id, top=top)
        return [[[(tokenizer.decode([i]).strip(), p) for i, p in mask] for mask in row] for row in filled]

    def classify(self, texts: Texts, *, second: Sequence[str] | None = None) -> list[list[tuple[str, float]]]:
        """The labels of each text, or image, with their probabilities, best first.

        `second` are the other halves of pairs (premise and hypothesis, query and passage).  A model with one label, or
        whose labels may hold together, gives each a probability of its own; a regression gives its score.
        """
        problem = (self.hf or {}).get("problem_type")
        return tasks.classify(self.module, self.inputs.labelled(texts, second), self.labels, problem=problem)

    def tag(self, texts: Sequence[str]) -> list[list[tasks.Tag]]:
        """The likeliest label of each token of each text, or whether it was replaced (ELECTRA)."""
        return tasks.tag(self.module, self.inputs.placed(texts), texts, self.labels)

    def entities(
        self, texts: Sequence[str], *, strategy: tasks.Strategy = "simple", window: int | None = None,
        overlap: int | None = None,
    ) -> list[list[tasks.Entity]]:  # fmt: skip
        """The entities in each text: neighbouring tokens of one label, where `B-` begins another and `O` is none.

        "first", "average" and "max" give each word one label, from its tokens.  A text longer than a `window` is read
        in windows that share `overlap` tokens (`tasks.entities_of`).
        """
        return tasks.entities_of(self.module, self.inputs, texts, self.labels, strategy, window, overlap)

    def answer(
        self, question: str, context: str, *, longest: int = 15, top: int = 1, no_answer: bool = False,
        window: int | None = None, overlap: int | None = None,
    ) -> list[tasks.Answer]:  # fmt: skip
        """The `top` pieces of `context` of at most `longest` tokens with the highest score, best first.

        With `no_answer` the empty answer competes.  A context longer than a `window` is read in windows that share
        `overlap` tokens (`tasks.answer`, `ModelInputs.windows`).  Raises InputError for a question that leaves no room.
        """
        windows = self.inputs.windows(question, context, window, overlap)
        return tasks.answer(self.module, windows, context, longest=longest, top=top, no_answer=no_answer)

    @property
    def labels(self) -> list[str]:
        """The names of the classes, from the config; `LABEL_0`, `LABEL_1`, ... where it has none."""
        return tasks.label_names(self.spec, self.hf or {})

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

    def _written(self, writing_tasks: Sequence[tasks.WritingTask], options: Mapping[str, Any]) -> list[Generation]:
        settings = {**writing_tasks[0].options, **options}
        if not settings.get("beams"):
            for name in ("length_penalty", "early_stopping"):
                if name not in options:
                    settings.pop(name, None)
        prompts = [one.prompt for one in writing_tasks]
        return self.generate(prompts, **{"decoder_prefix": writing_tasks[0].decoder_prefix, **settings})

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
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError("give a list of texts: [text]")
    if not texts:
        raise InputError("there are no texts; give a list of texts: [text]")
    return texts
