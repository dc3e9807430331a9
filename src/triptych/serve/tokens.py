"""`/tokenize` and `/detokenize`, in the shapes of vLLM (`prompt` or `messages`) and of llama.cpp's server
(`content`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.text import Tokenizer
from .abilities import require
from .calls import prepared
from .chat import conversation_of
from .conversation import prompt_of
from .fields import ApiError, Fields, read
from .requests import body
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server

OF_VLLM, OF_LLAMA_CPP = ("add_special_tokens", "return_token_strs"), ("add_special", "with_pieces")
OF_MESSAGES = ("continue_final_message", "add_generation_prompt")


def routes(server: Server) -> list[Route]:
    async def tokenize(request: HttpRequest) -> Response:
        fields = await body(request, "tokenize")
        worker = server.worker_of(fields)
        require(worker, "tokenize")
        return JSONResponse(await tokenized(worker, fields))

    async def detokenize(request: HttpRequest) -> Response:
        fields = await body(request, "detokenize")
        worker = server.worker_of(fields)
        require(worker, "tokenize")
        ids, vocab = fields.values["tokens"], max(worker.model.spec.vocab, worker.model.spec.source_vocab)
        if not all(0 <= one < vocab for one in ids):
            raise ApiError(400, f"tokens must be ids, integers from 0 to {vocab - 1:,}", "tokens")
        text = await prepared(worker, lambda: worker.model.inputs.words.decode(ids, skip_special=False), "tokens")
        return JSONResponse({"prompt": text, "content": text})

    async def info(request: HttpRequest) -> Response:
        fields = read(dict(request.query_params), "tokenizer_info")
        await server.ready(fields.get("model"))
        worker = server.worker_of(fields)
        require(worker, "tokenize")
        return JSONResponse(about(worker.model.inputs.words))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info),
    ]


def about(words: Tokenizer) -> dict[str, str | None]:
    """What lm-eval asks of a tokenizer that it reaches over HTTP: its special tokens, and the template of its chats."""
    ids = {"bos_token": words.bos_id, "eos_token": words.eos_id, "pad_token": words.pad_id, "unk_token": words.unk_id}
    names = {name: None if token is None else words.tokens([token])[0] for name, token in ids.items()}
    return {**names, "chat_template": None if words.chat is None else words.chat.source}


async def tokenized(worker: ModelWorker, fields: Fields) -> dict[str, Any]:
    """The tokens of a text, in the shape of the server whose fields the request has.  Raises ApiError for a mixture."""
    names = [name for name in ("prompt", "messages", "content") if name in fields.values]
    if len(names) != 1:
        raise ApiError(400, "give the text as prompt or messages (vLLM's shape) or as content (llama.cpp's)", "prompt")
    (name,) = names
    for other in (*(OF_VLLM if name == "content" else OF_LLAMA_CPP), *(() if name == "messages" else OF_MESSAGES)):
        if other in fields.values:
            raise ApiError(400, f"{other} does not go with {name}; leave it out", other)
    words, text = worker.model.inputs.words, fields.get(name)
    if name == "messages":
        require(worker, "chat")
        conversation = conversation_of(fields)
        ids = (await prepared(worker, lambda: prompt_of(worker, conversation), name)).ids
    else:
        special = fields.get("add_special", False) if name == "content" else fields.get("add_special_tokens", True)
        ids = await prepared(worker, lambda: words.encode(text, special=special), name)
    if name == "content":
        if not fields.get("with_pieces"):
            return {"tokens": ids}
        pieces = words.token_texts(ids)
        return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)]}
    more = {"token_strs": words.token_texts(ids)} if fields.get("return_token_strs") else {}
    longest = worker.model.spec.source_context
    return {"count": len(ids), "max_model_len": longest, "tokens": ids} | more
