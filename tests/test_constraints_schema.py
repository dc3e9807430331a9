"""JSON schemas: all that is written is valid to jsonschema, and what would not be kept is refused by its place."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from constrained_texts import bytewise, texts
from test_constraints import model
from triptych.errors import InputError
from triptych.generate import Constraint
from triptych.generate.constraints import constraint as constraints
from triptych.generate.constraints import json_schema
from triptych.generate.constraints.expressions import portable
from usual_models import MODELS, Flags, Owner

DRAFTS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}


def validator(schema: object, draft: str = "draft2020-12") -> Any:
    kind: Any = DRAFTS[draft]
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def is_valid(judge: Any, text: str) -> bool:
    try:
        return bool(judge.is_valid(json.loads(text)))
    except (ValueError, OverflowError):
        return False


def judged(schema: Any, constraint: Constraint, count: int, judge: Any | None = None) -> Counter[str]:
    """Of some random texts how many end "valid", "invalid", at the "length", or with an "error"."""
    judge = judge or validator(schema)
    counts: Counter[str] = Counter()
    for text, reason in texts(constraint, count, random.Random(0)):
        whole = "valid" if reason == "end" and is_valid(judge, text) else "invalid"
        counts[whole if reason == "end" else reason.partition(":")[0]] += 1
    return counts


def made(schema: object) -> tuple[Constraint | None, str]:
    """The constraint of a schema, or None and why it is refused."""
    try:
        return Constraint.schema(schema), ""
    except InputError as error:
        return None, str(error)


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text is one that the constraint allows."""
    row = constraint.start(bytewise(), 257, [256])
    data = text.encode()
    return row.matcher.try_consume_tokens(list(data)) == len(data) and bool(row.matcher.is_accepting())


# ---------------------------------------------------------------- the models of pydantic


def test_there_are_fifty_models_with_unions() -> None:
    assert len(MODELS) == 50
    described = json.dumps([json_schema.read(kind) for kind in MODELS.values()])
    assert described.count('"discriminator"') >= 5


@pytest.mark.parametrize("name", MODELS)
def test_each_usual_model_is_kept(name: str) -> None:
    schema = json_schema.read(MODELS[name])
    assert judged(schema, Constraint.schema(MODELS[name]), 3) == {"valid": 3}


@pytest.mark.heavy
def test_a_thousand_texts_of_the_usual_models_are_valid() -> None:
    counts: Counter[str] = Counter()
    for kind in MODELS.values():
        counts += judged(json_schema.read(kind), Constraint.schema(kind), 20)
    assert counts.total() == 1000
    assert counts["invalid"] == counts["error"] == 0
    assert counts["valid"] >= 900


@pytest.mark.heavy
def test_a_thousand_texts_of_a_random_model_are_valid_and_few_are_cut() -> None:
    """Written by the engine at temperature 1, twenty of each usual model; those cut at the limit say so."""
    one, counts = model(max_position_embeddings=4000), Counter[str]()
    for name, kind in MODELS.items():
        judge = validator(json_schema.read(kind))
        for written in one.generate([name] * 20, schema=kind, max_new_tokens=2000, temperature=1.0, seed=1):
            whole = "valid" if is_valid(judge, written.text) else "invalid"
            counts[whole if written.reason == "end" else written.reason] += 1
    assert counts.total() == 1000
    assert counts["invalid"] == 0
    assert 0 < counts["length"] <= 100, counts
    assert set(counts) == {"valid", "length"}


@pytest.mark.weights
@pytest.mark.heavy
def test_texts_of_smollm2_are_valid(smollm2: Any) -> None:
    counts: Counter[str] = Counter()
    for name in ("Person", "Classification", "Event", "Owner", "Plan", "Invoice", "Flags", "Contact"):
        kind = MODELS[name]
        judge = validator(json_schema.read(kind))
        prompt = smollm2.render([{"role": "user", "content": f"Write a short example of {name} as JSON."}])
        for written in smollm2.generate([prompt] * 3, schema=kind, max_new_tokens=150, temperature=1.0, seed=1):
            whole = "valid" if is_valid(judge, written.text) else "invalid"
            counts[whole if written.reason == "end" else written.reason] += 1
    assert counts["invalid"] == 0
    assert counts["valid"] >= 8, counts
    assert set(counts) <= {"valid", "length"}


