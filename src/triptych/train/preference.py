"""Pairs of answers of which one is preferred: direct preference optimization (Rafailov et al. 2023, equation 7).

The loss of a pair is `-log sigmoid(beta * (chosen - rejected))`, where each of the two is the log-probability of an
answer's tokens after the prompt, summed, less that of the reference: the model before training.  The reference of an
adapter is the same model with the adapter switched off; without an adapter it is a second copy of `model.path`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.count import MAX_LOGITS
from triptych.count.training import size
from triptych.errors import ConfigError, InputError, TextError
from triptych.nn import Transformer, without_adapter
from triptych.ops import RowNoise
from .base_model import read_base
from .chat_task import Message, messages_of
from .evaluate import HeldOut, Score, batched
from .objectives import Device, Example, TrainingBatch
from .ranks import Ranks
from .recipe import Recipe
from .records import DataRecord
from .task import ObjectiveTask, Prepared, epoch_rows, read_split


@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """`beta`, and the reference: `frozen`, or the trained model without its adapter where that is None."""

    beta: float
    frozen: Transformer | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @contextmanager
    def reference(self, module: Transformer) -> Iterator[Transformer]:
        """Inside, the model to compare with, in evaluation mode and without gradients."""
        if self.frozen is not None:
            with torch.no_grad():
                yield self.frozen
            self.ranks.after_evaluation(self.frozen)
            return
        training = module.training
        try:
            with torch.no_grad(), without_adapter(module):
                yield module.eval()
        finally:
            module.train(training)

    def nats(self, gains: Tensor) -> Tensor:
        """The losses [B] of pairs, from the `gains` [2, B] over the reference of the chosen and rejected answers."""
        return -F.logsigmoid(self.beta * (gains[0] - gains[1]))


@dataclass(frozen=True, eq=False, kw_only=True)
class PreferencePair(Example):
    """A prompt with the chosen answer, which is trained, and the same with the `rejected` one."""

    rejected: Example
    loss: PreferenceLoss

    def collated(self, examples: Sequence[Example], device: Device) -> PreferenceBatch:
        pairs = [one for one in examples if isinstance(one, PreferencePair)]
        rows = TrainingBatch.of([*pairs, *(pair.rejected for pair in pairs)], device)
        return PreferenceBatch(rows.ids, rows.rows, rows.at, rows.targets, examples=tuple(pairs))

    def shown(self) -> tuple[Example, ...]:
        return self, self.rejected


@dataclass(frozen=True, eq=False)
class PreferenceBatch(TrainingBatch):
    """B rows with chosen answers, then B with the rejected ones."""

    examples: tuple[PreferencePair, ...] = ()

    @property
    def numbers_of_rows(self) -> Sequence[int]:
        return [side << 40 | number for side in range(2) for number in self.numbers]

    @property
    def weight(self) -> float:
        """The number of pairs."""
        return float(len(self.examples))

    @property
    def loss(self) -> PreferenceLoss:
        return self.examples[0].loss

    def gains(self, module: Transformer, max_logits: int, random: RowNoise | None) -> tuple[Tensor, Tensor]:
        """[2, B]: log-probabilities of chosen and rejected answers less those of the reference, and those."""
        with self.loss.reference(module) as reference:
            before = -self.nats_of_rows(reference, max_logits, None).view(2, -1)
        return -self.nats_of_rows(module, max_logits, random).view(2, -1) - before, before

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        gains, _ = self.gains(module, max_logits, random)
        return self.loss.nats(gains).sum()


class PreferenceTask(ObjectiveTask):
    """Fields `prompt`, `chosen` and `rejected`: texts, or lists of messages, whose `prompt` may be left out where both
    lists begin with it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if recipe.base is None:
            raise ConfigError("objective preference compares a model with what it was before; give model.path")
        self.train, self.held_out = read_split(recipe.data, ("chosen", "rejected"), ("prompt",))

    def data(self, module: Transformer, tokens: int) -> Prepared:
        assert self.recipe.base is not None
        frozen = None
        if module.lora_adapter is None:
            base = read_base(self.recipe.base)
            frozen = base.module.requires_grad_(False)
            needed = size(sum(p.nbytes for p in frozen.parameters()))
            self.ranks.distribute(frozen, base.weights, module.device)
            self.notes.append(f"the reference is a second copy of the model, {needed}; an adapter needs none")
        loss = PreferenceLoss(self.objective.beta, frozen, self.ranks)
        data, held_out = (epoch_rows(self._pair(one, loss) for one in side) for side in (self.train, self.held_out))
        return data, HeldOutPreferences(batched(held_out.examples, max(1, tokens // 2), self.device))

    def _pair(self, record: DataRecord, loss: PreferenceLoss) -> PreferencePair | None:
        """The rows of a record; None where an answer does not fit into `run.length`, as the recipe says."""
        prompt, *answers = self._encoded(record)
        if answers[0] == answers[1]:
            raise record.error("chosen and rejected are the same, so there is nothing to learn; remove the record")
        first = min(_common(prompt, answer) for answer in answers)  # where the answers begin, counted in tokens
        rows = []
        for answer in answers:
            ids, trained = np.asarray(answer, dtype=np.int32), np.arange(1, len(answer)) >= first
            length = self.row_length(record, len(trained))
            if length is None or not trained[:length].any():
                return None
            rows.append(Example(ids[:-1][:length], ids[1:][:length], trained[:length]))
        chosen, rejected = rows
        return PreferencePair(chosen.ids, chosen.targets, chosen.trained, rejected=rejected, loss=loss)

    def _encoded(self, record: DataRecord) -> list[list[int]]:
        """The ids of the prompt, and those of it with the chosen and with the rejected answer.

        Texts end with EOS, and messages as the chat template writes them.  Source: the data formats of trl.
        """
        words, end = self.tokenizer, self.tokenizer.eos_id
        if isinstance(record.values["chosen"], list):
            return self._rendered(record)
        if "prompt" not in record.values:
            raise record.error("there is no prompt, which only lists of messages may begin with themselves")
        prompt = record.text("prompt")
        encoded = words.encode_batch([prompt, *(prompt + record.text(side) for side in ("chosen", "rejected"))])
        return [encoded[0], *(ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded[1:])]

    def _rendered(self, record: DataRecord) -> list[list[int]]:
        """`_encoded` of messages."""
        template = self.tokenizer.chat
        if template is None:
            raise TextError("messages need a tokenizer with a chat template; give a chat model as model.path")
        sides = [messages_of(record, side) for side in ("chosen", "rejected")]
        prompt: Sequence[Message]
        if "prompt" in record.values:
            prompt = messages_of(record, "prompt")
        else:
            prompt = sides[0][: _common(*sides)]
            sides = [side[len(prompt) :] for side in sides]
        if not prompt or prompt[-1]["role"] == "assistant":
            raise record.error("the prompt does not end with a message to be answered; end it with one of the user's")
        if not all(side and side[0]["role"] == "assistant" for side in sides):
            raise record.error("an answer does not begin with the assistant's message; begin both with one")
        try:
            rendered = [template.render(prompt), *(template.render([*prompt, *side], False) for side in sides)]
        except (TextError, InputError) as error:
            raise InputError(f"{record.location}: {error}") from None
        return [self.tokenizer.encode(text) for text in rendered]


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, eq=False)
class HeldOutPreferences(HeldOut):
    """Held-out pairs.  A pair is right where the chosen answer gained more over the reference than the rejected one;
    the margin is `beta` times the mean difference of the two gains."""

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        nats, ahead, likelier, longer = 0.0, list[Tensor](), list[Tensor](), list[bool]()
        for batch in batches:
            assert isinstance(batch, PreferenceBatch)
            gains, before = batch.gains(module, MAX_LOGITS, None)
            nats += float(batch.loss.nats(gains).sum())
            ahead.append(batch.loss.beta * (gains[0] - gains[1]))
            likelier.append(before[0] > before[1])
            longer += [one.trained.sum() > one.rejected.trained.sum() for one in batch.examples]
        margins = torch.cat(ahead)
        right, count = int((margins > 0).sum()), len(margins)
        guesses = {
            "likelier to the reference": float(torch.cat(likelier).double().mean()),
            "longer answer": float(np.mean(longer)),
        }
        figures = {"accuracy": right / count, "margin": float(margins.double().mean())}
        return Score(nats, count, right, metrics=figures, baselines=guesses)
