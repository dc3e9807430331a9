"""Constraints on what a row writes: a JSON schema, a regular expression, a grammar or a choice of texts.

The grammars are those of the library llguidance (https://github.com/guidance-ai/llguidance), which gives, after each
token, the tokens that may come next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triptych.arguments import checked_methods
from triptych.errors import InputError, shown
from triptych.text import Tokenizer
from . import json_schema
from .expressions import portable
from .row_constraint import RowConstraint
from .vocabulary import guidance, limits, reason, vocabulary_of

MOST_TEXT = 1 << 21  # characters of a grammar
_PLAIN = '\n%llguidance {"no_forcing": true}\n'  # every way to cut a text into tokens is allowed
_ONE_OF = "oneOf is kept where no output can be of two of its schemas, as with a property of another const in each"
_PLACES = 200  # schemas in which the place of a problem is looked for


@checked_methods
@dataclass(frozen=True)
class Constraint:
    """A constraint: one for any number of rows and models.  `Constraint.schema`, `.regex`, `.grammar` and `.choices`
    make one; `grammar_text` is what the library reads.

    A row under it has only tokens that lead to a whole text of the constraint.  It ends with the reason "end" as soon
    as nothing can follow, or at an end id where the text may end; with "length" where its limit comes first; and with
    an error where no token is left.  Special tokens are in no text.
    """

    kind: Literal["schema", "regex", "grammar", "choices"]
    grammar_text: str

    @classmethod
    def schema(cls, schema: object) -> Constraint:
        """JSON of a schema: a dict, its text, a pydantic model class, or another type that pydantic describes.

        Properties come in the order of the schema, and an object that lists its properties has no others unless
        `additionalProperties` says so.  Between tokens of JSON stand at most a space, or a line break with up to 16
        spaces.

        Raises InputError, with the part, for a schema that is none and for what would not be kept.
        """
        own = json_schema.read(schema)
        new, places = json_schema.rewritten(own, close=False)
        if problem := _problem(_of_schema(new)):
            raise InputError(_located(problem, new, places))
        if json_schema.may_close(places):
            closed, _ = json_schema.rewritten(own, close=True)
            # That each output is of one schema of a oneOf is known of the open ones, which allow more.
            strict = _of_schema(closed, coerce_one_of=True)
            if not _problem(strict):
                return cls("schema", strict)
        return cls("schema", _of_schema(new))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        r"""Texts that match a regular expression as a whole; `\d` and `\w` are ASCII.  Raises InputError for one that
        is none or has look-around, back references or word boundaries."""
        text = portable(pattern, "regex")
        line = guidance().regex_to_lark(text, "dw")
        return cls("regex", _checked(f"start: /{line}/{_PLAIN}", f"regex: {shown(pattern)} is not kept"))

    @classmethod
    def grammar(cls, grammar: str) -> Constraint:
        """Texts of a grammar in Lark's form, as llguidance reads it, whose first rule is `start`.  Raises InputError
        for another form, what the library cannot read, and settings in it that would not be kept."""
        # Blanks before a name stay in its line: empty lines would be read again from each of them.
        if re.search(r"^[^\S\n]*[\w-]+\s*::=", grammar, re.MULTILINE):
            raise InputError(
                'grammar is in the form of GBNF or EBNF; write it as Lark\'s, with rules as `start: "a" b`'
            )
        for word in ("x-guidance", "%llguidance", "temperature=", "max_tokens="):
            if word in grammar.replace(" ", ""):
                raise InputError(f"grammar: {word.rstrip('=')} in a grammar is not kept; leave it out")
        return cls("grammar", _checked(f"{grammar}{_PLAIN}", "grammar"))

    @classmethod
    def choices(cls, choices: Collection[str]) -> Constraint:
        """One of some texts.  Raises InputError for none, and for an empty one."""
        texts = list(choices) if isinstance(choices, Collection) and not isinstance(choices, str | Mapping) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise InputError(f"choices={shown(choices)} must be texts, none of them empty, as ['yes', 'no']")
        lines = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
        return cls("choices", _checked(f"start: {lines}{_PLAIN}", "choices"))

    @classmethod
    def composed(cls, grammar: str, parts: Mapping[str, Constraint]) -> Constraint:
        """Texts of a grammar in which each name of `parts` stands for a text of that constraint.

        Raises InputError as `grammar`, and for parts that are grammars, whose rules might have one name.
        """
        if any(part.kind == "grammar" for part in parts.values()):
            raise InputError("a grammar is no part of another constraint; write one grammar of both")
        own = {name: part.grammar_text.removesuffix(_PLAIN) for name, part in parts.items()}
        rules = [text.replace("start:", f"{name}:", 1) for name, text in own.items()]
        return cls("grammar", _checked("\n".join([grammar, *rules]) + _PLAIN, "grammar"))

    def prepare(self, tokenizer: Tokenizer | None, vocab: int) -> None:
        """Compile it for a tokenizer and a model with so many embeddings, which is kept: seconds for the first of a
        large vocabulary.  Raises InputError and TextError where they cannot be used together."""
        self.start(tokenizer, vocab, ())

    def start(self, tokenizer: Tokenizer | None, vocab: int, ends: Collection[int]) -> RowConstraint:
        """The constraint at the beginning of a row that may end at one of the ids `ends`.

        Raises as `prepare`, and InputError where it allows no token at all.
        """
        if tokenizer is None:
            raise InputError("a constraint needs a tokenizer, and this model has none")
        vocabulary = vocabulary_of(tokenizer, vocab)
        return RowConstraint(vocabulary, vocabulary.matcher(_lark(self.grammar_text)), ends)


def constraint_of(schema: object, constraint: Constraint | None, stop: Sequence[str] = ()) -> Constraint | None:
    """The constraint of a `schema`, or the one that was made; None where both are None.

    Raises as `Constraint.schema`, and InputError for both, and beside stop strings, which would cut the text.
    """
    if schema is not None and constraint is not None:
        raise InputError("schema and constraint do not go together; give one")
    if stop and not (schema is None and constraint is None):
        raise InputError("stop and a constraint do not go together: a stop string would cut the text; leave one out")
    return constraint if schema is None else Constraint.schema(schema)


def _lark(text: str) -> str:
    grammar: str = guidance().LLMatcher.grammar_from_lark(text)
    return grammar


def _of_schema(schema: Mapping[str, Any], **options: object) -> str:
    options["whitespace_pattern"] = json_schema.WHITE_SPACE
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    return f"start: %json {text}{_PLAIN}"


def _problem(grammar: str) -> str | None:
    """What the library says against a grammar, a warning too."""
    if len(grammar) > MOST_TEXT:
        return f"{len(grammar):,} characters are more than {MOST_TEXT:,}"
    wrong, messages = guidance().LLMatcher.validate_grammar_with_warnings(_lark(grammar), limits=limits())
    warnings = [message for message in messages if "no tokenizer" not in message]  # special tokens are looked up later
    return reason(warnings[0]) if warnings or wrong else None


def _checked(grammar: str, what: str) -> str:
    if problem := _problem(grammar):
        raise InputError(f"{what}: {problem}")
    return grammar


def _located(problem: str, schema: Mapping[str, Any], places: Mapping[str, Mapping[str, Any]]) -> str:
    """The problem with the place of the innermost schema that has it."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    where = ""
    inner: Sequence[str] = sorted(places, key=lambda place: -place.count("/"))
    for place in inner if len(inner) <= _PLACES else ():
        if place and _problem(_of_schema({**shared, **places[place]})) == problem:
            where = place
            break
    return f"schema{where}: {_ONE_OF if problem.startswith('oneOf') else problem}"
