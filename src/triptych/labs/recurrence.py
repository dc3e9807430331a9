"""A recurrent encoder-decoder with one fixed vector, one with attention, and a transformer, on one translation (Cho et
al. 2014; Bahdanau et al. 2015; lectures L0 and L1)."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.second_language import SecondLanguage
from triptych.labs.translation import Judgement, TranslationTask, quarters, word_by_word
from triptych.labs.translators import Builder, TrainedTranslator, Training, bahdanau, beside_encoder, fixed_vector
from triptych.page import Curve, TableSection

FALSIFIED_BY = (
    "The claim is false if attention leaves more than half of the fixed vector's wrong tokens in the longest quarter of"
    " the sentences, or if the fixed vector loses no more from the shortest quarter to the longest than attention does."
    " A task that word-by-word translation solves, or that attention does not learn, would show nothing either way."
)
FIXED, ATTENTION, TRANSFORMER = "GRU, fixed vector", "GRU, attention", "transformer"
BUILDERS: dict[str, Builder] = {FIXED: fixed_vector, ATTENTION: bahdanau, TRANSFORMER: beside_encoder}


@dataclass(frozen=True)
class Sizes:
    """What a run can change."""

    steps: int = size(200, "training steps of each model")
    rows: int = size(64, "sentences of a training step")
    rate: float = size(6e-3, "highest learning rate")
    width: int = size(64, "width of embeddings and states")
    layers: int = size(1, "blocks of the transformer's encoder, and of its decoder")
    nouns: int = size(4, "nouns of the language")
    verbs: int = size(3, "verbs of the language")
    adjectives: int = size(2, "adjectives of the language")
    clauses: int = size(2, "most clauses of a sentence")
    train: int = size(3000, "sentences to train on")
    held: int = size(120, "held-out sentences")


FULL = Sizes(steps=800, nouns=12, verbs=8, adjectives=6, clauses=4, train=20_000, held=400)
SEEDS = 5


def run(setup: Setup) -> LabResult:
    """Three models on the same sentences: what they get wrong by the length of the source, and how long they take."""
    sizes = setup.sized(Sizes(), FULL)
    language = SecondLanguage(setup.seed, nouns=sizes.nouns, verbs=sizes.verbs, adjectives=sizes.adjectives)
    task = TranslationTask.of(language, setup.seed, sizes.train, sizes.held, sizes.clauses)
    training = Training(sizes.width, 4, sizes.layers, sizes.rows, sizes.steps, sizes.rate, setup.seed)
    trained, judged = {}, {}
    for name, builder in BUILDERS.items():
        setup.progress(f"{name}: training {sizes.steps} steps")
        trained[name] = builder(task.rows, len(task.vocabulary), training)
        judged[name] = task.judged(trained[name])
    dictionary = Judgement.of(task, word_by_word(task))
    fixed, attention = judged[FIXED], judged[ATTENTION]
    checks = (
        Check(f"{ATTENTION}: wrong tokens, over those of word by word", attention.wrong / dictionary.wrong, most=0.5),
        Check(
            "longest quarter: wrong tokens of the fixed vector, over those of attention",
            fixed.by_length[-1] / max(attention.by_length[-1], 1e-9),
            least=2.0,
        ),
        Check("from the shortest quarter to the longest: what the fixed vector loses", _lost(fixed), least=0.1),
        Check("the same, less what attention loses", _lost(fixed) - _lost(attention), least=0.1),
    )
    meaning = (
        "All models read the same sentences in the same order, with the same optimizer and number of steps, and write"
        " freely. One vector has to hold the whole source, so that it loses more the longer the source is; attention"
        " reads the states of the source again for each word. Recurrence has another cost: each cell waits for the one"
        " before, so that a training step is a chain as long as the source and the target together, while that of a"
        " transformer is as long as its blocks are many."
    )
    return LabResult(
        "What does a recurrent translator lose with length, and what does attention give back?",
        meaning,
        checks,
        _sections(task, trained, judged, dictionary),
    )


def _lost(judgement: Judgement) -> float:
    return judgement.by_length[-1] - judgement.by_length[0]


def _sections(
    task: TranslationTask, trained: dict[str, TrainedTranslator], judged: dict[str, Judgement], dictionary: Judgement
) -> tuple[TableSection, TableSection, Curve, Curve]:
    lines = {**judged, "word by word": dictionary}
    header = ("model", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
    quality = TableSection("Wrong tokens, written freely", header, [[name, *j.cells] for name, j in lines.items()])
    source = max(len(source) for source in task.sources)
    target = max(len(target) for target in task.targets)
    level = max(trained[name].last for name in (ATTENTION, TRANSFORMER))
    rows = []
    for name, model in trained.items():
        chain, steps = model.model.sequential_steps(source, target), model.reached(level)
        seconds = "–" if steps is None else f"{model.seconds * steps / len(model.losses):.1f} s"
        reached = ["–", "–"] if steps is None else [str(steps), f"{steps * chain:,}"]
        rows.append([name, f"{model.model.parameters:,}", str(chain), *reached, seconds])
    cost = TableSection(
        f"To the loss that both with attention reach, {level:.2f} nats a token",
        ("model", "parameters", "chain of one step", "steps", "steps one after another", "processor time"),
        rows,
    )
    lengths = _mean_lengths(task)
    by_length = {name: list(zip(lengths, j.by_length, strict=True)) for name, j in lines.items()}
    losses = {name: [(float(i + 1), x) for i, x in enumerate(one.losses)] for name, one in trained.items()}
    return (
        quality,
        cost,
        Curve("Wrong tokens by length", "words of the source", "share", by_length, {}),
        Curve("Training", "step", "nats a token", losses, {}),
    )


def _mean_lengths(task: TranslationTask) -> list[float]:
    sources = task.sources
    return [sum(len(sources[i]) - 1 for i in group) / len(group) for group in quarters(sources)]
