"""Small texts, tokenized into shards, for the tests of shards and of training on them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from triptych.shards import ShardSet, Summary, tokenize
from triptych.text import Tokenizer, byte_tokenizer

WORDS = ("the", "old", "mill", "stands", "where", "river", "bends", "käse", "wheel", "war", "zwei", "日本", "☃")


def documents(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Texts of 1 to `longest` words."""
    r = random.Random(seed)
    return [" ".join(r.choices(WORDS, k=r.randint(1, longest))) for _ in range(count)]


def json_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def shards_of(folder: Path, texts: Sequence[str], shard_bytes: int = 4000, tokenizer: Tokenizer | None = None) -> Path:
    """The directory of the shards of `texts`."""
    out = folder / "shards"
    made(json_lines(folder / "texts.jsonl", texts), out, shard_bytes, tokenizer)
    return out


def made(source: Path, out: Path, shard_bytes: int = 4000, tokenizer: Tokenizer | None = None) -> Summary:
    return tokenize([source], out, tokenizer or byte_tokenizer(), processes=2, shard_bytes=shard_bytes)


def read_back(out: Path) -> list[str]:
    """The texts of all documents, in order."""
    shards = ShardSet(out)
    words = shards.tokenizer()
    return [words.decode(shards.document(i)) for i in range(shards.documents)]