def test_pydantic_reads_what_a_union_writes() -> None:
    """The tag of each is written, though it has a default, without which pydantic could not tell them apart."""
    for text, reason in texts(Constraint.schema(Owner), 20, random.Random(0)):
        assert reason == "end"
        TypeAdapter(Owner).validate_json(text)
    assert "kind" not in Owner.model_json_schema()["$defs"]["Dog"]["required"]


# ---------------------------------------------------------------- the test suite of JSON Schema


@pytest.fixture(scope="module")
def suite() -> Path:
    from conftest import _package

    name, sha256 = "jsonschema-4.26.0/json/tests", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
    return _package("jsonschema", "4.26.0", sha256) / name


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("**/*.json")):
        for case in json.loads(path.read_text("utf-8")):
            yield f"{path.stem}: {case['description']}", case["schema"]


LEAST_ACCEPTED = {"draft2020-12": 170, "draft2019-09": 170, "draft7": 170, "draft6": 165, "draft4": 130}


@pytest.mark.heavy
@pytest.mark.weights
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_of_the_test_suites_schemas_are_valid(draft: str, suite: Path) -> None:
    """Those of the schemas that are accepted; the others are refused in one line, with their place."""
    accepted, refused, counts = 0, 0, Counter[str]()
    for name, schema in cases(suite / draft):
        constraint, problem = made(schema)
        if constraint is None:
            assert problem.startswith("schema"), problem
            assert "\n" not in problem
            refused += 1
            continue
        accepted += 1
        one = judged(schema, constraint, 10, validator(schema, draft))
        assert not one["invalid"], name
        assert not one["error"], name
        counts += one
    print(f"{draft}: {accepted} schemas are accepted, {refused} refused; {dict(counts)}")
    assert accepted >= LEAST_ACCEPTED[draft]
    assert counts["length"] <= counts.total() / 10


# ---------------------------------------------------------------- what the library alone does not keep


def unread(schema: dict[str, Any]) -> Constraint:
    """The control: a schema that the library reads as it is."""
    return Constraint("schema", constraints._of_schema(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "multipleOf": 0.01}, "0.29"),
        ({"type": "string", "pattern": "^\\D$"}, '"\u0663"'),
        ({"type": "string", "pattern": "^\\S+$"}, '"\\u001e"'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"0000-01-01"'),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, '{"a":1,"a":2}'),
        ({"type": "integer", "minimum": 10**24, "maximum": 10**25}, "9223372036854775807"),
        ({"const": 12345678901234567890}, "12345678901234567000"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "[1,1]"),
    ],
)
def test_what_the_library_alone_would_write_is_refused_or_never_written(schema: dict[str, Any], text: str) -> None:
    keywords = dict(schema)
    if "x-guidance" not in schema:
        assert accepts(unread(schema), text), "the control: the library allows it"
    assert not is_valid(validator({k: v for k, v in keywords.items() if k != "x-guidance"}), text)
    constraint, problem = made(schema)
    assert problem.startswith("schema/") if constraint is None else not accepts(constraint, text)


