"""The metric of a run: one number from the logits [V] at one position; what share of it a patch
restores is `PatchGrid.restored` (patching.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.arguments import takes
from triptych.errors import InputError, shown
from .prompts import ProbedModel, index_below, name_tokens
from .sites import sites

MetricName = Literal["logit-difference", "logit", "probability", "log-probability", "kl"]
Answer = str | int
MetricFunction = Callable[[Tensor], Tensor]  # [R, V] logits in fp32 -> [R]


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for each row of logits.

    logit-difference   logits[answer] - logits[other]
    logit              logits[answer]
    probability        softmax(logits)[answer]
    log-probability    log_softmax(logits)[answer]
    kl                 KL(p || softmax(logits)), in nats, where p is the distribution of the unchanged (clean) run
    """

    name: str
    tokens: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    function: MetricFunction | None = None
    reference: Tensor | None = None  # [V], the log-probabilities that kl compares with

    def __post_init__(self) -> None:
        """Raises InputError for a metric that there is not, and for tokens that it does not take."""
        if self.function is not None:
            return
        if self.name not in get_args(MetricName):
            known = ", ".join(get_args(MetricName))
            raise InputError(f"metric {shown(self.name)} is not one of {known}, nor a function")
        needed = {"kl": 0, "logit-difference": 2}.get(self.name, 1)
        if len(self.tokens) != needed:
            wanted = ("no answer", "one answer", "two answers: the right one and another")[needed]
            raise InputError(f"the metric {self.name} takes {wanted}; {len(self.tokens)} were given")
        if len(set(self.tokens)) < needed:
            raise InputError(f"the two answers are the same token, {self.tokens[0]}; their difference is always 0")

    def __call__(self, logits: Tensor) -> Tensor:
        """[R, V] -> [R]."""
        if self.function is not None:
            values = self.function(logits)
            if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
                gave = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise InputError(
                    f"the metric gave {gave} for logits {list(logits.shape)}; it must give one number a row"
                )
            return values
        if self.name == "logit-difference":
            return logits[:, self.tokens[0]] - logits[:, self.tokens[1]]
        if self.name == "logit":
            return logits[:, self.tokens[0]]
        log_p = logits.log_softmax(-1)
        if self.name == "kl":
            if self.reference is None:
                raise InputError("the metric kl needs the logits to compare with; write metric.beside(logits)(others)")
            return torch.nn.functional.kl_div(
                log_p, self.reference.expand_as(log_p), reduction="none", log_target=True
            ).sum(-1)
        chosen = log_p[:, self.tokens[0]]
        return chosen if self.name == "log-probability" else chosen.exp()

    def beside(self, logits: Tensor) -> Metric:
        """The metric with the unchanged run's logits [1, V] to compare with; itself where it compares with none."""
        return replace(self, reference=logits[0].log_softmax(-1)) if self.name == "kl" else self

    def __str__(self) -> str:
        return self.name + (f" ({' - '.join(self.names)})" if self.names else "")


def metric_of(
    model: ProbedModel,
    answer: Answer | Sequence[Answer] | None,
    metric: MetricName | MetricFunction | None,
) -> Metric:
    """The metric of a call: by default the difference of two answers' logits, the log-probability of one, and kl
    where there is no answer.

    Raises InputError for a metric that there is not, an answer that is not one token or not in the vocabulary, and for
    answers that the metric does not take.
    """
    tokens = tuple(token_id(model, one) for one in answers_of(answer))
    names = tuple(name_tokens(model, tokens))
    if callable(metric):
        if not takes(metric, "logits"):
            raise InputError(f"metric={shown(metric)} must be a function of logits [R, V]")
        return Metric(getattr(metric, "__name__", "metric"), tokens, names, metric)
    return Metric(metric or {0: "kl", 1: "log-probability"}.get(len(tokens), "logit-difference"), tokens, names)


def answers_of(answer: Answer | Sequence[Answer] | None) -> Sequence[Answer]:
    """The answers of a call: none, one, or those of a list."""
    if answer is None:
        return ()
    if isinstance(answer, bytes):
        raise InputError(f"the answer {shown(answer)} is no text; give a string, or a token id")
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        return (answer,)
    if not answer:
        raise InputError("answer=[] names no answer; leave it out to compare whole distributions")
    return answer


def token_id(model: ProbedModel, answer: Answer) -> int:
    """The id of an answer.  Raises InputError where it is several tokens, or an id that the logits do not have."""
    width = sites(model.spec)["logits"].width if model.spec.head is not None else 0
    if isinstance(answer, str):
        if model.tokenizer is None:
            raise InputError(f"this model has no tokenizer; give the answer {answer!r} as a token id")
        ids = model.tokenizer.encode(answer, special=False)
        if len(ids) != 1:
            pieces = ", ".join(map(repr, model.tokenizer.tokens(ids))) or "nothing"
            spaced = len(model.tokenizer.encode(f" {answer}", special=False)) == 1
            instead = f"it is one with a space before it, {f' {answer}'!r}" if spaced else "give another word, or an id"
            raise InputError(f"the answer {shown(answer)} is {len(ids)} tokens ({pieces}); an answer is one: {instead}")
        answer = ids[0]
    token = index_below(width, answer)
    if token is None:
        raise InputError(f"the answer {shown(answer)} is not a token id from 0 to {width - 1}")
    return token
