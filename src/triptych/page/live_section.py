"""The section of a page that runs a model: plain data, made by `triptych.page.live`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, eq=False)
class LiveSection:
    """A model that runs in the page; `note` says what the reader can do with it.

    `content` is what the page's interpreter reads: program, tables, tensors, weights in base64, tokenizer, special ids.
    """

    title: str
    note: str
    content: Mapping[str, object]
    kind: ClassVar[str] = "live"

    def data(self) -> dict[str, object]:
        return dict(self.content)
