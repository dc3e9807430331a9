"""Regular expressions of tokenizers, from the dialect of the `tokenizers` library (Oniguruma's) to JavaScript's.

Only the structure is translated.  Every class of characters, such as `\\p{L}` or `[^\\s\\d]`, is kept by its source,
and the library itself says which characters it holds (`tokenizer_sets`), so versions of Unicode and rules of the
dialect cannot differ.
"""

import re
from typing import NoReturn

from triptych.errors import TextError

_ONE_CHARACTER = r"\\(?:[pP]\{\^?[\w -]+\}|[sSdDwWhHtnrfvae]|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|[^\w\s])"
_CLASS_PART = rf"{_ONE_CHARACTER}|\[:\^?\w+:\]|&&|[^\\\[\]]"
_COUNT = r"[*+?]|\{(?:\d+,?\d*|,\d+)\}"
#: Pairs of letters that some single character equals when case is ignored, such as U+00DF.
_FOLDED = ("ss", "ff", "fi", "fl", "st")
_AROUND = "\udfff"  # stands on both sides of the source of a class; no text of a tokenizer has half a surrogate pair


def translate(pattern: str) -> list[str]:
    """`pattern` for JavaScript's `u` mode: texts of it, and between them the sources of classes of characters.

    The entries 0, 2, 4, ... are text, the entries 1, 3, 5, ... sources that each match one character.

    Raises TextError, naming it, for a construct that is not known here.
    """
    reader = _Reader(pattern)
    text = reader.alternatives(ignore_case=False)
    if reader.at < len(pattern):
        reader.refuse("an unmatched )")
    return text.split(_AROUND)


def literal(text: str) -> str:
    """The regular expression of a text."""
    return re.sub(r"[\^$\\.*+?()\[\]{}|/]", r"\\\g<0>", text)


class _Reader:
    """Reads a pattern from left to right; `at` is the place of the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.kept = pattern, 0, 0

    def refuse(self, what: str) -> NoReturn:
        raise TextError(f"the page's tokenizer does not know {what} in the regular expression {self.pattern!r}")

    def take(self, expected: str) -> str:
        """Read what the regular expression `expected` matches here; "" where it does not match."""
        match = re.compile(expected, re.DOTALL).match(self.pattern, self.at)
        self.at = self.at if match is None else match.end()
        return "" if match is None else match[0]

    def alternatives(self, ignore_case: bool) -> str:
        """Up to the end or to the `)` of the group around."""
        first, whole = self.at, ""
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            whole += self.take(r"\|") or self._counted(self._atom(ignore_case))
        if ignore_case and any(pair in self.pattern[first : self.at].lower() for pair in _FOLDED):
            self.refuse("two letters that one character equals when case is ignored")
        return whole

    def _atom(self, ignore_case: bool) -> str:
        rest = self.pattern[self.at :]
        char = rest[0]
        if char == "(":
            return self._group(ignore_case)
        if end := self.take(r"\\[Az]"):
            return "(?<![^])" if end == "\\A" else "(?![^])"
        if char in "^$*+?":
            self.refuse(f"{char!r} here")
        source = self._class() if char == "[" else self.take(rf"\.|{_ONE_CHARACTER}")
        if not source:
            if char == "\\":
                self.refuse(repr(rest[:2]))
            self.at += 1
            if not ignore_case or char.lower() == char.upper():
                return literal(char)
            source = char
        if ignore_case and not source.isascii():
            self.refuse("letters beyond ASCII where case is ignored")
        return _AROUND + (f"(?i:{source})" if ignore_case else source) + _AROUND

    def _class(self) -> str:
        """The source of the class that begins here, with the classes inside it."""
        first, depth = self.at, 0
        while depth or self.at == first:
            if self.take(r"\[(?!:)\^?" if depth else r"\[\^?"):
                depth += 1
                if self.pattern.startswith("]", self.at):
                    self.refuse("a class that begins with ]")
            elif self.take(r"\]"):
                depth -= 1
            elif not self.take(_CLASS_PART):
                self.refuse(f"{self.pattern[self.at : self.at + 2]!r} in a class")
        return self.pattern[first : self.at]

    def _group(self, ignore_case: bool) -> str:
        opening = self.take(r"\(\?(?:[:=!>]|<[=!]|-?i:)|\((?!\?)")
        if not opening:
            self.refuse(f"the group {self.pattern[self.at : self.at + 4]!r}")
        inside = self.alternatives((ignore_case or opening == "(?i:") and opening != "(?-i:")
        if not self.take(r"\)"):
            self.refuse("a group without its )")
        if opening == "(?>":
            return self._atomic(inside)
        return f"{'(?:' if opening in ('(', '(?i:', '(?-i:') else opening}{inside})"

    def _atomic(self, inside: str) -> str:
        """What has matched `inside` is not tried shorter: a lookahead is left by its first match alone."""
        self.kept += 1
        return f"(?:(?=(?<kept{self.kept}>{inside}))\\k<kept{self.kept}>)"

    def _counted(self, atom: str) -> str:
        """`atom` with the count that follows it, if one does."""
        count = self.take(_COUNT)
        if not count:
            return atom
        atom += count.replace("{,", "{0,")
        if count[0] != "{" and self.take(r"\+"):
            atom = self._atomic(atom)
        elif count[0] != "{" or "," in count:
            atom += self.take(r"\?")
        if self.take(_COUNT):
            self.refuse("two counts in a row")
        return atom
