"""Pictures for a text decoder that stays fixed: gated cross-attention, and learned queries (lecture L4).

Flamingo (Alayrac et al. 2022) adds cross-attention and MLPs to a text decoder, each times a gate that begins at 0.
BLIP-2 (Li et al. 2023) trains a few queries that read the picture, and puts what they return before the text.  Here the
image encoder is trained on labels and the text decoder on captions; then both are fixed.  `captions` trains it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from triptych import nn
from triptych.attention import Rows
from triptych.model import create
from triptych.nn.inputs import flat
from triptych.nn.part import Taps
from triptych.page import Curve, TableSection
from triptych.spec import (
    BlockSpec,
    EmbedSpec,
    LearnedSpec,
    ModelSpec,
    NormsSpec,
    RMSNormSpec,
    StackSpec,
    attention,
    full,
    mlp,
)
from triptych.spec.model import ClassHeadSpec
from triptych.spec.parts import LinearSpec
from triptych.text import SEQ2SEQ, Tokenizer, word_tokenizer
from triptych.train import Example, Optimizer, OptimizerSettings, Schedule
from triptych.train.data import EpochRows
from triptych.train.image_tasks import in_memory, labelled_images
from triptych.train.labelled import SeveralLoss
from triptych_lectures.data.scenes import COLOURS, SHAPES, Scene, scenes
from .drawn_pictures import (
    HEADS,
    HIDDEN,
    KINDS,
    LONGEST,
    OF_CONTROL,
    OPTIMIZER,
    POSITIONS,
    PREPARATION,
    SMOOTHING,
    Captioned,
    CaptionsLab,
    Words,
    caption_rows,
    exact_share,
    word_shares,
)
from .lab import Check, Clause, Lab, LabResult, Setup, clause, size
from .small_models import Points, fit, parameters

WIDTH = CaptionsLab().width
WIDTHS = 4, 12  # numbers of a head of cross-attention, in the two blocks
CONTEXT = 2 * LONGEST  # tokens of two captions, each behind a start token
FAST = OPTIMIZER.model_copy(update={"muon_lr": 2e-2})  # of the encoder and the queries
OF_GATES = OptimizerSettings(name="muon", lr=0.1, muon_lr=2e-2, weight_decay=0.0)  # gates go a long way
LABELS = [f"{place} {word}" for place in ("first", "second") for word in (*COLOURS, *SHAPES)] + ["above"]
ALONE, GATED, QUERIES, WHOLE = "text decoder alone", "gated cross-attention", "learned queries", "all weights trained"
MIXED = ", shuffled captions"
OF_WHOLE = 0.9  # least share of the exact captions of the captioner whose weights are all trained
TRAINED = 0.25  # most of its parameters that a way may train


class FrozenCaptionsLab(Lab):
    name = "frozen-captions"

    scenes: int = size(6000, "scenes to train on", full=16_000)
    judged: int = size(200, "scenes held out", full=300)
    label_steps: int = size(500, "training steps of the image encoder, on labels", full=2500)
    text_steps: int = size(250, "training steps of the text decoder, on captions", full=600)
    steps: int = size(300, "training steps of each way to read pictures", full=3000)
    control: int = size(50, "of each way's control, on shuffled captions", full=200)
    captioner: int = size(0, "training steps of the captioner that trains every weight; 0 leaves it out", full=1500)
    rows: int = size(64, "scenes of a step")
    queries: int = size(9, "learned queries")

    def run(self, setup: Setup, *, shuffled: bool = False) -> LabResult:
        """The lab; with `shuffled`, every caption is trained beside the picture of another scene."""
        setup.progress(f"drawing {self.scenes:,} scenes")
        train, held = scenes(self.scenes, setup.seed), scenes(self.judged, setup.seed, held_out=True)
        parts = FrozenParts(self, train, word_tokenizer([one.caption for one in train], 100, SEQ2SEQ), setup)
        mixed = [train[i].caption for i in np.random.default_rng(setup.seed).permutation(len(train))]
        captions = mixed if shuffled else [scene.caption for scene in train]
        written = {ALONE: parts.alone(held)}
        ways: list[Way] = []
        for way in (Gated, Queried):
            for end, texts, steps in ((MIXED, mixed, self.control), ("", captions, self.steps)):
                setup.progress(f"{way.name}{end}: training for {steps:,} steps")
                one = way(parts)
                one.losses = one.train(texts, steps)
                written[way.name + end] = one.written(held)
            ways.append(one)
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
        control = Check(f"{way.name}, control: exact after training on shuffled captions", wrong, most=OF_CONTROL)
        begin = f"{way.about}: {way.trained:,} parameters are trained, {share:.0%} of a captioner's."
        end = f"Control: trained for {self.control:,} steps on shuffled captions, {wrong:.0%} of the captions."
        instead = f"{way.name.capitalize()} did not give the fixed decoder the picture"
        if WHOLE in written:
            of_whole = exact_share(written[WHOLE], held)
            return clause(
                f"{begin} Of pairs never seen {exact:.0%} of the captions are right in every word, where training every"
                f" weight reaches {of_whole:.0%}. {end}",
                Check(f"{way.name}: exact captions, over those of the captioner", exact / of_whole, least=OF_WHOLE),
                small,
                control,
                instead=instead,
            )
        right, alone = (float(np.mean(word_shares(written[of], held))) for of in (way.name, ALONE))
        learned = (right - alone) / (1 - alone)
        return clause(
            f"{begin} Of colors, shapes and relations {right:.0%} are right, where the text decoder alone has"
            f" {alone:.0%}. {end}",
            Check(f"{way.name}: right words, from the text decoder alone, 0, to all, 1", learned, least=0.5),
            small,
            control,
            instead=instead,
        )

    def _sections(
        self, parts: FrozenParts, ways: Sequence[Way], written: dict[str, Words], held: list[Scene]
    ) -> tuple[TableSection, TableSection, Curve]:
        rows = [
            [name, f"{exact_share(words, held):.1%}", *(f"{share:.1%}" for share in word_shares(words, held))]
            for name, words in written.items()
        ]
        costs = [("image encoder, on labels", parameters(parts.encoder), self.label_steps)]
        costs += [("text decoder, on captions", parameters(parts.text), self.text_steps)]
        costs += [(way.name, way.trained, self.steps) for way in ways]
        costs += [(WHOLE, parts.captioner, self.captioner)]
        return (
            TableSection("Captions and words right, of pairs never seen", ("model", "caption", *KINDS), rows),
            TableSection(
                f"What each stage costs, in steps of {self.rows} scenes",
                ("stage", "parameters trained", "of the captioner's", "steps"),
                [[name, f"{count:,}", f"{count / parts.captioner:.0%}", f"{steps:,}"] for name, count, steps in costs],
            ),
            Curve("Training", "step", "nats a word", {way.name: way.losses for way in ways}, {}),
        )


def _fixed(gate: float, changed: int) -> Clause:
    return clause(
        f"With gates at 0 the logits are those of the text decoder alone (they differ by at most {gate:.1g}), and after"
        f" training {changed} of the fixed tensors have changed by a bit.",
        Check("gates at 0: largest difference of logits", gate, most=1e-5),
        Check("fixed tensors that changed", changed, 0, 0),
        instead="What should stay fixed did not",
    )


@dataclass(frozen=True)
class FrozenParts:
    """The image encoder and the text decoder, each trained alone, and what both ways read."""

    lab: FrozenCaptionsLab
    train: Sequence[Scene]
    tokenizer: Tokenizer
    setup: Setup

    @cached_property
    def spec(self) -> ModelSpec:
        """Of the captioner of `captions`, with a text decoder that reads two captions."""
        spec = CaptionsLab().created(self.tokenizer, 0).spec
        assert spec.decoder is not None
        return replace(spec, decoder=replace(spec.decoder, embed=self.embed(CONTEXT)), context=CONTEXT)

    @cached_property
    def captioner(self) -> int:
        """Parameters of the captioner."""
        return parameters(CaptionsLab().created(self.tokenizer, 0).module)

    @property
    def stack(self) -> StackSpec:
        assert self.spec.decoder is not None
        return self.spec.decoder

    @property
    def block(self) -> BlockSpec:
        """Of the captioner's decoder, with cross-attention."""
        (block,) = self.stack.blocks
        assert isinstance(block, BlockSpec)
        return block

    @property
    def blocks(self) -> tuple[BlockSpec, BlockSpec]:
        """Of the text decoder.  The second has no MLP, so that a gated one finds its place there."""
        first = replace(self.block, cross=None, cross_norm=None)
        return first, replace(first, mlp=None, mlp_norm=None)

    def embed(self, positions: int | None, vocab: int | None = None) -> EmbedSpec:
        """A table of `vocab` vectors, by default the tokenizer's, with learned positions where a number is given."""
        position = None if positions is None else LearnedSpec(length=positions, width=WIDTH)
        return EmbedSpec(vocab=vocab or self.tokenizer.vocab_size, width=WIDTH, position=position)

    @cached_property
    def pixels(self) -> Tensor:
        return pixels_of(self.train)

    @cached_property
    def fixed(self) -> dict[str, nn.Transformer]:
        return {"encoder": self.encoder, "decoder": self.text}

    @cached_property
    def encoder(self) -> nn.Transformer:
        """A ViT trained on labels: color and shape of the first and of the second object, and how they lie."""
        lab = self.lab
        head = ClassHeadSpec(pool="mean", classes=LinearSpec(inputs=WIDTH, outputs=len(LABELS), bias=True))
        module = nn.new(
            replace(self.spec, family="vit", decoder=None, head=head, ties={}, context=None), self.setup.seed
        )
        with torch.no_grad():
            module.get_parameter("encoder.embed.position.weight").mul_(POSITIONS)
        goals = np.array([[label in _labels(scene) for label in LABELS] for scene in self.train], dtype=np.int64)
        images = [in_memory(scene.pixels, PREPARATION) for scene in self.train]
        data = EpochRows(tuple(labelled_images(module, images, goals, SeveralLoss(tuple(LABELS)))))
        self.setup.progress(f"training the image encoder on labels for {lab.label_steps:,} steps")
        fit(module, data, rows=lab.rows, length=LONGEST, steps=lab.label_steps, seed=self.setup.seed, optimizer=FAST)
        return module.requires_grad_(requires_grad=False)

    @cached_property
    def text(self) -> nn.Transformer:
        """A decoder trained on captions alone: a third of its documents are a caption, the others one caption twice,
        so that it learns to say again what stands before."""
        decoder, lab = replace(self.stack, blocks=self.blocks), self.lab
        module = nn.new(replace(self.spec, family="gpt2", encoder=None, decoder=decoder), self.setup.seed)
        random = np.random.default_rng(self.setup.seed)
        rows = EpochRows(tuple(self._document(scene, random, twice=i % 3 > 0) for i, scene in enumerate(self.train)))
        plain = OPTIMIZER.model_copy(update={"weight_decay": 0.0})
        self.setup.progress(f"training the text decoder on captions for {lab.text_steps:,} steps")
        fit(module, rows, rows=lab.rows, length=CONTEXT, steps=lab.text_steps, seed=self.setup.seed, optimizer=plain)
        return module.requires_grad_(requires_grad=False)

    def _document(self, scene: Scene, random: np.random.Generator, *, twice: bool) -> Example:
        words = self.tokenizer.encode(scene.caption)
        read, targets = self.read(words, random), [*words, self.end]
        if not twice:
            return _example(read, targets, 0)
        return _example([self.start, *words, *read], [*words, self.start, *targets], len(words) + 1)

    @property
    def start(self) -> int:
        assert self.spec.ids.start is not None
        return self.spec.ids.start

    @property
    def end(self) -> int:
        assert self.tokenizer.eos_id is not None
        return self.tokenizer.eos_id

    @property
    def hidden(self) -> int:
        """The token that is read in place of a hidden word."""
        assert self.tokenizer.unk_id is not None
        return self.tokenizer.unk_id

    def read(self, words: Sequence[int], random: np.random.Generator) -> list[int]:
        """What a decoder reads in training: the start, and the words, most of them hidden."""
        return [self.start, *(self.hidden if random.random() < HIDDEN else word for word in words)]

    def alone(self, held: Sequence[Scene]) -> Words:
        text = self.text  # trained here, where it is not yet
        return self.greedy(lambda rows: text(_batch(rows)), len(held))

    @torch.no_grad()
    def greedy(self, final: Callable[[list[list[int]]], Tensor], count: int) -> Words:
        """The words of `count` captions, each the likeliest after the vectors [N, D] that `final` returns for rows."""
        rows = [[self.start] for _ in range(count)]
        for _ in range(LONGEST - 1):
            vectors = final(rows)
            ends = len(vectors) // len(rows) * torch.arange(1, len(rows) + 1) - 1  # rows are of one length
            scores = self.text.unembed(vectors[ends], Rows((1,) * len(rows)))
            rows = [[*row, word] for row, word in zip(rows, scores.argmax(-1).tolist(), strict=True)]
        stops = {self.end, self.start}
        ends_at = [next((i for i, word in enumerate(row[1:], 1) if word in stops), len(row)) for row in rows]
        return [self.tokenizer.decode(row[1:end]).split() for row, end in zip(rows, ends_at, strict=True)]


