"""First Folio to modern spelling, on plays that were never read (lectures L0, L1 and L4: translation).

A model of letters beside two baselines: copying the source, and a table of each word's commonest modern spelling.
The quick run trains on single words; the full one, or `--model` with what the recipes `folio.toml` and
`folio-lines.toml` of docs/examples train, is judged on whole lines.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from triptych.errors import InputError
from triptych.model import Model, load
from triptych.page import Curve, Section, TableSection
from triptych.text.align import same_words
from triptych.train import OptimizerSettings
from triptych.train.metrics import distance, translation
from triptych.train.recipe import DataSettings
from triptych.train.sources import FOLDED, Pair, pairs, pieces
from .alignment import in_letters, speller
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, size
from .small_models import Points, fit

LONGEST = 128  # letters of a line
LEAST = 0.97  # share of letters right
SYSTEMS = ("the model", "the table", "copying")
# of the two parts of docs/examples: folio.toml and folio-lines.toml
FIRST = OptimizerSettings(name="muon", lr=3e-3, muon_lr=6e-3)
LATER = OptimizerSettings(name="muon", lr=1.5e-3, muon_lr=3e-3, weight_decay=0.01)


class ModernizeLab(Lab):
    name = "modernize"
    seeds = 1

    steps: Ints = size((300,), "training steps of each part of the training", full=(6000, 3600))
    rows: int = size(96, "rows of a training step", full=64)
    words: Ints = size(
        (1,), "most words of a row in each part; of 1, single words are judged, else whole lines", full=(10, 24)
    )
    width: int = size(64, "width of the model", full=128)
    layers: int = size(1, "blocks of the encoder", full=3)
    decoder_layers: int = size(1, "blocks of the decoder", full=2)
    passages: int = size(12_000, "passages to train on, evenly spaced among those of 32 plays", full=1_000_000)
    held: int = size(400, "held-out rows, evenly spaced among those of three plays", full=1000)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.words):
            raise InputError(
                f"sizes steps and words: {len(self.steps)} and {len(self.words)} parts of the training;"
                " give both for each part"
            )

    @classmethod
    def sized(cls, setup: Setup) -> ModernizeLab:
        """A model that is named is judged at full sizes."""
        return super().sized(setup if setup.model is None else replace(setup, full=True))

    def run(self, setup: Setup) -> LabResult:
        whole = setup.full or setup.model is not None
        lines, held_lines = pairs(DataSettings(path=FOLDED))
        lines = _spaced(lines, self.passages)
        held = held_lines if max(self.words) > 1 else pieces(held_lines, 1, 1)
        held = _spaced([pair for pair in held if max(map(len, pair)) < LONGEST], self.held)
        table = spelling_table(lines)
        model, losses = self._model(setup, lines)
        setup.progress(f"writing {len(held)} held-out rows")
        written = [one.text for one in model.generate([old for old, _ in held], max_new_tokens=LONGEST)]
        texts = (
            written,
            [" ".join(table.get(word, word) for word in old.split()) for old, _ in held],
            [old for old, _ in held],
        )
        systems = dict(zip(SYSTEMS, texts, strict=True))
        words = {name: aligned_words(held, of) for name, of in systems.items()}

        def right(test: Callable[[Word], bool]) -> Shares:
            return {name: letters_right(list(filter(test, of))) for name, of in words.items()}

        judged = whole_rows(systems, [new for _, new in held])
        changed, unknown = right(lambda word: word.old != word.new), right(lambda word: word.old not in table)
        alike = right(lambda word: word.old == word.new)["the model"]
        return self.result(
            _whole_lines(right(lambda word: True), unknown)
            if whole
            else _single_words(changed, alike, _best_first(right(lambda word: True), ".1%"), judged),
            _sections(held, systems, words, table, judged, losses),
            small=not whole,
        )

    def _model(self, setup: Setup, lines: Sequence[Pair]) -> tuple[Model, Points]:
        """The one that was named, or one trained now, and its losses."""
        if setup.model is not None:
            setup.progress(f"loading {setup.model}")
            model = load(setup.model, dequantize=True)
            if model.spec.layout != "encoder-decoder" or model.tokenizer is None:
                raise InputError(f"{setup.model}: this lab needs an encoder-decoder with a tokenizer")
            return model, []
        model = speller(self._config(), lines, setup.seed)
        losses: Points = []
        for part, (steps, words) in enumerate(zip(self.steps, self.words, strict=True)):
            setup.progress(f"training a spelling model for {steps} steps on 1 to {words} words")
            cut = pieces(lines, 1, words, across_lines=part > 0)
            train = [pair for pair in cut if max(map(len, pair)) < LONGEST]
            points = fit(
                model.module,
                in_letters(model, train, LONGEST),
                rows=self.rows,
                length=LONGEST,
                steps=steps,
                seed=setup.seed,
                optimizer=LATER if part else FIRST,
            )
            losses += [(sum(self.steps[:part]) + step, nats) for step, nats in points]
        model.module.eval()
        return model, losses

    def _config(self) -> dict[str, object]:
        """The model of docs/examples/folio.toml in these sizes."""
        return {
            "model_type": "mbart", "d_model": self.width, "encoder_ffn_dim": 5 * self.width // 2,
            "decoder_ffn_dim": 5 * self.width // 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_layers": self.layers, "decoder_layers": self.decoder_layers, "max_position_embeddings": 160,
            "activation_function": "gelu", "scale_embedding": True, "dropout": 0.0,
        }  # fmt: skip


class Word(NamedTuple):
    """A word of a held-out line that both editions have: its spellings, and what was written for it."""

    old: str
    new: str
    written: str

    @property
    def wrong(self) -> int:
        """Letters to change, at most all."""
        return min(len(self.new), distance(self.written, self.new))


Shares = Mapping[str, float]  # of letters right, by system


def _errors(one: float, other: float) -> float:
    """The wrong letters of one share that is right over those of the other; infinite where the other has none."""
    return (1 - one) / (1 - other) if other != 1 else math.inf


def _best_first(scores: Shares, form: str) -> str:
    return ", ".join(f"{name} {scores[name]:{form}}" for name in sorted(scores, key=lambda name: -scores[name]))


def _single_words(changed: Shares, alike: float, ranked: str, judged: Mapping[str, Shares]) -> Clauses:
    """What is claimed of a short training: `changed` are words that modern editions spell otherwise, `ranked` are the
    systems by the letters of all words, and `judged` is what they write as a whole."""
    model, copied = changed["the model"], changed["copying"]
    chrf = {name: of["chrF"] for name, of in judged.items() if "chrF" in of}
    by_chrf = f"; by chrF of what is written: {_best_first(chrf, '.1f')}" if chrf else ""
    yield clause(
        "The model has learned a part of the new spelling: of words that modern editions spell otherwise it writes"
        f" {model:.1%} of the letters right; control: copying them {copied:.1%}.",
        Check("words spelt otherwise: wrong letters, over those of copying", _errors(model, copied), most=0.9),
        instead="Of words that modern editions spell otherwise it writes hardly more letters right than copying",
    )
    yield clause(
        f"Words that are spelt alike it mostly leaves as they are: {alike:.1%} of their letters are right. Of all"
        f" words, the best first: {ranked}{by_chrf}.",
        Check("words spelt alike: letters right", alike, least=0.9),
        instead="It garbles words that are spelt alike",
    )


def _whole_lines(every: Shares, unknown: Shares) -> Clauses:
    """What is claimed of a whole training: `unknown` are words that the table does not know."""
    model, table, copied = (every[name] for name in SYSTEMS)
    better = _errors(unknown["the model"], unknown["the table"])
    yield clause(
        f"Writing whole lines of new plays, the model gets {model:.1%} of the letters of aligned words right;"
        f" control: copying gets {copied:.1%}.",
        Check("letters of aligned words right", model, least=LEAST),
        Check("wrong letters, over those of copying", _errors(model, copied), most=0.5),
        instead="It has not learned to modernize whole lines",
    )
    yield clause(
        f"That is no worse than a table of each word's commonest modern spelling, {table:.1%}.",
        Check("the table's wrong letters, over the model's", _errors(table, model), least=0.8),
        instead="A table of each word's commonest modern spelling is better",
    )
    yield clause(
        "It reads letters, and so can spell a word it has never seen: of words that the table does not know it gets"
        f" {unknown['the model']:.1%} of the letters right, the table {unknown['the table']:.1%}.",
        Check("words not in the table: wrong letters, over the table's", better, most=0.9),
        instead="Of words that the table does not know it gets hardly more right",
    )


def spelling_table(lines: Sequence[Pair]) -> dict[str, str]:
    """The commonest modern spelling of each old one, among words that both editions of a line have."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for old, new in lines:
        first, second = old.split(), new.split()
        for i, j in same_words(old, new):
            counts[first[i]][second[j]] += 1
    return {word: count.most_common(1)[0][0] for word, count in counts.items()}


