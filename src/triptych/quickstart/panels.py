"""What differs between the three panels: what they write, how they are judged, what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.model import Model
from triptych.page import AttentionMap
from triptych.page.inspect import inspect_text
from triptych.train import Job, Score, evaluate
from triptych.train.sources import pairs

Written = list[tuple[str, str]]  # label, text


@dataclass(frozen=True)
class Verdict:
    """How good the model became on held-out text: one figure, what to hold it against, and both in a sentence."""

    name: str
    value: float
    beside: str
    baseline: float
    said: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"measure": self.name, "value": self.value, "baseline": self.beside, "baseline_value": self.baseline}


@dataclass(frozen=True)
class Panel:
    """One layout on one task."""

    name: str
    title: str
    told: str
    write: Callable[[Model], Written]
    judge: Callable[[Model, Job], Verdict]
    maps: Callable[[Model], Sequence[AttentionMap]]


# ---------------------------------------------------------------- decoder

OPENING = "\nKING HENRY.\n"
SENTENCE = "She sat by the river bank"


def _continue(model: Model) -> Written:
    found = model.generate([OPENING], max_new_tokens=110, temperature=0.8, top_p=0.95, seed=1)[0]
    return [("writes on from a king's name", (OPENING + found.text).strip("\n"))]


def _nats(model: Model, job: Job) -> Verdict:
    score = _score(model, job)
    held = score.nats_per_character or score.nats_per_token
    unit = "character" if score.nats_per_character else "token"
    uniform = float(np.log(model.spec.vocab))
    said = f"{held:.3f} nats per {unit} on text it has not seen; guessing evenly among the symbols gives {uniform:.2f}"
    return Verdict(f"nats per {unit}", held, "uniform", uniform, said)


# ---------------------------------------------------------------- encoder

GAPS = (
    "I will not go to [MASK] .",
    "What [MASK] you , my lord ?",
    "The king is [MASK] , long live the king !",
    "Good [MASK] , sir .",
)


def _fill(model: Model) -> Written:
    answers = model.fill(GAPS, top=3)
    told = [f"{gap}   {', '.join(f'{w} {p:.0%}' for w, p in row[0])}" for gap, row in zip(GAPS, answers, strict=True)]
    return [("fills in", "\n".join(told))]


def _filled(model: Model, job: Job) -> Verdict:
    score = _score(model, job)
    said = (
        f"{score.accuracy:.1%} of {score.tokens:,} hidden words right on text it has not seen; always guessing the "
        f"commonest gives {score.baseline:.1%}"
    )
    return Verdict("hidden words right", score.accuracy, "the commonest word", score.baseline, said)


# ---------------------------------------------------------------- encoder-decoder

FOLIO = ("I loue", "haue giuen", "heauen hath", "we shall", "Pesant slaue")  # as long as the passages it learns from
STACKS = ("cross", "encoder", "decoder")
JUDGED = 200  # held-out passages written out in full


def _modernize(model: Model) -> Written:
    found = model.generate(FOLIO, max_new_tokens=80)
    return [("turns", "\n".join(f"{old} → {new.text}" for old, new in zip(FOLIO, found, strict=True)))]


def _corrected(model: Model, job: Job) -> Verdict:
    """Letters to change (Levenshtein distance) per letter of the modern text, ours beside copying the source."""
    _, held = pairs(job.recipe.data)
    room = job.recipe.run.length
    fitting = [pair for pair in held if max(len(model.ids([side])[0]) for side in pair) <= room]
    step = max(1, len(fitting) // JUDGED)
    chosen = fitting[::step][:JUDGED]
    found = model.generate([source for source, _ in chosen], max_new_tokens=room + 8)
    letters = sum(len(target) for _, target in chosen)
    ours = sum(distance(new.text, target) for new, (_, target) in zip(found, chosen, strict=True)) / letters
    copied = sum(distance(source, target) for source, target in chosen) / letters
    said = (
        f"{ours:.1%} of letters wrong in {len(chosen)} passages it has not seen; "
        f"copying the source leaves {copied:.1%} wrong"
    )
    return Verdict("letters wrong", ours, "copying", copied, said)


def distance(a: str, b: str) -> int:
    """Fewest letters to insert, delete or replace (Levenshtein 1966), a row of the table at a time."""
    there = np.array([ord(c) for c in b], dtype=np.int64)
    along = np.arange(len(b) + 1)
    row = along.copy()
    for i, letter in enumerate(a, 1):
        best = np.empty_like(row)
        best[0] = i
        best[1:] = np.minimum(row[:-1] + (there != ord(letter)), row[1:] + 1)
        row = np.minimum.accumulate(best - along) + along  # insertions along the row
    return int(row[-1])


# ---------------------------------------------------------------- the three


def _score(model: Model, job: Job) -> Score:
    held = job.trainer.held
    assert held is not None
    return evaluate(model.module, held)


PANELS = {
    panel.name: panel
    for panel in (
        Panel(
            "decoder",
            "A decoder that writes",
            "It reads a text one character after the other and says which comes next.  Each row of a map shows what "
            "one character looked back at; what lies ahead is hidden from it, so the upper right stays empty.",
            _continue,
            _nats,
            lambda model: inspect_text(model, SENTENCE).maps,
        ),
        Panel(
            "encoder",
            "An encoder that fills in hidden words",
            "It reads a whole text at once, some words of it hidden, and says what they were.  Each row of a map shows "
            "what one word looked at, on both sides of it.",
            _fill,
            _filled,
            lambda model: inspect_text(model, GAPS[2]).maps,
        ),
        Panel(
            "encoder-decoder",
            "An encoder-decoder that modernizes spelling",
            "Its encoder reads a passage as the First Folio of 1623 spells it, its decoder writes it in modern "
            "spelling.  The cross-attention maps are alignments: which letters of the old were looked at for each of "
            "the new.",
            _modernize,
            _corrected,
            lambda model: sorted(inspect_text(model, FOLIO[2]).maps, key=lambda item: STACKS.index(item.stack)),
        ),
    )
}
