"""An answer while it is written: its texts and its calls of tools, in order."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from .call_form import CallForm
from .call_parser import AnswerPiece, CallParser, Schemas


@dataclass(eq=False)
class TextPart:
    """A text of an answer."""

    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


@dataclass(eq=False)
class CallPart:
    """A call of a tool, its arguments as the model wrote them; `whole` once it has written all."""

    name: str
    arguments: str = ""
    whole: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])

    def value(self) -> dict[str, Any] | None:
        """The arguments; None where they are no JSON object."""
        try:
            value = json.loads(self.arguments) if self.whole else None
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


Part = TextPart | CallPart


@dataclass(frozen=True)
class Change:
    """What a step adds to a part of an answer, which may begin and end with it."""

    part: Part
    delta: str = ""
    begins: bool = False
    ends: bool = False


class Reply:
    """The parts of one choice, of the text that `put` gets; `parallel` allows more than one call."""

    def __init__(self, form: CallForm | None = None, schemas: Schemas | None = None, *, parallel: bool = True) -> None:
        self.parser = None if form is None else CallParser(form, schemas or {})
        self.parallel = parallel
        self.parts: list[Part] = []
        self.open: Part | None = None  # the last part, while it may grow

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]

    @property
    def called(self) -> bool:
        """Whether there is a whole call, after which the caller's part begins."""
        return any(call.whole for call in self.calls)

    @property
    def complete(self) -> bool:
        """Whether nothing more may come: one call was written, and no other is allowed."""
        return not self.parallel and self.called

    def put(self, text: str) -> list[Change]:
        """What the next text adds."""
        return self._changes([AnswerPiece("text", text)] if self.parser is None else self.parser.put(text))

    def finish(self) -> list[Change]:
        """What the end of the row adds."""
        changes = [] if self.parser is None or self.complete else self._changes(self.parser.finish())
        return [*changes, *self._close()]

    def _changes(self, pieces: list[AnswerPiece]) -> list[Change]:
        changes: list[Change] = []
        for one in pieces:
            if self.complete:
                break
            if one.kind == "text" and one.text:
                changes += self._text(one.text)
            elif one.kind == "name":
                changes += self._close()
                self.open = CallPart(one.text)
                self.parts.append(self.open)
                changes.append(Change(self.open, begins=True))
            elif isinstance(self.open, CallPart) and one.kind == "arguments":
                self.open.arguments += one.text
                changes.append(Change(self.open, one.text))
            elif isinstance(self.open, CallPart) and one.kind == "end":
                self.open.whole = True
                changes += self._close()
        return changes

    def _text(self, text: str) -> list[Change]:
        changes: list[Change] = []
        if not isinstance(self.open, TextPart):
            changes += self._close()
            self.open = TextPart()
            self.parts.append(self.open)
            changes.append(Change(self.open, begins=True))
        assert isinstance(self.open, TextPart)
        self.open.text += text
        return [*changes, Change(self.open, text)]

    def _close(self) -> list[Change]:
        part, self.open = self.open, None
        return [] if part is None else [Change(part, ends=True)]
