"""One word in many sentences, layer by layer, as `tools/word_states.py` wrote it; a section of a page that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from .sections import Json, Section


@cache
def word_states() -> Mapping[str, object]:
    """The last word's vector in thirty sentences as points in planes, by layer, of SmolLM2."""
    text = (files(__package__) / "word_states.json").read_text(encoding="utf-8")
    states: Mapping[str, object] = json.loads(text)
    return states


@dataclass(frozen=True)
class WordStates(Section):
    """The stored states, with what they show in words."""

    note: str = ""

    def data(self) -> Json:
        return {"states": word_states()}
