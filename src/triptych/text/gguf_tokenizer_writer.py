"""A tokenizer as the `tokenizer.*` metadata of a GGUF file: the reverse of `from_gguf`.

GGUF can describe byte-level BPE, SentencePiece's two models and WordPiece, with the ways of splitting text that are
listed in `SPLITS`.  Whether that is enough for a given tokenizer is tested: the metadata is read back, and must give
the same ids on texts that distinguish the known ways, or it is refused.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from triptych.errors import TextError
from .gguf_tokenizer import (
    COMPOSED,
    SCHEME,
    SPECIAL_IDS,
    SPLITS,
    STRIPPED,
    Split,
    byte_level_words,
    from_gguf,
)
from .sentencepiece_file import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from .tokenizer import Tokenizer

#: Every split once, under the name that most versions of llama.cpp know.
_NAMES = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o")
_INSTEAD = 'keep the model as an HF directory (convert it to hf), or train one with tokenizer = "bpe:512" in its recipe'
_PROBES = (
    "",
    "Hello, world! It's o'er; I'LL go, you've SEEN they'Re late -- don't",
    "year 2024, 3.14159, 1234567 and 12,345.67  8  90 ½ ² Ⅳ ٣",
    "e\u0301 café naïve Ångström é ﬁ Ｆｕｌｌ — “quoted” …",
    "日本語のテキスト。中文，한국어 हिन्दी العربية 🙂👩‍👩‍👧",
    "  leading,   inner    and trailing   ",
    "tabs\t\tand\nlines\n\n\nmore \n x\r\nwindows\u00a0nbsp",
    "CamelCase/path HTTPServer x²_y #f\n    return a[0];//!?\n",
)


def to_gguf(tokenizer: Tokenizer | None, vocab: int) -> dict[str, Any]:
    """The metadata of `tokenizer` for a model with `vocab` embeddings; those beyond its tokens get unused tokens.

    Raises TextError for a tokenizer that GGUF cannot describe, and for one with more tokens than embeddings.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    if tokenizer.vocab_size > vocab:
        raise TextError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model has rows for {vocab} tokens")
    tokens = {index: token for token, index in tokenizer.backend.get_vocab().items()}
    fields = _ids(tokenizer) | {"tokens": [tokens.get(i, f"[PAD{i}]") for i in range(vocab)]}
    state = json.loads(tokenizer.backend.to_str())
    kind = _kind(state)
    fields |= {"model": kind, "token_type": _types(tokenizer, tokens, vocab, kind), **_stripping(tokenizer)}
    rest = {} if tokenizer.chat is None else {"tokenizer.chat_template": tokenizer.chat.source}
    ways = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram, "bert": _word_piece}
    for more in ways[kind](tokenizer, state, fields):
        metadata = {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()} | rest
        if _same(tokenizer, from_gguf(metadata)):
            return metadata
    raise TextError(
        f"GGUF cannot describe this tokenizer ({_form(state)}) without a change of ids: it knows byte-level BPE, "
        f"SentencePiece and WordPiece; {_INSTEAD}"
    )


def _form(state: Mapping[str, Any]) -> str:
    """The kind of a tokenizer, of its `tokenizer.json`, in a few words."""
    model, splitting = state["model"], state["pre_tokenizer"]
    if model["type"] == "BPE" and not model["merges"] and not model.get("byte_fallback"):
        return "a token for each character and none for other bytes"
    return f"{model['type']}, split by {splitting['type'] if splitting else 'nothing'}"


def _same(ours: Tokenizer, again: Tokenizer) -> bool:
    """Whether both give the same ids for the probes, and for texts with some of the added tokens."""
    added = [token.content for token in ours.backend.get_added_tokens_decoder().values()]
    with_added = (f"the {token} sun{token}  and" for token in added[:9])
    return all(ours.encode(text) == again.encode(text) for text in (*_PROBES, *with_added))