ALLOWED: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a":1}', "{}", '{ "a" : 1 }', '{\n  "a": 1\n}'],
     ['{"b":1}', '{"a":1,"b":2}', ' {"a":1}', '{"a":1} ', '{   "a":1}', '{"a":"1"}']),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, ['{"a":1,"b":[2]}'], ['{"b":2,"a":1}']),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"^b": {"type": "null"}},
      "additionalProperties": False}, ['{"a":null,"b2":null}'], ['{"c":null}']),
    ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]},
     ['{"a":null,"b":null}'], ['{"a":null}']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"'],
     ['"1900-02-29"', '"2024-04-31"', '"2024-13-01"', '"0000-02-29"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"', '"2024-01-01T00:00:00.5+14:00"'],
     ['"2024-02-29 23:59:59Z"', '"2024-02-29T23:59:60Z"', '"2024-02-29T24:00:00Z"', '"2024-02-29T23:59:59"']),
    ({"type": "string", "format": "uuid4"}, ['"123e4567-e89b-42d3-a456-426614174000"'],
     ['"123e4567-e89b-12d3-a456-426614174000"']),
    ({"type": "string", "format": "byte"}, ['"YWI="', '""'], ['"YWI"']),
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"', '"2024-02-30"']),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
     ['["a","b"]', '["a", "c"]', '["a","b","c"]'], ['["a","a"]', '["a"]']),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, ["[]", "[false,true]"], ["[true,true]"]),
    ({"type": "array", "uniqueItems": False}, ["[1,1]"], []),
    ({"type": "string", "maxLength": 1}, ['"\U0001f600"', '"\\n"'], ['"ab"', '"\\ud800"']),
    ({"enum": [1, "a", None, {"b": [True]}]}, ["1", '"a"', "null", '{"b":[true]}'], ["2", "true"]),
    (True, ["1", '{"a":[]}', '"x"'], ["", "x"]),
    ({"type": "integer", "multipleOf": 3}, ["9", "0"], ["10", "9.0"]),
    ({"type": "string", "unknown-word": 1, "title": "T", "x-vendor": {}}, ['"a"'], ["1"]),
    ({"type": "object", "properties": {"x-guidance": {"type": "null"}}}, ['{"x-guidance":null}'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), ALLOWED, ids=[json.dumps(one[0])[:60] for one in ALLOWED])
def test_texts_that_are_allowed_and_others(schema: Any, allowed: list[str], forbidden: list[str]) -> None:
    constraint = Constraint.schema(json.dumps(schema))
    assert [text for text in allowed if not accepts(constraint, text)] == []
    assert [text for text in forbidden if accepts(constraint, text)] == []
    assert [text for text in allowed if not is_valid(validator(schema), text)] == []


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"not": {}}}}, "schema/properties/a/not is not kept"),
    ({"items": {"if": {}}}, "schema/items/if is not kept"),
    ({"$defs": {"x/y": {"contains": {}}}}, "schema/$defs/x~1y/contains is not kept"),
    ({"unevaluatedProperties": False}, "schema/unevaluatedProperties is not kept"),
    ({"x-guidance": {"lenient": True}}, "schema/x-guidance would change"),
    ({"anyOf": [{"x-guidance": {}}]}, "schema/anyOf/0/x-guidance would change"),
    ({"minLenght": 1}, "schema/minLenght is no keyword (did you mean 'minLength'?)"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "schema/properties/a"),
    ({"properties": {"a": {"pattern": "("}}}, "schema/properties/a/pattern: '(' is no regular expression"),
    ({"properties": {"a": {"pattern": "[^\\d]"}}}, "schema/properties/a/pattern: in '[^\\\\d]'"),
    ({"patternProperties": {"\\W": {}}}, "schema/patternProperties: in"),
    ({"format": "regex"}, "schema/format: 'regex' is not kept"),
    ({"format": 5}, "schema/format: 5 is not kept"),
    ({"contentEncoding": "gzip"}, "schema/contentEncoding: 'gzip' is not kept"),
    ({"contentMediaType": "application/json"}, "schema/contentMediaType is not kept"),
    ({"type": "number", "multipleOf": 0.1}, "schema/multipleOf: 0.1 has no exact form"),
    ({"maximum": 2**60}, "schema/maximum"),
    ({"exclusiveMinimum": True}, "schema/exclusiveMinimum"),
    ({"enum": [{"a": [2**60]}]}, "schema/enum: 1152921504606846976 is beyond 2**53"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "schema/uniqueItems"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "schema/minProperties"),
    ({"required": "a"}, "schema/required must be a list"),
    ({"properties": []}, "schema/properties must be an object of schemas"),
    ({"anyOf": {}}, "schema/anyOf must be a list of schemas"),
    ({"items": 5}, "schema/items must be an object, true or false"),
    ({"$ref": "https://example.com/x"}, "schema/$ref: 'https://example.com/x' is outside the schema"),
    ({"$ref": "#name"}, "schema/$ref: '#name' is outside"),
    ({"$ref": "#/$defs/x"}, "schema/$ref: there is no schema at '#/$defs/x'"),
    ({"properties": {"a": {"$id": "b"}}}, "schema/properties/a/$id"),
    ({"properties": {"a": {"type": "foo"}}}, "schema/properties/a: Invalid type: foo"),
    ({"properties": {"a": {"oneOf": [CAT, CAT]}}}, "schema/properties/a: oneOf is kept where"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "schema: oneOf is kept where"),
    (False, "schema=False must be a JSON schema"),
    ([1], "schema=[1] has no JSON schema"),
    ({"a": float("nan")}, "schema holds what JSON cannot"),
    ({"a": {1, 2}}, "schema holds what JSON cannot"),
    ("[1]", "must be a JSON schema"),
    ("nonsense", "schema is no JSON"),
    ({"description": "x" * (1 << 20)}, "schema has 1,048,5"),
    ({"type": "object", "properties": {f"p{i}": {} for i in range(401)}}, "schema/properties: more than 400"),
]