def aligned_words(held: Sequence[Pair], written: Sequence[str]) -> list[Word]:
    """The words that both editions of each line have, with what was written for each: the words of the written line are
    laid beside those of the modern one so that the fewest letters differ."""
    aligned = []
    for (old, new), text in zip(held, written, strict=True):
        beside = _laid_beside(text.split(), new.split())
        aligned += [Word(old.split()[i], new.split()[j], beside[j]) for i, j in same_words(old, new)]
    return aligned


def letters_right(words: Sequence[Word]) -> float:
    """The share of the letters of the modern spellings; NaN without words."""
    letters = sum(len(word.new) for word in words)
    return 1.0 - sum(word.wrong for word in words) / letters if letters else float("nan")


def _laid_beside(written: Sequence[str], right: Sequence[str]) -> list[str]:
    """For each word of `right` the word of `written` that stands beside it, or "" where none does, by the cheapest way
    of turning one into the other; a word that is left out or added costs its letters."""
    rows, columns = len(right), len(written)
    cost = np.zeros((rows + 1, columns + 1), dtype=np.int64)
    cost[1:, 0] = np.cumsum([len(word) for word in right])
    cost[0, 1:] = np.cumsum([len(word) for word in written])
    for i, word in enumerate(right):
        for j, other in enumerate(written):
            both = cost[i, j] + _distance(other, word)
            cost[i + 1, j + 1] = min(both, cost[i, j + 1] + len(word), cost[i + 1, j] + len(other))
    beside, i, j = [""] * rows, rows, columns
    while i and j:
        if cost[i, j] == cost[i - 1, j - 1] + _distance(written[j - 1], right[i - 1]):
            i, j = i - 1, j - 1
            beside[i] = written[j]
        elif cost[i, j] == cost[i - 1, j] + len(right[i - 1]):
            i -= 1
        else:
            j -= 1
    return beside


