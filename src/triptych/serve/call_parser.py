"""Finds calls of tools in the text of an answer while it is written.

What is not certain yet is held back: the beginning of what may open a call, and white space before it.  A call is
given from when its name is known, its arguments piece by piece.  What begins like a call and is none comes as text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.errors import TextError
from .call_form import LONG_IDS, CallForm, ElementBody, JsonBody, NamedBody, NoCallForm, Render, answer_text

NAME = r"[\w.:/-]{1,256}"
Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool, by its name


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer: of its text, the name of a call that begins, of its arguments, or the end of the call."""

    kind: Literal["text", "name", "arguments", "end"]
    text: str = ""


class CallReader(ABC):
    """Reads one call from after what opens it.

    `put` gives what its next text adds, first the name.  Then `rest` is what stood after its end, or None; and `failed`
    says that it is no call, where it has no name yet.
    """

    def __init__(self) -> None:
        self.text = ""
        self.named = self.failed = False
        self.rest: str | None = None

    @abstractmethod
    def put(self, text: str) -> list[AnswerPiece]: ...


class CallParser:
    """Divides an answer into text and calls by the form of a model."""

    def __init__(self, form: CallForm, schemas: Schemas) -> None:
        self.form, self.schemas = form, schemas
        self.opening, self.closing, self.between = map(_squeezed, (form.opening, form.closing, form.between or ""))
        if self.closing and self.between.startswith(self.closing):
            self.between = ""  # each call is closed by itself, and the next one opened
        self.held = ""  # of text that may open a call, or of what stands after one
        self.read = ""  # of a call that has no name yet, from what opened it
        self.opened = 0  # characters of `read` that opened it
        self.reader: CallReader | None = None
        self.after_call = False
        self.called = self.written = False  # whether there was a call; and text, since the last one

    def put(self, text: str) -> list[AnswerPiece]:
        """What the next text of the answer makes certain."""
        pieces: list[AnswerPiece] = []
        self.held += text
        while self.held and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[AnswerPiece]:
        """The rest of the answer, where the row has ended."""
        named = self.reader is not None and self.reader.named
        rest = "" if named else self.read + self.held
        closes = self.after_call and self.closing.startswith(_squeezed(rest))
        self.held, self.read, self.reader = "", "", None
        if closes or (self.called and not self.written and not rest.strip()):
            return []
        return [AnswerPiece("text", rest)] if rest else []

    def _advance(self, pieces: list[AnswerPiece]) -> bool:
        """Take what is certain of the held text.  False where more has to come first."""
        if self.reader is not None:
            return self._in_call(self.reader, pieces)
        if self.after_call:
            return self._after_call()
        return self._in_text(pieces) if self.opening else self._bare_object(pieces)

    # -- between calls ---------------------------------------------------------------------------------------------

    def _in_text(self, pieces: list[AnswerPiece]) -> bool:
        at = self.held.find(self.opening[0])
        while at >= 0:
            begin = _squeezed(self.held[at : at + 2 * len(self.opening) + 16])
            if begin.startswith(self.opening) or self.opening.startswith(begin):
                break
            at = self.held.find(self.opening[0], at + 1)
        before = self.held if at < 0 else self.held[:at]
        certain = len(before.rstrip())  # white space before a call is no text
        self._text(before[:certain], pieces)
        self.held = self.held[certain:]
        if at < 0 or not _squeezed(self.held).startswith(self.opening):
            return False
        rest = _without(self.held, self.opening)
        self._begin(self.held[: len(self.held) - len(rest)], rest)
        return True

    def _bare_object(self, pieces: list[AnswerPiece]) -> bool:
        """Where nothing opens a call: an object at the beginning of an answer, or after another call, may be one."""
        begin = self.held.lstrip()
        if not begin:
            return False
        if begin[0] == "{" and not self.written:
            self._begin(self.held[: len(self.held) - len(begin)], begin)
            return True
        self._text(self.held, pieces)
        self.held = ""
        return False

    def _text(self, text: str, pieces: list[AnswerPiece]) -> None:
        if self.called and not self.written:
            text = text.lstrip()
        if text:
            self.written = True
            pieces.append(AnswerPiece("text", text))

    def _begin(self, opened: str, rest: str) -> None:
        self.read, self.opened, self.held = opened, len(opened), rest
        self.reader = reader_of(self.form, self.schemas)

    # -- in a call and after it ------------------------------------------------------------------------------------

    def _in_call(self, reader: CallReader, pieces: list[AnswerPiece]) -> bool:
        text, self.held = self.held, ""
        pieces += reader.put(text)
        self.read = "" if reader.named else self.read + text
        if reader.failed:  # what seemed to open it is text, and what follows is looked at again
            opened = self.opened or len(self.read)
            self._text(self.read[:opened], pieces)
            self.reader, self.held, self.read = None, self.read[opened:], ""
            return True
        if reader.rest is not None:
            pieces.append(AnswerPiece("end"))
            self.reader, self.held = None, reader.rest
            self.after_call, self.called, self.written = True, True, False
            return True
        return False

    def _after_call(self) -> bool:
        """Skip what closes a call; where something separates two, the next one begins."""
        text = _squeezed(self.held)
        if self.between and text.startswith(self.between):
            self.after_call = False
            self._begin("", _without(self.held, self.between))
            return True
        if self.closing and text.startswith(self.closing):
            self.held, self.after_call = _without(self.held, self.closing), False
            return True
        if any(literal and literal.startswith(text) for literal in (self.between, self.closing)):
            return False
        self.after_call = False
        return True


