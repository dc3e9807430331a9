"""Losses, gradients and one step of each objective are those of transformers on the same weights and rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import references
import triptych
from triptych import families, nn
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.media.image import Preparation
from triptych.text import Encoded
from triptych.train import Example, Optimizer, OptimizerSettings, Schedule, collate, loss, seq2seq
from triptych.train.base_model import StartingModel
from triptych.train.contrastive import TextPair
from triptych.train.data import micro_batches
from triptych.train.image_tasks import CaptionExample, RecordImage, labelled_images
from triptych.train.labelled import IGNORED, ClassLoss, HeadLoss, ReplacedLoss, SeveralLoss, SpanLoss, labelled
from triptych.train.new_head import head_config, with_head
from triptych.train.text_tasks import corrupted, noise_spans

LENGTHS = (7, 3, 11, 5)
LABELS = tuple("abcde")
Theirs = Callable[[Any, dict[str, Tensor]], Tensor]


def rows() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, references.V, size=n).tolist() for n in LENGTHS]


def example(ids: list[int], goal: Sequence[int], head: HeadLoss) -> Example:
    row = Encoded(ids, [i % 2 for i in range(len(ids))], [], [])
    return labelled(row, goal, head, 0, np.ones(len(ids), dtype=bool))


def padded(ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids`, the mask and the token types of rows, padded at their ends."""
    most = max(map(len, ids))
    return {
        "input_ids": torch.tensor([[*row, *[0] * (most - len(row))] for row in ids]),
        "attention_mask": torch.tensor([[*[1] * len(row), *[0] * (most - len(row))] for row in ids]),
        "token_type_ids": torch.tensor([[i % 2 for i in range(most)] for _ in ids]),
    }


# What each objective trains on: the reference, the goals of the rows, our loss, and the reference's.
CLASSES = [[1], [0], [4], [1]]
SEVERAL = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]
TAGS = [[(3 * i + n) % 5 if i % 3 else IGNORED for i in range(n)] for n in LENGTHS]
SPANS = [[2, 5], [0, 0], [1, 10], [4, 4]]
REPLACED = [[int(i % 4 == 1) for i in range(n)] for n in LENGTHS]
WEIGHTS = (0.5, 2.0, 1.0, 1.0, 3.0)


def _labels(goals: list[list[int]]) -> Tensor:
    most = max(LENGTHS)
    return torch.tensor([[*goal, *[IGNORED] * (most - len(goal))] for goal in goals])


def _weighted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    goals = torch.tensor(CLASSES).flatten()
    return F.cross_entropy(model(**batch).logits, goals, torch.tensor(WEIGHTS), label_smoothing=0.2)


def _several(model: Any, batch: dict[str, Tensor]) -> Tensor:
    model.config.problem_type = "multi_label_classification"
    return model(**batch, labels=torch.tensor(SEVERAL).float()).loss


