"""The parts of the lab `frozen-captions`: what stays fixed, and two ways for it to read pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from triptych import nn, spec
from triptych.attention import Rows
from triptych.model import create
from triptych.nn.inputs import flat
from triptych.nn.part import Taps
from triptych.spec import BlockSpec, EmbedSpec, LearnedSpec, ModelSpec, NormsSpec, RMSNormSpec, StackSpec
from triptych.spec.model import ClassHeadSpec
from triptych.spec.parts import LinearSpec
from triptych.text import Tokenizer
from triptych.train import Data, Example, Optimizer, OptimizerSettings, Schedule
from triptych.train.data import EpochRows
from triptych.train.image_tasks import in_memory, labelled_images
from triptych.train.labelled import SeveralLoss
from triptych_lectures.data.scenes import COLOURS, SHAPES, Scene
from . import drawn_pictures
from .drawn_pictures import HEADS, LONGEST, OPTIMIZER, POSITIONS, PREPARATION, SMOOTHING, Captioned, CaptionsLab, Words
from .lab import Setup
from .small_models import Points, fit, parameters

WIDTH = CaptionsLab().width
HIDDEN = 0.7  # share of the words so far that are hidden in training: a decoder that writes sees all of its own
WIDTHS = 4, 12  # numbers of a head of cross-attention, in the two blocks
CONTEXT = 2 * LONGEST  # tokens of two captions, each behind a start token
FAST = OPTIMIZER.model_copy(update={"muon_lr": 2e-2})  # of the encoder and the queries
OF_GATES = OptimizerSettings(name="muon", lr=3e-2, muon_lr=2e-2, weight_decay=0.0)  # gates go a long way
LABELS = [f"{place} {word}" for place in ("first", "second") for word in (*COLOURS, *SHAPES)] + ["above"]


class Sizes(NamedTuple):
    """Steps of the encoder on labels and of the decoder on captions, scenes of a step, and learned queries."""

    label_steps: int
    text_steps: int
    rows: int
    queries: int


@dataclass(frozen=True)
class FrozenParts:
    """The image encoder and the text decoder, each trained alone, and what both ways read."""

    sizes: Sizes
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
        sizes = self.sizes
        head = ClassHeadSpec(pool="mean", classes=LinearSpec(inputs=WIDTH, outputs=len(LABELS), bias=True))
        alone = replace(self.spec, family="vit", decoder=None, head=head, ties={}, context=None)
        module = nn.new(alone, self.setup.seed)
        with torch.no_grad():
            module.get_parameter("encoder.embed.position.weight").mul_(POSITIONS)
        goals = np.array([[label in _labels(scene) for label in LABELS] for scene in self.train], dtype=np.int64)
        images = [in_memory(scene.pixels, PREPARATION) for scene in self.train]
        data = EpochRows(tuple(labelled_images(module, images, goals, SeveralLoss(tuple(LABELS)))))
        self.setup.progress(f"training the image encoder on labels for {sizes.label_steps:,} steps")
        self.fit(module, data, LONGEST, sizes.label_steps, FAST)
        return module.requires_grad_(requires_grad=False)

    @cached_property
    def text(self) -> nn.Transformer:
        """A decoder trained on captions alone: a third of its documents are a caption, the others one caption twice,
        so that it learns to say again what stands before."""
        decoder, sizes = replace(self.stack, blocks=self.blocks), self.sizes
        module = nn.new(replace(self.spec, family="gpt2", encoder=None, decoder=decoder), self.setup.seed)
        random = np.random.default_rng(self.setup.seed)
        rows = EpochRows(tuple(self._document(scene, random, twice=i % 3 > 0) for i, scene in enumerate(self.train)))
        plain = OPTIMIZER.model_copy(update={"weight_decay": 0.0})
        self.setup.progress(f"training the text decoder on captions for {sizes.text_steps:,} steps")
        self.fit(module, rows, CONTEXT, sizes.text_steps, plain)
        return module.requires_grad_(requires_grad=False)

    def fit(self, module: nn.Transformer, data: Data, length: int, steps: int, optimizer: OptimizerSettings) -> Points:
        """Train `module` in place; (step, loss in nats)."""
        rows, seed = self.sizes.rows, self.setup.seed
        return fit(module, data, rows=rows, length=length, steps=steps, seed=seed, optimizer=optimizer)

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

    def train(self, captions: Sequence[str], steps: int) -> Points:
        """Train on the scenes with these captions; (step, loss in nats)."""
        raise NotImplementedError

    def written(self, held: Sequence[Scene]) -> Words:
        """What it writes about scenes."""
        raise NotImplementedError

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

    name = "gated cross-attention"
    about = "Cross-attention in both layers and an MLP are added to the text decoder, times gates that begin at 0"

    def __init__(self, parts: FrozenParts) -> None:
        whole = parts.block
        reads = (spec.attention(WIDTH, HEADS, head_width=width, kind="cross") for width in WIDTHS)
        first, second = (
            replace(block, cross=cross, cross_norm=_gate(whole.cross_norm))
            for block, cross in zip(parts.blocks, reads, strict=True)
        )
        blocks = first, replace(second, mlp=whole.mlp, mlp_norm=_gate(whole.mlp_norm))
        built = replace(parts.spec, decoder=replace(parts.stack, blocks=blocks))
        self.model = create(built, parts.tokenizer, seed=parts.setup.seed)
        super().__init__(parts, self.model.module)
        for name, own in self.module.named_parameters():
            if name.endswith("norm.out.weight"):
                own.data.zero_()

    def train(self, captions: Sequence[str], steps: int) -> Points:
        data = drawn_pictures.caption_rows(self.model, self.parts.train, captions, HIDDEN)
        return self.parts.fit(self.module, data, LONGEST, steps, OF_GATES)

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

    name = "learned queries"
    about = "Queries read the picture through one layer of cross-attention and stand before the text as words would"

    def __init__(self, parts: FrozenParts) -> None:
        kinds = {name: replace(kind, mask=spec.full()) for name, kind in parts.stack.kinds.items()}
        block = replace(parts.block, attn=spec.attention(WIDTH, 2, head_width=8), mlp=spec.mlp(WIDTH, 96, "relu"))
        reader = replace(parts.stack, embed=parts.embed(None, parts.sizes.queries), kinds=kinds, blocks=(block,))
        built = replace(parts.spec, decoder=reader, head=None, ties={}, context=None)
        super().__init__(parts, nn.new(built, parts.setup.seed))

    def takes(self, name: str) -> bool:
        return name.startswith("encoder.")

    def train(self, captions: Sequence[str], steps: int) -> Points:
        sizes, random = self.parts.sizes, np.random.default_rng(self.parts.setup.seed)
        optimizer, schedule, losses = Optimizer(self.module, FAST), Schedule(shape="linear"), Points()
        words = [self.parts.tokenizer.encode(caption) for caption in captions]
        for step in range(1, steps + 1):
            drawn = random.choice(len(words), sizes.rows, replace=False).tolist()
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
        count = self.parts.sizes.queries
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
