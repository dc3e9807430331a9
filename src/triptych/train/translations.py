"""BLEU and chrF of what an encoder-decoder writes for held-out sources, beside those of the sources themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from triptych.errors import ConfigError
from triptych.generate import Engine, Request, Scheduler, generate
from triptych.nn import Transformer
from triptych.text import Tokenizer
from triptych.train import metrics
from triptych.train.evaluate import HeldOut, Score
from triptych.train.objectives import TrainingBatch
from triptych.train.recipe import Recipe
from triptych.train.sources import Pair


@dataclass(frozen=True, eq=False)
class WithTranslations(HeldOut):
    """Held-out rows, of which `pairs` are also translated: greedily, at most `length` tokens each.  A `sample` of them
    translates nothing."""

    pairs: tuple[Pair, ...] = ()
    tokenizer: Tokenizer | None = None
    length: int = 0

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        """The score of `HeldOut`, and BLEU and chrF of the translations; the baseline is BLEU of the sources."""
        score = super().measured(module, batches)
        assert self.tokenizer is not None
        sources, right = ([pair[side] for pair in self.pairs] for side in (0, 1))
        written = translated(module, self.tokenizer, sources, self.length)
        copied = metrics.translation(sources, right)["BLEU"]
        return replace(score, metrics=metrics.translation(written, right), baselines={"copying the source": copied})


def with_translations(held: HeldOut, recipe: Recipe, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> HeldOut:
    """`held` with those of the held-out `pairs` that `objective.translate` asks for, evenly spaced; unchanged without.

    Raises ConfigError where fewer fit into `run.length`, and InputError where sacrebleu is missing, before anything is
    trained.
    """
    count, length = recipe.objective.translate, recipe.run.length
    if count is None:
        return held
    metrics.translation(["a"], ["a"])
    fitting = [pair for pair in pairs if max(len(tokenizer.encode(side)) for side in pair) <= length]
    if count > len(fitting):
        raise ConfigError(
            f"objective.translate = {count} is more than the {len(fitting)} pairs held out; lower it or raise "
            "data.held_out"
        )
    chosen = tuple(fitting[i * len(fitting) // count] for i in range(count))
    rows = {field.name: getattr(held, field.name) for field in fields(HeldOut)}
    return WithTranslations(**rows, pairs=chosen, tokenizer=tokenizer, length=length)


def translated(module: Transformer, tokenizer: Tokenizer, sources: Sequence[str], length: int) -> list[str]:
    """What the model writes for each source, the likeliest token each time, at most `length` tokens."""
    start = module.spec.ids.start
    assert start is not None
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    requests = [
        Request(prompt=[start], source=tokenizer.encode(source), max_new_tokens=length, ends=ends, number=i)
        for i, source in enumerate(sources)
    ]
    with torch.autocast(module.device.type, enabled=False):
        return [one.text for one in generate(Scheduler(Engine(module)), requests, tokenizer)]
