"""The tokenizer of a page: what `Tokenizer.from(data)` of the page's scripts is made from.

Kinds: characters, words and bytes, which new models have.
"""

from __future__ import annotations

import json
from typing import Any

from triptych.errors import InputError
from triptych.text import Tokenizer
from triptych.text.token_names import BYTE_OF


def tokenizer_data(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as plain data: its vocabulary, the tokens that stand for themselves, and those put around a text.

    Raises InputError for a kind that the page does not have.
    """
    backend = json.loads(tokenizer.backend.to_str())
    model, split = backend["model"], backend.get("pre_tokenizer") or {}
    if model["type"] == "BPE" and not model["merges"] and split.get("type") == "Split":
        kind = "characters"
    elif model["type"] == "BPE" and model["vocab"] == BYTE_OF and split.get("type") == "ByteLevel":
        kind = "bytes"
    elif model["type"] == "WordLevel" and split.get("type") == "BertPreTokenizer":
        kind = "words"
    else:
        raise InputError(
            f"a page has no tokenizer of this kind ({model['type']}); it has those of characters, words and bytes"
        )
    added = {token["content"]: token["id"] for token in backend["added_tokens"]}
    around = tokenizer.encode("")
    inside = tokenizer.encode("a")
    before = next((i for i, pair in enumerate(zip(around, inside, strict=False)) if pair[0] != pair[1]), len(around))
    return {
        "kind": kind, "vocab": model["vocab"], "added": added, "unknown": tokenizer.unk_id,
        "before": around[:before], "after": around[before:],
    }  # fmt: skip
