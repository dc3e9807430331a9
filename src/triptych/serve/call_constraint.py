"""The constraint of an answer that has to be a call: the form of the model with the names and schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from triptych.errors import TriptychError
from triptych.generate import Constraint
from triptych.text import Tokenizer
from .call_form import LONG_IDS, SHORT_IDS, CallForm, ElementBody
from .fields import ApiError
from .structured import schema_constraint
from .tools import Tool, ToolUse

#: What an object of arguments may say where each argument is an element, and what one of texts may.
OBJECT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "description", "title", "$schema", "$defs",
     "definitions")
)  # fmt: skip
TEXT_KEYS = frozenset({"type", "description", "title", "default", "examples"})
ID = re.compile("|".join((*LONG_IDS, *SHORT_IDS)))


def call_constraint(
    form: CallForm, use: ToolUse, tokenizer: Tokenizer, ends: Collection[int] = (), answer: Constraint | None = None
) -> Constraint:  # fmt: skip
    """One call of a tool, or several where the form and the request allow them; or where an `answer` is given, a text
    of that constraint instead.  The row ends with one of `ends`, which are no part of a call.

    Raises ApiError for tools whose arguments would not be kept to their schemas.
    """
    if not form.head and not form.middle:
        raise ApiError(400, "this model writes the arguments of a call before its name, which is not kept", "tools")
    lark = Lark(tokenizer)
    calls = " | ".join(_call(lark, form, tool, number) for number, tool in enumerate(use.tools))
    more = form.between is not None and use.parallel and use.choice != "named"
    again = f"({lark.literal(form.between or '')} call)*" if more else ""
    closing = form.closing
    for text, token in lark.added.items():
        closing = closing.removesuffix(text) if token in ends else closing
    rules = [f"calls: {lark.literal(form.opening)} call {again} {lark.literal(closing)}", f"call: {calls}"]
    if answer is not None:
        lark.parts["answer"] = answer
    start = "start: calls" if answer is None else "start: calls | answer"
    try:
        return Constraint.composed("\n".join([start, *rules, *lark.rules]), lark.parts)
    except TriptychError as error:
        raise ApiError(400, f"tools: {error}", "tools") from None


class Lark:
    """The rules of a grammar and the constraints in it, while they are collected."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        longest_first = sorted(self.added, key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, longest_first))) if self.added else None
        self.rules: list[str] = []
        self.parts: dict[str, Constraint] = {}

    def literal(self, text: str) -> str:
        """A text; where a model has a token of its own for a part of it, that token."""
        pieces, at = [], 0
        for match in self.tokens.finditer(text) if self.tokens is not None else ():
            pieces += [text[at : match.start()], self.added[match[0]]]
            at = match.end()
        pieces.append(text[at:])
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
            for piece in pieces if piece != ""
        )  # fmt: skip

    def part(self, name: str, constraint: Constraint) -> str:
        self.parts[name] = constraint
        return name

    def rule(self, name: str, text: str) -> str:
        self.rules.append(f"{name}: {text}")
        return name


def _call(lark: Lark, form: CallForm, tool: Tool, number: int) -> str:
    """The name of the rule of a call of a tool."""
    where = f"tools: the arguments of {tool.name}"
    if isinstance(form.body, ElementBody):
        return lark.rule(f"call_{number}", _elements(lark, form.body, tool, number, where))
    arguments = lark.part(f"arguments_{number}", schema_constraint(_object(tool.parameters), where))
    before, after = ID.split(form.tail) if ID.search(form.tail) else (form.tail, None)
    tail = lark.literal(before) + ("" if after is None else f" /[a-zA-Z0-9]{{9}}/ {lark.literal(after)}")
    return lark.rule(f"call_{number}", f"{lark.literal(form.head + tool.name + form.middle)} {arguments} {tail}")


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, which are an object also where it does not say so."""
    return schema if schema.get("type") == "object" else {"type": "object", **schema}


def _elements(lark: Lark, body: ElementBody, tool: Tool, number: int, where: str) -> str:
    """A call with an element for each argument, those that are required first."""
    schema = tool.parameters
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    unknown = sorted({*schema} - OBJECT_KEYS) or sorted({*required} - {*properties})
    if unknown:
        raise ApiError(400, f"{where}: {unknown[0]} is not kept where each is an element", "tools")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    close = body.after_value.rstrip()
    between = lark.literal(body.after_value[len(close) :])
    elements: dict[str, str] = {}
    for place, (key, value) in enumerate(properties.items()):
        name = f"element_{number}_{place}"
        text = _closed(lark, f"{name}_value", value, shared, close, f"{where}: {key}")
        elements[key] = lark.rule(name, f"{lark.literal(body.before_key + key + body.before_value)} {text}")
    needed = [elements[key] for key in properties if key in required]
    optional = [elements[key] for key in properties if key not in required]
    orders = [_joined(between, [*needed, *(f"{one}?" for one in optional)])] if needed else [
        _joined(between, [one, *(f"{other}?" for other in optional[i + 1 :])]) for i, one in enumerate(optional)
    ]  # fmt: skip
    every = f"({' | '.join(orders)}){'' if needed else '?'}" if orders else ""
    return f"{lark.literal(tool.name + body.after_name)} {every}"


def _joined(between: str, elements: Sequence[str]) -> str:
    """Elements one after another, those that end with `?` with what is between before them or not at all."""
    first, *rest = elements
    return " ".join(
        [first, *(f"({between} {one[:-1]})?" if one.endswith("?") else f"{between} {one}" for one in rest)]
    )  # fmt: skip


def _closed(lark: Lark, name: str, schema: Any, shared: Mapping[str, Any], close: str, where: str) -> str:
    """The value of an element and what closes it: a text as it is, without `</`, or JSON of another type."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        inner = {**shared, **schema} if isinstance(schema, Mapping) else schema
        return f"{lark.part(name, schema_constraint(inner, where))} {lark.literal(close)}"
    if "enum" in schema and all(isinstance(one, str) and one for one in schema["enum"]):
        return f"({' | '.join(map(lark.literal, schema['enum']))}) {lark.literal(close)}"
    unknown = sorted({*schema} - TEXT_KEYS)
    if unknown:
        raise ApiError(400, f"{where}: {unknown[0]} is not kept where each is an element", "tools")
    # One expression with the characters that close it: alone, it would take the first of them as its own.
    token = None if lark.tokens is None else lark.tokens.search(close)
    first, rest = (close, "") if token is None else (close[: token.start()], close[token.start() :])
    ending = re.escape(first).replace("\\\n", r"\n").replace("/", r"\/")
    return rf"/([^<]|<[^\/<])*{ending}/ {lark.literal(rest)}"