class Way:
    """A way for a fixed text decoder to read pictures: a module, of which some parameters are trained."""

    name: ClassVar[str]
    about: ClassVar[str]

    def __init__(self, parts: FrozenParts, module: nn.Transformer) -> None:
        """`module` begins with the weights of the parts, and trains the others."""
        self.parts, self.module, self.losses = parts, module, Points()
        for name, own in module.named_parameters():
            part = parts.fixed[name.partition(".")[0]].state_dict().get(name) if self.takes(name) else None
            if part is not None:
                own.data.copy_(part)
            own.requires_grad_(part is None)

    def takes(self, name: str) -> bool:
        """Whether a tensor of this name is one of the fixed parts."""
        return True

    @property
    def trained(self) -> int:
        """How many parameters are trained."""
        return sum(own.numel() for own in self.module.parameters() if own.requires_grad)

    def changed(self) -> int:
        """How many tensors that should be fixed have another bit than those of the part that they came from."""
        kept = {name: own for part in self.parts.fixed.values() for name, own in part.named_parameters()}
        fixed = [(name, own) for name, own in self.module.named_parameters() if not own.requires_grad]
        return sum(not torch.equal(own, kept[name]) for name, own in fixed)


class Gated(Way):
    """Cross-attention in both blocks and an MLP in the second, whose outputs are normalized and multiplied by gates, a
    vector for each; they begin at 0."""

    name = GATED
    about = "Cross-attention in both layers and an MLP are added to the text decoder, times gates that begin at 0"

    def __init__(self, parts: FrozenParts) -> None:
        whole = parts.block
        first, second = (
            replace(
                block, cross=attention(WIDTH, HEADS, head_width=width, kind="cross"), cross_norm=_gate(whole.cross_norm)
            )
            for block, width in zip(parts.blocks, WIDTHS, strict=True)
        )
        blocks = first, replace(second, mlp=whole.mlp, mlp_norm=_gate(whole.mlp_norm))
        spec = replace(parts.spec, decoder=replace(parts.stack, blocks=blocks))
        self.model = create(spec, parts.tokenizer, seed=parts.setup.seed)
        super().__init__(parts, self.model.module)
        for name, own in self.module.named_parameters():
            if name.endswith("norm.out.weight"):
                own.data.zero_()

    def train(self, captions: Sequence[str], steps: int) -> Points:
        lab, seed = self.parts.lab, self.parts.setup.seed
        data = caption_rows(self.model, self.parts.train, captions)
        return fit(self.module, data, rows=lab.rows, length=LONGEST, steps=steps, seed=seed, optimizer=OF_GATES)

    def written(self, held: Sequence[Scene]) -> Words:
        return Captioned(self.model, held).written

    @torch.no_grad()
    def distance(self, held: Sequence[Scene]) -> float:
        """The largest difference of logits from those of the text decoder alone, which reads the same captions."""
        ids = [[self.parts.start, *self.parts.tokenizer.encode(scene.caption)] for scene in held]
        both = self.module.logits(self.module.batch(list(pixels_of(held)), ids))
        return float((both - self.parts.text.logits(_batch(ids))).abs().max())


