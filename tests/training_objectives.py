"""What `training_cases` compares: for each objective random rows, our examples of them, and the reference's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training_cases import Case, case_of, decoder, other, vision_case
from triptych.media.image import Preparation
from triptych.text import Encoded
from triptych.train import Example, TokenMasking, causal, seq2seq
from triptych.train.audio_records import SpokenExample
from triptych.train.caption_task import CaptionExample
from triptych.train.contrastive import TextPair
from triptych.train.corruption import corrupted, noise_spans
from triptych.train.image_labels import labelled_images
from triptych.train.image_records import RecordImage
from triptych.train.labelled import IGNORED, ClassLoss, HeadLoss, ReplacedLoss, SeveralLoss, SpanLoss, labelled

Rows = list[list[int]]
DECODERS = (
    "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "gemma",
    "gemma2", "gemma3_text", "starcoder2", "granite",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "modernbert")
SEQ2SEQ = ("t5", "mt5", "bart", "mbart", "marian")


def _rows(random: Random, config: Any, *, low: int = 2, high: int = 12, end: int | None = None, vocab: int | None = None) -> Rows:
    """Ragged rows of ids that are neither padding nor an end."""
    taken = {config.pad_token_id, config.eos_token_id if not isinstance(config.eos_token_id, list) else None, end, 0, 1, 2}
    words = [i for i in range(vocab or config.vocab_size) if i not in taken]
    tail = [] if end is None else [end]
    return [
        [*random.choices(words, k=random.randint(low, high)), *tail] for _ in range(random.randint(4, 7))
    ]


def _padded(rows: Sequence[Sequence[int]], pad: int, left: bool = False) -> tuple[Tensor, Tensor]:
    most = max(map(len, rows))

    def whole(row: Sequence[int], value: int) -> list[int]:
        fill = [value] * (most - len(row))
        return [*fill, *row] if left else [*row, *fill]

    return torch.tensor([whole(row, pad) for row in rows]), torch.tensor([whole([1] * len(row), 0) for row in rows])


# ---------------------------------------------------------------- tokens


def _trained_part(random: Random, rows: Rows) -> list[list[bool]]:
    """Of half of the cases every token is trained, of the others a drawn part, at least one in the first row."""
    if random.random() < 0.5:
        return [[True] * len(row) for row in rows]
    part = [[random.random() < 0.5 for _ in row] for row in rows]
    part[0][-1] = True
    return part


def _after_the_first(labels: Rows) -> Rows:
    """The first token of a row is predicted from nothing; beside padding before it, its label would count."""
    return [[IGNORED, *row[1:]] for row in labels]


def next_token(seed: int) -> Case:
    random = Random(f"next token {seed}")
    reference, module = decoder(DECODERS[seed % len(DECODERS)], seed)
    rows = _rows(random, reference.config)
    part = _trained_part(random, rows)
    examples = []
    for row, trained in zip(rows, part, strict=True):
        one = causal(row)
        examples.append(replace(one, trained=np.array(trained[1:])))
    labels = [[i if t else IGNORED for i, t in zip(row, trained, strict=True)] for row, trained in zip(rows, part, strict=True)]
    labels = _after_the_first(labels)
    layout = random.choice(["right", "left", "packed"])

    def padded(model: Any) -> Tensor:
        left = layout == "left"
        ids, mask = _padded(rows, 0, left)
        goals, _ = _padded(labels, IGNORED, left)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), goals[:, 1:].flatten(), ignore_index=IGNORED)

    def own(model: Any) -> Tensor:
        ids, mask = _padded(rows, 0)
        return model(input_ids=ids, attention_mask=mask, labels=_padded(labels, IGNORED)[0]).loss

    def packed(model: Any) -> Tensor:
        """One row of all, which the positions tell apart."""
        ids = torch.tensor([[i for row in rows for i in row]])
        positions = torch.tensor([[i for row in rows for i in range(len(row))]])
        goals = [label for row in labels for label in row]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        return F.cross_entropy(logits[:-1], torch.tensor(goals)[1:], ignore_index=IGNORED)

    return case_of(random, reference, module, examples, {"right": own, "left": padded, "packed": packed}[layout])


def masked(seed: int) -> Case:
    random = Random(f"masked {seed}")
    reference, module = other(ENCODERS[seed % len(ENCODERS)], "ForMaskedLM", seed)
    rows = _rows(random, reference.config)
    masking = TokenMasking(3, reference.config.vocab_size, frozenset({0, 1, 2, 3}), random.choice([0.15, 0.4]))
    numbers = np.random.default_rng(seed)
    examples = [masking(row, numbers) for row in rows]
    labels = [np.where(one.trained, one.targets, IGNORED).tolist() for one in examples]
    pad = reference.config.pad_token_id or 0

    def theirs(model: Any) -> Tensor:
        ids, mask = _padded([one.ids.tolist() for one in examples], pad)
        # The reference of ModernBERT with `sparse_prediction` reads no padding, and the others ignore it.
        return model(input_ids=ids, attention_mask=mask, labels=_padded(labels, IGNORED)[0]).loss

    return case_of(random, reference, module, examples, theirs)


def _pairs(random: Random, config: Any, family: str) -> tuple[Rows, Rows]:
    end = config.eos_token_id
    sources = _rows(random, config, end=end)
    vocab = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    every = [i for i in range(3, min(vocab, config.vocab_size)) if i not in (config.pad_token_id, end)]
    targets = [[*random.choices(every, k=random.randint(1, 9)), end] for _ in sources]
    return sources, targets


def _seq2seq_loss(sources: Rows, targets: Rows, start: int, own_shift: bool) -> Callable[[Any], Tensor]:
    def theirs(model: Any) -> Tensor:
        pad = model.config.pad_token_id
        ids, mask = _padded(sources, pad)
        labels = _padded(targets, IGNORED)[0]
        if own_shift:
            return model(input_ids=ids, attention_mask=mask, labels=labels).loss
        begun = _padded([[start, *row[:-1]] for row in targets], pad)[0]
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=begun, labels=labels).loss

    return theirs


def to_sequence(seed: int) -> Case:
    random, family = Random(f"seq2seq {seed}"), SEQ2SEQ[seed % len(SEQ2SEQ)]
    reference, module = other(family, "MTModel" if family == "marian" else "ForConditionalGeneration", seed)
    sources, targets = _pairs(random, reference.config, family)
    start = reference.config.decoder_start_token_id
    examples = [seq2seq(source, target, start) for source, target in zip(sources, targets, strict=True)]
    # mBART turns a target round, its last token first.
    return case_of(random, reference, module, examples, _seq2seq_loss(sources, targets, start, family != "mbart"))


def corruption(seed: int) -> Case:
    random = Random(f"corruption {seed}")
    reference, module = other(("t5", "mt5")[seed % 2], "ForConditionalGeneration", seed)
    numbers = np.random.default_rng(seed)
    vocab, pairs = reference.config.vocab_size, []
    for row in _rows(random, reference.config, low=3, high=16, vocab=vocab - 10):
        spans = noise_spans(len(row), random.choice([0.15, 0.3, 0.5]), random.choice([1.0, 2.0, 3.0]), numbers)
        pairs.append(corrupted(np.array(row, dtype=np.int32), spans, range(vocab - 1, vocab - 11, -1), 1))
    examples = [seq2seq(source, target, 0) for source, target in pairs]
    sources, targets = ([side.tolist() for side in sides] for sides in zip(*pairs, strict=True))
    return case_of(random, reference, module, examples, _seq2seq_loss(sources, targets, 0, own_shift=True))


# ---------------------------------------------------------------- labels


def _labelled(rows: Rows, types: Rows, goals: Sequence[Sequence[int]], head: HeadLoss) -> list[Example]:
    return [
        labelled(Encoded(row, kinds, [], []), goal, head, 0, np.ones(len(row), dtype=bool))
        for row, kinds, goal in zip(rows, types, goals, strict=True)
    ]


def _types(random: Random, config: Any, rows: Rows) -> Rows:
    """Token types of pairs: 0 to a drawn place and 1 after it, where the model has them."""
    known = int(getattr(config, "type_vocab_size", 0) or 0)
    return [
        [int(i >= cut and known > 1) for i in range(len(row))] for row in rows for cut in [random.randint(1, len(row))]
    ]


def _inputs(model: Any, rows: Rows, types: Rows) -> dict[str, Tensor]:
    ids, mask = _padded(rows, model.config.pad_token_id or 0)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = _padded(types, 0)[0]
    return inputs


def _class_loss(random: Random, count: int) -> ClassLoss:
    weights = tuple(random.choice([0.5, 1.0, 3.0]) for _ in range(count)) if random.random() < 0.5 else None
    return ClassLoss(tuple(f"L{i}" for i in range(count)), random.choice([0.0, 0.0, 0.1, 0.3]), weights)


def _cross_entropy(logits: Tensor, goals: Tensor, head: ClassLoss) -> Tensor:
    weights = None if head.weights is None else torch.tensor(head.weights)
    return F.cross_entropy(logits, goals, weights, label_smoothing=head.smoothing, ignore_index=IGNORED)


def _classes(drawn: Any) -> bool:
    """Two labels or more, and not regression."""
    count = len(drawn.keys["id2label"]) if "id2label" in drawn.keys else drawn.keys["num_labels"]
    return count > 1 and drawn.keys["problem_type"] != "regression"


CONTRASTED = ("bert", "roberta", "electra", "distilbert", "modernbert")
LABELLED = (*ENCODERS, "bart", "mbart", "t5", "mt5")


def labels(seed: int) -> Case:
    random, family = Random(f"labels {seed}"), LABELLED[seed % len(LABELLED)]
    reference, module = other(family, "ForSequenceClassification", seed, _classes)
    config, count = reference.config, reference.config.num_labels
    rows = _rows(random, config, end=config.eos_token_id if config.is_encoder_decoder else None)
    types = _types(random, config, rows)
    if random.random() < 0.4:
        goals = [[random.randint(0, 1) for _ in range(count)] for _ in rows]
        reference.config.problem_type = "multi_label_classification"
        wanted = torch.tensor(goals).float()
        several = _labelled(rows, types, goals, SeveralLoss(tuple(map(str, range(count)))))
        return case_of(random, reference, module, several, lambda model: model(**_inputs(model, rows, types), labels=wanted).loss)
    right = [random.randrange(count) for _ in rows]
    head = _class_loss(random, count)

    def theirs(model: Any) -> Tensor:
        model.config.problem_type = "single_label_classification"
        out = model(**_inputs(model, rows, types), labels=torch.tensor(right))
        plain = head.smoothing == 0 and head.weights is None
        return out.loss if plain else _cross_entropy(out.logits, torch.tensor(right), head)

    return case_of(random, reference, module, _labelled(rows, types, [[one] for one in right], head), theirs)


def tags(seed: int) -> Case:
    random, family = Random(f"tags {seed}"), ENCODERS[seed % len(ENCODERS)]

    def several(drawn: Any) -> bool:
        return len(drawn.keys.get("id2label", ())) > 1 or drawn.keys.get("num_labels", 0) > 1

    reference, module = other(family, "ForTokenClassification", seed, several)
    count = reference.config.num_labels
    rows = _rows(random, reference.config)
    types = _types(random, reference.config, rows)
    goals = [[random.randrange(count) if random.random() < 0.7 else IGNORED for _ in row] for row in rows]
    goals[0][0] = 0
    head = _class_loss(random, count)
    examples = [
        replace(one, trained=np.array(goal) != IGNORED)
        for one, goal in zip(_labelled(rows, types, goals, head), goals, strict=True)
    ]

    def theirs(model: Any) -> Tensor:
        wanted = _padded(goals, IGNORED)[0]
        out = model(**_inputs(model, rows, types), labels=wanted)
        plain = head.smoothing == 0 and head.weights is None
        return out.loss if plain else _cross_entropy(out.logits.flatten(0, 1), wanted.flatten(), head)

    return case_of(random, reference, module, examples, theirs)


def spans(seed: int) -> Case:
    random, family = Random(f"spans {seed}"), ENCODERS[seed % len(ENCODERS)]
    reference, module = other(family, "ForQuestionAnswering", seed)
    rows = _rows(random, reference.config)
    types = _types(random, reference.config, rows)
    goals = [sorted(random.choices(range(len(row)), k=2)) for row in rows]
    smoothing = random.choice([0.0, 0.2])

    def theirs(model: Any) -> Tensor:
        """Row by row: the reference lets padding take part in the softmax over positions."""
        each = []
        for row, kinds, (first, last) in zip(rows, types, goals, strict=True):
            ends = {"start_positions": torch.tensor([first]), "end_positions": torch.tensor([last])}
            out = model(**_inputs(model, [row], [kinds]), **ends)
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
    rows = _rows(random, reference.config)
    types = _types(random, reference.config, rows)
    goals = [[int(random.random() < 0.3) for _ in row] for row in rows]

    def theirs(model: Any) -> Tensor:
        return model(**_inputs(model, rows, types), labels=_padded(goals, 0)[0]).loss

    return case_of(random, reference, module, _labelled(rows, types, goals, ReplacedLoss()), theirs)


def contrast(seed: int) -> Case:
    """Beside sentence-transformers' own loss of the pooled vectors, of each micro-batch alone; with hard negatives in
    half of the cases."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    random, family = Random(f"contrast {seed}"), CONTRASTED[seed % len(CONTRASTED)]
    mode, normalize = random.choice(["mean", "first"]), random.random() < 0.5
    pooled = {"triptych_pooling": {"mode": mode, "normalize": normalize}}
    reference, module = other(family, "Model", seed, lambda drawn: family not in ("bert", "roberta") or not drawn.pooler, **pooled)
    sides, count, scale = random.choice([2, 3]), random.choice([4, 6, 8]), random.choice([1.0, 20.0])
    texts = [[*_rows(random, reference.config), *_rows(random, reference.config)] for _ in range(sides)]
    texts = [side[:count] for side in texts]
    kinds = [_types(random, reference.config, side) for side in texts]

    def pair(i: int) -> TextPair:
        ids = np.array(texts[0][i], dtype=np.int32)
        others = tuple(Encoded(texts[k][i], kinds[k][i], [], []) for k in range(1, sides))
        types = np.array(kinds[0][i], dtype=np.int32)
        return TextPair(
            ids=ids, targets=ids, trained=np.arange(len(ids)) == 0, types=types, others=others, scale=scale
        )

    parts = random.choice([1, 2])
    ranking = MultipleNegativesRankingLoss(model=torch.nn.Identity(), scale=scale)

    def theirs(model: Any, parts: int = parts) -> Tensor:
        vectors = []
        for side, kind in zip(texts, kinds, strict=True):
            inputs = _inputs(model, side, kind)
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


