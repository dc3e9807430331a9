"""Regular expressions of tokenizers, from the dialect of the `tokenizers` library (Oniguruma's) to JavaScript's.

Only the structure is translated.  Every class of characters, such as `\\p{L}` or `[^\\s\\d]`, is kept by its source,
and the library itself says which characters it holds (`tokenizer_sets`), so versions of Unicode and rules of the
dialect cannot differ.
"""

from __future__ import annotations

import re

from triptych.errors import TextError

_SPECIAL = frozenset("^$\\.*+?()[]{}|/")
_ONE_CHARACTER = re.compile(
    r"\\(?:[pP]\{\^?[\w -]+\}|[sSdDwWhHtnrfvae]|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|[^\w\s])"
)
_CLASS_PART = re.compile(rf"(?:{_ONE_CHARACTER.pattern}|\[:\^?\w+:\]|&&|[^\\\[\]])", re.DOTALL)
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
#: Pairs of letters that some single character equals when case is ignored, such as U+00DF.
_FOLDED = ("ss", "ff", "fi", "fl", "st")


def translate(pattern: str) -> list[str]:
    """`pattern` for JavaScript's `u` mode: texts of it, and between them the sources of classes of characters.

    The entries 0, 2, 4, ... are text, the entries 1, 3, 5, ... sources that each match one character.

    Raises TextError, naming it, for a construct that is not known here.
    """
    reader = _Reader(pattern)
    text = reader.alternatives(ignore_case=False)
    if reader.at < len(pattern):
        reader.refuse("an unmatched )")
    return text


class _Reader:
    """Reads a pattern from left to right; `at` is the place of the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.kept = pattern, 0, 0

    def refuse(self, what: str) -> None:
        raise TextError(f"the page's tokenizer does not know {what} in the regular expression {self.pattern!r}")

    def alternatives(self, ignore_case: bool) -> list[str]:
        """Up to the end or to the `)` of the group around."""
        first, whole = self.at, [""]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at += 1
                whole[-1] += "|"
            else:
                whole = _joined(whole, self._counted(self._atom(ignore_case)))
        if ignore_case and any(pair in self.pattern[first : self.at].lower() for pair in _FOLDED):
            self.refuse("two letters that one character equals when case is ignored")
        return whole

    def _atom(self, ignore_case: bool) -> list[str]:
        rest = self.pattern[self.at :]
        char = rest[0]
        if char == "(":
            return self._group(rest, ignore_case)
        if rest.startswith(("\\A", "\\z")):
            self.at += 2
            return ["(?<![^])" if rest[1] == "A" else "(?![^])"]
        if char in "^$*+?":
            self.refuse(f"{char!r} here")
        if char in "[\\.":
            source = "." if char == "." else self._class() if char == "[" else self._escape(rest)
            self.at += len(source) * (char != "[")
            return ["", self._cased(source) if ignore_case else source, ""]
        self.at += 1
        if ignore_case and char.lower() != char.upper():
            return ["", self._cased(char), ""]
        return [f"\\{char}" if char in _SPECIAL else char]

    def _cased(self, source: str) -> str:
        if not source.isascii():
            self.refuse("letters beyond ASCII where case is ignored")
        return f"(?i:{source})"

    def _escape(self, rest: str) -> str:
        match = _ONE_CHARACTER.match(rest)
        if match is None:
            self.refuse(repr(rest[:2]))
        assert match is not None
        return match[0]

    def _class(self) -> str:
        """The source of the class that begins here, with the classes inside it."""
        first, depth = self.at, 0
        while True:
            opening = re.compile(r"\[\^?").match(self.pattern, self.at)
            posix = self.pattern.startswith("[:", self.at)
            if opening and not (depth and posix):
                depth, self.at = depth + 1, opening.end()
                if self.pattern.startswith("]", self.at):
                    self.refuse("a class that begins with ]")
            elif self.pattern.startswith("]", self.at):
                depth, self.at = depth - 1, self.at + 1
                if depth == 0:
                    return self.pattern[first : self.at]
            else:
                part = _CLASS_PART.match(self.pattern, self.at)
                if part is None:
                    self.refuse(f"{self.pattern[self.at : self.at + 2]!r} in a class")
                assert part is not None
                self.at = part.end()

    def _group(self, rest: str, ignore_case: bool) -> list[str]:
        opening = next((one for one in (*_GROUPS, "(?i:", "(?-i:", "(?>") if rest.startswith(one)), "(")
        if opening == "(" and rest.startswith("(?"):
            self.refuse(f"the group {rest[:4]!r}")
        self.at += len(opening)
        inside = self.alternatives((ignore_case or opening == "(?i:") and opening != "(?-i:")
        if not self.pattern.startswith(")", self.at):
            self.refuse("a group without its )")
        self.at += 1
        if opening == "(?>":
            return self._atomic(inside)
        return _joined([opening if opening in _GROUPS else "(?:"], inside, [")"])

    def _atomic(self, inside: list[str]) -> list[str]:
        """What has matched `inside` is not tried shorter: a lookahead is left by its first match alone."""
        self.kept += 1
        return _joined([f"(?:(?=(?<kept{self.kept}>"], inside, [f"))\\k<kept{self.kept}>)"])

    def _counted(self, atom: list[str]) -> list[str]:
        """`atom` with the count that follows it, if one does."""
        rest = self.pattern[self.at :]
        count = _COUNT.match(rest)
        if rest[:1] in {"*", "+", "?"}:
            self.at += 1
            atom = _joined(atom, [rest[0]])
        elif count is not None and (count[1] or count[3]):
            self.at += count.end()
            atom = _joined(atom, [f"{{{count[1] or 0}{count[2]}{count[3]}}}"])
        else:
            return atom
        after = self.pattern[self.at : self.at + 1]
        if after == "+" and count is None:
            self.at += 1
            return self._counted_once(self._atomic(atom))
        if after == "?" and (count is None or count[2]):
            self.at += 1
            atom = _joined(atom, ["?"])
        return self._counted_once(atom)

    def _counted_once(self, atom: list[str]) -> list[str]:
        rest = self.pattern[self.at :]
        if rest[:1] in {"*", "+", "?"} or _COUNT.match(rest):
            self.refuse("two counts in a row")
        return atom


def _joined(*parts: list[str]) -> list[str]:
    """Lists that each begin and end with a text, one after the other."""
    whole = [""]
    for part in parts:
        whole = [*whole[:-1], whole[-1] + part[0], *part[1:]]
    return whole