class Queried(Way):
    """Queries, one block with cross-attention to the picture, whose vectors stand before the text as words would."""

    name = QUERIES
    about = "Queries read the picture through one layer of cross-attention and stand before the text as words would"

    def __init__(self, parts: FrozenParts) -> None:
        kinds = {name: replace(kind, mask=full()) for name, kind in parts.stack.kinds.items()}
        block = replace(parts.block, attn=attention(WIDTH, 2, head_width=8), mlp=mlp(WIDTH, 96, "relu"))
        reader = replace(parts.stack, embed=parts.embed(None, parts.lab.queries), kinds=kinds, blocks=(block,))
        spec = replace(parts.spec, decoder=reader, head=None, ties={}, context=None)
        super().__init__(parts, nn.new(spec, parts.setup.seed))

    def takes(self, name: str) -> bool:
        return name.startswith("encoder.")

    def train(self, captions: Sequence[str], steps: int) -> Points:
        lab, random = self.parts.lab, np.random.default_rng(self.parts.setup.seed)
        optimizer, schedule, losses = Optimizer(self.module, FAST), Schedule(shape="linear"), Points()
        words = [self.parts.tokenizer.encode(caption) for caption in captions]
        for step in range(1, steps + 1):
            drawn = random.choice(len(words), lab.rows, replace=False).tolist()
            read = [self.parts.read(words[i], random) for i in drawn]
            targets = torch.tensor([word for i in drawn for word in (*words[i], self.parts.end)])
            logits = self.parts.text.unembed(self._final(self.parts.pixels[drawn], read), Rows(()))
            loss = cross_entropy(logits, targets, label_smoothing=SMOOTHING)
            loss.backward()
            optimizer.clip()
            optimizer.step(schedule.factor(step / steps))
            losses.append((float(step), float(loss.detach())))
        return losses

    def written(self, held: Sequence[Scene]) -> Words:
        pixels = pixels_of(held)
        return self.parts.greedy(lambda rows: self._final(pixels, rows), len(held))

    def _final(self, pixels: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """The text decoder's vectors [N, D] of the tokens of `rows`, each behind the queries of its picture."""
        count = self.parts.lab.queries
        read = self.module(self.module.batch(list(pixels), [range(count)] * len(rows)))
        batch = _batch([[*[self.parts.hidden] * count, *row] for row in rows])
        before = torch.cat([torch.arange(len(row) + count) < count for row in rows])
        vectors = self.parts.text(replace(batch, taps=Before(before.nonzero().flatten(), read)))
        return vectors[~before]


class Before(Taps):
    """Adds `vectors` [P, D] to the embeddings of the tokens at `places` [P]."""

    def __init__(self, places: Tensor, vectors: Tensor) -> None:
        self.places, self.vectors = places, vectors

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        return value.index_add(0, self.places, self.vectors) if site == "embed" else value


def pixels_of(pictured: Sequence[Scene]) -> Tensor:
    """[scenes, 3, side, side]"""
    return torch.stack([in_memory(scene.pixels, PREPARATION).pixels() for scene in pictured])


def _gate(norms: NormsSpec | None) -> NormsSpec:
    assert norms is not None
    return replace(norms, out=RMSNormSpec(width=WIDTH))


def _batch(rows: Sequence[Sequence[int]]) -> nn.Batch:
    ids, where = flat(rows, torch.device("cpu"))
    return nn.Batch(inputs=ids, rows=where)


def _labels(scene: Scene) -> set[str]:
    placed = zip(("first", "second"), scene.objects, strict=True)
    return {f"{place} {word}" for place, one in placed for word in one.pair} | {scene.relation}


def _example(read: Sequence[int], targets: Sequence[int], untrained: int) -> Example:
    return Example(np.array(read, np.int32), np.array(targets, np.int32), np.arange(len(targets)) >= untrained)
