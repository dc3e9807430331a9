"""Random cases of objectives with labels, of texts that belong together, and of those that read images and sounds.

`DRAW[name](seed)` is a case of any objective, and `training_cases.compare` trains it.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training_cases import Case, case_of, decoder, other, vision_case
from training_tokens import DECODERS, ENCODERS, Rows, corruption, masked, next_token, padded_rows, ragged, to_sequence
from triptych.media.image import Preparation
from triptych.text import Encoded
from triptych.train import Example, causal, seq2seq
from triptych.train.audio_records import Speech, SpokenExample
from triptych.train.contrastive import TextPair
from triptych.train.distill_loss import Distillation, TeacherModel
from triptych.train.image_tasks import CaptionExample, RecordImage, labelled_images
from triptych.train.labelled import IGNORED, ClassLoss, HeadLoss, ReplacedLoss, SeveralLoss, SpanLoss, labelled
from triptych.train.preference import PreferenceLoss, PreferencePair


def _labelled(rows: Rows, types: Rows, goals: Sequence[Sequence[int]], head: HeadLoss) -> list[Example]:
    return [
        labelled(Encoded(row, kinds, [], []), goal, head, 0, np.ones(len(row), dtype=bool))
        for row, kinds, goal in zip(rows, types, goals, strict=True)
    ]


def token_types(random: Random, config: Any, rows: Rows) -> Rows:
    """Token types of pairs: 0 to a drawn place and 1 after it, where the model has them."""
    known = int(getattr(config, "type_vocab_size", 0) or 0)
    return [
        [int(i >= cut and known > 1) for i in range(len(row))] for row in rows for cut in [random.randint(1, len(row))]
    ]


def padded_inputs(model: Any, rows: Rows, types: Rows) -> dict[str, Tensor]:
    ids, mask = padded_rows(rows, model.config.pad_token_id or 0)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = padded_rows(types, 0)[0]
    return inputs


def drawn_loss(random: Random, count: int) -> ClassLoss:
    weights = tuple(random.choice([0.5, 1.0, 3.0]) for _ in range(count)) if random.random() < 0.5 else None
    return ClassLoss(tuple(f"L{i}" for i in range(count)), random.choice([0.0, 0.0, 0.1, 0.3]), weights)


def weighted_loss(logits: Tensor, goals: Tensor, head: ClassLoss) -> Tensor:
    weights = None if head.weights is None else torch.tensor(head.weights)
    return F.cross_entropy(logits, goals, weights, label_smoothing=head.smoothing, ignore_index=IGNORED)


def has_classes(drawn: Any) -> bool:
    """Two labels or more, and not regression."""
    count = len(drawn.keys["id2label"]) if "id2label" in drawn.keys else drawn.keys["num_labels"]
    return count > 1 and drawn.keys["problem_type"] != "regression"


CONTRASTED = ("bert", "roberta", "electra", "distilbert", "modernbert")
LABELLED = (*ENCODERS, "bart", "mbart", "t5", "mt5")


def labels(seed: int) -> Case:
    random, family = Random(f"labels {seed}"), LABELLED[seed % len(LABELLED)]
    reference, module = other(family, "ForSequenceClassification", seed, has_classes)
    config, count = reference.config, reference.config.num_labels
    rows = ragged(random, config, end=config.eos_token_id if config.is_encoder_decoder else None)
    types = token_types(random, config, rows)
    if random.random() < 0.4:
        goals = [[random.randint(0, 1) for _ in range(count)] for _ in rows]
        reference.config.problem_type = "multi_label_classification"
        wanted = torch.tensor(goals).float()
        several = _labelled(rows, types, goals, SeveralLoss(tuple(map(str, range(count)))))

        def each(model: Any) -> Tensor:
            return model(**padded_inputs(model, rows, types), labels=wanted).loss

        return case_of(random, reference, module, several, each)
    right = [random.randrange(count) for _ in rows]
    head = drawn_loss(random, count)

    def theirs(model: Any) -> Tensor:
        model.config.problem_type = "single_label_classification"
        out = model(**padded_inputs(model, rows, types), labels=torch.tensor(right))
        plain = head.smoothing == 0 and head.weights is None
        return out.loss if plain else weighted_loss(out.logits, torch.tensor(right), head)

    return case_of(random, reference, module, _labelled(rows, types, [[one] for one in right], head), theirs)


def tags(seed: int) -> Case:
    random, family = Random(f"tags {seed}"), ENCODERS[seed % len(ENCODERS)]

    def several(drawn: Any) -> bool:
        return len(drawn.keys.get("id2label", ())) > 1 or drawn.keys.get("num_labels", 0) > 1

    reference, module = other(family, "ForTokenClassification", seed, several)
    count = reference.config.num_labels
    rows = ragged(random, reference.config)
    types = token_types(random, reference.config, rows)
    goals = [[random.randrange(count) if random.random() < 0.7 else IGNORED for _ in row] for row in rows]
    goals[0][0] = 0
    head = drawn_loss(random, count)
    examples = [
        replace(one, trained=np.array(goal) != IGNORED)
        for one, goal in zip(_labelled(rows, types, goals, head), goals, strict=True)
    ]

    def theirs(model: Any) -> Tensor:
        wanted = padded_rows(goals, IGNORED)[0]
        out = model(**padded_inputs(model, rows, types), labels=wanted)
        plain = head.smoothing == 0 and head.weights is None
        return out.loss if plain else weighted_loss(out.logits.flatten(0, 1), wanted.flatten(), head)

    return case_of(random, reference, module, examples, theirs)


def spans(seed: int) -> Case:
    random, family = Random(f"spans {seed}"), ENCODERS[seed % len(ENCODERS)]
    reference, module = other(family, "ForQuestionAnswering", seed)
    rows = ragged(random, reference.config)
    types = token_types(random, reference.config, rows)
    goals = [sorted(random.choices(range(len(row)), k=2)) for row in rows]
    smoothing = random.choice([0.0, 0.2])

    def theirs(model: Any) -> Tensor:
        """Row by row: the reference lets padding take part in the softmax over positions."""
        each = []
        for row, kinds, (first, last) in zip(rows, types, goals, strict=True):
            ends = {"start_positions": torch.tensor([first]), "end_positions": torch.tensor([last])}
            out = model(**padded_inputs(model, [row], [kinds]), **ends)
            smooth = [
                F.cross_entropy(scores, place, label_smoothing=smoothing)
                for scores, place in zip((out.start_logits, out.end_logits), ends.values(), strict=True)
            ]
            each.append(sum(smooth) / 2 if smoothing else out.loss)
        return torch.stack(each).mean()

    return case_of(random, reference, module, _labelled(rows, types, goals, SpanLoss(smoothing)), theirs)


def replaced(seed: int) -> Case:
    random = Random(f"replaced {seed}")
    reference, module = other("electra", "ForPreTraining", seed)
    rows = ragged(random, reference.config)
    types = token_types(random, reference.config, rows)
    goals = [[int(random.random() < 0.3) for _ in row] for row in rows]

    def theirs(model: Any) -> Tensor:
        return model(**padded_inputs(model, rows, types), labels=padded_rows(goals, 0)[0]).loss

    return case_of(random, reference, module, _labelled(rows, types, goals, ReplacedLoss()), theirs)


def contrast(seed: int) -> Case:
    """Beside sentence-transformers' own loss of the pooled vectors, of each micro-batch alone; with hard negatives in
    half of the cases."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    random, family = Random(f"contrast {seed}"), CONTRASTED[seed % len(CONTRASTED)]
    mode, normalize = random.choice(["mean", "first"]), random.random() < 0.5
    pooled = {"triptych_pooling": {"mode": mode, "normalize": normalize}}
    two = family in ("bert", "roberta")  # which have a pooler or none
    reference, module = other(family, "Model", seed, lambda drawn: not (two and drawn.pooler), **pooled)
    sides, count, scale = random.choice([2, 3]), random.choice([4, 6, 8]), random.choice([1.0, 20.0])
    texts = [[*ragged(random, reference.config), *ragged(random, reference.config)] for _ in range(sides)]
    texts = [side[:count] for side in texts]
    kinds = [token_types(random, reference.config, side) for side in texts]

    def pair(i: int) -> TextPair:
        return TextPair.of([Encoded(texts[k][i], kinds[k][i], [], []) for k in range(sides)], scale)

    parts = random.choice([1, 2])
    ranking = MultipleNegativesRankingLoss(model=torch.nn.Identity(), scale=scale)

    def theirs(model: Any, parts: int = parts) -> Tensor:
        vectors = []
        for side, kind in zip(texts, kinds, strict=True):
            inputs = padded_inputs(model, side, kind)
            last = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            vectors.append(last[:, 0] if mode == "first" else (last * mask).sum(1) / mask.sum(1))
        size = count // parts
        each = [
            ranking.compute_loss_from_embeddings([one[i : i + size] for one in vectors], torch.empty(0))
            for i in range(0, count, size)
        ]
        return torch.stack(each).mean()

    case = case_of(random, reference, module, [pair(i) for i in range(count)], theirs)
    return replace(case, accumulate=parts, whole=lambda model: theirs(model, 1))


