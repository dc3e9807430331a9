"""A model as lm-eval asks it: its `TemplateLM`, for decoders and encoder-decoders.

Empty contexts, the special tokens around texts and what is cut off of a text that is too long are those of lm-eval's
own adapter for transformers (`lm_eval.models.huggingface`, 0.4.13), so that both give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from triptych.arguments import integer
from triptych.errors import InputError, nearest
from triptych.generate import MAX_ROWS, QueueProgress, Request, score
from triptych.generate.request import TokenLogprobs
from triptych.model import Model
from triptych.spec import LMHeadSpec
from .perplexity import windows
from .scoring import scheduler_of

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

LENGTH = 2048  # tokens that a model reads of which nothing says how many
MOST_LENGTH = 10**9  # a tokenizer without a limit names a larger number
NEW_TOKENS = 256  # of a generation whose task names no number
LENGTH_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")  # of a config, in the order in which they count
# Of `generation_kwargs` -> what `Model.generate` calls it; `until` and `max_gen_toks` stand apart.
SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "num_beams": "beams",
    "repetition_penalty": "repetition_penalty", "length_penalty": "length_penalty", "early_stopping": "early_stopping",
}  # fmt: skip

Scored = tuple[list[int], list[int]]
"""The ids of a context, and those behind it that are scored."""


class TriptychLM(TemplateLM):  # type: ignore[misc] # lm-eval has no types
    """`lm_eval.evaluator.simple_evaluate(model=TriptychLM(model), ...)`.

    max_length    tokens that the model reads at most; by default what its config says, as lm-eval reads it.
    max_rows      requests that run at once.
    on_progress   called with what was asked for, and how many of its requests are done, of how many.

    Raises InputError for a model that predicts no next tokens, and TextError without a tokenizer.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_length: int | None = None,
        max_rows: int = MAX_ROWS,
        on_progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        spec = model.spec
        if spec.layout == "encoder" or not isinstance(spec.head, LMHeadSpec):
            raise InputError(
                f"lm-eval's tasks need a model that predicts next tokens, and this {spec.family} {spec.layout} does "
                "not; an encoder with a masked-LM head has a pseudo-perplexity: evaluate.perplexity, or --data FILE"
            )
        model.check_words("lm-eval")
        self.model, self.words, self.max_rows = model, model.inputs.words, integer("max_rows", max_rows, 1)
        self.backend = "seq2seq" if spec.layout == "encoder-decoder" else "causal"
        self.max_length = _length(model) if max_length is None else integer("max_length", max_length, 2)
        self.on_progress = on_progress
        self.scheduler = scheduler_of(model, self.max_rows)

    @property
    def eot_token_id(self) -> int:
        """The end token.  Raises InputError for a tokenizer without one."""
        ends = (self.words.eos_id, *self.model.end_ids)
        token = next((token for token in ends if token is not None), None)
        if token is None:
            raise InputError("this tokenizer has no end token, which lm-eval puts before a text without context")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context: BOS, or EOS where there is none."""
        return self.eot_token_id if self.words.bos_id is None else self.words.bos_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.path or "memory").replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The ids of a text, with the tokenizer's special tokens unless the text begins with the id before texts."""
        if add_special_tokens is None:
            first = self.words.decode([self.prefix_token_id], skip_special=False)
            add_special_tokens = not string.startswith(first)
        return self.words.encode(string, special=add_special_tokens)

    # -- log-likelihoods ------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """log P of each continuation behind its context, in nats, and whether it is the greedy one."""
        for i, request in enumerate(requests):
            if not request.args[1]:
                raise InputError(f"request {i} of task {request.task_name!r}: a choice is empty, so nothing is scored")
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        rows = [(context, continuation) for _, context, continuation in requests]
        answers = [
            (math.fsum(one.logprob for one in scores), all(one.top[0][0] == token for one, token in pairs))
            for scores, pairs in self._scored("loglikelihood", rows)
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """log P of each whole text, in nats.  One that is longer than what the model reads is divided by `windows`,
        with one token of context at least; an encoder-decoder's encoder reads that context."""
        texts = [request.args[0] for request in requests]
        parts = [[*windows(self.tok_encode(text), self.prefix_token_id, self.max_length)] for text in texts]
        scored = iter(self._scored("loglikelihood_rolling", [row for rows in parts for row in rows]))
        totals = []
        for text, rows in zip(texts, parts, strict=True):
            totals.append(math.fsum(one.logprob for _ in rows for one in next(scored)[0]))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _scored(
        self, kind: str, rows: Sequence[Scored]
    ) -> list[tuple[list[TokenLogprobs], list[tuple[TokenLogprobs, int]]]]:
        """The log-probabilities of what is scored of each row, and the same beside the ids; rows that begin alike run
        one after another, so that their beginnings are computed once."""
        made = [self._request(*row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (made[i].source or (), made[i].prompt))
        requests = (made[i] for i in order)

        def progressed(progress: QueueProgress) -> None:
            self.on_progress(kind, progress.done - before, len(rows))

        before = self.scheduler.progress.done
        scores: list[list[TokenLogprobs]] = [[] for _ in rows]
        for i, one in zip(order, score(self.scheduler, requests, on_progress=progressed), strict=True):
            scores[i] = one
        return [(one, [*zip(one, row[1][-len(one) :], strict=True)]) for one, row in zip(scores, rows, strict=True)]

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        """A request for the log-probabilities of a continuation; of what is too long the end counts."""
        most = self.max_length
        if self.backend == "seq2seq":
            prompt = [self.model.spec.start_id(), *continuation[-most:]]
            return Request(prompt=prompt, source=context[-most:], score_from=1, max_new_tokens=0, logprobs=1)
        if len(continuation) > most:
            raise InputError(f"a continuation of {len(continuation):,} tokens is longer than the {most:,} of the model")
        ids = [*context, *continuation][-most - 1 :]
        return Request(prompt=ids, score_from=len(ids) - len(continuation), max_new_tokens=0, logprobs=1)

    # -- texts ----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The text behind each context, up to the first of the strings in `until`, the end token, or `max_gen_toks`
        tokens, 256 unless the task names a number; greedy unless it says `do_sample`."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts, done = [""] * len(requests), 0
        for members in groups.values():
            settings = _settings(requests[members[0]].args[1])
            room = self.max_length - (0 if self.backend == "seq2seq" else settings["max_new_tokens"])
            if room < 1:
                raise InputError(
                    f"max_gen_toks={settings['max_new_tokens']} leaves no room for a context in the "
                    f"{self.max_length:,} tokens of the model"
                )
            prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in members]

            def progressed(progress: QueueProgress, before: int = done) -> None:
                self.on_progress("generate_until", before + progress.done, len(requests))

            written = self.model.generate(prompts, max_rows=self.max_rows, on_progress=progressed, **settings)
            done += len(members)
            for i, one in zip(members, written, strict=True):
                texts[i] = one.text
                self.cache_hook.add_partial("generate_until", requests[i].args, one.text)
        return texts

    # -- chats ----------------------------------------------------------------------------------------------------

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the chat template; empty where there is none, or none is to be used."""
        return self.words.chat.source if chat_template and self.words.chat is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without `add_generation_prompt` it ends with the last message, which goes on.

        Raises InputError for a model without a chat template.
        """
        if self.words.chat is None:
            raise InputError("the model has no chat template; evaluate without it")
        text = self.words.chat.render(chat_history, add_generation_prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]


def _length(model: Model) -> int:
    """Tokens that a model reads, as lm-eval finds them: the first number that the config or else the tokenizer's names,
    or 2,048; not more than the model has positions."""
    hf: Mapping[str, Any] = model.hf or {}
    text = hf.get("text_config")
    stated = [(text if isinstance(text, Mapping) else hf).get(key) for key in LENGTH_KEYS]
    stated += [model.spec.context, model.inputs.side_file("tokenizer_config.json").get("model_max_length")]
    length = next((one for one in stated if isinstance(one, int) and 0 < one < MOST_LENGTH), LENGTH)
    limit = model.spec.longest_row
    return length if limit is None or model.spec.layout == "encoder-decoder" else min(length, limit)


def _settings(task: Mapping[str, Any]) -> dict[str, Any]:
    """What `Model.generate` is given for `generation_kwargs` of a task.  Raises InputError for a key that it has no
    word for."""
    kwargs = dict(normalize_gen_kwargs(dict(task), NEW_TOKENS))
    settings: dict[str, Any] = {"max_new_tokens": kwargs.pop("max_gen_toks")}
    settings["stop"] = [text for text in kwargs.pop("until", None) or () if text]
    kwargs["temperature"] = kwargs.get("temperature", 1.0) if kwargs.pop("do_sample", False) else 0.0
    for name, value in kwargs.items():
        if name not in SETTINGS:
            raise InputError(f"generation_kwargs has {name!r}, which is not known{nearest(name, SETTINGS)}")
        settings[SETTINGS[name]] = 0 if name == "num_beams" and value == 1 else value
    if not settings["temperature"]:
        settings = {name: value for name, value in settings.items() if name not in ("top_k", "top_p", "min_p")}
    return settings
