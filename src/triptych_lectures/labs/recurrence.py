"""A recurrent encoder-decoder with one fixed vector, one with attention, and a transformer, on one translation (Cho et
al. 2014; Bahdanau et al. 2015; lectures L0 and L1)."""

from __future__ import annotations

from triptych.page import Curve, TableSection
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.translation import (
    Comparison,
    Judgement,
    TranslationSizes,
    TranslationTask,
    compared,
    quarters,
)
from triptych_lectures.labs.translators import Builder, bahdanau, beside_encoder, fixed_vector

FIXED, ATTENTION, TRANSFORMER = "GRU, fixed vector", "GRU, attention", "transformer"
BUILDERS: dict[str, Builder] = {FIXED: fixed_vector, ATTENTION: bahdanau, TRANSFORMER: beside_encoder}


class RecurrenceLab(TranslationSizes):
    """Three models on the same sentences: what they get wrong by the length of the source, and how long they take."""

    name = "recurrence"
    falsified_by = (
        "The claim is false if attention leaves more than half of the fixed vector's wrong tokens in the longest"
        " quarter of the sentences, or if the fixed vector loses no more from the shortest quarter to the longest than"
        " attention does. A task that word-by-word translation solves, or that attention does not learn, would show"
        " nothing either way."
    )
    seeds = 5

    steps: int = size(200, "training steps of each model", full=800)
    rows: int = size(64, "sentences of a training step")
    layers: int = size(1, "blocks of the transformer's encoder, and of its decoder")
    clauses: int = size(2, "most clauses of a sentence", most=16, full=4)

    def run(self, setup: Setup) -> LabResult:
        comparison = compared(self, BUILDERS, setup)
        question = "What does a recurrent translator lose with length, and what does attention give back?"
        sections = (_quality(comparison), _cost(comparison), _by_length(comparison), comparison.losses)
        return LabResult(question, MEANING, _checks(comparison), sections)


MEANING = (
    "All models read the same sentences in the same order, with the same optimizer and number of steps, and write"
    " freely. One vector has to hold the whole source, so that it loses more the longer the source is; attention"
    " reads the states of the source again for each word. Recurrence has another cost: each cell waits for the one"
    " before, so that a training step is a chain as long as the source and the target together, while that of a"
    " transformer is as long as its blocks are many. Wrong tokens are those to insert, delete or replace, over the"
    " tokens of the right translation."
)


def _checks(comparison: Comparison) -> tuple[Check, ...]:
    fixed, attention = comparison.judged[FIXED], comparison.judged[ATTENTION]
    return (
        Check(
            f"{ATTENTION}: wrong tokens, over those of word by word",
            attention.wrong / comparison.word_by_word.wrong,
            most=0.5,
        ),
        Check(
            "longest quarter: wrong tokens of the fixed vector, over those of attention",
            fixed.by_length[-1] / max(attention.by_length[-1], 1e-9),
            least=2.0,
        ),
        Check(
            "increase of wrong tokens from the shortest quarter to the longest, fixed vector", _lost(fixed), least=0.1
        ),
        Check(
            "increase of wrong tokens from the shortest quarter to the longest, fixed vector less attention",
            _lost(fixed) - _lost(attention),
            least=0.1,
        ),
    )


def _lost(judgement: Judgement) -> float:
    """By how much the share of wrong tokens is larger in the longest quarter than in the shortest."""
    return judgement.by_length[-1] - judgement.by_length[0]


def _quality(comparison: Comparison) -> TableSection:
    header = ("model", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
    rows = [[name, *judgement.cells] for name, judgement in _lines(comparison).items()]
    return TableSection("Wrong tokens, written freely", header, rows)


def _lines(comparison: Comparison) -> dict[str, Judgement]:
    return {**comparison.judged, "word by word": comparison.word_by_word}


def _cost(comparison: Comparison) -> TableSection:
    """Of each model the steps, and the operations one after the other, to the loss that both with attention reach."""
    source = max(len(source) for source in comparison.task.sources)
    target = max(len(target) for target in comparison.task.targets)
    level = max(comparison.trained[name].last for name in (ATTENTION, TRANSFORMER))
    rows = []
    for name, translator in comparison.trained.items():
        chain, steps = translator.model.sequential_steps(source, target), translator.reached(level)
        seconds = "–" if steps is None else f"{translator.seconds * steps / len(translator.losses):.1f} s"
        reached = ["–", "–"] if steps is None else [str(steps), f"{steps * chain:,}"]
        rows.append([name, f"{translator.model.parameters:,}", str(chain), *reached, seconds])
    return TableSection(
        f"To the loss that both with attention reach, {level:.2f} nats a token",
        ("model", "parameters", "chain of one step", "steps", "steps one after another", "processor time"),
        rows,
    )


def _by_length(comparison: Comparison) -> Curve:
    lengths = _mean_lengths(comparison.task)
    lines = {
        name: list(zip(lengths, judgement.by_length, strict=True)) for name, judgement in _lines(comparison).items()
    }
    return Curve("Wrong tokens by length", "words of the source", "share", lines, {})


def _mean_lengths(task: TranslationTask) -> list[float]:
    sources = task.sources
    return [sum(len(sources[i]) - 1 for i in group) / len(group) for group in quarters(sources)]
