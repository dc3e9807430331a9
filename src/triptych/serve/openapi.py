"""`/openapi.json`: the routes of this server and the fields of their requests, made of the table of fields
(`fields.toml`) and of what each route answers (`openapi.toml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import triptych
from triptych.files import tables_of
from .fields import KINDS, MOST_ROWS, table

if TYPE_CHECKING:
    from .app import Server
    from .cards import ModelCard

Schema = dict[str, Any]
TEXT = {"type": "string"}
JSON = {str: "string", dict: "object", list: "array", int: "integer"}
BIAS = {"type": "number", "minimum": -100, "maximum": 100}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # which leave the prompt a token
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")  # fields of models whose template shows how calls are written
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
        return JSONResponse(document(server, known))

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
    """The fields of a route: those of each of its shapes, or all."""
    shapes = []
    for shape in about.get("shapes", [{}]):
        alike: dict[object, list[ModelCard]] = {}  # models of which the same is said
        for card in (server.cards[name] for name in names):
            if shape.get("layout", card.spec.layout) == card.spec.layout:
                same = (_vocab(card), card.spec.reads.outputs, card.mask, card.languages)
                alike.setdefault(same, []).append(card)
        shapes += [_shape_schema(server, about, shape, cards) for cards in alike.values()]
    return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}


def _vocab(card: ModelCard) -> int:
    """The ids that every part of a model knows."""
    return min((n for n in (card.spec.vocab, card.spec.source_vocab) if n), default=1)


def _shape_schema(
    server: Server, about: Mapping[str, Any], shape: Mapping[str, Any], cards: Sequence[ModelCard]
) -> Schema:
    """The fields of a route but those that are refused and those that the shape is `without`; those that it is `with`
    are required, and `set` has more of the schemas of some."""
    first = cards[0]
    tables = [*about["fields"], *(server.inside if about.get("inside") else ())]
    known = {name: field for name, field in table(*tables).items() if not field.get("refused")}
    if not first.tools:
        known = {name: field for name, field in known.items() if name not in TOOLS}
    required = {name for name, field in known.items() if field.get("required")} | {*shape.get("with", ())}
    required |= {"model"} if "model" in known and len(server.names) > 1 else set()
    without = {*shape.get("without", ()), *(() if shape.get("constraint") else table("constraint"))}
    form, properties = "body" in about, dict[str, Schema]()  # a form has no null
    for name, field in known.items():
        if name in without:
            properties |= {} if form else {name: {"type": "null"}}
            continue
        schema = field_schema(field, _vocab(first))
        if name == "model":
            schema = TEXT | {"enum": [card.name for card in cards]}
        if name in about.get("items", {}):
            schema |= {"items": {"$ref": f"#/components/schemas/{about['items'][name]}"}}
        if name in about.get("objects", {}):
            schema = body_schema(server, {"fields": [about["objects"][name]]}, [first.name])
        if name == "dimensions":
            schema["enum"] = [first.spec.reads.outputs]
        if name == "logit_bias":
            digits = max(len(str(first.spec.vocab)) - 1, 1)
            schema |= {"propertyNames": {"pattern": f"^[0-9]{{1,{digits}}}$"}, "additionalProperties": BIAS}
        if name in LIMITS and first.spec.longest_row is not None and not about.get("shortens"):
            schema["maximum"] = first.spec.longest_row - 1
        if name == "language" and first.languages:
            schema["enum"] = list(first.languages)
        if about.get("masks") == name:
            masked = TEXT | {"pattern": re.escape(str(first.mask))}
            schema = {"anyOf": [masked, {"type": "array", "items": masked, "minItems": 1, "maxItems": MOST_ROWS}]}
        schema |= shape.get("set", {}).get(name, {})
        properties[name] = schema if form or name in required else {"anyOf": [schema, {"type": "null"}]}
    if form:
        properties["file"] = {"type": "string", "format": "binary", "contentMediaType": "audio/wav"}
        required.add("file")
    whole: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return whole | ({"required": sorted(required)} if required else {})


def field_schema(field: Mapping[str, Any], vocab: int) -> Schema:
    """The JSON schema of a field of the table, whose token ids are below `vocab`."""
    kind = field["type"]
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab - 1}}
    some, full = ids | {"minItems": 1}, TEXT | {"minLength": 1}
    if kind == "strings":
        one = full if field.get("no_empty") else TEXT
        texts = {"type": "array", "items": one} | ({"maxItems": field["most"]} if "most" in field else {})
        return {"anyOf": [one, texts]}
    if "fields" in field:
        inner = {name: one for name, one in table(field["fields"]).items() if not one.get("refused")}
        properties = {name: {"anyOf": [field_schema(one, vocab), {"type": "null"}]} for name, one in inner.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    if kind in ("prompt", "choice", "selection", "schema"):
        return {"anyOf": [{"type": JSON[one]} for one in KINDS[kind]]}
    if kind == "rows":
        rows = {"type": "array", "items": {"anyOf": [full, some]}, "minItems": 1, "maxItems": MOST_ROWS}
        return {"anyOf": [full, some, rows]}
    if kind == "prefix":
        return {"anyOf": [full, some]}
    if kind == "duration":
        return {"anyOf": [TEXT, {"type": "number"}]}
    schema: Schema = ids if kind == "ids" else {"type": kind}
    for key, name in zip(("least", "above", "most"), SIZES.get(kind, ()), strict=False):
        if key in field:
            schema[name] = field[key]
    if "only_empty" in field:
        schema["maxLength" if kind == "string" else "maxItems"] = 0
    return schema | ({"enum": list(field["one_of"])} if "one_of" in field else {})
