"""The tasks of a `Model` that reads text: vectors, labels, answers, search, translation and summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from triptych import tasks
from triptych.checkpoints.header import KEY, SentenceSettings
from triptych.errors import InputError
from triptych.generate import Executor, Generation
from triptych.model.inside import ModelInside
from triptych.spec import PoolingSpec
from triptych.tasks.model_inputs import Texts


class ModelTasks(ModelInside):
    """Tasks of a model that reads text, or of one that labels images.

    executor   what computes the steps of a generation, and encodes: "auto", the native step wherever it may
               (`generate.Engine` says why not elsewhere), on a GPU "static"; or "modules", "static", "compiled".
    """

    executor: Executor = "auto"
    generate: Callable[..., list[Generation]]

    def encode(
        self, texts: Texts, *, pooling: str | None = None, normalize: bool | None = None, batch_tokens: int = 4096,
        matmul: tasks.Matmul = "auto",
    ) -> Tensor:  # fmt: skip
        """One vector for each text, `[B, D]`, in the order of the texts (`.float().numpy()` is a NumPy array).

        `pooling` is "mean" (over the tokens), "first" (the [CLS] token) or "dense" (BERT's pooler), and `normalize`
        scales each vector to length 1; without them, both are as the checkpoint says.  Texts run in batches of at most
        `batch_tokens` tokens.

        `matmul` is the arithmetic of an encoder's matrix products: "bf16", whatever its weights are stored as (sums and
        all else stay fp32; with MiniLM the least cosine to fp32 is above 0.9999); "stored", that of the stored weights;
        "auto", bf16 for a model of bf16, and for packed weights on a processor with AMX.

        A checkpoint of sentence-transformers also says how many tokens of a text it reads (`max_seq_length`): the rest
        of a text is cut off, as there.  Rows of ids are read whole.

        Raises InputError for pooling that the model does not have, and for "bf16" where the processor or the model
        does not allow it.
        """
        how = tasks.pooling(self.module, pooling, normalize)
        rows = self.inputs.sentences(texts, self.hf or {})
        return tasks.encode(self.module, rows, how, batch_tokens=batch_tokens, executor=self.executor, matmul=matmul)

    def fill(self, texts: Texts, *, top: int = 5) -> list[list[list[tuple[str, float]]]]:
        """The `top` likeliest tokens at each mask token of each text, as (text of the token, probability), best first:
        `fill(texts)[text][mask][rank]`.

        Raises InputError for a model without a masked-LM head, a tokenizer without a mask token, and a text without
        one.
        """
        tokenizer = self.inputs.words
        if tokenizer.mask_id is None:
            raise InputError("this tokenizer has no mask token, so there is nothing to fill in")
        filled = tasks.fill(self.module, self.ids(texts), tokenizer.mask_id, top=top)
        return [[[(tokenizer.decode([i]).strip(), p) for i, p in mask] for mask in row] for row in filled]

    def classify(self, texts: Texts, *, second: Sequence[str] | None = None) -> list[list[tuple[str, float]]]:
        """The labels of each text, or image, with their probabilities, best first.

        `second` has the second text of each pair (premise and hypothesis, query and passage).  The probabilities are a
        softmax over the labels; of a model with one label, or whose labels may hold together (`problem_type` of its
        config), a sigmoid of each.  A regression gives its score.

        Raises InputError for a model without a head over classes.
        """
        problem = (self.hf or {}).get("problem_type")
        return tasks.classify(self.module, self.inputs.labelled(texts, second), self.labels, problem=problem)

    def tag(self, texts: Sequence[str]) -> list[list[tasks.Tag]]:
        """The likeliest label of each token of each text, or whether it was replaced (ELECTRA).

        Raises InputError for a model without a head over tokens.
        """
        return tasks.tag(self.module, self.inputs.placed(texts), texts, self.labels)

    def entities(
        self, texts: Sequence[str], *, strategy: tasks.Strategy = "simple", window: int | None = None,
        overlap: int | None = None,
    ) -> list[list[tasks.Entity]]:  # fmt: skip
        """The entities in each text: neighbouring tokens of one label, where `B-` begins a new one and `O` is none.

        `strategy` is that of transformers' pipeline: "simple" labels each token; "first", "average" and "max" give each
        word one label: that of its first token, of the mean of its tokens' probabilities, or of its surest token.

        A text longer than `window` tokens is read in windows that share `overlap` tokens.  Raises InputError for a
        model without a head over tokens and for another strategy.
        """
        return tasks.entities_of(self.module, self.inputs, texts, self.labels, strategy, window, overlap)

    def answer(
        self, question: str, context: str, *, longest: int = 15, top: int = 1, no_answer: bool = False,
        window: int | None = None, overlap: int | None = None,
    ) -> list[tasks.Answer]:  # fmt: skip
        """The `top` pieces of `context` of at most `longest` tokens with the highest score, best first.

        The score of a piece is the probability that the answer starts at its first token times the probability that it
        ends at its last, as in transformers' pipeline.  With `no_answer` the empty answer competes (SQuAD 2.0,
        Rajpurkar et al. 2018).  A context longer than `window` tokens is read in windows that share `overlap` tokens.

        Raises InputError for a model without a head over spans, an empty question or context, and a question that
        leaves no room for the context.
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
        """The `k` passages of the text files below `folder` nearest to `query`, by the cosine of their vectors.

        A passage has at most `tokens` tokens (128, or what the model reads), of which neighbours share `overlap` (32,
        or half a passage), and ends where a sentence or a line does.  Vectors are pooled as the checkpoint says
        (`encode`), and those of unchanged files are read from a safetensors file (`index`, by default in the user's
        cache).

        Raises InputError for a model that reads no text, an empty query, settings out of range, and a folder without
        text; TextError without a tokenizer.
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
        """A summary of each text, by an encoder-decoder, or by a decoder with a chat template.

        The files of the checkpoint set beams and limits; `options` are those of `generate` and replace them.  Raises
        InputError for a model that writes no text, and for an empty text.
        """
        return self._written([tasks.summary(self.inputs, self.hf or {}, text) for text in texts], options)

    def translate(
        self, texts: Sequence[str], source: str | None = None, target: str | None = None, **options: Any
    ) -> list[Generation]:  # fmt: skip
        """Each text in the language `target`; `source` and `target` as the checkpoint names them ("en_XX"), or in short
        ("en").

        `options` as in `summarize`.  Raises InputError for a language that the checkpoint does not know, with those
        that it does, for a model that does not translate, and for an empty text.
        """
        hf = self.hf or {}
        return self._written([tasks.translation(self.inputs, hf, text, source, target) for text in texts],
                             options)  # fmt: skip

    def answer_in_words(self, question: str, context: str, **options: Any) -> Generation:
        """An answer to `question` from `context`, generated by the model; `options` as in `summarize`.

        `answer` selects a piece of the context instead.  Raises InputError for a model that writes no text, and for an
        empty question or context.
        """
        return self._written([tasks.written_answer(self.inputs, self.hf or {}, question, context)], options)[0]

    def _written(self, writing_tasks: Sequence[tasks.WritingTask], options: Mapping[str, Any]) -> list[Generation]:
        if not writing_tasks:
            raise InputError("there are no texts; give a list of texts: [text]")
        settings = {**writing_tasks[0].options, **options}
        if not settings.get("beams"):
            for name in ("length_penalty", "early_stopping"):
                if name not in options:
                    settings.pop(name, None)
        prompts = [one.prompt for one in writing_tasks]
        return self.generate(prompts, **{"decoder_prefix": writing_tasks[0].decoder_prefix, **settings})

    def note_on_vectors(self) -> str | None:
        """A line to print where the checkpoint was not trained to compare texts by their vectors; else None."""
        if isinstance(self.spec.head, PoolingSpec):
            return None
        return (
            f"this {self.spec.family} checkpoint says nothing about pooling: its mean vectors rank texts less well "
            "than those of a model for sentence embeddings, such as hub:sentence-transformers/all-MiniLM-L6-v2"
        )
