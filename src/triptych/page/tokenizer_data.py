"""What the tokenizer of a page (`tokenizer*.js`) needs to split texts as a `Tokenizer` does, as plain data.

The steps of a tokenizer are written as a few simpler ones, which are all that the scripts know: replacing characters
of a set, Unicode forms, replacing by patterns, splitting by patterns, marking spaces, and writing bytes as characters.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from triptych.errors import TextError
from triptych.text import Tokenizer
from triptych.text.detokenize import WITH_SPACE_BEFORE
from triptych.text.tokenizer_limits import Component, Step, steps
from . import tokenizer_sets as sets
from .tokenizer_regex import literal, translate

#: What the library's `ByteLevel` splits by (Radford et al. 2019).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_Steps = Iterable[dict[str, Any]]
_Table = Mapping[str, Callable[["_Export", Step], _Steps]]


def tokenizer_data(tokenizer: Tokenizer) -> dict[str, Any]:
    """The vocabulary, the steps, and the sets of characters that the scripts of a page need, as JSON.

    In a page, `new Tokenizer(data)` then has `encode(text)`, the ids of `tokenizer.encode(text)` with its special
    tokens; `decode(ids)`, as `tokenizer.decode(ids)`; and `pieces(ids)`, as `tokenizer.tokens(ids)`.

    Raises TextError, naming it, for a step that the scripts do not know.
    """
    return _Export(tokenizer).data()


class _Export:
    """Collects the sets of characters while the steps are written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.backend: Backend = tokenizer.backend
        self.file: Mapping[str, Any] = json.loads(self.backend.to_str())
        self.sets: dict[str, sets.Packed] = {}

    def data(self) -> dict[str, Any]:
        before, after = self._around()
        kinds = {step["type"] for step in steps(self.backend.decoder)}
        normalize = self._script_steps(_NORMALIZERS, self.backend.normalizer)
        split = self._script_steps(_PRE_TOKENIZERS, self.backend.pre_tokenizer)
        _check_first(normalize, split)
        added = self._added()
        return {
            "model": self._model(),
            "added": added,
            "normalize": normalize,
            "split": split,
            "before": before,
            "after": after,
            "bos": self.tokenizer.leading_bos,
            "decode": self._script_steps(_DECODERS, self.backend.decoder) or [{"step": "spaces"}],
            "clean": [[text, text.strip()] for text in WITH_SPACE_BEFORE] if self.tokenizer.cleans_spaces else [],
            "names": {"bytes": "ByteLevel" in kinds, "marks": bool(kinds & {"Metaspace", "Replace"})},
            "sets": self.sets,
        }

    def set(self, name: str) -> str:
        """The name, with the characters that it stands for among the sets of the page."""
        self.sets[name] = sets.of_name(name)
        return name

    def char_of(self, name: str) -> list[str]:
        """The pattern of one character of a set."""
        return ["", self.set(name), ""]

    def replaced(self, name: str, by: str = "") -> dict[str, Any]:
        """The step that replaces the characters of a set."""
        return {"step": "replace", "pattern": self.char_of(name), "content": by}

    def pattern(self, pattern: Mapping[str, str] | str) -> list[str]:
        """Texts and, at odd places, names of sets: a regular expression in JavaScript's `u` mode."""
        if isinstance(pattern, Mapping) and "String" in pattern:
            if not pattern["String"]:
                raise TextError("the page's tokenizer does not know the empty text as a pattern")
            return [literal(pattern["String"])]
        parts = translate(pattern if isinstance(pattern, str) else pattern["Regex"])
        for source in parts[1::2]:
            self.sets[source] = sets.of_regex(source)
        return parts

    def _script_steps(self, table: _Table, part: Component | None) -> list[dict[str, Any]]:
        """The steps of a part of the tokenizer as those of the scripts."""
        known: list[dict[str, Any]] = []
        for step in steps(part):
            if step["type"] not in table:
                raise TextError(
                    f"the page's tokenizer does not know the step {step['type']}; it knows {', '.join(sorted(table))}"
                )
            known += table[step["type"]](self, step)
        return known

    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processors put before and after a text."""
        before: list[int] = []
        after: list[int] = []
        for step in steps(self.backend.post_processor):
            if step["type"] == "TemplateProcessing":
                parts, tokens = step["single"], step["special_tokens"]
                place = next((i for i, part in enumerate(parts) if "Sequence" in part), None)
                if place is None or parts[place]["Sequence"]["id"] != "A":
                    raise TextError("the page's tokenizer does not know a TemplateProcessing without the text")
                ids = [tokens[part["SpecialToken"]["id"]]["ids"] if "SpecialToken" in part else [] for part in parts]
                before = [one for part in ids[:place] for one in part] + before
                after = after + [one for part in ids[place:] for one in part]
            elif step["type"] in ("BertProcessing", "RobertaProcessing"):
                before, after = [step["cls"][1], *before], [*after, step["sep"][1]]
            elif step["type"] != "ByteLevel":
                raise TextError(f"the page's tokenizer does not know the post-processor {step['type']}")
        return before, after

    def _added(self) -> list[dict[str, Any]]:
        """The added tokens with the text they are found by, which is normalized for those found after normalizing."""
        normalizer = self.backend.normalizer
        entries: list[dict[str, Any]] = []
        for token in self.file["added_tokens"]:
            text = token["content"]
            late = token["normalized"]
            found = normalizer.normalize_str(text) if late and normalizer is not None else text
            if not found or any(late == other["late"] and found == other["found"] for other in entries):
                raise TextError(f"the page's tokenizer cannot tell the added token {text!r} from others by {found!r}")
            flags = {"left": token["lstrip"], "right": token["rstrip"], "word": token["single_word"]}
            entries.append(
                {"id": token["id"], "text": text, "found": found, "late": late, "special": token["special"]} | flags
            )
        if any(entry["left"] or entry["right"] for entry in entries):
            self.set("white space")
        if any(entry["word"] for entry in entries):
            self.set("word")
        return entries

    def _model(self) -> dict[str, Any]:
        model = self.file["model"]
        kind = model["type"]
        if kind == "Unigram":
            tokens: list[str | None] = [piece for piece, _ in model["vocab"]]
            ids = {piece: index for index, (piece, _) in enumerate(model["vocab"])}
        else:
            ids = model["vocab"]
            tokens = [None] * (max(ids.values(), default=-1) + 1)
            for piece, index in ids.items():
                tokens[index] = piece
        data = {"type": kind, "tokens": tokens, "unk": model.get("unk_id", ids.get(model.get("unk_token")))}
        if data["unk"] is None and model.get("unk_token"):
            raise TextError(f"its vocabulary lacks its unknown token {model['unk_token']!r}")
        if kind == "Unigram":
            return data | {"scores": [score for _, score in model["vocab"]], "fallback": bool(model["byte_fallback"])}
        if kind == "WordPiece":
            inside = model["continuing_subword_prefix"]
            return data | {"inside": inside, "longest": model["max_input_chars_per_word"]}
        if kind == "WordLevel":
            return data
        if kind != "BPE":
            raise TextError(
                f"the page's tokenizer does not know the model {kind}; it knows BPE, Unigram, WordLevel, WordPiece"
            )
        if model["dropout"]:
            raise TextError("the page's tokenizer does not know a dropout of merges")
        inside = model["continuing_subword_prefix"] or ""
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        merges = [index for a, b in pairs for index in (ids[a], ids[b], ids[a + b.removeprefix(inside)])]
        return data | {
            "merges": merges,
            "inside": inside,
            "last": model["end_of_word_suffix"] or "",
            "fuse": bool(model["fuse_unk"]),
            "fallback": bool(model["byte_fallback"]),
            "whole": bool(model.get("ignore_merges")),
        }


def _check_first(normalize: list[dict[str, Any]], split: list[dict[str, Any]]) -> None:
    """Raise TextError where a mark depends on the first character, and that may be removed before."""
    if any(step.get("scheme") == "first" for step in split):
        for step in normalize:
            if step["step"] not in ("unicode", "lower", "prepend") and not step.get("content"):
                raise TextError("the page's tokenizer does not know Metaspace as 'first' after characters are removed")


# What writes each step of the library as steps of the scripts.


def _unicode(export: _Export, step: Step) -> _Steps:
    yield {"step": "unicode", "form": step["type"], "set": export.set("unicode")}


def _lower(export: _Export, step: Step) -> _Steps:
    yield {"step": "lower", "set": export.set("lowered")}


def _bert(export: _Export, step: Step) -> _Steps:
    if step["clean_text"]:
        yield export.replaced("removed True")
        yield export.replaced("spaces True", " ")
    if step["handle_chinese_chars"]:
        yield {"step": "around", "set": export.set("ideographs")}
    if step["lowercase"] if step["strip_accents"] is None else step["strip_accents"]:
        yield from _unicode(export, {"type": "NFD"})
        yield export.replaced("accents True")
    if step["lowercase"]:
        yield from _lower(export, step)


def _charsmap(export: _Export, step: Step) -> _Steps:
    if step["precompiled_charsmap"]:
        classes = sets.clusters()
        export.sets |= classes
        yield {"step": "charsmap", "table": step["precompiled_charsmap"], "classes": list(classes)}


def _split_at(pattern: list[str], behavior: str, invert: bool = False) -> dict[str, Any]:
    return {"step": "split", "pattern": pattern, "behavior": behavior, "invert": invert}


def _byte_level(export: _Export, step: Step) -> _Steps:
    if step["add_prefix_space"]:
        yield {"step": "prefix"}
    if step["use_regex"]:
        yield _split_at(export.pattern(_GPT2), "Isolated")
    yield {"step": "bytes"}


def _metaspace(export: _Export, step: Step) -> _Steps:
    keys = {"mark": "replacement", "scheme": "prepend_scheme", "split": "split"}
    yield {"step": "metaspace"} | {ours: step[theirs] for ours, theirs in keys.items()}


def _plain(export: _Export, step: Step) -> _Steps:
    """A decoder whose settings need no change."""
    yield {"step": step["type"]} | {key: value for key, value in step.items() if key != "type"}


_NORMALIZERS: _Table = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), _unicode), "Lowercase": _lower, "BertNormalizer": _bert,
    "StripAccents": lambda export, step: [export.replaced("accents False")],
    "Nmt": lambda export, step: [export.replaced("removed False"), export.replaced("spaces False", " ")],
    "Strip": lambda export, step: [
        {"step": "strip", "set": export.set("white space"), "left": step["strip_left"], "right": step["strip_right"]}
    ],
    "Replace": lambda export, step: [
        {"step": "replace", "pattern": export.pattern(step["pattern"]), "content": step["content"]}
    ],
    "Prepend": lambda export, step: [{"step": "prepend", "content": step["prepend"]}],
    "Precompiled": _charsmap,
    "ByteLevel": lambda export, step: [{"step": "bytes"}],
}  # fmt: skip
_PRE_TOKENIZERS: _Table = {
    "ByteLevel": _byte_level,
    "Split": lambda export, step: [_split_at(export.pattern(step["pattern"]), step["behavior"], step["invert"])],
    "Whitespace": lambda export, step: [
        _split_at(["", export.set("word"), "+|", export.set("other"), "+"], "Removed", invert=True)
    ],
    "WhitespaceSplit": lambda export, step: [_split_at(export.char_of("white space"), "Removed")],
    "Punctuation": lambda export, step: [_split_at(export.char_of("Punctuation"), step["behavior"])],
    "Digits": lambda export, step: [
        _split_at(export.char_of("Digits"), "Isolated" if step["individual_digits"] else "Contiguous")
    ],
    "Metaspace": _metaspace,
    "BertPreTokenizer": lambda export, step: [
        _split_at(export.char_of("white space"), "Removed"), _split_at(export.char_of("BertPreTokenizer"), "Isolated")
    ],
    "CharDelimiterSplit": lambda export, step: [_split_at(export.pattern({"String": step["delimiter"]}), "Removed")],
}  # fmt: skip
_DECODERS: _Table = {
    **dict.fromkeys(("ByteLevel", "WordPiece", "Metaspace", "ByteFallback", "Fuse", "Strip", "BPEDecoder"), _plain),
    "Replace": lambda export, step: [
        {"step": "Replace", "pattern": export.pattern(step["pattern"]), "content": step["content"]}
    ],
}  # fmt: skip
