"""Does a pattern of attention explain the output?  (Lectures L0 1.3 and L4 12.8; Jain and Wallace 2019, "Attention is
not Explanation"; Wiegreffe and Pinter 2019, "Attention is not not Explanation")

A classifier is trained on a task whose deciding token is known.  A full run, or one with a model, also looks at the
next word of a pretrained decoder.
"""

import math

import torch

from triptych import nn
from triptych.errors import InputError
from triptych.page import AttentionMap, AttentionSection, Curve, Section, TableSection
from . import other_patterns as patterns
from .bounds import rounded_up
from .generated_tasks import GeneratedTask, ShuffledTask, TrainedRun, TrainingBudget, held_out_rows, right, train
from .lab import Check, Conclusion, Lab, LabResult, Setup, clause, size
from .other_patterns import Answers, AskedKind, ClassifierAnswers, Path, Replacement
from .pretrained import decoder
from .small_models import curve, encoder, share_table

ModelResult = tuple[Conclusion, tuple[Section, ...]]
TEXT = "When Mary and John went to the store, John gave a drink to"  # Wang et al. 2022: it ends in "Mary"


class NotExplanationLab(Lab):
    name = "not-explanation"

    kinds: int = size(8, "kinds of which the classifier is asked for one", most="length")
    values: int = size(4, "values that a kind may have, two or more, which are the labels", least=2)
    length: int = size(16, "tokens of a row beside the first, at least as many as kinds")
    width: int = size(32, "width of the classifier's residual stream", multiple="heads")
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

    @property
    def task(self) -> AskedKind:
        return AskedKind(self.kinds, self.values, self.length)

    def run(self, setup: Setup) -> LabResult:
        """0.4 and 0.3 of 1 are far, 0.05 is unchanged, and 0.5, or half of the rows, is most."""
        setup.progress(f"a classifier: {self.trained} steps, and as many with shuffled labels")
        conclusion, sections = self._of_classifier(setup.seed)
        if whole := setup.full or setup.model is not None:
            of_decoder, more = self._of_decoder(setup)
            conclusion, sections = conclusion + of_decoder, sections + more
        return self.result(conclusion, sections, small=not whole)

    def _of_classifier(self, seed: int) -> ModelResult:
        """Train the classifier, search for other patterns, shuffle them, and rank the tokens by four measures."""
        module, _ = _trained(self, self.task, seed)
        _, control = _trained(self, ShuffledTask(self.task), seed)
        rows, random = held_out_rows(self.task, self.tested, seed), torch.Generator().manual_seed(seed)
        share, rows = right(module, rows), rows[: self.searched]
        answers = ClassifierAnswers(module, rows)
        steps, rate = self.search_steps, self.search_rate
        other, path = patterns.search(answers, random, steps=steps, rate=rate, faithful=self.search_faithful)
        mixed = patterns.shuffled(answers, other.attention, random)
        alone = []  # the change of the output when one layer is shuffled
        for layer in range(self.layers):
            one = answers.patterns.clone()
            one[:, layer] = mixed.patterns[:, layer]
            alone.append(patterns.replaced(answers, one).output)
        changed = float(patterns.distances(answers.with_patterns(other.patterns).softmax(-1), answers.output).max())
        deciding, hidden = torch.tensor([self.task.deciding(row) for row in rows]), answers.ablations()
        scores = {
            "hiding it": hidden,
            "gradient": answers.gradients(),
            # [R, T]: the first token's attention to each token, the mean over layers and heads
            "attention": answers.patterns[:, :, :, 0].mean((1, 2)),
            "attention of the alternative": other.patterns[:, :, :, 0].mean((1, 2)),
        }
        # The first token asks: it is read in every row, and is not among those that are ranked.
        named = {by: float((of[:, 1:].argmax(-1) + 1 == deciding).double().mean()) for by, of in scores.items()}
        needed = float(hidden.gather(1, deciding[:, None]).mean())
        most = patterns.apart_in(answers, other.patterns, alone.index(max(alone)))
        where = "where a shuffle alone moves the output most"
        by_attention, by_other = named["attention"], named["attention of the alternative"]
        ahead, ratio = by_attention - by_other, mixed.attention / other.attention
        conclusion = (
            clause(
                f"A classifier of {self.layers} layers answers which value the kind that is asked for has, {share:.0%}"
                f" right. All its patterns can be exchanged at once for others, at a mean total variation distance of"
                f" {other.attention:.2f} (0 to 1), and its answers stay: they are {other.output:.1g} away, at most"
                f" {rounded_up(changed, '.1g')}.",
                Check("classifier: right on new rows", share, least=0.9),
                Check("distance of the alternative patterns, mean over all layers (0 to 1)", other.attention, 0.4),
                Check(f"distance of the first token's alternative {where}", most, least=0.3),
                Check("output change under the alternative in all layers (0 to 1)", other.output, most=0.05),
                instead="The classifier did not learn, or its answers do not stay under other patterns",
            ),
            clause(
                f"Control: shuffled patterns at a distance of {mixed.attention:.2f} change the answers by"
                f" {mixed.output:.2f}; from shuffled labels a classifier learns"
                f" {max(0.0, control.learned):.0%} of what can be learned.",
                Check("control: distance of the shuffled patterns over that of the alternative", ratio, most=1.05),
                Check("control: output change under the shuffled patterns in all layers", mixed.output, least=0.5),
                Check("control: learned from shuffled labels", control.learned, most=0.1),
                instead="Any patterns give this output, or any labels can be learned",
            ),
            clause(
                f"The token that decides is known here. Hiding tokens one by one names it in {named['hiding it']:.0%}"
                f" of the rows, the most attention in {by_attention:.0%}, and the most attention of the alternative in"
                f" {by_other:.0%}.",
                Check("output change when the deciding token is hidden", needed, least=0.5),
                Check("rows in which hiding tokens one by one names the deciding token", named["hiding it"], 0.5),
                Check("rows in which the most attention names it, less those of the alternative's", ahead, least=0.2),
                instead="The token that decides is not the one that matters, or both attentions name it alike",
            ),
        )
        layers = [
            [str(layer), f"{moved:.3f}", f"{patterns.apart_in(answers, other.patterns, layer):.2f}"]
            for layer, moved in enumerate(alone)
        ]
        header = ("layer", "output change, this layer shuffled", "distance of the alternative")
        sections = (
            _replacements("Classifier", other, mixed),
            TableSection("Classifier, by layer", header, layers),
            share_table("Rows in which the deciding token is named", ("by", "share"), named, ".0%"),
            _curve("The search for other patterns, classifier", path),
        )
        return conclusion, sections

    def _of_decoder(self, setup: Setup) -> ModelResult:
        """Search for other patterns of the last token, shuffle them, and hide one token after the other."""
        model = decoder(setup)
        if model.spec.layout != "decoder":
            raise InputError(f"this lab predicts the next word; it needs a decoder, not an {model.spec.layout}")
        [ids] = model.ids([self.text])
        if len(ids) < 3:
            raise InputError(f"size text: {self.text!r} is {len(ids)} tokens; give three or more")
        last = Answers(model, [ids], at=len(ids) - 1, query=len(ids) - 1)
        layers, random = range(last.patterns.shape[1]), torch.Generator().manual_seed(setup.seed)
        setup.progress(f"searching for other patterns in all {len(layers)} layers of the decoder, {self.steps} steps")
        other, path = patterns.search(last, random, steps=self.steps, rate=self.rate, faithful=self.faithful)
        setup.progress("shuffling the decoder's patterns")
        mixed = patterns.shuffled(last, other.attention, random)
        alone = [float(last.moved([last.edit(mixed.patterns, layer)])) for layer in layers]
        sensitive = sorted(layers, key=lambda layer: -alone[layer])[: self.sensitive]
        apart = {layer: patterns.apart_in(last, other.patterns, layer) for layer in sensitive}
        setup.progress("hiding one token of the decoder after the other")
        hidden = [float(last.moved_without(key)) for key in range(len(ids))]
        tokens = [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)
        weights = last.patterns[0, :, :, 0].mean((0, 1)).tolist()
        drop, read = max(hidden), weights.index(max(weights))  # the largest change, and the token that is read most
        needed, over_read = hidden.index(drop), drop / (hidden[read] or math.nan)
        where = f"in the {len(apart)} layers where a shuffle alone moves the output most"
        ratio = mixed.attention / other.attention
        conclusion = (
            clause(
                "In all layers and heads of the pretrained decoder at once the last token's attention can be exchanged"
                f" for weights {other.attention:.2f} of 1 away, and the next word keeps its probability: it changes by"
                f" {other.output:.3f}. Control: a shuffle by {mixed.attention:.2f} changes it by {mixed.output:.2f}.",
                Check("decoder: distance of the alternative patterns, mean over all layers", other.attention, 0.4),
                Check(f"decoder: distance {where}", sum(apart.values()) / len(apart), least=0.3),
                Check("decoder: output change under the alternative in all layers", other.output, most=0.05),
                Check(
                    "decoder, control: distance of the shuffled patterns over that of the alternative",
                    ratio,
                    0.95,
                    1.05,
                ),
                Check("decoder, control: output change under the shuffled patterns in all layers", mixed.output, 0.5),
                instead="The decoder's next word does not stay under other patterns alone",
            ),
            clause(
                f"Weights do not rank importance: {tokens[read]} gets {weights[read]:.0%} of all attention, and hiding"
                f" it changes the output by {hidden[read]:.2f}; {tokens[needed]} gets {weights[needed]:.0%}, and hiding"
                f" it changes the output by {drop:.2f}.",
                Check("decoder: output change when the token that matters most is hidden", drop, least=0.3),
                Check("decoder: that over the change when the most attended one is", over_read, least=3.0),
                instead="The token with the most attention is among those that matter most",
            ),
        )
        by_layer = [[str(layer), f"{alone[layer]:.3f}", f"{distance:.2f}"] for layer, distance in apart.items()]
        header = ("layer", "output change, this layer shuffled", "distance of the alternative here")
        of_tokens = zip(tokens, weights, hidden, strict=True)
        by_token = [[token, f"{weight:.1%}", f"{change:.3f}"] for token, weight, change in of_tokens]
        columns = ("token", "share of attention", "output change if hidden")
        both = torch.cat([last.patterns[0], other.patterns[0]], 2).clamp(0, 1).float().numpy()
        shown = ["original", "alternative"]
        maps = [AttentionMap("decoder", layer, shown, tokens, both[layer]) for layer in sorted(sensitive)]
        about = "The last token's attention, original and alternative."
        sections = (
            _replacements("Decoder", other, mixed),
            TableSection("Decoder, layers where a shuffle moves the output most", header, by_layer),
            TableSection("From the last token, all layers", columns, by_token),
            _curve("The search for other patterns, decoder", path),
            AttentionSection("Two patterns, one output", about, maps),
        )
        return conclusion, sections


def _trained(sizes: NotExplanationLab, task: GeneratedTask, seed: int) -> tuple[nn.Transformer, TrainedRun]:
    """Blocks in which every token sees every other, without positions: the task does not need them."""
    module = encoder(sizes.task.blank + 1, sizes.width, sizes.heads, sizes.layers, seed)
    budget = TrainingBudget(sizes.trained, sizes.rows, sizes.learning_rate, shape="linear")
    return module, train(module, task, budget, seed)


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
