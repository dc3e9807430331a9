"""Labs of drawn pictures: captions by a ViT with a decoder, and names of shapes by a ViT.

`captions` (Xu et al. 2015; lecture L4): scenes of two objects, with pairs of a color and a shape that no scene in
training had.  `image-labels` (Dosovitskiy et al. 2021): the shape of one object anywhere in a noisy image, beside the
commonest shape and a linear model of the pixels.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.errors import InputError
from triptych.media.image import Preparation, png
from triptych.model import Model, create
from triptych.page import Curve, PatchWeights, Picture, PicturesSection, TableSection
from triptych.spec import PatchesSpec
from triptych.text import SEQ2SEQ, Tokenizer, word_tokenizer
from triptych.train import OptimizerSettings, metrics, seq2seq
from triptych.train.data import EpochRows, HiddenWords
from triptych.train.image_tasks import CaptionExample, in_memory, labelled_images
from triptych.train.labelled import ClassLoss
from triptych_lectures.data.scenes import COLOURS, RELATIONS, SHAPES, SIDE, Scene, scenes, shapes
from .lab import Check, Findings, Lab, LabResult, Setup, clause, size
from .small_models import Points, fit, share_table

# The dark ground is 0, and positions begin as large as what is drawn: a relation is read from positions alone.
PREPARATION = Preparation(height=SIDE, width=SIDE, mean=(0.063,) * 3)
POSITIONS = 4.0  # what the first positions of the encoder are multiplied by
LONGEST = 16  # most words of a caption
HEADS = 4  # of each layer of both stacks
OPTIMIZER = OptimizerSettings(name="muon", lr=3e-3, muon_lr=1e-2, weight_decay=0.5)
HIDDEN = 0.9  # share of the words so far that are hidden in training
SMOOTHING = 0.15  # share of each target that is spread over all words
OF_CONTROL = 0.05  # most captions that may be right after training on shuffled ones
MOST_UNTRAINED = 1.5  # most weight on the named object before training, over that of equal weights
KINDS = {"colour": tuple(COLOURS), "shape": SHAPES, "relation": tuple(name.split()[0] for name in RELATIONS)}

Words = Sequence[Sequence[str]]  # of captions
Patterns = list[list[Tensor]]  # for each decoder layer, for each scene, [H, T, 1 + patches]


class CaptionsLab(Lab):
    """Captions of pairs that were never seen, and where cross-attention is while each word is written."""

    name = "captions"

    scenes: int = size(6000, "scenes to train on", full=16_000)
    judged: int = size(200, "scenes held out, and as many of known pairs to choose the layer on", full=300)
    steps: int = size(400, "training steps", full=1500)
    control: int = size(100, "training steps of the control, on shuffled captions", full=200)
    rows: int = size(64, "scenes of a step")
    patch: int = size(12, f"pixels of a patch's side; {SIDE} is a multiple of it")
    width: int = size(64, f"numbers of a vector in both stacks, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(2, "layers of the encoder")
    decoder_layers: int = size(1, "layers of the decoder")

    def __post_init__(self) -> None:
        if SIDE % self.patch:
            raise InputError(f"size patch: {self.patch} must divide the {SIDE} pixels of an image's side")

    def run(self, setup: Setup) -> LabResult:
        setup.progress(f"drawing {self.scenes:,} scenes")
        train = scenes(self.scenes, setup.seed)
        known = scenes(self.judged, setup.seed + 1)
        held = scenes(self.judged, setup.seed, held_out=True)
        tokenizer = word_tokenizer([scene.caption for scene in train], 100, SEQ2SEQ)
        random = np.random.default_rng(setup.seed)
        mixed = [train[i].caption for i in random.permutation(len(train))]
        model, control = (self.created(tokenizer, setup.seed) for _ in range(2))
        untrained = Captioned(model, held)
        setup.progress(f"training for {self.steps} steps")
        losses = self.trained(model, train, [scene.caption for scene in train], self.steps, setup.seed)
        setup.progress(f"training the control for {self.control} steps")
        self.trained(control, train, mixed, self.control, setup.seed)
        setup.progress("writing captions")
        shuffled_captions, new, of_known = Captioned(control, held), Captioned(model, held), Captioned(model, known)
        layer = int(np.argmax(of_known.on_objects()))  # chosen on scenes of known pairs
        weights = new.on_objects()
        claim = WHOLE if setup.full else SMALLER
        exact, wrong, before = new.exact(), shuffled_captions.exact(), untrained.on_objects()
        conclusion = (
            clause(
                "No scene in training had these pairs of a color and a shape, so that both must be read from the image"
                f" and put together: {exact:.0%} of the captions are right in every word. Control: trained for"
                f" {self.control:,} steps on shuffled captions, {wrong:.0%} are.",
                Check("captions of pairs never seen that are right in every word", exact, least=claim.exact),
                Check("captions right after training on shuffled ones", wrong, most=OF_CONTROL),
                unseen(train, held),
                instead="Captions of new pairs are not read from the image, or the pairs are not new",
            ),
            clause(
                f"While the words of one object are written, cross-attention gives its patches {weights[layer]:.1f}"
                " times the weight that they have when all keys have the same; before training"
                f" {before[layer]:.1f} times.",
                Check("weight on the patches of the named object, over chance", weights[layer], claim.on_object),
                Check("control: the same before training", before[layer], most=MOST_UNTRAINED),
                instead="Cross-attention is not on the object that is named, or was before training",
            ),
        )
        remarks = f"Layer {layer} was chosen on other scenes."
        if not setup.full:
            remarks += (
                " This is the smaller version, which stops before all is learned: it is held to"
                f" {claim.exact:.0%} of the captions and {claim.on_object:g} times, `--full` to {WHOLE.exact:.0%} and"
                f" {WHOLE.on_object:g} times."
            )
        rows = {
            "before training": untrained, "trained on shuffled captions": shuffled_captions, "trained": new,
            "the same, of pairs seen in training": of_known,
        }  # fmt: skip
        of_layers = enumerate(zip(weights, before, strict=True))
        sections = (
            TableSection(
                "Captions and words right",
                ("model", "caption", *KINDS),
                [[name, *captioned.shares()] for name, captioned in rows.items()],
            ),
            TableSection(
                "Weight on the patches of the named object",
                ("decoder layer", "trained", "before training"),
                [[str(i), *(f"{weight:.2f} × chance" for weight in both)] for i, both in of_layers],
            ),
            new.pictures(layer),
            Curve("Training", "step", "nats a word", {"loss": losses}, {}),
        )
        return self.result(conclusion, sections, remarks)

    def created(self, tokenizer: Tokenizer, seed: int) -> Model:
        """A ViT and a GPT-2 that reads it, untrained."""
        shared = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        encoder = shared | {
            "model_type": "vit", "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * self.width, "image_size": SIDE, "patch_size": self.patch,
        }  # fmt: skip
        decoder = {
            "model_type": "gpt2", "n_embd": self.width, "n_layer": self.decoder_layers, "n_head": HEADS,
            "n_inner": 2 * self.width, "n_positions": LONGEST, "vocab_size": tokenizer.vocab_size,
            "add_cross_attention": True, "initializer_range": 0.08, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
        }  # fmt: skip
        start = tokenizer.pad_id
        ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": start, "decoder_start_token_id": start}
        config: dict[str, Any] = {"model_type": "vision-encoder-decoder", "is_encoder_decoder": True} | ids
        model = create(config | {"encoder": encoder, "decoder": decoder}, tokenizer, seed=seed)
        with torch.no_grad():
            model.module.get_parameter("encoder.embed.position.weight").mul_(POSITIONS)
        return model

    def trained(self, model: Model, train: Sequence[Scene], captions: Sequence[str], steps: int, seed: int) -> Points:
        """Train the model on scenes with these captions; (step, loss in nats)."""
        data = caption_rows(model, train, captions, HIDDEN)
        return fit(model.module, data, rows=self.rows, length=LONGEST, steps=steps, seed=seed, optimizer=OPTIMIZER)


def caption_rows(model: Model, pictured: Sequence[Scene], captions: Sequence[str], rate: float) -> HiddenWords:
    """Scenes with these captions, for `model` to train on, with a share `rate` of the words so far hidden: otherwise a
    decoder learns first which shapes follow "red", among which the held-out pairs are not."""
    start, words = model.spec.ids.start, model.inputs.words
    assert start is not None
    assert words.unk_id is not None
    examples = list[CaptionExample]()
    for scene, caption in zip(pictured, captions, strict=True):
        text = seq2seq([0], words.encode(caption), start)
        row, image = (text.ids, text.targets, text.trained), in_memory(scene.pixels, PREPARATION)
        examples.append(CaptionExample(*row, image=image, read=model.module.flat, smoothing=SMOOTHING))
    return HiddenWords(tuple(examples), words.unk_id, rate)


def unseen(train: Sequence[Scene], held: Sequence[Scene]) -> Check:
    """That each held-out scene has a pair of a colour and a shape that no scene in training has."""
    pairs = {one.pair for scene in train for one in scene.objects}
    known = sum(all(one.pair in pairs for one in scene.objects) for scene in held)
    return Check("held-out scenes whose pairs of a color and a shape training has, both", known, most=0)


def exact_share(written: Words, pictured: Sequence[Scene]) -> float:
    """The share of captions that are right in every word."""
    pairs = zip(written, pictured, strict=True)
    return float(np.mean([words == scene.caption.split() for words, scene in pairs]))


def word_shares(written: Words, pictured: Sequence[Scene]) -> list[float]:
    """Of each of `KINDS`, the share of words that are right at their place."""
    right = [
        (word, one == word)
        for words, scene in zip(written, pictured, strict=True)
        for word, one in zip_longest(scene.caption.split(), words)
    ]
    return [float(np.mean([same for word, same in right if word in words])) for words in KINDS.values()]


class Claim(NamedTuple):
    """What must be reached on pairs never seen: the share of captions right in every word, and the weight on the
    patches of the named object over that of equal weights."""

    exact: float
    on_object: float


WHOLE, SMALLER = Claim(exact=0.95, on_object=3.0), Claim(exact=0.5, on_object=2.0)


class Captioned:
    """What a model writes about scenes, and where it looks while it reads the right caption."""

    def __init__(self, model: Model, pictured: Sequence[Scene]) -> None:
        slot = model.spec.reads.embed
        assert isinstance(slot, PatchesSpec)
        self.scenes, self.patch = pictured, slot.patch
        images = [PREPARATION.normalized(scene.pixels.astype(np.float32)) for scene in pictured]
        pixels = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
        self.written = [output.text.split() for output in model.generate(pixels, max_new_tokens=LONGEST - 1)]
        start, words = model.spec.ids.start, model.inputs.words
        assert start is not None
        read = [[start, *words.encode(scene.caption)[:-1]] for scene in pictured]
        trace = model.trace(pixels, read, read=["decoder.blocks.*.cross.pattern"])
        self.patterns: Patterns = [trace[site] for site in trace]

    def exact(self) -> float:
        return exact_share(self.written, self.scenes)

    def shares(self) -> list[str]:
        """The share of captions that are right, and of words by kind, right at their place."""
        return [f"{share:.1%}" for share in (self.exact(), *word_shares(self.written, self.scenes))]

    def on_objects(self) -> list[float]:
        """For each layer, the mean weight on the patches of the object whose colour or shape is written, over what it
        would be with equal weights; the mean over heads."""
        weights: list[list[float]] = [[] for _ in self.patterns]
        chance = []
        for number, scene in enumerate(self.scenes):
            for place, covered in _named(scene, self.patch):
                chance.append(covered.mean() * len(covered) / (len(covered) + 1))  # one key is no patch
                on = torch.from_numpy(covered)
                for layer, pattern in zip(weights, self.patterns, strict=True):
                    layer.append(float(pattern[number][:, place, 1:][:, on].sum(-1).mean()))
        return [float(np.mean(layer) / np.mean(chance)) for layer in weights]

    def pictures(self, layer: int, count: int = 3) -> PicturesSection:
        """The first scenes under the weights of each word, the mean over heads."""
        shown = []
        side = SIDE // self.patch
        for number, scene in enumerate(self.scenes[:count]):
            words, on = scene.caption.split(), dict(_named(scene, self.patch))
            items = []
            for place, word in enumerate(words):
                if word in ("a", "of"):
                    continue
                weights = self.patterns[layer][number][:, place, 1:].mean(0).double().numpy()
                about = f"{weights[on[place]].sum():.0%} on the object" if place in on else ""
                items.append(PatchWeights(word, weights.reshape(side, side).clip(0, 1), about))
            name = f"{scene.caption}; written: {' '.join(self.written[number])}"
            shown.append(Picture(name, png(scene.pixels), items))
        return PicturesSection(
            "Where it looks while it writes a word",
            f"Cross-attention of decoder layer {layer}, the mean over its heads, in scenes with pairs never seen: the"
            " darker a patch, the less weight it has.",
            shown,
        )


def _named(scene: Scene, patch: int) -> list[tuple[int, NDArray[np.bool_]]]:
    """The place in the caption of each word that names a colour or a shape, and the patches of its object."""
    words = scene.caption.split()
    places = (1, 2), (len(words) - 2, len(words) - 1)
    named = zip(scene.objects, places, strict=True)
    return [(place, drawn.patches(patch)) for drawn, places_of_it in named for place in places_of_it]


PATCH = 6  # pixels of a patch's side
Side = Sequence[tuple[NDArray[np.uint8], str]]  # pictures with their shapes


class ImageLabelsLab(Lab):
    """A ViT on drawn shapes beside two simpler guesses and a control."""

    name = "image-labels"

    pictures: int = size(4000, "pictures to train on", full=10_000)
    judged: int = size(400, "pictures held out", full=1000)
    steps: int = size(300, "training steps", full=600)
    rows: int = size(64, "pictures of a step")
    width: int = size(48, f"numbers of a vector, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(2, "layers")

    def findings(self, setup: Setup) -> Findings:
        setup.progress(f"drawing {self.pictures:,} pictures")
        train, held = shapes(self.pictures, setup.seed), shapes(self.judged, setup.seed + 1)
        right, wanted = (np.array([SHAPES.index(shape) for _, shape in side]) for side in (train, held))
        mixed = np.random.default_rng(setup.seed).permutation(right)
        setup.progress("fitting the linear model")
        vectors, others = (
            np.stack([picture for picture, _ in side]).reshape(len(side), -1).astype(np.float32)
            for side in (train, held)
        )
        guesses = metrics.linear(vectors, right, others, len(SHAPES))
        setup.progress(f"training for {self.steps} steps, twice")
        model, losses = self.trained(train, right, setup.seed)
        control, _ = self.trained(train, mixed, setup.seed)
        named = {
            "commonest shape": metrics.majority(right, len(held)),
            "linear model of the pixels": guesses,
            "ViT trained on shuffled labels": predicted(control, held),
            "ViT": predicted(model, held),
        }
        shares = {name: float((guess == wanted).mean()) for name, guess in named.items()}
        vit, control_right, linear, commonest = (shares[name] for name in reversed(named))
        yield clause(
            "The objects lie in any place, so that single pixels say little of the shape: a linear model of the"
            f" pixels is right on {linear:.0%} of new pictures, the commonest shape on {commonest:.0%}.",
            Check("linear model: shapes right, above the commonest shape", linear - commonest, most=0.2),
            instead="Weights of single pixels tell the shapes apart",
        )
        yield clause(
            f"The ViT, whose attention compares patches, is right on {vit:.0%}. Control: trained on shuffled"
            f" labels, on {control_right:.0%}.",
            Check("shapes right", vit, least=0.9),
            Check("more than the better of the two", vit - max(commonest, linear), least=0.3),
            Check("control: above the commonest shape", control_right - commonest, most=0.1),
            instead="The ViT did not learn the shapes from the pictures, or the control learned them too",
        )
        yield share_table("Shapes right", ("who names them", "share"), shares)
        yield Curve("Training", "step", "nats an image", {"loss": losses}, {})

    def trained(self, side: Side, labels: NDArray[np.integer], seed: int) -> tuple[Model, Points]:
        """A ViT trained on pictures with these labels, and (step, loss in nats)."""
        config = {
            "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": HEADS, "intermediate_size": 2 * self.width,
            "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.1, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "id2label": {str(i): shape for i, shape in enumerate(SHAPES)},
        }  # fmt: skip
        model = create(config, seed=seed)
        images = [in_memory(picture, PREPARATION) for picture, _ in side]
        data = EpochRows(tuple(labelled_images(model.module, images, labels[:, None], ClassLoss(SHAPES))))
        steps, length = self.steps, (SIDE // PATCH) ** 2 + 1
        losses = fit(model.module, data, rows=self.rows, length=length, steps=steps, seed=seed, optimizer=OPTIMIZER)
        return model, losses


def predicted(model: Model, side: Side) -> NDArray[np.int64]:
    """The most probable class of each picture."""
    ranked = model.classify([in_memory(picture, PREPARATION).pixels() for picture, _ in side])
    return np.array([SHAPES.index(labels[0][0]) for labels in ranked])
