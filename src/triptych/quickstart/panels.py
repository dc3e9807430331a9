"""The three panels: the samples they write, how they are evaluated, and the text that their page begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.model import Model
from triptych.train import Job
from triptych.train.metrics import distance
from triptych.train.recipe import DataSettings
from triptych.train.sources import SHAKESPEARE, pairs, texts

Samples = list[tuple[str, str]]  # label, text
WORDS = 12  # most of a line of which a prompt is made


@dataclass(frozen=True)
class HeldOutResult:
    """The evaluation on held-out text: one measure, the same for a baseline, and both in a sentence."""

    measure: str
    value: float
    baseline: str
    baseline_value: float
    sentence: str


@dataclass(frozen=True)
class Panel:
    """One layout on one task.

    `samples` is the heading over what `write` gives for the prompts.  `prompts` are for the plays, and so is `text`,
    what the model in the page begins with; `description` says what the model does with it and what its attention maps
    show.
    """

    name: str
    title: str
    samples: str
    description: str
    prompts: tuple[str, ...]
    write: Callable[[Model, Sequence[str]], Samples]
    evaluate: Callable[[Model, Job], HeldOutResult]
    text: str

    def prompts_for(self, data: DataSettings) -> tuple[str, ...]:
        """The panel's own prompts, and of other data than the plays some made of what is held out."""
        if data.path == SHAKESPEARE:
            return self.prompts
        if self.name == "encoder-decoder":
            return tuple(source for source, _ in pairs(data)[1][: len(self.prompts)])
        lines = [line.split()[:WORDS] for text in texts(data).held_out for line in text.splitlines() if line.strip()]
        if not lines:
            return self.prompts
        if self.name == "decoder":
            return (" ".join(lines[0][: WORDS // 3]),)
        gaps = [[*words[: len(words) // 2], "[MASK]", *words[len(words) // 2 + 1 :]] for words in lines]
        return tuple(" ".join(words) for words in sorted(gaps, key=len, reverse=True)[: len(self.prompts)])

    def text_for(self, data: DataSettings) -> str:
        """The text that the model in the page begins with."""
        return self.text if data.path == SHAKESPEARE else self.prompts_for(data)[0]


# ---------------------------------------------------------------- decoder

OPENING = "\nKING HENRY.\n"
SENTENCE = "She sat by the river bank"


def _continue(model: Model, prompts: Sequence[str]) -> Samples:
    generations = model.generate(prompts, max_new_tokens=110, temperature=0.8, top_p=0.95, seed=1)
    return [
        (f"continues “{prompt.strip()}”", (prompt + one.text).strip("\n"))
        for prompt, one in zip(prompts, generations, strict=True)
    ]


def _nats(model: Model, job: Job) -> HeldOutResult:
    score = job.trainer.last_score()
    value = score.nats_per_character or score.nats_per_token
    unit = "character" if score.nats_per_character else "token"
    uniform = float(np.log(model.spec.vocab))
    sentence = f"{value:.3f} nats per {unit} on held-out text; a uniform guess among the tokens has {uniform:.2f}"
    return HeldOutResult(f"nats per {unit}", value, "uniform", uniform, sentence)


# ---------------------------------------------------------------- encoder

GAPS = (
    "I will not go to [MASK] .",
    "What [MASK] you , my lord ?",
    "The king is [MASK] , long live the king !",
    "Good [MASK] , sir .",
)


def _fill(model: Model, prompts: Sequence[str]) -> Samples:
    rows = zip(prompts, model.fill(prompts, top=3), strict=True)
    filled = [f"{gap}   {' · '.join(f'“{word}” {p:.0%}' for word, p in row[0])}" for gap, row in rows]
    return [("fills in", "\n".join(filled))]


def _filled(model: Model, job: Job) -> HeldOutResult:
    score = job.trainer.last_score()
    sentence = (
        f"{score.accuracy:.1%} of {score.tokens:,} masked words predicted correctly on held-out text; the most "
        f"frequent word each time would be right for {score.baseline:.1%}"
    )
    return HeldOutResult(
        "masked words predicted correctly", score.accuracy, "the most frequent word", score.baseline, sentence
    )


# ---------------------------------------------------------------- encoder-decoder

FOLIO = (
    "I loue",
    "haue giuen",
    "heauen hath",
    "we shall",
    "Pesant slaue",
)  # as long as the passages of its training data
PASSAGES = 200  # held-out passages that are generated for the evaluation


def _modernize(model: Model, prompts: Sequence[str]) -> Samples:
    generations = model.generate(prompts, max_new_tokens=80)
    lines = [f"{old} → {new.text}" for old, new in zip(prompts, generations, strict=True)]
    return [("modernizes", "\n".join(lines))]


def _corrected(model: Model, job: Job) -> HeldOutResult:
    """Levenshtein distance per letter of the modern text: of the model's output, and of the unchanged source."""
    _, held_out = pairs(job.recipe.data)
    length = job.recipe.run.length
    fitting = [pair for pair in held_out if max(len(model.ids([side])[0]) for side in pair) <= length]
    step = max(1, len(fitting) // PASSAGES)
    chosen = fitting[::step][:PASSAGES]
    generations = model.generate([source for source, _ in chosen], max_new_tokens=length + 8)
    letters = sum(len(target) for _, target in chosen)
    ours = sum(distance(new.text, target) for new, (_, target) in zip(generations, chosen, strict=True)) / letters
    copied = sum(distance(source, target) for source, target in chosen) / letters
    sentence = (
        f"{ours:.1%} of letters wrong in {len(chosen)} held-out passages; the unchanged source has {copied:.1%} wrong"
    )
    return HeldOutResult("letters wrong", ours, "copying", copied, sentence)


# ---------------------------------------------------------------- the three

PANELS = {
    panel.name: panel
    for panel in (
        Panel(
            "decoder",
            "A decoder that writes",
            "Generated text",
            "It reads a text character by character and predicts the next one.  Type, let it write, cut parts out.  "
            "Each row of a map shows how one character attends to those before it; later ones are masked.",
            (OPENING,),
            _continue,
            _nats,
            SENTENCE,
        ),
        Panel(
            "encoder",
            "An encoder that fills in masked words",
            "Predictions for masked words",
            "It reads a whole text at once with some words masked, and predicts those.  Type, press a word to mask it, "
            "cut parts out.  Each row of a map shows how one word attends to the words on both sides of it.",
            GAPS,
            _fill,
            _filled,
            GAPS[2],
        ),
        Panel(
            "encoder-decoder",
            "An encoder-decoder that modernizes spelling",
            "Passages in modern spelling",
            "Its encoder reads a passage as the First Folio of 1623 spells it, its decoder writes it in modern "
            "spelling.  Type a source and let it write.  The cross-attention maps are alignments: they show which "
            "letters of the source each letter of the output attends to.",
            FOLIO,
            _modernize,
            _corrected,
            FOLIO[2],
        ),
    )
}
