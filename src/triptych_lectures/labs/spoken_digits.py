"""Does a model in the shape of Whisper, trained from nothing, write down digits spoken by voices that it never heard?
(Lectures L1 and L4: an encoder reads another kind of input, and cross-attention joins it to the text.)

Behind each sound comes silence, in which the decoder finds the end.  Whisper's goes on to the end of its window, which
would be half of the work of a full run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.media import audio
from triptych.model import create
from triptych.page import AttentionMap, AttentionSection, Curve
from triptych.text import SPEECH, WhisperTokens, with_whisper_tokens, word_tokenizer
from triptych.train import Example, OptimizerSettings
from triptych.train.audio_records import Speech
from triptych.train.data import RandomUse, random_numbers
from triptych.train.metrics import word_error_rate
from triptych.train.objectives import Ids
from triptych_lectures.data.digit_recordings import DIGITS, HEARD, UNHEARD, Clips, DigitRecorder, Recording, SpokenWords
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import Points, fit, share_table

RIGHT = 0.95  # of the words, by the claim
SPARE = 0.1  # three standard deviations of a share of 200 words, of which the best constant text has a third right
MARGIN = 0.04  # seconds before and behind a word that count as it: two positions of the encoder


class SpokenDigitsLab(Lab):
    name = "spoken-digits"

    steps: int = size(240, "training steps", full=1000)
    control: int = size(120, "training steps of the control, whose transcripts are shuffled", full=600)
    rows: int = size(16, "recordings of a step", full=16)
    width: int = size(64, "width of the model", full=96)
    mels: int = size(32, "mel bands of a frame", full=40)
    seconds: float = size(1.6, "seconds of sound that the model reads at once", full=4.8)
    silence: float = size(1.6, "seconds of silence behind a sound, at most to the end of what is read", full=0.2)
    least: int = size(1, "fewest words of a recording", full=3)
    most: int = size(2, "most words of a recording", full=7)
    digits: int = size(5, "different words, from zero on", full=10)
    speakers: int = size(80, "voices at a speed and a pitch in training", full=160)
    unheard: int = size(24, "voices at a speed and a pitch that are tested", full=24)
    tested: int = size(150, "recordings that are tested", full=200)
    noise: tuple[float, ...] = size((10.0, 30.0), "least and greatest signal-to-noise ratio, in dB")
    lr: float = size(3e-3, "learning rate of AdamW's share")
    muon: float = size(6e-3, "learning rate of Muon's share")

    def findings(self, setup: Setup) -> Findings:
        setup.progress(f"synthesizing the words of {self.speakers + self.unheard} speakers")
        random = np.random.default_rng(setup.seed)
        speakers = HEARD.draw(self.speakers, random), UNHEARD.draw(self.unheard, random)
        spoken, words = SpokenWords.cached(), DIGITS[: self.digits]
        heard, unheard = (tuple(spoken.vocabulary(side, words).values()) for side in speakers)
        # voices, speeds and pitches of both sides
        shared = set.intersection(*({of for one in side for of in vars(one).items()} for side in speakers))
        trained = Digits(self, heard, setup.seed)
        losses = trained.trained(setup)
        control = Digits(replace(self, steps=self.control), heard, setup.seed)
        control_losses = control.trained(setup, shuffled=True)
        setup.progress(f"transcribing {self.tested} recordings of voices that it never heard")
        random = np.random.default_rng((setup.seed, 1))
        chosen, tested = (trained.recordings(clips, self.tested, random) for clips in (heard, unheard))
        right, known, shuffled = trained.right(tested), trained.right(chosen), control.right(tested)
        aligned = trained.aligned(chosen, tested)
        blind = best_constant([one.text for one in tested])
        more, above = aligned.own - aligned.other, shuffled - blind
        own = [_last(losses[: self.control]), _last(control_losses)]  # after as many steps
        yield clause(
            "The encoder reads mel frames instead of tokens, and nothing else is new. Of voices, speeds and pitches"
            f" that training did not have, {right:.0%} of the words are written right.",
            Check("words right, of voices, speeds and pitches never heard", right, least=RIGHT),
            Check("voices, speeds and pitches of these that training has", len(shared), most=0),
            instead="It was not seen to write the words of voices that it never heard",
        )
        yield clause(
            "Cross-attention finds the word in the sound, though no training record says when a word is spoken: in"
            f" {aligned.own:.0%} of the cases the strongest weight is at most {MARGIN:g} s from the word it writes;"
            f" control: as near to another word of the recording, the mean of the others, in {aligned.other:.0%}.",
            Check("strongest attention on the word it writes, less on another one", more, least=0.5),
            instead="Cross-attention is not on the word that is written",
        )
        yield clause(
            f"Control: with transcripts of other sounds, {shuffled:.0%} of the words are right; the best constant"
            f" text has {blind:.0%}. After {self.control:,} steps its loss is {own[1]:.2f} nats a token, that of"
            f" the true transcripts {own[0]:.2f}.",
            Check("the same trained on shuffled transcripts, above the best constant text", above, most=SPARE),
            Check("loss after as many steps: true transcripts, over shuffled ones", own[0] / own[1], most=0.9),
            instead="Shuffled transcripts teach as much",
        )
        shares = {
            "voices never heard": right,
            "voices of the training": known,
            "voices never heard, trained on shuffled transcripts": shuffled,
            "the constant text with the most words right": blind,
        }
        lies = {
            f"at most {MARGIN:g} s from the word that is written": aligned.own,
            "as near to another word, the mean of the others": aligned.other,
            "later than for the word before": aligned.later,
        }
        where = f"Strongest attention of decoder layer {aligned.layer}, which was chosen on voices of the training"
        yield share_table("Words right", ("whose", "share"), shares)
        yield share_table(where, ("where it lies", "share"), lies)
        yield trained.map(tested[0], aligned.layer)
        yield Curve("Training", "step", "nats a token", {"transcripts": losses, "shuffled": control_losses}, {})


@dataclass(frozen=True, eq=False)
class DrawnRecordings:
    """New recordings of the same words in each step, the shortest ones first: a model learns where to listen from
    single words.  With `shuffled`, each sound has the transcript of the next one of its step."""

    digits: Digits
    shuffled: bool = False

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        random, digits = random_numbers(seed, RandomUse.OFFSETS, step), self.digits
        drawn = digits.recordings(digits.clips, rows, random, self.words(step))
        texts = [one.text for one in drawn]
        if self.shuffled:
            texts = [*texts[1:], *texts[:1]]
        return [
            digits.speech.example(text, [digits.ids[word] for word in text.split()], frames)
            for text, frames in zip(texts, digits.frames(drawn), strict=True)
        ]

    def words(self, step: int) -> tuple[int, int]:
        """The fewest and the most words in `step`: from one to all in the first half of the training."""
        sizes = self.digits.sizes
        share = min(1.0, step / (sizes.steps / 2))
        return max(1, round(share * sizes.least)), max(1, round(share * sizes.most))

    def held_out_rows(self) -> Iterator[Example]:
        return iter(())

    def targets(self) -> Ids:
        return np.array([*self.digits.ids.values(), self.digits.speech.end], dtype=np.int32)


class WordAttention(NamedTuple):
    """How often the strongest cross-attention of `layer` lies on the word that is written (`own`), on each other word
    of the recording (`other`), and later than for the word before."""

    layer: int
    own: float
    other: float
    later: float


class Digits:
    """A model of two encoder and two decoder layers, how its rows are made, and the sounds that it is trained on; `ids`
    are the tokens of the words."""

    def __init__(self, sizes: SpokenDigitsLab, clips: tuple[Clips, ...], seed: int) -> None:
        tokenizer = with_whisper_tokens(word_tokenizer(DIGITS[: sizes.digits], 64, SPEECH))
        tokens = WhisperTokens.of(tokenizer, {}, tokenizer.vocab_size)
        config = {
            "model_type": "whisper", "d_model": sizes.width, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * sizes.width,
            "decoder_ffn_dim": 2 * sizes.width, "num_mel_bins": sizes.mels, "dropout": 0.0,
            "max_source_positions": round(sizes.seconds * audio.RATE / audio.HOP / 2),
            "max_target_positions": sizes.most + 8, "vocab_size": tokenizer.vocab_size, "bos_token_id": tokens.end,
            "eos_token_id": tokens.end, "pad_token_id": tokenizer.pad_id, "decoder_start_token_id": tokens.start,
            "init_std": sizes.width**-0.5,
        }  # fmt: skip
        self.sizes, self.clips, self.model = sizes, clips, create(config, tokenizer, seed=seed)
        self.speech = Speech.of(self.model.module, tokens)
        self.ids = {word: self.model.inputs.words.encode(word)[0] for word in DIGITS[: sizes.digits]}

    def recordings(
        self, clips: tuple[Clips, ...], count: int, random: np.random.Generator, words: tuple[int, int] | None = None
    ) -> list[Recording]:
        """Of any of these speakers, with the lab's numbers of words or with `words`."""
        (least, most), sizes = self.sizes.noise, self.sizes
        words = words or (sizes.least, sizes.most)
        recorder = DigitRecorder(words, noise=(least, most), seconds=sizes.seconds)
        return [recorder(clips[random.integers(len(clips))], random) for _ in range(count)]

    def trained(self, setup: Setup, *, shuffled: bool = False) -> Points:
        """Train the model in place; the losses."""
        sizes = self.sizes
        setup.progress(f"training for {sizes.steps} steps{' on shuffled transcripts' if shuffled else ''}")
        return fit(
            self.model.module, DrawnRecordings(self, shuffled), rows=sizes.rows, length=sizes.most + 8,
            steps=sizes.steps, seed=setup.seed,
            optimizer=OptimizerSettings(name="muon", lr=sizes.lr, muon_lr=sizes.muon),
        )  # fmt: skip

    def frames(self, recordings: Sequence[Recording]) -> list[Tensor]:
        """The mel frames of each sound, as in training."""
        return [self.speech.frames(one.sound, self.sizes.silence) for one in recordings]

    def right(self, recordings: Sequence[Recording]) -> float:
        """1 - the word error rate of what the model writes."""
        written = self.speech.written(self.model.module, self.frames(recordings), self.sizes.most + 4)
        texts = [self.model.inputs.words.decode(ids) for ids in written]
        return 1 - word_error_rate(texts, [one.text for one in recordings])

    def patterns(self, recordings: Sequence[Recording]) -> list[list[Tensor]]:
        """For each decoder layer, for each recording, the mean of the heads' cross-attention where each word of the
        true transcript is predicted: `[words, positions]`."""
        read = [self.speech.row(self.model.inputs.words.encode(one.text)).ids.tolist() for one in recordings]
        trace = self.model.trace(self.frames(recordings), read, read=["decoder.blocks.*.cross.pattern"])
        first = len(self.speech.prompt) - 1
        return [[pattern.mean(0)[first:-1] for pattern in trace[site]] for site in trace]

    def aligned(self, chosen: Sequence[Recording], tested: Sequence[Recording]) -> WordAttention:
        """Of `tested`, in the layer that is best for `chosen`."""
        layers = [_hits(layer, chosen)[0] for layer in self.patterns(chosen)]
        layer = int(np.argmax(layers))
        return WordAttention(layer, *_hits(self.patterns(tested)[layer], tested))

    def map(self, one: Recording, layer: int) -> AttentionSection:
        """Where the model looks while it writes each word, every fifth of a second."""
        pattern, words = self.patterns([one])[layer][0].float(), [word for word, _, _ in one.words]
        step = 10
        last = -(-len(one.sound) // (2 * audio.HOP * step)) * step
        binned = torch.stack([part.sum(-1) for part in pattern[:, :last].split(step, dim=-1)], dim=-1)
        times = [f"{i * step * 2 * audio.HOP / audio.RATE:.1f}" for i in range(binned.shape[-1])]
        looks = AttentionMap("cross", layer, words, times, binned[None].numpy())
        return AttentionSection("Where it looks", "Rows are words to write, columns seconds of the sound.", [looks])


def _last(losses: Points) -> float:
    """The mean of the last twenty steps."""
    return float(np.mean([loss for _, loss in losses[-20:]]))


def best_constant(texts: Sequence[str]) -> float:
    """The share of words right if one of these texts is written for all of them, whichever does best: more than a model
    that hears nothing can expect."""
    return max(1 - word_error_rate([text] * len(texts), texts) for text in set(texts))


def _hits(patterns: Sequence[Tensor], recordings: Sequence[Recording]) -> tuple[float, float, float]:
    """Of the words of recordings with several: the share whose strongest weight lies on them, the same for the other
    words of the recording in their place, and, of all but the first words, the share whose strongest weight is later
    than that of the word before."""
    own, others, later = list[float](), list[float](), list[float]()
    for pattern, one in zip(patterns, recordings, strict=True):
        if len(one.words) < 2:
            continue
        peaks = ((pattern.argmax(-1).double() + 0.5) * 2 * audio.HOP / audio.RATE).tolist()
        for i, peak in enumerate(peaks):
            on = [float(begin - MARGIN <= peak <= end + MARGIN) for _, begin, end in one.words]
            own.append(on.pop(i))
            others.append(float(np.mean(on)))
        later += [float(b > a) for a, b in pairwise(peaks)]
    return float(np.mean(own)), float(np.mean(others)), float(np.mean(later))