# ---------------------------------------------------------------- images and sounds


def _images(random: Random, slot: Any, count: int) -> tuple[list[RecordImage], Tensor]:
    """Images of random pixels as records hold them, and as the reference takes them, [B, C, H, W]."""
    numbers = np.random.default_rng(random.randrange(10**6))
    pixels = numbers.normal(size=(count, slot.channels, *slot.image)).astype(np.float32)
    how = Preparation(height=slot.image[0], width=slot.image[1])
    return [RecordImage(Path(), how, one.ravel(), one) for one in pixels], torch.from_numpy(pixels)


def image_labels(seed: int) -> Case:
    random = Random(f"images {seed}")
    reference, module = other("vit", "ForImageClassification", seed, _classes)
    count = reference.config.num_labels
    images, pixels = _images(random, module.spec.reads.embed, random.randint(4, 7))
    if random.random() < 0.4:
        goals = [[random.randint(0, 1) for _ in range(count)] for _ in images]
        reference.config.problem_type = "multi_label_classification"
        several = labelled_images(module, images, np.array(goals), SeveralLoss(tuple(map(str, range(count)))))
        wanted = torch.tensor(goals).float()
        return case_of(random, reference, module, several, lambda model: model(pixel_values=pixels, labels=wanted).loss)
    right, head = torch.tensor([random.randrange(count) for _ in images]), _class_loss(random, count)
    examples = labelled_images(module, images, right[:, None].numpy(), head)

    def theirs(model: Any) -> Tensor:
        return _cross_entropy(model(pixel_values=pixels).logits, right, head)

    return case_of(random, reference, module, examples, theirs)


