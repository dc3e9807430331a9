"""The section of a page that runs a model: plain data, made by `triptych.page.live`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

TOKENIZERS = {"BPE": "tokenizer_bpe.js", "Unigram": "tokenizer_unigram.js"}
DECODERS = frozenset(("spaces", "Fuse", "ByteLevel", "WordPiece"))  # of tokenizer.js
BEHAVIORS = frozenset(("Isolated", "Removed"))  # of tokenizer_text.js
BIASES = frozenset(("alibi_bias", "disentangled_bias", "reached_row", "reached_table", "t5_bias"))
RARE = frozenset(("conv1d", "experts", "l2_normalize", "patches", "pool", "sinusoids"))


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
        tokenizer, operations = self.content["tokenizer"], {*_operations(self.content["program"]["entries"])}
        needed = {
            TOKENIZERS.get(tokenizer["model"]["type"]): True,
            "tokenizer_charsmap.js": any(step["step"] == "charsmap" for step in tokenizer["normalize"]),
            "tokenizer_splits.js": any(
                step["step"] == "metaspace" or step.get("behavior", "Isolated") not in BEHAVIORS
                for step in tokenizer["split"]
            ),
            "tokenizer_decoders.js": {step["step"] for step in tokenizer["decode"]} - DECODERS,
            "live_biases.js": operations & BIASES,
            "live_rare.js": operations & RARE,
        }
        return tuple(name for name, is_needed in needed.items() if name and is_needed)

    def data(self) -> dict[str, object]:
        return dict(self.content)


def _operations(entries: Mapping[str, Any]) -> Iterator[str]:
    """The names of all operations of a program as JSON, those of its experts included."""
    for entry in entries.values():
        for step in entry["instructions"]:
            yield step["op"]
            if step["op"] == "experts":
                yield from _operations(step["attributes"]["expert"])
