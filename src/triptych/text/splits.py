"""How byte-level BPE splits a text into words before merging, by the names that GGUF files use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True)
class Split:
    """How one family of byte-level BPE splits text into words before merging.

    `patterns` are regular expressions applied in turn; each makes its matches words of their own.  `whole_words`: a
    word that is itself a token is not merged from its characters (`ignore_merges`).  `add_bos`: whether texts begin
    with BOS where a file does not say.  `normalizer` makes the normalizer that runs first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern of cl100k and its successors; the pattern `digits` matches a run of digits."""
    return rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN_WORDS = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_O200K_WORDS = (
    rf"{_START}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_START}{_UPPER}+{_LOWER}*{_SHORTENED}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)

_CL100K = Split((_words(r"\p{N}{1,3}"),))

#: Name in a GGUF -> the split in the `tokenizer.json` that the models of that name were published with.
SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), Split((_GPT2_WORDS,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), Split((r"\p{N}", _GPT2_WORDS))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), replace(_CL100K, whole_words=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((_words(r"\p{N}"),), normalizer=normalizers.NFC)),
    "tekken": Split((_TEKKEN_WORDS,), whole_words=True, add_bos=True),
    "gpt-4o": Split((_O200K_WORDS,)),
}


def byte_level_words(split: Split) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that splits a text into words by `split` and writes their bytes as characters."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