@pytest.mark.parametrize(("schema", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_what_is_not_kept_is_refused_with_its_place(schema: Any, problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        Constraint.schema(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_depth_is_limited() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(99):
        deep = {"type": "array", "items": deep}
    assert accepts(Constraint.schema(deep), "[[]]")
    with pytest.raises(InputError, match="more than 100 deep"):
        Constraint.schema({"items": {"items": deep}})
    deeper: Any = {}
    for _ in range(100_000):
        deeper = {"items": deeper}
    with pytest.raises(InputError, match="schema"):
        Constraint.schema(deeper)


def test_a_union_that_closing_would_make_ambiguous_is_judged_open() -> None:
    """`{"a": 1}` is of both, though a closed second one would not allow it."""
    first = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    second = {"type": "object", "properties": {"b": {"type": "integer"}}}
    with pytest.raises(InputError, match="oneOf is kept where"):
        Constraint.schema({"oneOf": [first, second]})
    assert accepts(Constraint.schema({"anyOf": [first, second]}), '{"a":1}')


def test_a_set_of_an_enum_is_written_in_its_order() -> None:
    found = {text for text, _ in texts(Constraint.schema(Flags), 40, random.Random(0))}
    assert len(found) > 4
    for text in found:
        colors = json.loads(text)["colors"]
        assert colors == [color for color in ("red", "green", "blue") if color in colors]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d+", r"\d+"), (r"[^\s@]", r"[^\s\x1c-\x1f@]"), (r"\S", r"[^\s\x1c-\x1f]"), (r"[]a]", r"[\]a]"),
        (r"[^]a]", r"[^\]a]"), (r"[a[b]", r"[a\[b]"), (r"\[\d\]", r"\[\d\]"), (r"[\d\w]", r"[\d\w]"),
    ],
)  # fmt: skip
def test_expressions_as_the_library_reads_them(pattern: str, expected: str) -> None:
    assert portable(pattern, "regex") == expected


@pytest.mark.parametrize("pattern", ["[[a]", "a{,3}", "(?x)a b", "(?m)^a", "[a&&b]", r"\p{L}", "(?P<a", "\\"])
def test_expressions_that_are_read_in_several_ways_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="regex"):
        portable(pattern, "regex")


@pytest.mark.parametrize(
    "pattern", [r"[^\s@]+@[^\s@]+\.\w{2,}", r"\S{3}", r"[a[b]]?x", r"(?i)ab|[^]c]", r"a.c", r"[\w-]+"]
)
def test_texts_of_an_expression_match_it_in_python(pattern: str) -> None:
    for text, reason in texts(Constraint.regex(pattern), 60, random.Random(0)):
        assert reason in ("end", "length")
        assert reason == "length" or re.fullmatch(pattern, text), text