@cache
def _distance(a: str, b: str) -> int:
    return 0 if a == b else distance(a, b)


def _spaced(rows: Sequence[Pair], count: int) -> list[Pair]:
    """At most so many rows, evenly spaced, because they are in the order of the plays."""
    return list(rows[:: max(1, len(rows) // count)][:count])


def _sections(
    held: Sequence[Pair],
    systems: dict[str, list[str]],
    words: dict[str, list[Word]],
    table: dict[str, str],
    judged: Mapping[str, Shares],
    losses: Points,
) -> Sections:
    kinds: dict[str, Callable[[Word], bool]] = {
        "all": lambda word: True,
        "spelt otherwise": lambda word: word.old != word.new,
        "not in the table": lambda word: word.old not in table,
    }
    header = ("", *(f"{kind}, {sum(map(test, words['copying'])):,} words" for kind, test in kinds.items()))
    rows = [
        [name, *(f"{letters_right(list(filter(test, of))):.2%}" for test in kinds.values())]
        for name, of in words.items()
    ]
    columns = list(dict.fromkeys(measure for of in judged.values() for measure in of))
    shown = [[name, *(f"{of[measure]:{FORMS[measure]}}" for measure in columns)] for name, of in judged.items()]
    title = "Whole rows (chrF, and BLEU where rows have several words, need sacrebleu)"
    sections: list[Section] = [
        TableSection("Letters of aligned words right", header, rows),
        TableSection(title, ("", *columns), shown),
    ]
    unseen = [(i, word) for i, word in enumerate(words["the model"]) if word.old not in table][:20]
    if unseen:
        shown = [[word.old, word.new, word.written, words["the table"][i].written] for i, word in unseen]
        sections.append(TableSection("Words that the table does not know", ("old", "modern", "model", "copied"), shown))
    shown = [[old, new, text] for (old, new), text in zip(held[:12], systems["the model"], strict=False)]
    sections.append(TableSection("What it writes", ("First Folio", "modern edition", "the model"), shown))
    if losses:
        sections.append(Curve("Training", "step", "nats a letter", {"loss": losses}, {}))
    return tuple(sections)


FORMS = {"exactly right": ".1%", "letters wrong": ".2%", "BLEU": ".1f", "chrF": ".1f"}  # of each measure


def whole_rows(systems: Mapping[str, Sequence[str]], right: Sequence[str]) -> dict[str, dict[str, float]]:
    """Each system's rows as wholes: exactly right, letters wrong, and BLEU and chrF where sacrebleu is installed; no
    BLEU of single words, which have none of the sequences of four that it counts."""
    judged = {}
    for name, texts in systems.items():
        wrong = sum(distance(a, b) for a, b in zip(texts, right, strict=True)) / sum(map(len, right))
        exact = sum(a == b for a, b in zip(texts, right, strict=True)) / len(right)
        judged[name] = {"exactly right": exact, "letters wrong": wrong}
        with suppress(InputError):  # without sacrebleu
            judged[name] |= translation(texts, right)
        if not any(" " in text for text in right):
            judged[name].pop("BLEU", None)
    return judged
