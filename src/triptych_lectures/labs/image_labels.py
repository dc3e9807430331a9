"""Does a ViT learn what pixels alone do not tell?  (Dosovitskiy et al. 2021)

One object of any colour lies anywhere in a noisy image, and its shape is asked for.  Beside the ViT stand the commonest
shape and a linear model of the pixels, which has the same pictures and finds no shape that moves about.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from triptych.media.image import Preparation
from triptych.model import Model, create
from triptych.page import Curve, Section, TableSection
from triptych.train import OptimizerSettings, baselines
from triptych.train.data import EpochRows
from triptych.train.image_labels import labelled_images
from triptych.train.image_records import in_memory
from triptych.train.labelled import ClassLoss
from triptych_lectures.data.scenes import SHAPES, SIDE, shapes
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import fit

QUESTION = "Does a ViT learn a shape that a linear model of the pixels does not find?"
PREPARATION = Preparation(height=SIDE, width=SIDE, mean=(0.063,) * 3)  # the dark ground is 0
HEADS = 4
PATCH = 6  # pixels of a patch's side
OPTIMIZER = OptimizerSettings(name="muon", lr=3e-3, muon_lr=1e-2, weight_decay=0.5)
RIGHT, ABOVE, OF_CONTROL = 0.9, 0.3, 0.3


class ImageLabelsLab(Lab):
    """A ViT on drawn shapes beside two simpler guesses and a control."""

    name = "image-labels"
    falsified_by = (
        "The claim is false if the ViT names the shapes of new pictures no better than logistic regression on their"
        " pixels, which cannot put two pixels together. That it reads the shape is false if it names new shapes as well"
        " after training on shuffled labels, for then something else than the pictures would tell them."
    )
    seeds = 5

    pictures: int = size(4000, "pictures to train on", full=10_000)
    judged: int = size(400, "pictures held out", full=1000)
    steps: int = size(300, "training steps", full=600)
    rows: int = size(64, "pictures of a step")
    width: int = size(48, f"numbers of a vector, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(2, "layers")

    def run(self, setup: Setup, *, shuffled: bool = False) -> LabResult:
        """The lab; with `shuffled`, its control: every label is trained beside another picture."""
        setup.progress(f"drawing {self.pictures:,} pictures")
        train, held = shapes(self.pictures, setup.seed), shapes(self.judged, setup.seed + 1)
        right, wanted = (np.array([SHAPES.index(shape) for _, shape in side]) for side in (train, held))
        mixed = np.random.default_rng(setup.seed).permutation(right)
        pixels = [np.stack([picture for picture, _ in side]).reshape(len(side), -1) for side in (train, held)]
        setup.progress("fitting the linear model")
        vectors = [side.astype(np.float32) for side in pixels]
        guesses = baselines.linear(vectors[0], right, vectors[1], len(SHAPES))
        setup.progress(f"training for {self.steps} steps, twice")
        pictures = [picture for picture, _ in train]
        model, losses = self.trained(pictures, mixed if shuffled else right, setup.seed)
        control, _ = self.trained(pictures, mixed, setup.seed)
        named = {
            "commonest shape": baselines.majority(right, len(held)),
            "linear model of the pixels": guesses,
            "ViT trained on shuffled labels": predicted(control, [picture for picture, _ in held]),
            "ViT": predicted(model, [picture for picture, _ in held]),
        }
        shares = {name: float((guess == wanted).mean()) for name, guess in named.items()}
        best = max(shares["commonest shape"], shares["linear model of the pixels"])
        checks = (
            Check("shapes right", shares["ViT"], least=RIGHT),
            Check(
                "more than the better of the commonest shape and the linear model", shares["ViT"] - best, least=ABOVE
            ),
            Check(
                "shapes right after training on shuffled labels",
                shares["ViT trained on shuffled labels"],
                most=OF_CONTROL,
            ),
        )
        sections: list[Section] = [
            TableSection(
                "Shapes right", ("who names them", "share"), [[name, f"{x:.1%}"] for name, x in shares.items()]
            ),
            Curve("Training", "step", "nats an image", {"loss": losses}, {}),
        ]
        meaning = (
            "Any pixel is as often inside a circle as inside a square, because the objects lie in any place: a sum of"
            " pixel weights cannot tell them. Attention compares patches, and the first vector gathers what they have"
            " in common. The control, trained on shuffled labels, shows what is right by chance."
        )
        return LabResult(QUESTION, meaning, checks, tuple(sections))

    def trained(
        self, pictures: list[NDArray[np.uint8]], labels: NDArray[np.integer], seed: int
    ) -> tuple[Model, list[tuple[float, float]]]:
        """A ViT trained on pictures with these labels, and (step, loss in nats)."""
        config = {
            "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": HEADS, "intermediate_size": 2 * self.width,
            "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.1, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "id2label": {str(i): shape for i, shape in enumerate(SHAPES)},
        }  # fmt: skip
        model = create(config, seed=seed)
        images = [in_memory(picture, PREPARATION) for picture in pictures]
        data = EpochRows(tuple(labelled_images(model.module, images, labels[:, None], ClassLoss(SHAPES))))
        steps, length = self.steps, (SIDE // PATCH) ** 2 + 1
        losses = fit(model.module, data, rows=self.rows, length=length, steps=steps, seed=seed, optimizer=OPTIMIZER)
        return model, losses


def predicted(model: Model, pictures: list[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """The most probable class of each picture."""
    ranked = model.classify([in_memory(picture, PREPARATION).pixels() for picture in pictures])
    return np.array([SHAPES.index(labels[0][0]) for labels in ranked])
