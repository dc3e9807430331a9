"""Pictures for a text decoder that stays fixed: gated cross-attention, and learned queries (lecture L4).

Flamingo (Alayrac et al. 2022) adds cross-attention and MLPs to a text decoder, each times a gate that begins at 0.
BLIP-2 (Li et al. 2023) trains a few queries that read the picture, and puts what they return before the text.  Here the
image encoder is trained on labels and the text decoder on captions; then both are fixed.  `captions` trains it all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.page import Curve, TableSection
from triptych.text import SEQ2SEQ, word_tokenizer
from triptych_lectures.data.scenes import Scene, scenes
from .bounds import rounded_up
from .drawn_pictures import KINDS, OF_CONTROL, Captioned, CaptionsLab, Words, exact_share, unseen, word_shares
from .frozen_parts import FrozenParts, Gated, Queried, Sizes, Way
from .lab import Check, Clause, Lab, LabResult, Sections, Setup, clause, size
from .small_models import parameters

ALONE, WHOLE, MIXED = "text decoder alone", "all weights trained", ", another picture"
OF_WHOLE = 0.9  # least share of the exact captions of the captioner whose weights are all trained
TRAINED = 0.25  # most of its parameters that a way may train


class FrozenCaptionsLab(Lab):
    name = "frozen-captions"

    scenes: int = size(6000, "scenes to train on", full=16_000)
    judged: int = size(200, "scenes held out", full=300)
    label_steps: int = size(500, "training steps of the image encoder, on labels", full=2500)
    text_steps: int = size(250, "training steps of the text decoder, on captions", full=600)
    steps: int = size(300, "training steps of each way to read pictures", full=1500)
    captioner: int = size(0, "training steps of the captioner that trains every weight; 0 leaves it out", full=1500)
    rows: int = size(64, "scenes of a step")
    queries: int = size(9, "learned queries")

    def run(self, setup: Setup) -> LabResult:
        setup.progress(f"drawing {self.scenes:,} scenes")
        train, held = scenes(self.scenes, setup.seed), scenes(self.judged, setup.seed, held_out=True)
        tokenizer = word_tokenizer([one.caption for one in train], 100, SEQ2SEQ)
        sizes = Sizes(self.label_steps, self.text_steps, self.rows, self.queries)
        parts = FrozenParts(sizes, train, tokenizer, setup)
        captions = [scene.caption for scene in train]
        written = {ALONE: parts.alone(held)}
        ways = [Gated(parts), Queried(parts)]
        for way in ways:
            setup.progress(f"{way.name}: training for {self.steps:,} steps")
            way.losses = way.train(captions, self.steps)
            written[way.name] = way.written(held)
            written[way.name + MIXED] = way.written([*held[1:], held[0]])
        if self.captioner:
            setup.progress(f"{WHOLE}: training for {self.captioner:,} steps")
            whole = CaptionsLab(scenes=self.scenes)
            model = whole.created(parts.tokenizer, setup.seed)
            whole.trained(model, train, captions, self.captioner, setup.seed)
            written[WHOLE] = Captioned(model, held).written
        changed = sum(way.changed() for way in ways)
        conclusion = (
            _fixed(Gated(parts).distance(held), changed),
            *(self._way(one, parts, written, held) for one in ways),
        )
        return self.result(conclusion, self._sections(parts, ways, written, held), small=not setup.full)

    def _way(self, way: Way, parts: FrozenParts, written: dict[str, Words], held: list[Scene]) -> Clause:
        exact, wrong = (exact_share(written[way.name + end], held) for end in ("", MIXED))
        share = way.trained / parts.captioner
        small = Check(f"{way.name}: parameters trained, over those of a captioner", share, most=TRAINED)
        control = Check(f"{way.name}, control: exact from pictures of other scenes", wrong, most=OF_CONTROL)
        begin = f"{way.about}: {way.trained:,} parameters are trained, {share:.0%} of a captioner's."
        end = f"Control: with the pictures of other scenes {wrong:.0%} of the captions are right."
        new = unseen(parts.train, held)
        instead = f"{way.name.capitalize()} did not give the fixed decoder the picture, or not with so few parameters"
        if WHOLE in written:
            of_whole = exact_share(written[WHOLE], held)
            learned = (
                f"Of pairs never seen {exact:.0%} of the captions are right in every word, where training every weight"
                f" reaches {of_whole:.0%}."
            )
            checks = [
                Check(f"{way.name}: exact captions, at least 90% of the captioner's", exact, least=OF_WHOLE * of_whole),
                Check("captioner: exact captions", of_whole, least=0.5),
            ]
        else:
            right, alone = (float(np.mean(word_shares(written[of], held))) for of in (way.name, ALONE))
            learned = (
                f"Of colors, of shapes and of relations {right:.0%} are right on the mean of the three, where the"
                f" text decoder alone has {alone:.0%}."
            )
            share_of_rest = (right - alone) / (1 - alone)
            checks = [Check(f"{way.name}: right words, from the text decoder alone, 0, to all, 1", share_of_rest, 0.5)]
        return clause(f"{begin} {learned} {end}", *checks, small, control, new, instead=instead)

    def _sections(
        self, parts: FrozenParts, ways: Sequence[Way], written: dict[str, Words], held: list[Scene]
    ) -> Sections:
        rows = [
            [name, f"{exact_share(words, held):.1%}", *(f"{share:.1%}" for share in word_shares(words, held))]
            for name, words in written.items()
        ]
        costs = [("image encoder, on labels", parameters(parts.encoder), self.label_steps)]
        costs += [("text decoder, on captions", parameters(parts.text), self.text_steps)]
        costs += [(way.name, way.trained, self.steps) for way in ways]
        costs += [(WHOLE, parts.captioner, self.captioner)]
        yield TableSection("Captions and words right, of pairs never seen", ("model", "caption", *KINDS), rows)
        yield TableSection(
            f"What each stage costs, in steps of {self.rows} scenes",
            ("stage", "parameters trained", "of the captioner's", "steps"),
            [[name, f"{count:,}", f"{count / parts.captioner:.0%}", f"{steps:,}"] for name, count, steps in costs],
        )
        yield Curve("Training", "step", "nats a word", {way.name: way.losses for way in ways}, {})


def _fixed(gate: float, changed: int) -> Clause:
    return clause(
        f"With gates at 0 the logits are those of the text decoder alone (they differ by at most"
        f" {rounded_up(gate, '.1g')}), and after training {changed} of the fixed tensors have changed by a bit.",
        Check("gates at 0: largest difference of logits", gate, most=1e-5),
        Check("fixed tensors that changed", changed, 0, 0),
        instead="What should stay fixed did not",
    )
