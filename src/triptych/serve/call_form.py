"""How a model writes calls of tools: found by rendering a known call through its chat template.

A conversation with one call and one with two are rendered, and what stands where the assistant's text would stand is
taken apart: what opens the calls, what stands between two and what closes them, and how the name and the arguments are
written.  Three ways are known: an object of JSON with both (ChatML as Hermes and Qwen write it, Llama 3, Mistral), the
name and then the arguments in JSON (DeepSeek, newer Mistral), and an element for each argument (Qwen's coder, GLM).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from triptych.errors import InputError, TextError

Render = Callable[..., str]  # messages, and the variables of the template

NAME, OTHER_NAME = "alpha_probe", "omega_probe"
ARGUMENTS = {"first_key": "first_value", "second_key": "second_value"}
OTHER_ARGUMENTS = {"third_key": "third_value", "fourth_key": "fourth_value"}
TEXT = "\N{SECTION SIGN}\N{PILCROW SIGN}"  # an answer that begins and ends like no call
LONG_IDS = "call_0123456789abcdef", "call_fedcba9876543210"
SHORT_IDS = "Abcdef123", "Bcdefg234"  # letters and digits, nine of them, as Mistral's templates want


class NoCallForm(Exception):
    """The template has no form for calls of tools that is known here; the message says why."""


@dataclass(frozen=True)
class JsonBody:
    """An object of JSON that has the name under one key and the arguments under another."""

    name_key: str
    arguments_key: str
    keys: tuple[str, ...]  # all of them, in the order of the template


@dataclass(frozen=True)
class NamedBody:
    """The name, then `middle`, then the arguments as JSON."""

    middle: str


@dataclass(frozen=True)
class ElementBody:
    """The name, `after_name`, and for each argument `before_key`, its key, `before_value`, its value and
    `after_value`."""

    after_name: str
    before_key: str
    before_value: str
    after_value: str


Body = JsonBody | NamedBody | ElementBody


@dataclass(frozen=True)
class CallForm:
    """How calls are written, and how messages have to hold them for the template.

    opening         before the first call; empty where only an object of JSON at the beginning says that it is one.
    between         between two calls; None where the template writes no more than one.
    closing         after the last one.
    head, middle    of a call, before and after its name, up to its arguments.
    tail            after its arguments, up to the end of the call.
    parsed          arguments are given as objects, not as their JSON.
    short_ids       the template wants ids of nine letters and digits.
    empty_content   a message with calls has an empty text, not none.
    """

    body: Body
    opening: str
    between: str | None
    closing: str
    head: str
    middle: str
    tail: str
    parsed: bool
    short_ids: bool
    empty_content: bool

    @property
    def literals(self) -> str:
        """All that is written around names and arguments."""
        return "".join((self.opening, self.between or "", self.closing, self.head, self.middle, self.tail))

    def message(self, content: str, calls: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
        """An assistant's message with calls, each an id, a name and arguments, as the template reads it."""
        return _message(self.parsed, self.empty_content, [(self.id_of(id), *rest) for id, *rest in calls], content)

    def id_of(self, id: str) -> str:
        """The id of a call as the template wants it, the same each time."""
        if not self.short_ids or (len(id) == len(SHORT_IDS[0]) and id.isalnum()):
            return id
        return hashlib.sha256(id.encode()).hexdigest()[: len(SHORT_IDS[0])]


def _message(
    parsed: bool, empty_content: bool, calls: Sequence[Sequence[Any]], content: str = ""
) -> dict[str, Any]:  # fmt: skip
    written = [
        {"id": id, "type": "function",
         "function": {"name": name, "arguments": arguments if parsed else json.dumps(arguments, ensure_ascii=False)}}
        for id, name, arguments in calls
    ]  # fmt: skip
    return {"role": "assistant", "content": content if content or empty_content else None, "tool_calls": written}


def call_form(render: Render) -> CallForm:
    """The form of calls of a template.  Raises NoCallForm where it has none that is known here."""
    tools = [_tool(NAME, ARGUMENTS), _tool(OTHER_NAME, OTHER_ARGUMENTS)]
    try:
        answer_text(render, {"role": "assistant", "content": TEXT}, tools)
    except InputError:
        raise NoCallForm("the chat template of this model does not read tools") from None
    except TextError as error:
        raise NoCallForm(f"the chat template of this model cannot render a conversation with tools ({error})") from None
    kinds = (True, False) if _writes_text(render, tools) else (True,)
    for parsed, ids, empty in product(kinds, (LONG_IDS, SHORT_IDS), (True, False)):
        first, second = (ids[0], NAME, ARGUMENTS), (ids[1], OTHER_NAME, OTHER_ARGUMENTS)
        try:
            one = answer_text(render, _message(parsed, empty, [first]), tools)
            body, start, stop = _body(one, NAME, ARGUMENTS)
        except (TextError, NoCallForm):
            continue
        opening, unit, closing = one[:start], one[start:stop], one[stop:]
        between = None
        try:
            two = answer_text(render, _message(parsed, empty, [first, second]), tools)
            _, other, _ = _body(two, OTHER_NAME, OTHER_ARGUMENTS)
        except (TextError, NoCallForm):
            pass
        else:
            between = two[stop:other] if two.startswith(opening + unit) and two.endswith(closing) else None
        head, middle, tail = _pieces(unit, body)
        return CallForm(body, opening, between, closing, head, middle, tail, parsed, ids is SHORT_IDS, empty)
    raise NoCallForm("the chat template of this model writes calls of tools in no form that is known here")


