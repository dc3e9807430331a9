"""JSON schemas as the library llguidance is to read them: each part is kept by every output, or refused by its place.

The library reads most keywords, and some of them in another way than validators do: expressions (`expressions`), dates
that do not exist, bounds beyond its integers, fractions of `multipleOf`, numbers of properties.  What is given to it
allows less than the schema where that is needed, and never more: short white space, and no properties beside those that
an object lists, unless it says so by `additionalProperties`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from triptych.arguments import integer
from triptych.errors import InputError, nearest, shown
from triptych.files import tables_of
from .expressions import portable

MOST_DEPTH = 100  # schemas inside one another
MOST_TEXT = 1 << 20  # characters
MOST_OPTIONAL = 400  # properties of an object that may be left out: each may come next
EXACT = 2**53  # integers up to here are numbers of JSON that everybody reads alike
SHORT_ENUM = 6  # values of which all sets are written out
WHITE_SPACE = r" ?|\n {0,16}"  # between two tokens of JSON: nothing, a space, or a line break with an indentation
Schema = dict[str, Any]
_TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null"}  # whose equality is that of their JSON
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref")


@cache
def _keywords(kind: str) -> frozenset[str]:
    return frozenset(tables_of(__file__)["keywords"][kind])


@cache
def _formats() -> dict[str, str]:
    tables = tables_of(__file__)
    formats = dict(tables["formats"])
    for name, part in tables["parts"].items():
        formats = {key: value.replace(f"{{{name}}}", part) for key, value in formats.items()}
    return formats


def read(schema: object) -> Schema:
    """A schema as a dict of its own: from a dict, a JSON text, True, a pydantic model class or another type that
    pydantic describes.  Raises InputError for anything else."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(f'schema is no JSON: {error}; give a JSON schema, as \'{{"type": "object"}}\'') from None
    elif not isinstance(schema, Mapping | bool):
        schema = _of_type(schema)
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise InputError(f"schema={shown(schema)} must be a JSON schema: a dict, its text, or a pydantic model class")
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate is a ValueError here
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema holds what JSON cannot: {error}") from None
    if len(text) > MOST_TEXT:
        raise InputError(f"schema has {len(text):,} characters; at most {MOST_TEXT:,} are read")
    copied: Schema = json.loads(text)
    return copied


def _of_type(kind: Any) -> object:
    import pydantic

    try:
        adapter = kind if isinstance(kind, pydantic.TypeAdapter) else pydantic.TypeAdapter[Any](kind)
        return adapter.json_schema()
    except (pydantic.PydanticUserError, pydantic.errors.PydanticInvalidForJsonSchema, TypeError) as error:
        problem = str(error).partition("\n")[0]
        raise InputError(f"schema={shown(kind)} has no JSON schema: {problem}; give a dict or a model class") from None


def rewritten(schema: Schema, *, close: bool) -> tuple[Schema, dict[str, Schema]]:
    """The schema for the library, and each schema in it by its place (a JSON pointer).

    With `close` an object that lists `properties` and does not say what others may be has no others.

    Raises InputError for what would not be kept, with its place.
    """
    writer = _Rewriter(close)
    new = writer.schema(schema, "", 0)
    for place, target in writer.references.items():
        if target not in writer.places:
            problem = f"{place}/$ref: there is no schema at {shown('#' + target)}"
            raise InputError(f"schema{problem}; references are to schemas in the same text, as #/$defs/NAME")
    for place in [*writer.places]:
        tag = writer.places[place].get("discriminator")
        if isinstance(tag, dict) and isinstance(tag.get("propertyName"), str):
            writer.require(place, tag["propertyName"], set())
    return new, writer.places


def may_close(places: Mapping[str, Schema]) -> bool:
    """Whether no object of the schema is described in two places together, so that each is closed by itself."""
    for schema in places.values():
        used = [name for name in _COMBINATORS if name in schema]
        beside = {*schema} & _keywords("honored") - {"$defs", "definitions", "type"} - {*used}
        if len(schema.get("allOf", ())) > 1 or len(used) > 1 or (used and beside):
            return False
    return True


def pointer(*names: object) -> str:
    """A part of a JSON pointer (RFC 6901)."""
    return "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in names)


