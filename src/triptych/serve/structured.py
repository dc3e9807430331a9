"""Constraints of requests: OpenAI's `response_format` and `text.format`, Anthropic's `output_config.format`, vLLM's
`structured_outputs` and `guided_*`, llama.cpp's `grammar` and `json_schema`, Ollama's `format`.  What would not be kept
is a 400 that names the part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from triptych.errors import TriptychError, nearest, shown
from triptych.generate import Constraint
from triptych.model import Model
from .fields import ApiError, Fields, read

MOST_SCHEMA = 1 << 18  # characters of a schema
MOST_GRAMMAR = 1 << 16  # of a grammar
MOST_EXPRESSION = 1 << 13  # of a regular expression
MOST_CHOICES = 1 << 12
LARGEST_CHOICES = 1 << 16  # characters of all choices

#: Fields of `structured_outputs` and those with `guided_` before them -> the kind of constraint.
KINDS = {"json": "schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}


def constraint_of(fields: Fields, model: Model) -> Constraint | None:
    """The constraint of a request, compiled for its model; None where it has none.  The first for a model takes seconds
    with a large vocabulary: call it outside the event loop.

    Raises ApiError for several, for what is malformed or too large, and for what would not be kept.
    """
    present = [name for name in _FIELDS if name in fields.values]
    constraints = [one for one in [(name, _FIELDS[name](fields.values[name], name)) for name in present] if one[1]]
    if len(constraints) > 1:
        names = " and ".join(name for name, _ in constraints)
        raise ApiError(400, f"{names} do not go together; give one", constraints[1][0])
    for name, constraint in constraints:
        assert constraint is not None
        if fields.get("stop"):
            raise ApiError(400, f"stop and {name} do not go together: a stop would cut the text; leave one out", "stop")
        try:
            constraint.prepare(model.tokenizer, model.spec.vocab)
        except TriptychError as error:
            raise ApiError(400, f"{name}: {error}", name) from None
        return constraint
    return None


def format_constraint(value: Any, name: str) -> Constraint | None:
    """That of OpenAI's `response_format`, or of `text.format` of its newer route, whose schema stands beside its
    type."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        _only(value, name, ("type",))
        return None
    if kind == "json_object":
        _only(value, name, ("type", "schema"))
        return schema_constraint(value.get("schema", {"type": "object"}), name)
    if kind != "json_schema":
        raise ApiError(400, f"{name}.type must be text, json_object or json_schema, not {shown(kind)}", name)
    if "json_schema" in value:
        _only(value, name, ("type", "json_schema"))
        nested, at = value["json_schema"], f"{name}.json_schema"
    else:
        nested, at = {key: one for key, one in value.items() if key != "type"}, name
    return schema_constraint(read(nested, "json_schema_format", at=at).values["schema"], name)


def _inner_format(value: Mapping[str, Any], name: str) -> Constraint | None:
    """That of `text.format` (OpenAI's responses) or `output_config.format` (Anthropic's messages)."""
    wanted = value.get("format")
    return None if wanted is None else format_constraint(wanted, f"{name}.format")


def _ollama_format(value: Any, name: str) -> Constraint | None:
    """That of Ollama's `format`: a schema, `json` for any object, or an empty text for none."""
    return None if value == "" else schema_constraint({"type": "object"} if value == "json" else value, name)


def schema_constraint(schema: Any, name: str) -> Constraint:
    """JSON of a schema, as an object or as its text; also of the arguments of a tool."""
    if not isinstance(schema, Mapping | str):
        raise ApiError(400, f"{name}: the schema must be an object, not {shown(schema)}", name)
    _check_size(schema if isinstance(schema, str) else json.dumps(schema), MOST_SCHEMA, name)
    return _made(lambda: Constraint.schema(schema), name)


def _structured(value: Any, name: str) -> Constraint | None:
    """That of vLLM's `structured_outputs`."""
    wanted = {key: one for key, one in value.items() if one is not None}
    if wanted.pop("json_object", None):
        wanted["json"] = {"type": "object"}
    _only(wanted, name, KINDS)
    if len(wanted) != 1:
        raise ApiError(400, f"{name} must have one of {', '.join(KINDS)} and json_object", name)
    [(key, one)] = wanted.items()
    return _of_kind(KINDS[key], one, name)


def _of_kind(kind: str, value: Any, name: str) -> Constraint:
    if kind == "schema":
        return schema_constraint(value, name)
    if kind == "choices":
        if not isinstance(value, list) or not 0 < len(value) <= MOST_CHOICES:
            raise ApiError(400, f"{name}: the choices must be a list of 1 to {MOST_CHOICES:,} texts", name)
        if not all(isinstance(one, str) for one in value):
            raise ApiError(400, f"{name}: the choices must be texts", name)
        _check_size("".join(value), LARGEST_CHOICES, name)
        return _made(lambda: Constraint.choices(value), name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{name}: the {kind} must be a text that is not empty", name)
    _check_size(value, MOST_EXPRESSION if kind == "regex" else MOST_GRAMMAR, name)
    return _made(lambda: Constraint.regex(value) if kind == "regex" else Constraint.grammar(value), name)


_FIELDS: dict[str, Callable[[Any, str], Constraint | None]] = {
    "response_format": format_constraint,
    "text": lambda value, name: _inner_format(value, name),
    "output_format": format_constraint,
    "output_config": lambda value, name: _inner_format(value, name),
    "structured_outputs": _structured,
    "json_schema": schema_constraint,
    "format": lambda value, name: _ollama_format(value, name),
    "grammar": lambda value, name: _of_kind("grammar", value, name),
    "guided_json": schema_constraint,
    "guided_regex": lambda value, name: _of_kind("regex", value, name),
    "guided_choice": lambda value, name: _of_kind("choices", value, name),
    "guided_grammar": lambda value, name: _of_kind("grammar", value, name),
}


def _made(make: Callable[[], Constraint], name: str) -> Constraint:
    try:
        return make()
    except TriptychError as error:
        raise ApiError(400, f"{name}: {error}", name) from None


def _only(value: Mapping[str, Any], name: str, known: Any) -> None:
    """Raise ApiError for a field that an object does not have."""
    for key in value:
        if key not in known:
            raise ApiError(400, f"{name}.{key} is not supported here{nearest(key, known)}; leave it out", name)


def _check_size(text: str, most: int, name: str) -> None:
    if len(text) > most:
        raise ApiError(400, f"{name} has {len(text):,} characters; at most {most:,} are read", name)