def _images(random: Random, slot: Any, count: int) -> tuple[list[RecordImage], Tensor]:
    """Images of random pixels as records hold them, and as the reference takes them, [B, C, H, W]."""
    numbers = np.random.default_rng(random.randrange(10**6))
    pixels = numbers.normal(size=(count, slot.channels, *slot.image)).astype(np.float32)
    how = Preparation(height=slot.image[0], width=slot.image[1])
    return [RecordImage(Path(), how, one.ravel(), one) for one in pixels], torch.from_numpy(pixels)


def image_labels(seed: int) -> Case:
    random = Random(f"images {seed}")
    reference, module = other("vit", "ForImageClassification", seed, has_classes)
    count = reference.config.num_labels
    images, pixels = _images(random, module.spec.reads.embed, random.randint(4, 7))
    if random.random() < 0.4:
        goals = [[random.randint(0, 1) for _ in range(count)] for _ in images]
        reference.config.problem_type = "multi_label_classification"
        several = labelled_images(module, images, np.array(goals), SeveralLoss(tuple(map(str, range(count)))))
        wanted = torch.tensor(goals).float()
        return case_of(random, reference, module, several, lambda model: model(pixel_values=pixels, labels=wanted).loss)
    right, head = torch.tensor([random.randrange(count) for _ in images]), drawn_loss(random, count)
    examples = labelled_images(module, images, right[:, None].numpy(), head)

    def theirs(model: Any) -> Tensor:
        return weighted_loss(model(pixel_values=pixels).logits, right, head)

    return case_of(random, reference, module, examples, theirs)


