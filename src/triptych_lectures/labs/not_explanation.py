"""Does a pattern of attention explain the output?  (Lectures L0 1.3 and L4 12.8; Jain and Wallace 2019, "Attention is
not Explanation"; Wiegreffe and Pinter 2019, "Attention is not not Explanation")

A classifier is trained on a task whose deciding token is known.  A full run, or one with a model, also looks at the
next word of a pretrained decoder.
"""

from __future__ import annotations

import math

import torch

from triptych.errors import InputError
from triptych.page import AttentionMap, AttentionSection, Curve, Section, TableSection
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.other_patterns import (
    AskedKind,
    ClassifierResult,
    DecoderResult,
    Path,
    Replacement,
    of_classifier,
    of_decoder,
)
from triptych_lectures.labs.pretrained import decoder
from triptych_lectures.labs.small import curve, share_table

TEXT = "When Mary and John went to the store, John gave a drink to"  # Wang et al. 2022: it ends in "Mary"


class NotExplanationLab(Lab):
    """The attention of all layers: replaced by an optimized alternative, shuffled, cut token by token."""

    name = "not-explanation"
    falsified_by = (
        "The claim is false if no other pattern, set in all layers at once, leaves the output as it was, or if any"
        " pattern does: a shuffled pattern that is no farther from the original must change it. The second claim, of"
        " the decoder, is that weights do not rank importance. It is false if hiding the token with the most attention"
        " changes the output most."
    )

    kinds: int = size(8, "kinds of which the classifier is asked for one")
    values: int = size(4, "values that a kind may have, two or more, which are the labels", least=2)
    length: int = size(16, "tokens of a row beside the first, at least as many as kinds")
    width: int = size(32, "width of the classifier's residual stream")
    heads: int = size(4, "heads of each layer, which divide the width", full=8)
    layers: int = size(2, "blocks of the classifier", full=3)
    trained: int = size(250, "training steps of the classifier")
    rows: int = size(32, "rows of a training step")
    learning_rate: float = size(3e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(200, "rows that the share of right answers is taken from")
    searched: int = size(24, "rows whose patterns are searched", full=48)
    search_steps: int = size(50, "steps of the search in the classifier", full=80)
    search_rate: float = size(0.5, "learning rate of that search")
    search_faithful: float = size(1.0, "weight of the output in the loss of that search")
    text: str = size(TEXT, "text whose next word the decoder predicts")
    steps: int = size(30, "steps of the search in the decoder")
    rate: float = size(0.3, "learning rate of that search")
    faithful: float = size(5.0, "weight of the output in the loss of that search")
    sensitive: int = size(5, "layers where a shuffle alone moves the decoder's output most, compared one by one")

    def __post_init__(self) -> None:
        if self.kinds > self.length:
            raise InputError(f"sizes kinds {self.kinds} and length {self.length}: a row has a token of each kind")
        if self.width % self.heads:
            raise InputError(f"sizes width {self.width} and heads {self.heads}: the width must be a multiple")

    @property
    def task(self) -> AskedKind:
        return AskedKind(self.kinds, self.values, self.length)

    def run(self, setup: Setup) -> LabResult:
        last = None
        if setup.full or setup.model is not None:
            last = of_decoder(decoder(setup), self, setup.seed, setup.progress)
        setup.progress(f"a classifier: {self.trained} steps, and as many with shuffled labels")
        small = of_classifier(self, setup.seed)
        checks, meaning, sections = _classifier_checks(small), self._meaning(small), _classifier_sections(small)
        if last is not None:
            layers = last.sensitive(self.sensitive)
            checks, meaning = (*checks, *_decoder_checks(last, layers)), f"{meaning} {_decoder_meaning(last)}"
            sections = (*sections, *_decoder_sections(last, layers))
        return LabResult("Does a pattern of attention explain the output?", meaning, checks, sections)

    def _meaning(self, result: ClassifierResult) -> str:
        hiding, gradient, attention, alternative = result.named.values()
        return (
            f"A classifier of {self.layers} layers answers which value the kind that is asked for has. All its"
            f" attention can be exchanged at once for weights {result.other.attention:.2f} of 1 away, and its answers"
            f" stay: the largest change is {result.changed:.4f}. Weights shuffled by {result.mixed.attention:.2f}"
            f" change them by {result.mixed.output:.2f}. The token that decides is known here. Hiding tokens one by one"
            f" names it in {hiding:.0%} of the rows (without it a guess is still right in 1 of {self.values}), the"
            f" gradient in {gradient:.0%}, the most attention in {attention:.0%}, and the most attention of the"
            f" alternative, which gives the same answers, in {alternative:.0%}."
        )


def _classifier_checks(result: ClassifierResult) -> tuple[Check, ...]:
    """As of the decoder: 0.4 and 0.3 of 1 are far, 0.05 is unchanged, and 0.5, or half of the rows, is most."""
    named = result.named
    return (
        Check("classifier: right on new rows", result.right, least=0.9),
        Check("distance of the alternative patterns, mean over all layers (0 to 1)", result.other.attention, least=0.4),
        Check(
            "distance of the first token's alternative where a shuffle alone moves the output most",
            result.apart(*result.sensitive(1)),
            least=0.3,
        ),
        Check("output change under the alternative in all layers (0 to 1)", result.other.output, most=0.05),
        Check("control: distance of the shuffled patterns over that of the alternative",
              result.mixed.attention / result.other.attention, most=1.05),
        Check("control: output change under the shuffled patterns in all layers", result.mixed.output, least=0.5),
        Check("output change when the deciding token is hidden", result.needed, least=0.5),
        Check("rows in which the deciding token is named by hiding tokens one by one", named["hiding it"], least=0.5),
        Check("rows in which the deciding token is named by the most attention, less by that of the alternative",
              named["attention"] - named["attention of the alternative"], least=0.2),
        Check("control: learned from shuffled labels", result.shuffled_labels.learned, most=0.1),
    )  # fmt: skip


def _classifier_sections(result: ClassifierResult) -> tuple[Section, ...]:
    layers = [[str(layer), f"{moved:.3f}", f"{result.apart(layer):.2f}"] for layer, moved in enumerate(result.alone)]
    return (
        _replacements("Classifier", result.other, result.mixed),
        TableSection(
            "Classifier, by layer",
            ("layer", "output change, this layer shuffled", "distance of the alternative"),
            layers,
        ),
        share_table("Rows in which the deciding token is named", ("by", "share"), result.named, ".0%"),
        _curve("The search for other patterns, classifier", result.path),
    )


def _decoder_checks(result: DecoderResult, layers: list[int]) -> tuple[Check, ...]:
    other, mixed = result.other, result.mixed
    return (
        Check("decoder: distance of the alternative patterns, mean over all layers", other.attention, least=0.4),
        Check(
            f"decoder: distance in the {len(layers)} layers where a shuffle alone moves the output most",
            sum(map(result.apart, layers)) / len(layers),
            least=0.3,
        ),
        Check("decoder: output change under the alternative in all layers", other.output, most=0.05),
        Check(
            "decoder, control: distance of the shuffled patterns over that of the alternative",
            mixed.attention / other.attention,
            0.95,
            1.05,
        ),
        Check("decoder, control: output change under the shuffled patterns in all layers", mixed.output, least=0.5),
        Check("decoder: output change when the token that matters most is hidden", result.drop, least=0.3),
        Check(
            "decoder: that over the change when the most attended one is",
            result.drop / (result.hidden[result.most_read] or math.nan),
            least=3.0,
        ),
    )


def _decoder_meaning(result: DecoderResult) -> str:
    tokens, weights, read = result.tokens, result.weights, result.most_read
    needed = result.hidden.index(result.drop)
    return (
        "In all layers and heads of the decoder at once the last token's attention can be exchanged for weights that"
        " look elsewhere, and the next word keeps its probability: the picture of the weights is one of many that give"
        f" this output. A shuffle of the same distance changes it by {result.mixed.output:.2f} of 1. Weights do not"
        f" rank importance either: {tokens[read]} gets {weights[read]:.0%} of all attention, and hiding it changes"
        f" the output by {result.hidden[read]:.2f}; {tokens[needed]} gets {weights[needed]:.0%}, and hiding it changes"
        f" the output by {result.drop:.2f}. The alternative was searched for one sentence with the model's weights held"
        " fixed. That a model could be trained to use such patterns is not shown (Wiegreffe and Pinter)."
    )


def _decoder_sections(result: DecoderResult, layers: list[int]) -> tuple[Section, ...]:
    by_layer = [[str(layer), f"{result.alone[layer]:.3f}", f"{result.apart(layer):.2f}"] for layer in layers]
    header = ("layer", "output change, this layer shuffled", "distance of the alternative here")
    of_tokens = zip(result.tokens, result.weights, result.hidden, strict=True)
    by_token = [[token, f"{weight:.1%}", f"{change:.3f}"] for token, weight, change in of_tokens]
    both = torch.cat([result.answers.patterns[0], result.other.patterns[0]], 2).clamp(0, 1).float().numpy()
    rows = ["original", "alternative"]
    maps = [AttentionMap("decoder", layer, rows, result.tokens, both[layer]) for layer in sorted(layers)]
    about = "The last token's attention, original and alternative."
    return (
        _replacements("Decoder", result.other, result.mixed),
        TableSection("Decoder, layers where a shuffle moves the output most", header, by_layer),
        TableSection(
            "From the last token, all layers", ("token", "share of attention", "output change if hidden"), by_token
        ),
        _curve("The search for other patterns, decoder", result.path),
        AttentionSection("Two patterns, one output", about, maps),
    )


def _replacements(model: str, other: Replacement, mixed: Replacement) -> TableSection:
    rows = [
        [name, f"{replacement.attention:.2f}", f"{replacement.output:.4f}"]
        for name, replacement in (("optimized", other), ("shuffled", mixed))
    ]
    title = f"{model}, all layers replaced at once: total variation, 0 to 1"
    return TableSection(title, ("patterns", "attention", "output"), rows)


def _curve(title: str, path: Path) -> Curve:
    lines = {name: [distances[i] for distances in path] for i, name in enumerate(("attention", "output"))}
    return curve(title, "step", "distance from the original, 0 to 1", range(len(path)), lines)