def captions(seed: int) -> Case:
    """A ViT read by GPT-2 or BERT."""
    random = Random(f"captions {seed}")
    reference, module = vision_case(seed)
    config, smoothing = reference.config, random.choice([0.0, 0.0, 0.1])
    rows = _rows(random, config.decoder, end=config.eos_token_id)
    images, pixels = _images(random, module.spec.reads.embed, len(rows))
    start = config.decoder_start_token_id
    examples = []
    for row, image in zip(rows, images, strict=True):
        one = seq2seq([0], row, start)
        examples.append(
            CaptionExample(one.ids, one.targets, one.trained, image=image, read=module.flat, smoothing=smoothing)
        )
    goals = _padded(rows, IGNORED)[0]

    def theirs(model: Any) -> Tensor:
        out = model(pixel_values=pixels, labels=goals)
        if not smoothing:
            return out.loss
        return F.cross_entropy(out.logits.flatten(0, 1), goals.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)

    return case_of(random, reference, module, examples, theirs)


def speech(seed: int) -> Case:
    """Only what follows a drawn prompt is trained, as of transcripts."""
    random = Random(f"speech {seed}")
    reference, module = other("whisper", "ForConditionalGeneration", seed)
    config, slot = reference.config, module.spec.reads.embed
    rows = _rows(random, config, end=config.eos_token_id)
    window = 2 * config.max_source_positions
    numbers = np.random.default_rng(seed)
    frames = [torch.from_numpy(numbers.normal(size=(window, config.num_mel_bins)).astype(np.float32)) for _ in rows]
    skipped = [random.randint(0, len(row) - 1) for row in rows]
    examples = []
    for row, one, skip in zip(rows, frames, skipped, strict=True):
        plain = seq2seq([0], row, config.decoder_start_token_id)
        trained = np.arange(len(row)) >= skip
        examples.append(
            SpokenExample(ids=plain.ids, targets=plain.targets, trained=trained, frames=one, stride=slot.stride, text="")
        )
    goals = [[IGNORED] * skip + row[skip:] for row, skip in zip(rows, skipped, strict=True)]

    def theirs(model: Any) -> Tensor:
        begun = _padded([[config.decoder_start_token_id, *row[:-1]] for row in rows], config.pad_token_id)[0]
        features = torch.stack([one.T for one in frames])
        return model(input_features=features, decoder_input_ids=begun, labels=_padded(goals, IGNORED)[0]).loss

    return case_of(random, reference, module, examples, theirs)


DRAW: dict[str, Callable[[int], Case]] = {
    "next token": next_token, "masked": masked, "seq2seq": to_sequence, "corruption": corruption, "labels": labels,
    "tags": tags, "spans": spans, "replaced": replaced, "images": image_labels, "speech": speech,
    "contrast": contrast, "captions": captions,
}  # fmt: skip
