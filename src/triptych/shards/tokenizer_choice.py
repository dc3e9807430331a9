"""The tokenizer that a run uses: a new one from the beginning of its texts, or that of a model or a directory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from triptych.arguments import checked
from triptych.checkpoints.header import read_header
from triptych.errors import TextError, nearest
from triptych.text import Layout, Tokenizer, from_directory, has_tokenizer, new_tokenizer
from .inputs import hub_texts, list_inputs, parts, texts_of
from .manifest import MANIFEST, PLAN, TOKENIZER, Manifest, read_manifest

BEGINNING = 1 << 24  # characters of the texts from which a new vocabulary is made
_NEW = ("byte", "bpe:8192", "words:8192")


@checked
def choose_tokenizer(
    wanted: str,
    inputs: Sequence[str | Path],
    out: Path | str,
    *,
    layout: Layout = "decoder",
    field: str = "text",
    separator: str | None = None,
    offline: bool = False,
) -> Tokenizer:
    """`byte`, `bpe:N` or `words:N`, whose vocabulary is made from the first 2^24 characters of `inputs`; else the
    tokenizer of the model or directory `wanted`.  Where a run in `out` has begun with a new one, it is that one.

    Raises TextError for a name that is none of these, and for a model without a tokenizer.
    """
    if wanted.partition(":")[0] in ("byte", "bpe", "words") and not Path(wanted).exists():
        for name in (MANIFEST, PLAN):
            if (Path(out) / name).is_file() and read_manifest(Path(out) / name).tokenizer_from == wanted:
                return from_directory(Path(out) / TOKENIZER)
        made = new_tokenizer(wanted, _beginning(inputs, field, separator) if wanted != "byte" else (), layout)
        if made is not None:
            return made
    elif Path(wanted).is_dir() and has_tokenizer(Path(wanted)):
        return from_directory(wanted)
    elif Path(wanted).exists() or wanted.startswith("hub:"):
        tokenizer = read_header(wanted, offline=offline, weights=False).tokenizer()
        if tokenizer is not None:
            return tokenizer
        raise TextError(f"{wanted} has no tokenizer; give a model that reads text")
    problem = f"no tokenizer {wanted!r}{nearest(wanted, _NEW)}"
    raise TextError(f"{problem}; give a model, a directory with tokenizer.json, or {', '.join(_NEW)} for a new one")


def _beginning(inputs: Sequence[str | Path], field: str, separator: str | None) -> list[str]:
    plan = Manifest(
        tokenizer="", vocab_size=0, tokenizer_from="", field=field, separator=separator, shard_bytes=BEGINNING,
        inputs=list_inputs(inputs)[0],
    )  # fmt: skip
    left = BEGINNING

    def enough(text: str) -> bool:
        nonlocal left
        left -= len(text)
        return left + len(text) > 0

    every = (text for part in parts(plan, hub_texts) for text in texts_of(part, field, separator))
    texts = [text[:BEGINNING] for text in takewhile(enough, every) if text.strip()]
    if not texts:
        raise TextError("the inputs have no text; give others")
    return texts
