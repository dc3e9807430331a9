"""The section of a page that runs a model: plain data, made by `triptych.page.live`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

TOKENIZERS = {"BPE": "tokenizer_bpe.js", "Unigram": "tokenizer_unigram.js"}
DECODERS = frozenset(("spaces", "Fuse", "ByteLevel"))  # of tokenizer.js
WORDS = frozenset(("WordPiece", "WordLevel"))  # of tokenizer_words.js, which also decodes WordPiece
BEHAVIORS = frozenset(("Isolated", "Removed"))  # of tokenizer.js

IN_EVERY_PAGE = frozenset(("live_operations.js", "live_attention.js"))


@cache
def defined(function: str) -> dict[str, str]:
    """What the page's interpreter defines by calls of `function`, "operation" or "mask": name -> script."""
    scripts = sorted(
        (one for one in files(__package__).iterdir() if one.name.startswith("live_")), key=lambda one: one.name
    )
    call = re.compile(rf'^{function}\("(\w+)"', re.MULTILINE)
    return {name: one.name for one in scripts for name in call.findall(one.read_text(encoding="utf-8"))}


@dataclass(frozen=True, eq=False)
class LiveSection:
    """A model that runs in the page; `note` says what the reader can do with it.

    `content` is what the page's interpreter reads: program, tables, tensors, weights in base64, tokenizer, special ids.
    """

    title: str
    note: str
    content: Mapping[str, Any]
    kind: ClassVar[str] = "live"

    @property
    def scripts(self) -> tuple[str, ...]:
        """The scripts that this model's page needs and others do not, by its tokenizer and its operations."""
        tokenizer, steps = self.content["tokenizer"], list(_steps(self.content["program"]["entries"]))
        attends = [step["attributes"] for step in steps if step["op"] == "attend"]
        decodes = {step["step"] for step in tokenizer["decode"]}
        needed = {
            TOKENIZERS.get(tokenizer["model"]["type"]): True,
            "tokenizer_words.js": {tokenizer["model"]["type"], *decodes} & WORDS,
            "tokenizer_charsmap.js": any(step["step"] == "charsmap" for step in tokenizer["normalize"]),
            "tokenizer_splits.js": any(
                step["step"] == "metaspace" or step.get("behavior", "Isolated") not in BEHAVIORS
                for step in tokenizer["split"]
            ),
            "tokenizer_decoders.js": decodes - DECODERS - WORDS,
            "live_mechanisms.js": {how["mechanism"] for how in attends} - {"dot_product"},
            "live_writing.js": self.content["layout"] != "encoder" and self.content["head"] == "LMHead",
        }
        named = {defined("operation")[step["op"]] for step in steps}
        named |= {defined("mask")[how["mask"]["part"]] for how in attends}
        named |= {name for name, is_needed in needed.items() if name and is_needed}
        return tuple(sorted(named - IN_EVERY_PAGE))

    def data(self) -> dict[str, object]:
        return dict(self.content)


def _steps(entries: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All steps of a program as JSON, those of its experts included."""
    for entry in entries.values():
        for step in entry["instructions"]:
            yield step
            if step["op"] == "experts":
                yield from _steps(step["attributes"]["expert"])