def check_form(form: CallForm, render: Render) -> None:
    """Raise NoCallForm where a call of other values, as the template writes it, is not read back as it was."""
    arguments = {"text": 'a "b" {c}', "number": 7}
    kinds = {"text": "string", "number": "integer"}
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": "gamma_probe", "description": "", "parameters": schema}
    message = form.message("", [(LONG_IDS[1], "gamma_probe", arguments)])
    try:
        text = answer_text(render, message, [{"type": "function", "function": function}])
        parser = CallParser(form, {"gamma_probe": schema})
        pieces = [*parser.put(text), *parser.finish()]
        value = json.loads("".join(one.text for one in pieces if one.kind == "arguments"))
    except (TextError, ValueError):
        pieces, value = [], None
    others = [(one.kind, one.text) for one in pieces if one.kind != "arguments"]
    if value != arguments or others != [("name", "gamma_probe"), ("end", "")]:
        raise NoCallForm("the chat template of this model writes calls of tools in no form that is read back here")


def reader_of(form: CallForm, schemas: Schemas) -> CallReader:
    if isinstance(form.body, JsonBody):
        return ObjectReader(form.body)
    if isinstance(form.body, NamedBody):
        return NamedReader(form.body)
    return ElementReader(form.body, form.closing, schemas)


class ObjectReader(CallReader):
    """A call as one object of JSON.  Its arguments are given as they come where the name stands before them."""

    def __init__(self, body: JsonBody) -> None:
        super().__init__()
        self.body, self.scan, self.arguments = body, JsonEnd(), JsonEnd()
        self.delivered = 0  # characters of `text` up to which arguments were given
        name, arguments = re.escape(body.name_key), re.escape(body.arguments_key)
        scalar = r'"[^"\\]*"\s*:\s*(?:"[^"\\]*"|true|false|null|\d+)\s*,\s*'
        begin = rf'\s*\{{\s*(?:{scalar})*?"{name}"\s*:\s*"({NAME})"\s*,\s*'
        self.head = re.compile(rf'{begin}(?:{scalar})*?"{arguments}"\s*:\s*(?=\{{)')
        self.first = re.compile(r'\s*\{\s*"([^"\\]*)"\s*:')

    def put(self, text: str) -> list[AnswerPiece]:
        before, pieces = len(self.text), []
        self.text += text
        end = self.scan.put(text)
        whole = None if end is None else before + end
        if not self.named:
            head = self.head.match(self.text)
            if head is not None:
                self.named, self.delivered = True, head.end()
                pieces.append(AnswerPiece("name", head[1]))
            elif whole is not None:
                return self._whole(whole)
            else:
                first = self.first.match(self.text)
                begin = self.text.lstrip()[:1]
                self.failed = begin not in ("", "{") or (first is not None and first[1] not in self.body.keys)
                return pieces
        if not self.arguments.ended:
            piece = self.text[self.delivered :]
            stop = self.arguments.put(piece)
            piece = piece if stop is None else piece[:stop]
            self.delivered += len(piece)
            pieces += [AnswerPiece("arguments", piece)] if piece else []
        if whole is not None:
            self.rest = self.text[whole:]
        return pieces

    def _whole(self, end: int) -> list[AnswerPiece]:
        """A whole object whose name does not stand before its arguments, or whose arguments are JSON in a text."""
        try:
            value = json.loads(self.text[:end])
            name, arguments = value[self.body.name_key], value[self.body.arguments_key]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, KeyError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            self.failed = True
            return []
        self.named, self.rest = True, self.text[end:]
        return [AnswerPiece("name", name), AnswerPiece("arguments", json.dumps(arguments, ensure_ascii=False))]