def _kind(state: Mapping[str, Any]) -> str:
    model = state["model"]["type"]
    if model in ("WordPiece", "Unigram"):
        return "bert" if model == "WordPiece" else "t5"
    if model != "BPE":
        raise TextError(f"GGUF cannot describe a tokenizer of type {model}; {_INSTEAD}")
    return "gpt2" if '"ByteLevel"' in json.dumps([state["pre_tokenizer"], state["decoder"]]) else "llama"


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of the special tokens, and the stop tokens beside EOS."""
    named = {field: getattr(tokenizer, f"{name}_id") for name, field in SPECIAL_IDS.items()}
    ends = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
    if len(ends) > 2:
        raise TextError(
            f"GGUF has keys for two stop tokens beside EOS, and this tokenizer has {len(ends)}; convert the model to hf"
        )
    named |= zip(("eot_token_id", "eom_token_id"), ends, strict=False)
    return {name: index for name, index in named.items() if index is not None}


def _types(tokenizer: Tokenizer, tokens: Mapping[int, str], vocab: int, kind: str) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()

    def type_of(index: int) -> int:
        if index not in tokens:
            return UNUSED
        if kind in ("llama", "t5") and index == tokenizer.unk_id:
            return UNKNOWN
        if index in added:
            return CONTROL if added[index].special else USER_DEFINED
        return BYTE if kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", tokens[index]) else NORMAL

    return [type_of(index) for index in range(vocab)]


def _stripping(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Under keys of Triptych's own, the ids of tokens that take the spaces on their left and right."""
    added = tokenizer.backend.get_added_tokens_decoder().items()
    both = ([i for i, token in added if token.lstrip], [i for i, token in added if token.rstrip])
    return {key: ids for key, ids in zip(STRIPPED, both, strict=True) if ids}


def _bos_and_eos(tokenizer: Tokenizer) -> dict[str, bool]:
    """Whether texts begin with BOS and end with EOS."""
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    before = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return {"add_bos_token": before > 0, "add_eos_token": len(whole) > before + len(plain)}


def _byte_level(tokenizer: Tokenizer, state: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """With each named split that splits the probes as this tokenizer does."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    for name in _NAMES:
        if not merges or _cuts_like(tokenizer, SPLITS[name]):
            named = {"pre": name, "merges": merges, **_bos_and_eos(tokenizer)}
            yield from (named, named | {COMPOSED: True})


def _cuts_like(tokenizer: Tokenizer, split: Split) -> bool:
    own = tokenizer.backend.pre_tokenizer
    if own is None:
        return False
    known = byte_level_words(split)
    return all(known.pre_tokenize_str(text) == own.pre_tokenize_str(text) for text in _PROBES)


def _sentencepiece(
    tokenizer: Tokenizer, state: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The score of a piece is minus the rank of the merge that makes it."""
    ranks: dict[str, int] = {}
    merges = state["model"]["merges"]
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in fields["tokens"]]
    fixed = {"scores": scores, **_bos_and_eos(tokenizer)}
    yield from ({**fixed, "add_space_prefix": prefix} for prefix in (True, False))
    yield from ({**fixed, "add_space_prefix": True, SCHEME: scheme} for scheme in ("first", "always"))


def _unigram(tokenizer: Tokenizer, state: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens outside the model score 0.  The table of replacements is written as bytes."""
    scores = dict(state["model"]["vocab"])
    more: dict[str, Any] = {"scores": [float(scores.get(token, 0.0)) for token in fields["tokens"]]}
    more["unknown_token_id"] = state["model"]["unk_id"]
    charsmap = re.search(r'"precompiled_charsmap": ?"([^"]+)"', json.dumps(state["normalizer"]))
    if charsmap:
        more["precompiled_charsmap"] = base64.b64decode(charsmap[1])
    for prefix, single in product((True, False), repeat=2):
        yield {**more, "add_space_prefix": prefix, "remove_extra_whitespaces": single, **_bos_and_eos(tokenizer)}


def _word_piece(tokenizer: Tokenizer, state: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """GGUF marks tokens that begin a word, BERT those that continue one; GGUF calls [CLS] and [SEP] BOS and EOS."""
    pieces = [
        token if kind != NORMAL else token.removeprefix("##") if token.startswith("##") else f"▁{token}"
        for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
    ]
    ends = {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    special_ids = {name: index for name, index in ends.items() if index is not None}
    for lowercase in (True, False):
        yield {"tokens": pieces, **special_ids, **({} if lowercase else {"normalizer.lowercase": False})}