def captions(seed: int) -> Case:
    """A ViT read by GPT-2 or BERT."""
    random = Random(f"captions {seed}")
    reference, module = vision_case(seed)
    config, smoothing = reference.config, random.choice([0.0, 0.0, 0.1])
    rows = ragged(random, config.decoder, end=config.eos_token_id)
    images, pixels = _images(random, module.spec.reads.embed, len(rows))
    start = config.decoder_start_token_id
    examples = []
    for row, image in zip(rows, images, strict=True):
        one = seq2seq([0], row, start)
        examples.append(
            CaptionExample(one.ids, one.targets, one.trained, image=image, read=module.flat, smoothing=smoothing)
        )
    goals = padded_rows(rows, IGNORED)[0]

    def theirs(model: Any) -> Tensor:
        out = model(pixel_values=pixels, labels=goals)
        if not smoothing:
            return out.loss
        logits = out.logits.flatten(0, 1)
        return F.cross_entropy(logits, goals.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)

    return case_of(random, reference, module, examples, theirs)


def speech(seed: int) -> Case:
    """Only what follows a drawn prompt is trained, as of transcripts."""
    random = Random(f"speech {seed}")
    reference, module = other("whisper", "ForConditionalGeneration", seed)
    config, slot = reference.config, module.spec.reads.embed
    rows = ragged(random, config, end=config.eos_token_id)
    window = 2 * config.max_source_positions
    numbers = np.random.default_rng(seed)
    frames = [torch.from_numpy(numbers.normal(size=(window, config.num_mel_bins)).astype(np.float32)) for _ in rows]
    skipped = [random.randint(0, len(row) - 1) for row in rows]
    examples = []
    for row, one, skip in zip(rows, frames, skipped, strict=True):
        plain = seq2seq([0], row, config.decoder_start_token_id)
        trained = np.arange(len(row)) >= skip
        examples.append(
            SpokenExample(plain.ids, plain.targets, trained, sound=one, speech=Speech(slot, (), 0), text="")
        )
    goals = [[IGNORED] * skip + row[skip:] for row, skip in zip(rows, skipped, strict=True)]

    def theirs(model: Any) -> Tensor:
        begun = padded_rows([[config.decoder_start_token_id, *row[:-1]] for row in rows], config.pad_token_id)[0]
        features = torch.stack([one.T for one in frames])
        return model(input_features=features, decoder_input_ids=begun, labels=padded_rows(goals, IGNORED)[0]).loss

    return case_of(random, reference, module, examples, theirs)