def _writes_text(render: Render, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template may take arguments as the JSON that it writes: it writes no object, or one as Python does."""
    for ids, empty in product((LONG_IDS, SHORT_IDS), (True, False)):
        try:
            text = answer_text(render, _message(True, empty, [(ids[0], NAME, ARGUMENTS)]), tools)
        except (TextError, NoCallForm):
            continue
        return str(ARGUMENTS) in text
    return True


def _tool(name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": key} for key in arguments},
                  "required": [*arguments]}  # fmt: skip
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def answer_text(render: Render, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """What a template writes of a message where it has the text of an answer, and whatever ends a turn with calls in
    another way.  Raises NoCallForm where that place is not found."""

    def rendered(message: Mapping[str, Any]) -> str:
        return render([{"role": "user", "content": "?"}, message], tools=tools, add_generation_prompt=False)

    before, answer, after = rendered({"role": "assistant", "content": TEXT}).partition(TEXT)
    called = rendered(message)
    pairs = enumerate(zip(before, called, strict=False))
    start = next((i for i, (own, other) in pairs if own != other), min(len(before), len(called)))
    if not answer or TEXT in after or before[start:].strip():  # white space before an answer may differ
        raise NoCallForm("the chat template of this model does not render what the assistant answers")
    return called[start:].rstrip().removesuffix(after.rstrip())


def _body(text: str, name: str, arguments: Mapping[str, str]) -> tuple[Body, int, int]:
    """How a call is written, and from where to where in the text.  Raises NoCallForm where it is not found."""
    for start, stop, value in _objects(text):
        named = [key for key, inner in value.items() if inner == name]
        argued = [key for key, inner in value.items() if inner == arguments]
        if named and argued:
            return JsonBody(named[0], argued[0], tuple(value)), start, stop
    for start, stop, value in _objects(text):
        at = text.rfind(name, 0, start)
        if value == arguments and at >= 0:
            return NamedBody(text[at + len(name) : start]), at, stop
    return _elements(text, name, arguments)


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The objects of JSON in a text, from where to where; outer ones first."""
    decoder = json.JSONDecoder()
    for start, char in enumerate(text):
        if char == "{":
            try:
                value, stop = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            yield start, stop, value


def _elements(text: str, name: str, arguments: Mapping[str, str]) -> tuple[Body, int, int]:
    places, at = [], 0
    for word in [name, *(word for pair in arguments.items() for word in pair)]:
        start = text.find(word, at)
        if start < 0:
            raise NoCallForm("the call is not found in what the template renders")
        at = start + len(word)
        places.append((start, at))
    gaps = [text[stop:start] for (_, stop), (start, _) in pairwise(places)]
    after_name, before_value, between = gaps[0], gaps[1], gaps[2]
    rest = text[places[-1][1] :]
    if before_value != gaps[3] or "<" not in after_name or "<" not in between:
        raise NoCallForm("the call is in no form that is known here")
    cut, end = after_name.rindex("<"), between.rindex("<")
    before_key, after_value = after_name[cut:], between[:end]
    stop = len(rest) - len(rest.lstrip()) + len(after_value.strip())
    if before_key != between[end:] or not after_value.strip() or not rest.lstrip().startswith(after_value.strip()):
        raise NoCallForm("the call is in no form that is known here")
    return ElementBody(after_name[:cut], before_key, before_value, after_value), places[0][0], places[-1][1] + stop


def _pieces(unit: str, body: Body) -> tuple[str, str, str]:
    """What stands in a call before its name, between name and arguments, and after these; empty where the arguments
    come first."""
    if isinstance(body, ElementBody):
        return "", body.after_name, ""
    place = next(((start, stop) for start, stop, value in _objects(unit) if value == ARGUMENTS), (0, 0))
    at = unit.find(NAME)
    return (unit[:at], unit[at + len(NAME) : place[0]], unit[place[1] :]) if at < place[0] else ("", "", "")