def _spans(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Row by row: the reference lets padding take part in the softmax over positions."""
    each = []
    for i, n in enumerate(LENGTHS):
        one = {name: value[i : i + 1, :n] for name, value in batch.items()}
        first, last = (torch.tensor([place]) for place in SPANS[i])
        each.append(model(**one, start_positions=first, end_positions=last).loss)
    return torch.stack(each).mean()


CASES: dict[str, tuple[str, list[list[int]], HeadLoss, Theirs]] = {
    "labels": ("bert-classes", CLASSES, ClassLoss(LABELS),
               lambda model, batch: model(**batch, labels=torch.tensor(CLASSES).flatten()).loss),
    "labels weighted and smoothed": ("bert-classes", CLASSES, ClassLoss(LABELS, 0.2, WEIGHTS), _weighted),
    "several labels": ("bert-classes", SEVERAL, SeveralLoss(LABELS), _several),
    "tags": ("bert-tokens", TAGS, ClassLoss(LABELS), lambda model, batch: model(**batch, labels=_labels(TAGS)).loss),
    "spans": ("bert-spans", SPANS, SpanLoss(), _spans),
    "replaced": ("electra", REPLACED, ReplacedLoss(),
                 lambda model, batch: model(**batch, labels=_labels(REPLACED).clamp(min=0)).loss),
}  # fmt: skip


def gradients(module: nn.Transformer) -> dict[str, Tensor]:
    """The gradients under the reference's names; zeros where there is none."""
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    return {step.source: step.to_source(own) for step in families.save_plan(module.spec)}


def trained(module: nn.Transformer, examples: list[Example], accumulate: int) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of one step, and the step taken by AdamW."""
    settings = OptimizerSettings(name="adamw", lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, clip=0.0)
    optimizer = Optimizer(module.eval(), settings)  # without dropout
    batches = [collate(part) for part in micro_batches(examples, accumulate)]
    weight, total = sum(batch.weight for batch in batches), 0.0
    for batch in batches:
        nats, _ = loss(module, batch)
        (nats / weight).backward()
        total += float(nats.detach())
    found = {name: grad.clone() for name, grad in gradients(module).items()}
    optimizer.step(Schedule(shape="constant", warmup=0.0).factor(0.5))
    return total / weight, found


def differences(name: str, module: nn.Transformer, examples: list[Example], theirs: Theirs, accumulate: int,
                batch: dict[str, Tensor], unnamed: int = 1) -> tuple[float, float, float]:  # fmt: skip
    """Of the loss, of the gradients relative to the largest, and of the weights after a step.  At most `unnamed`
    parameters have another name in the reference's module than in its files.

    The step of weights whose gradient is nearly zero depends on rounding, so that only the others are compared.
    """
    model = references.build(name)
    value = theirs(model, batch)
    value.backward()
    wanted = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.0).step()
    ours, found = trained(module, examples, accumulate)
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    shared = found.keys() & wanted.keys()
    assert len(shared) >= len(wanted) - unnamed  # a tied weight has one name here and may have another there
    gradient = max(float((found[key] - wanted[key]).abs().max()) for key in shared) / largest
    after, state = dict(to_checkpoint(module, {})[0]), model.state_dict()
    clear = {key: wanted[key].abs() > 1e-3 * largest for key in shared}
    step = max(float(((after[key] - state[key]).abs() * clear[key]).max()) for key in shared)
    return abs(ours - float(value.detach())), gradient, step


def starting(loaded: triptych.Model) -> StartingModel:
    return StartingModel(loaded.module, None, dict(loaded.hf or {}), {}, loaded.module.named_parameters())


def unfilled(base: StartingModel) -> tuple[nn.Transformer, nn.NamedWeights]:
    assert base.weights is not None
    return base.module, ((name, weight.detach()) for name, weight in base.weights)


def of_head(case: str) -> tuple[str, list[Example], Theirs]:
    name, goals, head, theirs = CASES[case]
    return name, [example(ids, goal, head) for ids, goal in zip(rows(), goals, strict=True)], theirs


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_heads_train_as_in_transformers(case: str, accumulate: int) -> None:
    name, examples, theirs = of_head(case)
    module = triptych.load(references.saved(name)[1]).module
    found = differences(name, module, examples, theirs, accumulate, padded(rows()))
    assert max(found) < 1e-4, found


SABOTAGE: Mapping[str, tuple[str, list[list[int]], HeadLoss]] = {
    "a label is another": ("labels", [[1], [0], [4], [2]], ClassLoss(LABELS)),
    "no smoothing": ("labels weighted and smoothed", CLASSES, ClassLoss(LABELS, 0.0, WEIGHTS)),
    "no weights": ("labels weighted and smoothed", CLASSES, ClassLoss(LABELS, 0.2)),
    "a label too many": ("several labels", [*SEVERAL[:1], [1, 0, 0, 0, 0], *SEVERAL[2:]], SeveralLoss(LABELS)),
    "every piece is labelled": ("tags", [[max(tag, 0) for tag in row] for row in TAGS], ClassLoss(LABELS)),
    "the end one too far": ("spans", [[2, 6], *SPANS[1:]], SpanLoss()),
    "originals are replaced": ("replaced", [[1 - one for one in row] for row in REPLACED], ReplacedLoss()),
}


@pytest.mark.parametrize("broken", SABOTAGE)
def test_a_broken_objective_is_noticed(broken: str) -> None:
    case, goals, head = SABOTAGE[broken]
    name, _, theirs = of_head(case)
    module = triptych.load(references.saved(name)[1]).module
    examples = [example(ids, goal, head) for ids, goal in zip(rows(), goals, strict=True)]
    assert min(differences(name, module, examples, theirs, 1, padded(rows()))[:2]) > 1e-4


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("broken", [False, True])
def test_span_corruption_trains_as_t5_does(accumulate: int, broken: bool) -> None:
    random = np.random.default_rng(0)
    pairs = []
    for ids in rows():
        spans = noise_spans(len(ids), 0.3, 2.0, random)
        pairs.append(corrupted(np.array(ids, dtype=np.int32), spans, range(references.V - 1, 0, -1), 1))
    module = triptych.load(references.saved("t5")[1]).module
    start = 1 if broken else 0
    examples = [seq2seq(source, target, start) for source, target in pairs]
    batch = padded([source.tolist() for source, _ in pairs])
    labels = padded([(target + 1).tolist() for _, target in pairs])["input_ids"] - 1  # padding becomes -1

    def theirs(model: Any, batch: dict[str, Tensor]) -> Tensor:
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return model(**given, labels=labels.masked_fill(labels < 0, -100)).loss

    found = differences("t5", module, examples, theirs, accumulate, batch)
    assert (max(found) < 1e-4) != broken, found


@pytest.mark.parametrize("negatives", [0, 1])
@pytest.mark.parametrize("broken", [False, True])
def test_contrast_is_that_of_sentence_transformers(negatives: int, broken: bool) -> None:
    """Against `scale * cosine` and cross-entropy in float64, with and without hard negatives."""
    loaded = triptych.load(references.saved("bert-classes")[1], dtype="float64")
    config = head_config(loaded.hf, "contrastive")
    module = nn.fill(*unfilled(with_head(starting(loaded), config, "contrastive", 0)))
    random, scale = np.random.default_rng(5), 20.0
    texts = [
        [random.integers(3, references.V, size=4 + i + j).tolist() for j in range(2 + negatives)] for i in range(4)
    ]

    def pair(of: list[list[int]]) -> TextPair:
        return TextPair.of([Encoded(one, [0] * len(one), [], []) for one in of], scale)

    batch = collate([pair(of) for of in texts])
    nats, count = loss(module, batch)
    (nats / count).backward()

    reference = references.build("bert-classes").double().bert

    def vector(ids: list[int]) -> Tensor:
        return reference(torch.tensor([ids])).last_hidden_state[0].mean(0)

    anchors = torch.stack([vector(of[0]) for of in texts])
    others = torch.stack([vector(of[1 + place]) for place in range(1 + negatives) for of in texts])
    cosines = F.cosine_similarity(anchors[:, None], others[None], dim=-1)
    wanted = F.cross_entropy((1.0 if broken else scale) * cosines, torch.arange(4))
    wanted.backward()
    theirs = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    ours = gradients(module)
    gap = max(float((ours[key.removeprefix("bert.")] - theirs[key]).abs().max()) for key in theirs if key in ours)
    assert len(theirs.keys() & ours.keys()) > 20
    assert (abs(float(nats.detach() / count) - float(wanted.detach())) < 1e-9) != broken
    assert (gap < 1e-9) != broken


def test_a_new_head_keeps_the_body_and_what_both_heads_share() -> None:
    loaded = triptych.load(references.saved("bert-classes")[1])
    body = {name: p.clone() for name, p in loaded.module.named_parameters() if not name.startswith("head.")}
    config = head_config(loaded.hf, "labels", ["x", "y", "z"])
    module, again, other = (
        nn.fill(*unfilled(with_head(starting(loaded), config, "labels", seed))) for seed in (7, 7, 8)
    )
    assert all(torch.equal(value, module.get_parameter(name)) for name, value in body.items())
    pooler = "head.transform.dense.weight"
    assert torch.equal(module.get_parameter(pooler), loaded.module.get_parameter(pooler))
    weight = "head.classes.weight"
    assert module.get_parameter(weight).shape[0] == 3
    assert torch.equal(module.get_parameter(weight), again.get_parameter(weight))
    assert not torch.equal(module.get_parameter(weight), other.get_parameter(weight))
    names = [f"LABEL_{i}" for i in range(5)]
    same = head_config(loaded.hf, "labels", names)
    assert with_head(starting(loaded), same, "labels", 7).module is loaded.module
    with pytest.raises(triptych.errors.ConfigError, match="objective replaced trains one of electra"):
        head_config(loaded.hf, "replaced")


def layers_of(module: nn.Transformer) -> int:
    """Of the ViT, whose 16 parameters a layer transformers renames as it saves; those before and after them it does
    not, and the patches' gradient goes through every layer."""
    return len(module.spec.encoder.blocks)


def drawn(module: nn.Transformer, count: int) -> tuple[list[RecordImage], Tensor]:
    """Images of random pixels as records hold them, and as transformers takes them, [B, C, H, W]."""
    slot = module.spec.reads.embed
    pixels = np.random.default_rng(7).normal(size=(count, slot.channels, *slot.image)).astype(np.float32)
    how = Preparation(height=slot.image[0], width=slot.image[1])
    return [RecordImage(Path(), how, one.ravel(), one) for one in pixels], torch.from_numpy(pixels)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", ["vision-gpt2", "vision-bert"])
def test_captions_train_as_in_transformers(name: str, broken: bool, accumulate: int) -> None:
    """Ragged captions, each beside its image; broken, beside that of another."""
    module, texts = triptych.load(references.saved(name)[1]).module, rows()
    start = module.spec.ids.start
    images, pixels = drawn(module, len(texts))
    beside = images[1:] + images[:1] if broken else images
    examples = [
        CaptionExample(one.ids, one.targets, one.trained, image=image, read=module.flat)
        for one, image in zip([seq2seq([0], ids, start) for ids in texts], beside, strict=True)
    ]
    most = max(LENGTHS)
    labels = torch.tensor([[*ids, *[-100] * (most - len(ids))] for ids in texts])

    def theirs(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(pixel_values=pixels, labels=labels).loss

    found = differences(name, module, list(examples), theirs, accumulate, {}, unnamed=16 * layers_of(module))
    assert (max(found) < 1e-4) != broken, found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("broken", [False, True])
def test_labels_of_images_train_as_in_transformers(broken: bool, accumulate: int) -> None:
    module = triptych.load(references.saved("vit")[1]).module
    images, pixels = drawn(module, len(CLASSES))
    goals = np.array(CLASSES[1:] + CLASSES[:1] if broken else CLASSES)
    examples = labelled_images(module, images, goals, ClassLoss(LABELS))

    def theirs(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(pixel_values=pixels, labels=torch.tensor(CLASSES).flatten()).loss

    found = differences("vit", module, list(examples), theirs, accumulate, {}, unnamed=16 * layers_of(module))
    assert (max(found) < 1e-4) != broken, found