@dataclass(eq=False)
class _Rewriter:
    """One pass over a schema: `places` are the rewritten schemas, `references` the targets of `$ref`, by place."""

    close: bool
    places: dict[str, Schema] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    root: Schema = field(default_factory=dict)

    def schema(self, schema: object, at: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InputError(f"schema{at} must be an object, true or false, not {shown(schema)}")
        if depth > MOST_DEPTH:
            raise InputError(f"schema{at}: schemas stand more than {MOST_DEPTH} deep in one another")
        self.root = self.root or schema
        new = dict(schema)
        self.places[at] = new
        for name in schema:
            self._keyword(schema, name, at)
        for name, part, inner in _parts(schema, at):
            value = self.schema(inner, at + pointer(*part), depth + 1)
            if len(part) == 1:
                new[name] = value
                continue
            if new[name] is schema[name]:
                new[name] = type(schema[name])(schema[name])
            new[name][part[1]] = value
        self._strings(new, at)
        self._numbers(new, at)
        self._objects(new, at)
        self._unique(new, at)
        return new

    def _keyword(self, schema: Schema, name: str, at: str) -> None:
        """Raise InputError for a keyword that is not kept, and for one that is spelled nearly like one that is."""
        known = _keywords("honored") | _keywords("annotations") | _keywords("refused")
        if name == "x-guidance":
            raise InputError(f"schema{at}/x-guidance would change how the schema is read; leave it out")
        if name in _keywords("refused"):
            raise InputError(f"schema{at}{pointer(name)} is not kept; leave it out, or say it in another way")
        if name not in known and (close := nearest(name, known, 0.85)):
            raise InputError(f"schema{at}{pointer(name)} is no keyword{close}")
        if name in ("$id", "id") and at and isinstance(schema[name], str):
            raise InputError(f"schema{at}{pointer(name)}: a schema inside another has a name of its own; leave it out")
        if name == "$ref":
            target = schema[name]
            if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
                problem = f"{shown(target)} is outside the schema; write what it names under $defs"
                raise InputError(f"schema{at}/$ref: {problem}, and #/$defs/NAME here")
            self.references[at] = unquote(target[1:])

    def _strings(self, new: Schema, at: str) -> None:
        """The expressions of a schema, and its format as one."""
        if "pattern" in new:
            new["pattern"] = portable(new["pattern"], f"schema{at}/pattern")
        if isinstance(patterns := new.get("patternProperties"), dict):
            where = f"schema{at}/patternProperties"
            new["patternProperties"] = {portable(name, where): value for name, value in patterns.items()}
        names = []
        if "contentEncoding" in new:
            names.append(("contentEncoding", new.pop("contentEncoding")))
        if "format" in new:
            names.append(("format", new.pop("format")))
        for key, name in names:
            expression = _formats().get(name) if isinstance(name, str) else None
            if expression is None or (key == "contentEncoding" and name != "base64"):
                known = "base64" if key == "contentEncoding" else ", ".join(sorted(_formats()))
                raise InputError(f"schema{at}/{key}: {shown(name)} is not kept; what is kept is {known}")
            if expression.startswith("format:"):
                new["format"] = expression.removeprefix("format:")
            elif expression and "pattern" in new:
                new["allOf"] = [*new.get("allOf", ()), {"pattern": expression}]
            elif expression:
                new["pattern"] = expression

    def _numbers(self, new: Schema, at: str) -> None:
        """Raise InputError for numbers that the library rounds, and fractions that validators divide by in binary."""
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if name in new:
                value = new[name]
                if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > EXACT:
                    raise InputError(f"schema{at}/{name}: {shown(value)} must be a number of at most 2**53 in size")
        multiple = new.get("multipleOf", 1)
        if multiple * 1024 % 1:
            problem = f"{multiple} has no exact form in binary, in which validators divide"
            raise InputError(f"schema{at}/multipleOf: {problem}; give an integer, or a fraction of powers of 2")
        for name in ("enum", "const"):
            for number in _numbers_in(new.get(name)):
                if abs(number) > EXACT:
                    problem = f"{shown(number)} is beyond 2**53, where numbers are rounded"
                    raise InputError(f"schema{at}/{name}: {problem}")

    def _objects(self, new: Schema, at: str) -> None:
        """Close an object, and refuse a least number of properties that one name, written twice, would seem to
        reach."""
        others = ("additionalProperties", "patternProperties")
        listed, required = new.get("properties"), new.get("required", ())
        if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
            raise InputError(f"schema{at}/required must be a list of names, not {shown(required)}")
        if self.close and listed and not any(name in new for name in others) and {*required} <= {*listed}:
            new["additionalProperties"] = False
        if isinstance(listed, dict) and len({*listed} - {*required}) > MOST_OPTIONAL:
            problem = f"more than {MOST_OPTIONAL} may be left out; list them under required"
            raise InputError(f"schema{at}/properties: {problem}")
        least = integer(f"schema{at}/minProperties", new.get("minProperties", 0), 0)
        if least > len({*required}) + 1 and new.get("additionalProperties") is not False:
            problem = f"{least} different names are more than are kept"
            raise InputError(f"schema{at}/minProperties: {problem}; list them under required")

    def require(self, place: str, tag: str, seen: set[str]) -> None:
        """Have every object of a union written with the property that says which it is, also where that has a
        default."""
        place = self.references.get(place, place)
        schema = self.places.get(place)
        if schema is None or place in seen:
            return
        seen.add(place)
        if tag in schema.get("properties", ()) and tag not in schema.get("required", ()):
            schema["required"] = [*schema.get("required", ()), tag]
        for kind in ("oneOf", "anyOf"):
            for i in range(len(schema.get(kind, ()))):
                self.require(place + pointer(kind, i), tag, seen)

    def _unique(self, new: Schema, at: str) -> None:
        """Write out the sets of a few values, in the order of the values; other items cannot be told apart."""
        if not new.pop("uniqueItems", False):
            return
        items = new.get("items")
        seen = set[str]()
        while isinstance(items, dict) and "$ref" in items and items["$ref"] not in seen:
            seen.add(items["$ref"])
            items = _at(self.root, unquote(items["$ref"][1:]))
        values = _values(items)
        if values is None or len(values) > SHORT_ENUM or "prefixItems" in new:
            problem = f"it is kept for items of an enum of at most {SHORT_ENUM} values"
            raise InputError(f"schema{at}/uniqueItems: {problem}; leave it out, and remove repeated items afterwards")
        least, most = new.pop("minItems", 0), new.pop("maxItems", len(values))
        sizes = range(integer(f"schema{at}/minItems", least, 0), min(most, len(values)) + 1)
        del new["items"]
        new["enum"] = [list(some) for size in sizes for some in combinations(values, size)]
        if not new["enum"]:
            raise InputError(f"schema{at}/minItems: there are only {len(values)} different items")


def _parts(schema: Schema, at: str) -> Iterator[tuple[str, tuple[object, ...], object]]:
    """The schemas inside one: the keyword, the path below this schema, and the schema."""
    for name, value in schema.items():
        if name in _keywords("one") or (name in _keywords("one_or_list") and not isinstance(value, list)):
            yield name, (name,), value
        elif name in _keywords("list") | _keywords("one_or_list"):
            if not isinstance(value, list):
                raise InputError(f"schema{at}/{name} must be a list of schemas, not {shown(value)}")
            yield from ((name, (name, i), inner) for i, inner in enumerate(value))
        elif name in _keywords("table"):
            if not isinstance(value, dict):
                raise InputError(f"schema{at}/{name} must be an object of schemas, not {shown(value)}")
            yield from ((name, (name, key), inner) for key, inner in value.items())


def _numbers_in(value: object) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _numbers_in(inner)


def _at(root: object, target: str) -> object:
    """What stands at a JSON pointer; None where nothing does."""
    for name in target.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(name)] if name.isdigit() and int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def _values(items: object) -> list[object] | None:
    """All values that a schema allows, where it lists them, each once."""
    if not isinstance(items, dict) or not {*items} <= {"enum", "const", "type", *_keywords("annotations")}:
        return None
    kind = items.get("type")
    listed = [items["const"]] if "const" in items else [False, True] if kind == "boolean" else items.get("enum")
    if not isinstance(listed, list) or not all(kind in (None, _TYPES.get(type(value))) for value in listed):
        return None
    return [*{json.dumps(value): value for value in listed}.values()]
