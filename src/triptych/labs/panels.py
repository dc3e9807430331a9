"""One translation in three layouts: an encoder-decoder, a decoder with a prefix mask, and a decoder with a plain prompt
(Vaswani et al. 2017; Raffel et al. 2020, section 3.2; Radford et al. 2019; lectures L0, L1 and L4)."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.second_language import SecondLanguage
from triptych.labs.translation import Judgement, TranslationTask, word_by_word
from triptych.labs.translators import Builder, TrainedTranslator, Training, behind_prefix, behind_prompt, beside_encoder
from triptych.page import Curve, TableSection

FALSIFIED_BY = (
    "The claim is false if one of the layouts, with no more parameters than the encoder-decoder and the same sentences"
    " and steps, leaves more than half of the wrong tokens of word-by-word translation. That word by word is wrong for"
    " less than half of the tokens would mean that the task asks for no reading of the sentence, and show nothing."
)
BUILDERS: dict[str, Builder] = {
    "encoder-decoder": beside_encoder,
    "decoder, prefix mask": behind_prefix,
    "decoder, plain prompt": behind_prompt,
}


@dataclass(frozen=True)
class Sizes:
    """What a run can change."""

    steps: int = size(150, "training steps of each model")
    rows: int = size(48, "sentences of a training step")
    rate: float = size(6e-3, "highest learning rate")
    width: int = size(64, "width of embeddings and blocks")
    layers: int = size(1, "blocks of the encoder, and of the decoder beside it; a decoder alone has twice as many")
    nouns: int = size(4, "nouns of the language")
    verbs: int = size(3, "verbs of the language")
    adjectives: int = size(2, "adjectives of the language")
    clauses: int = size(1, "most clauses of a sentence")
    train: int = size(3000, "sentences to train on")
    held: int = size(120, "held-out sentences")


FULL = Sizes(steps=800, nouns=12, verbs=8, adjectives=6, clauses=3, train=20_000, held=400)
SEEDS = 5


def run(setup: Setup) -> LabResult:
    """Three layouts on the same sentences: what they get wrong, with how many parameters."""
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
    parameters = [model.model.parameters for model in trained.values()]
    checks = (
        Check("word by word: wrong tokens", dictionary.wrong, least=0.5),
        *(
            Check(f"{name}: wrong tokens, over those of word by word", judgement.wrong / dictionary.wrong, most=0.5)
            for name, judgement in judged.items()
        ),
        Check(
            "parameters of the larger decoder, over the encoder-decoder's", max(parameters[1:]) / parameters[0], most=1
        ),
    )
    meaning = (
        "A translation needs no layout of its own: a decoder alone that finds the source in front of the target writes"
        " it too. With the prefix mask each word of the source sees those after it, as in an encoder; with a plain"
        " prompt it sees only those before it, and what a later word decides - the noun its gender, the verb the sense"
        " of a noun - has to be put together when the target is written."
    )
    return LabResult("Does a translation need an encoder?", meaning, checks, _sections(trained, judged, dictionary))


def _sections(
    trained: dict[str, TrainedTranslator], judged: dict[str, Judgement], dictionary: Judgement
) -> tuple[TableSection, Curve]:
    header = ("layout", "parameters", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
    rows = [[name, f"{trained[name].model.parameters:,}", *judgement.cells] for name, judgement in judged.items()]
    rows.append(["word by word", "–", *dictionary.cells])
    losses = {name: [(float(i + 1), x) for i, x in enumerate(one.losses)] for name, one in trained.items()}
    return TableSection("Wrong tokens, written freely", header, rows), Curve(
        "Training", "step", "nats a token", losses, {}
    )