class NamedReader(CallReader):
    """A call as its name, and its arguments as JSON."""

    def __init__(self, body: NamedBody) -> None:
        super().__init__()
        self.arguments = JsonEnd()
        self.head = re.compile(rf"\s*({NAME})\s*{_loose(body.middle)}\s*(?=\{{)")

    def put(self, text: str) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if not self.named:
            self.text += text
            head = self.head.match(self.text)
            if head is None:
                self.failed = "{" in self.text or len(self.text) > 512
                return []
            self.named, text = True, self.text[head.end() :]
            pieces.append(AnswerPiece("name", head[1]))
        stop = self.arguments.put(text)
        if stop is not None:
            self.rest, text = text[stop:], text[:stop]
        return [*pieces, AnswerPiece("arguments", text)] if text else pieces


class ElementReader(CallReader):
    """A call as an element for each argument, whose values are JSON or texts as the tool's schema says."""

    def __init__(self, body: ElementBody, closing: str, schemas: Schemas) -> None:
        super().__init__()
        self.body, self.schemas, self.name, self.count = body, schemas, "", 0
        self.mark = body.after_value.split()[-1]  # without which no argument has ended
        after, close = _loose(body.after_name), _loose(closing)
        newline = r"\n?" if body.after_value.startswith("\n") else ""
        self.head = re.compile(rf"\s*({NAME})\s*{after}\s*(?={_loose(body.before_key)}|{close})")
        self.argument = re.compile(
            rf"\s*{_loose(body.before_key)}(.*?){_loose(body.before_value)}(.*?){newline}{_loose(body.after_value)}",
            re.DOTALL,
        )
        self.close = re.compile(rf"\s*(?={close})")

    def put(self, text: str) -> list[AnswerPiece]:
        self.text += text
        pieces: list[AnswerPiece] = []
        if not self.named:
            head = self.head.match(self.text)
            if head is None:
                self.failed = len(self.text) > 512
                return []
            self.named, self.name, self.text = True, head[1], self.text[head.end() :]
            pieces = [AnswerPiece("name", self.name), AnswerPiece("arguments", "{")]
        while self.mark in self.text and (one := self.argument.match(self.text)) is not None:
            key, value = one[1].strip(), self._value(one[1].strip(), one[2])
            comma = ", " if self.count else ""
            pieces.append(
                AnswerPiece("arguments", f"{comma}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
            )
            self.text, self.count = self.text[one.end() :], self.count + 1
        end = self.close.match(self.text)
        if end is not None:
            self.rest = self.text[end.end() :]
            pieces.append(AnswerPiece("arguments", "}"))
        return pieces

    def _value(self, key: str, text: str) -> object:
        """The value of an argument: a text where its schema says so, else JSON where it is."""
        text = text.removeprefix("\n") if self.body.before_value.endswith("\n") else text
        schema = (self.schemas.get(self.name, {}).get("properties") or {}).get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


class JsonEnd:
    """Finds the end of a JSON object or list, by its brackets outside strings."""

    def __init__(self) -> None:
        self.depth, self.string, self.escaped, self.ended = 0, False, False, False

    def put(self, text: str) -> int | None:
        """The place in this text after which the value has ended; None where it goes on, or ended before."""
        for place, char in enumerate(text):
            if self.ended:
                return None
            if self.escaped:
                self.escaped = False
            elif self.string:
                self.escaped, self.string = char == "\\", char != '"'
            elif char == '"':
                self.string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    self.ended = True
                    return place + 1
        return None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _without(text: str, squeezed: str) -> str:
    """What follows the first characters that are, without white space, `squeezed`."""
    left = len(squeezed)
    for place, char in enumerate(text):
        if not left:
            return text[place:]
        left -= not char.isspace()
    return ""


def _loose(literal: str) -> str:
    """A regular expression for a text whose white space may differ."""
    return r"\s*".join(map(re.escape, literal.split()))
