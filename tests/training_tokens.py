"""Random cases of objectives that predict tokens: the next one, hidden ones, those of another sequence."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training_cases import Case, case_of, decoder, other
from triptych.train import TokenMasking, causal, seq2seq
from triptych.train.labelled import IGNORED
from triptych.train.text_tasks import corrupted, noise_spans

Rows = list[list[int]]
DECODERS = (
    "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "gemma",
    "gemma2", "gemma3_text", "starcoder2", "granite",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "modernbert")
SEQ2SEQ = ("t5", "mt5", "bart", "mbart", "marian")


def ragged(
    random: Random, config: Any, *, low: int = 2, high: int = 12, end: int | None = None, vocab: int | None = None
) -> Rows:
    """Ragged rows of ids that are neither padding nor an end."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    taken = {config.pad_token_id, *ends, end, 0, 1, 2}
    words = [i for i in range(vocab or config.vocab_size) if i not in taken]
    tail = [] if end is None else [end]
    return [[*random.choices(words, k=random.randint(low, high)), *tail] for _ in range(random.randint(4, 7))]


def padded_rows(rows: Sequence[Sequence[int]], pad: int, left: bool = False) -> tuple[Tensor, Tensor]:
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
    rows = ragged(random, reference.config)
    part = _trained_part(random, rows)
    examples = []
    for row, trained in zip(rows, part, strict=True):
        one = causal(row)
        examples.append(replace(one, trained=np.array(trained[1:])))
    pairs = [list(zip(row, trained, strict=True)) for row, trained in zip(rows, part, strict=True)]
    labels = _after_the_first([[i if counts else IGNORED for i, counts in pair] for pair in pairs])
    layout = random.choice(["right", "left", "packed"])

    def padded(model: Any) -> Tensor:
        left = layout == "left"
        ids, mask = padded_rows(rows, 0, left)
        goals, _ = padded_rows(labels, IGNORED, left)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), goals[:, 1:].flatten(), ignore_index=IGNORED)

    def own(model: Any) -> Tensor:
        ids, mask = padded_rows(rows, 0)
        return model(input_ids=ids, attention_mask=mask, labels=padded_rows(labels, IGNORED)[0]).loss

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
    rows = ragged(random, reference.config)
    pad = reference.config.pad_token_id or 0
    hidden = 4 if pad == 3 else 3  # RoBERTa counts positions by what is no padding
    special = frozenset({0, 1, 2, hidden, pad})
    masking = TokenMasking(hidden, reference.config.vocab_size, special, random.choice([0.15, 0.4]))
    numbers = np.random.default_rng(seed)
    examples = [masking(row, numbers) for row in rows]
    labels = [np.where(one.trained, one.targets, IGNORED).tolist() for one in examples]

    def theirs(model: Any) -> Tensor:
        ids, mask = padded_rows([one.ids.tolist() for one in examples], pad)
        # The reference of ModernBERT with `sparse_prediction` reads no padding, and the others ignore it.
        return model(input_ids=ids, attention_mask=mask, labels=padded_rows(labels, IGNORED)[0]).loss

    return case_of(random, reference, module, examples, theirs)


def _pairs(random: Random, config: Any, family: str) -> tuple[Rows, Rows]:
    end = config.eos_token_id
    sources = ragged(random, config, end=end)
    vocab = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    every = [i for i in range(3, min(vocab, config.vocab_size)) if i not in (config.pad_token_id, end)]
    targets = [[*random.choices(every, k=random.randint(1, 9)), end] for _ in sources]
    return sources, targets


def _seq2seq_loss(sources: Rows, targets: Rows, start: int, own_shift: bool) -> Callable[[Any], Tensor]:
    def theirs(model: Any) -> Tensor:
        pad = model.config.pad_token_id
        ids, mask = padded_rows(sources, pad)
        labels = padded_rows(targets, IGNORED)[0]
        if own_shift:
            return model(input_ids=ids, attention_mask=mask, labels=labels).loss
        begun = padded_rows([[start, *row[:-1]] for row in targets], pad)[0]
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
    for row in ragged(random, reference.config, low=3, high=16, vocab=vocab - 10):
        spans = noise_spans(len(row), random.choice([0.15, 0.3, 0.5]), random.choice([1.0, 2.0, 3.0]), numbers)
        pairs.append(corrupted(np.array(row, dtype=np.int32), spans, range(vocab - 1, vocab - 11, -1), 1))
    examples = [seq2seq(source, target, 0) for source, target in pairs]
    sources, targets = ([side.tolist() for side in sides] for sides in zip(*pairs, strict=True))
    return case_of(random, reference, module, examples, _seq2seq_loss(sources, targets, 0, own_shift=True))