def preference(seed: int) -> Case:
    """Pairs of answers, compared with the model as it is before the first step."""
    random = Random(f"preference {seed}")
    reference, module = decoder(DECODERS[seed % len(DECODERS)], seed)
    before, beta = deepcopy(reference).eval(), random.choice([0.1, 0.5, 2.0])
    frozen = PreferenceLoss(beta, deepcopy(module).eval().requires_grad_(False))
    rows = ragged(random, reference.config, low=4)
    prompts = [random.randint(1, len(row) - 2) for row in rows]
    others = [
        [*row[:prompt], *random.choices(row, k=random.randint(1, 9))] for row, prompt in zip(rows, prompts, strict=True)
    ]

    def example(row: Sequence[int], prompt: int) -> Example:
        return replace(causal(row), trained=np.arange(1, len(row)) >= prompt)

    examples = []
    for row, other_row, prompt in zip(rows, others, prompts, strict=True):
        one = example(row, prompt)
        pair = PreferencePair(one.ids, one.targets, one.trained, rejected=example(other_row, prompt), loss=frozen)
        examples.append(pair)

    def log_probabilities(model: Any, answers: Rows) -> Tensor:
        ids, mask = padded_rows(answers, 0)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        each = logits.gather(-1, ids[:, 1:, None])[..., 0]
        counts = torch.arange(1, ids.shape[1]) >= torch.tensor(prompts)[:, None]
        return (each * counts * mask[:, 1:]).sum(-1)

    def theirs(model: Any) -> Tensor:
        with torch.no_grad():
            start = [log_probabilities(before, side) for side in (rows, others)]
        gains = [log_probabilities(model, side) - old for side, old in zip((rows, others), start, strict=True)]
        return torch.log1p(torch.exp(-beta * (gains[0] - gains[1]))).mean()

    return case_of(random, reference, module, examples, theirs)


def distilled(seed: int) -> Case:
    """Next tokens with a teacher of another family, often with more or fewer logits: the sums are written out."""
    random = Random(f"distilled {seed}")
    reference, module = decoder(DECODERS[seed % len(DECODERS)], seed)
    teacher, its_module = decoder(DECODERS[(seed + 5) % len(DECODERS)], seed + 100)
    vocab = min(reference.config.vocab_size, teacher.config.vocab_size)
    rows = ragged(random, reference.config, vocab=vocab, low=3)
    top, heat = random.choice([None, 1, 4, vocab]), random.choice([0.7, 1.0, 3.0])
    weight = random.choice([0.3, 0.8, 1.0])
    frozen = TeacherModel(its_module.eval().requires_grad_(False), vocab, heat, top)
    distillation = Distillation(frozen, vocab, heat, weight)
    teacher.eval()

    def of_row(model: Any, row: Sequence[int]) -> Tensor:
        """The sum over the tokens of a row."""
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        with torch.no_grad():
            theirs = torch.softmax(teacher(input_ids=torch.tensor([row])).logits[0, :-1, :vocab] / heat, -1)
        own = torch.softmax(logits[:, :vocab] / heat, -1)
        kept = torch.zeros_like(theirs).scatter(-1, theirs.topk(top or vocab).indices, 1.0)
        apart = (kept * theirs * (theirs.log() - own.log())).sum()
        if kept.sum() < kept.numel():
            p, q = ((one * (1 - kept)).sum(-1) for one in (theirs, own))
            apart = apart + (p * (p.log() - q.log())).sum()
        tokens = -torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None]).sum()
        return (1 - weight) * tokens + weight * heat * heat * apart

    def theirs(model: Any) -> Tensor:
        return torch.stack([of_row(model, row) for row in rows]).sum() / sum(len(row) - 1 for row in rows)

    return case_of(random, reference, module, [distillation.row(causal(row)) for row in rows], theirs)


DRAW: dict[str, Callable[[int], Case]] = {
    "next token": next_token, "masked": masked, "seq2seq": to_sequence, "corruption": corruption, "labels": labels,
    "tags": tags, "spans": spans, "replaced": replaced, "images": image_labels, "speech": speech,
    "contrast": contrast, "captions": captions, "preference": preference,
    "distilled": distilled,
}  # fmt: skip
