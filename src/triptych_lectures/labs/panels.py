"""One translation in three layouts: an encoder-decoder, a decoder with a prefix mask, and a decoder with a plain prompt
(Vaswani et al. 2017; Raffel et al. 2020, section 3.2; Radford et al. 2019; lectures L0, L1 and L4)."""

from __future__ import annotations

from triptych.page import TableSection
from triptych_lectures.labs.lab import Check, LabResult, Setup
from triptych_lectures.labs.translation import Comparison, TranslationSizes, compared
from triptych_lectures.labs.translators import Builder, behind_prefix, behind_prompt, beside_encoder

BUILDERS: dict[str, Builder] = {
    "encoder-decoder": beside_encoder,
    "decoder, prefix mask": behind_prefix,
    "decoder, plain prompt": behind_prompt,
}


class PanelsLab(TranslationSizes):
    """Three layouts on the same sentences: what they get wrong, with how many parameters."""

    name = "panels"
    falsified_by = (
        "The claim is false if one of the layouts, with no more parameters than the encoder-decoder and the same"
        " sentences and steps, leaves more than half of the wrong tokens of word-by-word translation. That word by word"
        " is wrong for less than half of the tokens would mean that the task asks for no reading of the sentence, and"
        " show nothing."
    )
    seeds = 5

    def run(self, setup: Setup) -> LabResult:
        comparison = compared(self, BUILDERS, setup)
        sections = (_table(comparison), comparison.losses)
        return LabResult("Does a translation need an encoder?", MEANING, _checks(comparison), sections)


MEANING = (
    "A translation needs no layout of its own: a decoder alone that finds the source in front of the target writes it"
    " too. With the prefix mask each word of the source sees those after it, as in an encoder; with a plain prompt it"
    " sees only those before it, and what a later word decides - the noun its gender, the verb the sense of a noun -"
    " has to be put together when the target is written. Wrong tokens are those to insert, delete or replace, over"
    " the tokens of the right translation."
)


def _checks(comparison: Comparison) -> tuple[Check, ...]:
    reference = comparison.word_by_word.wrong
    encoder_decoder, *alone = [translator.model.parameters for translator in comparison.trained.values()]
    return (
        Check("word by word: wrong tokens", reference, least=0.5),
        *(
            Check(f"{name}: wrong tokens, over those of word by word", judgement.wrong / reference, most=0.5)
            for name, judgement in comparison.judged.items()
        ),
        Check("parameters of the larger decoder, over the encoder-decoder's", max(alone) / encoder_decoder, most=1),
    )


def _table(comparison: Comparison) -> TableSection:
    header = ("layout", "parameters", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
    rows = [
        [name, f"{comparison.trained[name].model.parameters:,}", *judgement.cells]
        for name, judgement in comparison.judged.items()
    ]
    rows.append(["word by word", "–", *comparison.word_by_word.cells])
    return TableSection("Wrong tokens, written freely", header, rows)
