"""`/openapi.json`: the routes of this server and the fields of their requests, made of the table of fields
(`fields.toml`) and of what each route answers (`openapi.toml`)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import triptych
from triptych.files import tables_of
from .fields import KINDS, MOST_ROWS, table
from .thinking import think_values, variables_of

if TYPE_CHECKING:
    from .app import Server
    from .cards import ModelCard

Schema = dict[str, Any]
TEXT = {"type": "string"}
JSON = {str: "string", dict: "object", list: "array", int: "integer"}
BIAS = {"type": "number", "minimum": -100, "maximum": 100}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # which leave the prompt a token
SIZES = {
    "number": ("minimum", "exclusiveMinimum", "maximum"), "integer": ("minimum", "exclusiveMinimum", "maximum"),
    "array": ("minItems", "", "maxItems"), "ids": ("minItems", "", "maxItems"),
    "object": ("minProperties", "", "maxProperties"), "string": ("minLength", "", "maxLength"),
}  # fmt: skip
ERRORS = {
    "400": "A field is wrong, or the model cannot do this", "404": "There is no such model",
    "413": "The request is too large", "415": "The body is of another type", "503": "The server is stopping",
}  # fmt: skip


def routes(server: Server, known: Sequence[Route]) -> list[Route]:
    async def openapi(request: HttpRequest) -> Response:
        return JSONResponse(await asyncio.to_thread(document, server, known))  # templates are rendered for it

    return [Route("/openapi.json", openapi)]


def document(server: Server, known: Sequence[Route]) -> dict[str, Any]:
    """The description of a server, in OpenAPI 3.1.  A route that none of its models serves is left out."""
    described = tables_of(__file__)
    paths: dict[str, Any] = {}
    for route in known:
        path = route.path.replace(":path}", "}")
        about = described["routes"].get(path)
        names = [] if about is None else _able(server, about)
        if about is not None and names and (server.inspect or not about.get("inspect")):
            method = "post" if "POST" in (route.methods or ()) else "get"
            paths[path] = {method: _operation(server, path, about, names)}
    secured = {} if server.key is None else {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": triptych.__version__, "description": described["about"]},
        "paths": paths,
        "components": {"schemas": described["schemas"], "securitySchemes": secured},
        "security": [{name: []} for name in secured],
    }


def _able(server: Server, about: Mapping[str, Any]) -> list[str]:
    ability = about.get("ability")
    return [name for name in server.names if ability is None or ability in server.cards[name].able]


def _operation(server: Server, path: str, about: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    form = about.get("error", "Error")
    contents = {kind: {"schema": _answer(schema)} for kind, schema in about["answers"].items()}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": contents}}
    statuses = (
        ["400", "404", "413", "415", "503"]
        if "fields" in about
        else ["400", "404"]
        if "{" in path or "query" in about
        else []
    )
    for status in [*statuses, *(["401"] if server.key is not None else [])]:
        description = ERRORS.get(status, "The key is missing or wrong")
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
        answers[status] = {"description": description, "content": content}
    operation: dict[str, Any] = {"summary": about["summary"], "responses": answers}
    if "fields" in about:
        media = about.get("body", "application/json")
        schema = body_schema(server, about, names)
        operation["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    if "{" in path or "query" in about:
        name, place = (about["query"], "query") if "query" in about else ("name", "path")
        required = place == "path" or len(server.names) > 1
        schema = {"type": "string", "enum": list(names)}
        operation["parameters"] = [{"name": name, "in": place, "required": required, "schema": schema}]
    return operation


def _answer(schema: str) -> Schema:
    return TEXT if schema == "text" else {"$ref": f"#/components/schemas/{schema}"}


def body_schema(server: Server, about: Mapping[str, Any], names: Sequence[str]) -> Schema:
    """The fields of a route: those of each of its shapes, or all.  Models of which the same is said stand together."""
    schemas = []
    for shape in about.get("shapes", [{}]):
        alike: dict[str, tuple[Schema, list[str]]] = {}
        for card in (server.cards[name] for name in names):
            if _has_shape(card, shape):
                schema = _shape_schema(server, about, shape, card)
                alike.setdefault(json.dumps(schema, sort_keys=True), (schema, []))[1].append(card.name)
        for schema, same in alike.values():
            if "model" in schema["properties"]:
                schema["properties"]["model"] |= {"enum": same}
            schemas.append(schema)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _has_shape(card: ModelCard, shape: Mapping[str, Any]) -> bool:
    return (
        shape.get("layout", card.spec.layout) == card.spec.layout
        and (shape.get("ability") is None or shape["ability"] in card.able)
        and (card.tools or not shape.get("tools"))
    )


def _vocab(card: ModelCard) -> int:
    """The ids that every part of a model knows."""
    return min((n for n in (card.spec.vocab, card.spec.source_vocab) if n), default=1)


def _longest_prompt(card: ModelCard, about: Mapping[str, Any]) -> int | None:
    """The most ids of a prompt; one that is continued leaves room for one."""
    longest = card.spec.source_context
    writes = about.get("ability") == "completions" and card.spec.layout == "decoder"
    return None if longest is None else longest - writes


def _shape_schema(server: Server, about: Mapping[str, Any], shape: Mapping[str, Any], card: ModelCard) -> Schema:
    """The fields of a route but those that are refused and those that the shape is `without`; those that it is `with`
    are required, and `set` has more of the schemas of some."""
    tables = [*about["fields"], *(server.inside if about.get("inside") else ())]
    known = {name: field for name, field in table(*tables).items() if not field.get("refused")}
    required = {name for name, field in known.items() if field.get("required")} | {*shape.get("with", ())}
    required |= {"model"} if "model" in known and len(server.names) > 1 else set()
    alternatives = table("constraint") if shape.get("constraint") else {}
    without = {*shape.get("without", ()), *(() if alternatives else table("constraint"))}
    form, properties = "body" in about, dict[str, Schema]()  # a form has no null
    for name, field in known.items():
        if name in without:
            properties |= {} if form else {name: {"type": "null"}}
            continue
        more = shape.get("set", {}).get(name, {})
        complete = "const" in more or "$ref" in more
        schema = more if complete else _field_of(server, about, shape, name, field, card) | more
        bare = form or name in required or name in alternatives
        properties[name] = schema if bare else {"anyOf": [schema, {"type": "null"}]}
    if form:
        properties["file"] = {"type": "string", "format": "binary", "contentMediaType": "audio/wav"}
        required.add("file")
    whole: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if "either" in about and not alternatives:
        name, other = about["either"]
        whole["dependentSchemas"] = {name: {"properties": {other: {"type": "null"}}}}
    whole |= {"oneOf": [{"required": [name]} for name in alternatives]} if alternatives else {}
    return whole | ({"required": sorted(required)} if required else {})


def _field_of(
    server: Server, about: Mapping[str, Any], shape: Mapping[str, Any], name: str, field: Mapping[str, Any],
    card: ModelCard,
) -> Schema:  # fmt: skip
    """The schema of a field as this model has it; the name of the model is anything yet."""
    schema = field_schema(field, _vocab(card), _longest_prompt(card, about))
    items = about.get("items", {}) | (about.get("tools_items", {}) if card.tools else {})
    longest, (least, each) = card.spec.longest_row, card.least_prompts if about.get("templated") else (1, 0)
    if name in items:
        item = {"$ref": f"#/components/schemas/{items[name]}"}
        schema = {"anyOf": [TEXT, {"type": "array", "items": item}]} if "anyOf" in schema else schema | {"items": item}
    if name in about.get("tables", {}):
        item = _object_schema(about["tables"][name], _vocab(card))
        own = "custom" if about["tables"][name] == "messages_tool" else "function"
        other = {"type": "object", "required": ["type"], "properties": {"type": TEXT | {"not": {"const": own}}}}
        every = item if name in shape.get("with", ()) else {"anyOf": [item, other]} if card.tools else other
        schema |= {"items": every, "uniqueItems": True}
    if name in about.get("objects", {}):
        inner = {"without": shape.get("objects_without", {}).get(name, ())}
        schema = body_schema(server, {"fields": [about["objects"][name]], "shapes": [inner]}, [card.name])
    if name == "think":
        schema = {"enum": think_values(card.tokenizer)}
    if name == "chat_template_kwargs":
        value = {"type": ["string", "number", "boolean"]}
        properties = dict.fromkeys(sorted(variables_of(card.tokenizer)), value)
        schema |= {"properties": properties, "additionalProperties": False}
    if name == "dimensions":
        schema["enum"] = [card.spec.reads.outputs]
    if name == "logit_bias":
        digits = max(len(str(card.spec.vocab)) - 1, 1)
        schema |= {"propertyNames": {"pattern": f"^[0-9]{{1,{digits}}}$"}, "additionalProperties": BIAS}
    if name in LIMITS and longest is not None and not about.get("shortens"):
        schema["maximum"] = max(longest - least, 1)
    if name == "messages" and longest is not None and each:
        schema["maxItems"] = min(schema["maxItems"], 1 + max(longest - 1 - least, 0) // each)
    if name == "language" and card.languages:
        schema["enum"] = list(card.languages)
    if about.get("masks") == name:
        masked = TEXT | {"pattern": re.escape(str(card.mask))}
        schema = {"anyOf": [masked, {"type": "array", "items": masked, "minItems": 1, "maxItems": MOST_ROWS}]}
    return schema


def _object_schema(name: str, vocab: int) -> Schema:
    """The schema of an object whose fields are those of a table; null counts as left out."""
    known = {key: field for key, field in table(name).items() if not field.get("refused")}
    required = sorted(key for key, field in known.items() if field.get("required"))
    schemas = {key: field_schema(field, vocab) for key, field in known.items()}
    nullable = {key: {"anyOf": [schema, {"type": "null"}]} for key, schema in schemas.items()}
    properties = nullable | {key: schemas[key] for key in required}
    whole: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return whole | ({"required": required} if required else {})


def field_schema(field: Mapping[str, Any], vocab: int, longest: int | None = None) -> Schema:
    """The JSON schema of a field of the table, whose token ids are below `vocab`, at most `longest` in a row."""
    if "described" in field:
        return dict(field["described"])
    kind = field["type"]
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab - 1}}
    full, most = TEXT | {"minLength": 1}, {} if longest is None else {"maxItems": longest}
    some = ids | {"minItems": 1} | most
    if kind == "strings":
        one = full if field.get("no_empty") else TEXT
        texts = {"type": "array", "items": one} | ({"maxItems": field["most"]} if "most" in field else {})
        return {"anyOf": [one, texts]}
    if "fields" in field:
        return _object_schema(field["fields"], vocab)
    if kind in ("prompt", "choice", "selection", "schema"):
        return {"anyOf": [{"type": JSON[one]} for one in KINDS[kind]]}
    if kind == "rows":
        rows = {"type": "array", "items": {"anyOf": [full, some]}, "minItems": 1, "maxItems": MOST_ROWS}
        return {"anyOf": [full, some, rows]}
    if kind == "prefix":
        return {"anyOf": [full, some]}
    if kind == "duration":
        return {"anyOf": [TEXT, {"type": "number"}]}
    if kind == "level":
        return {"enum": list(field["one_of"])}
    schema: Schema = ids if kind == "ids" else {"type": kind}
    for key, name in zip(("least", "above", "most"), SIZES.get(kind, ()), strict=False):
        if key in field:
            schema[name] = field[key]
    if "only_empty" in field:
        schema["maxLength" if kind == "string" else "maxItems"] = 0
    return schema | ({"enum": list(field["one_of"])} if "one_of" in field else {})
