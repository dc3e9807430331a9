"""What a model can be asked for, by its spec and its tokenizer: the routes that serve it, and why others do not."""

from __future__ import annotations

from triptych.spec import (
    ClassHeadSpec,
    EmbedSpec,
    FramesSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    ModelSpec,
    PoolingSpec,
)
from triptych.text import Tokenizer
from .fields import ApiError
from .worker import ModelWorker

ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "classify": "/v1/classify",
    "fill": "/v1/fill",
    "transcriptions": "/v1/audio/transcriptions",
    "tokenize": "/tokenize",
}


def abilities(spec: ModelSpec, tokenizer: Tokenizer | None) -> list[str]:
    """The keys of `ROUTES` that a model answers, in their order."""
    text, head = isinstance(spec.reads.embed, EmbedSpec), spec.head
    writes = spec.decoder is not None and isinstance(head, LMHeadSpec)
    able = {
        "completions": text and writes,
        "chat": text and writes and tokenizer is not None and tokenizer.chat is not None,
        "embeddings": text,
        "rerank": text and tokenizer is not None and (isinstance(head, PoolingSpec) or _one_class(spec)),
        "classify": text and isinstance(head, ClassHeadSpec),
        "fill": text and tokenizer is not None and tokenizer.mask_id is not None and isinstance(head, MaskedLMHeadSpec),
        "transcriptions": writes and isinstance(spec.reads.embed, FramesSpec),
        "tokenize": tokenizer is not None,
    }
    return [name for name in ROUTES if able[name]]


def _one_class(spec: ModelSpec) -> bool:
    return isinstance(spec.head, ClassHeadSpec) and spec.head.classes.outputs == 1


def require(worker: ModelWorker, ability: str) -> None:
    """Raise ApiError, which names what the model can be asked for, where it is not `ability`."""
    able = abilities(worker.model.spec, worker.model.tokenizer)
    if ability not in able:
        routes = ", ".join(ROUTES[name] for name in able) or "no route"
        problem = f"{worker.name} ({worker.model.spec.family}) does not serve {ROUTES[ability]}; it serves {routes}"
        raise ApiError(400, problem, "model")
