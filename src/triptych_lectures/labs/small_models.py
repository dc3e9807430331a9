"""Builders of small models, short training runs, curves and tables of what they measure, and fitted exponents, for the
labs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import AdamW

from triptych import nn, spec
from triptych.page import Curve, TableSection
from triptych.spec.norms import Norm
from triptych.spec.parts import LinearSpec
from triptych.spec.positions import Absolute, PositionSpec
from triptych.train import Data, Example, Optimizer, OptimizerSettings, RunSettings, Schedule, Trainer
from triptych.train.objectives import Ids

CAUSAL = spec.causal()

Points = list[tuple[float, float]]


def block(width: int, heads: int, hidden: int | None, *, norms: spec.NormsSpec | None = None) -> spec.BlockSpec:
    """A block of width D and H heads, pre-norm by default; without an MLP when `hidden` (F) is None."""
    norms = norms or spec.NormsSpec(pre=spec.RMSNormSpec(width=width))
    inner = None if hidden is None else spec.mlp(width, hidden, "relu")
    return spec.BlockSpec(
        attn=spec.attention(width, heads, head_width=width // heads),
        mlp=inner,
        attn_norm=norms,
        mlp_norm=None if inner is None else norms,
    )


def decoder(
    vocab: int,
    blocks: Sequence[spec.BlockSpec],
    *,
    embedded: Absolute | None = None,
    inside: PositionSpec | None = None,
    final_norm: Norm | None = None,
    mask: spec.Mask = CAUSAL,
    scale: float | None = None,
) -> spec.ModelSpec:
    """A decoder of `blocks`, causal by default, with positions added to the embedding (`embedded`), which is multiplied
    by `scale`, or in attention (`inside`).

    Initial weights have variance 1/D, so that a linear map keeps the size of a normalized vector.
    """
    width = blocks[0].attn.q.inputs
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(vocab=vocab, width=width, position=embedded, scale=scale),
        kinds={"self": spec.KindSpec(mask=mask, position=inside)},
        blocks=tuple(blocks),
        final_norm=final_norm,
    )
    head = spec.LMHeadSpec(proj=LinearSpec(inputs=width, outputs=vocab))
    return spec.ModelSpec(family="triptych", decoder=stack, head=head, init_std=width**-0.5)


def attention_layers(
    layers: int, vocab: int, width: int, heads: int, seed: int, *, scale: float | None = None
) -> nn.Transformer:
    """A decoder of attention alone, with ALiBi's positions, each head with a range of its own."""
    blocks = [block(width, heads, hidden=None)] * layers
    norm = spec.RMSNormSpec(width=width)
    return nn.new(decoder(vocab, blocks, inside=spec.AlibiSpec(heads=heads), final_norm=norm, scale=scale), seed)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def with_mask(module: nn.Transformer, mask: spec.Mask) -> nn.Transformer:
    """Another decoder with the weights of `module` and this mask."""
    other = nn.new(masked(module.spec, mask))
    other.load_state_dict(module.state_dict())
    return other


def encoder(vocab: int, width: int, heads: int, layers: int, seed: int) -> nn.Transformer:
    """Blocks in which every token sees every other, without positions."""
    blocks = [block(width, heads, 2 * width)] * layers
    return nn.new(decoder(vocab, blocks, final_norm=spec.RMSNormSpec(width=width), mask=spec.full()), seed)


def masked(model: spec.ModelSpec, mask: spec.Mask) -> spec.ModelSpec:
    """The decoder `model` with `mask` in place of its own; the mask is part of the spec and not of the weights."""
    stack = model.decoder
    assert stack is not None
    kinds = {name: replace(kind, mask=mask) for name, kind in stack.kinds.items()}
    return replace(model, decoder=replace(stack, kinds=kinds))


def fit(
    module: nn.Transformer,
    data: Data,
    *,
    rows: int,
    length: int,
    steps: int,
    seed: int,
    optimizer: OptimizerSettings | None = None,
    schedule: Schedule | None = None,
    after_step: Callable[[int], None] | None = None,
) -> Points:
    """Train `module` in place for `steps` steps of `rows` rows of at most `length` tokens, and call `after_step` with
    the number of each.  -> (step, loss in nats)"""
    settings = RunSettings(rows=rows, length=length, steps=steps, seed=seed, precision="fp32", evaluate_every=0.0)
    schedule = schedule or Schedule(shape="linear")
    trainer = Trainer(module, data, Optimizer(module, optimizer or OptimizerSettings()), schedule, settings)
    if after_step is not None:
        trainer.on_step = lambda event: after_step(event.step)
    trainer.run()
    return [(float(step.step), step.loss) for step in trainer.at.history]


def descend(
    module: torch.nn.Module,
    loss: Callable[[int], torch.Tensor],
    *,
    steps: int,
    optimizer: OptimizerSettings,
    schedule: Schedule,
) -> Iterator[float]:
    """Train a module that is not one of the library's, in place, by AdamW with the rates and the clipping of `Trainer`.

    `loss` returns that of a step, which are counted from 0; its value is yielded after the step, so that a run can be
    looked at, and ended, in between.
    """
    adamw = AdamW(module.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay)
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = optimizer.lr * schedule.factor((step + 1) / steps)
        nats = loss(step)
        adamw.zero_grad()
        nats.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip)
        adamw.step()
        yield float(nats.detach())


def examples(ids: Ids, targets: Ids, trained: NDArray[np.bool_] | None = None) -> list[Example]:
    """The rows of `ids` and of `targets`, [B, T], to train on at every token, or where `trained`, [T], says so."""
    if trained is None:
        trained = np.ones(ids.shape[1], dtype=bool)
    return [Example(row, own, trained) for row, own in zip(ids, targets, strict=True)]


def halves(values: NDArray[np.float64]) -> tuple[float, float]:
    """The mean of the first half and that of the second."""
    first, second = np.array_split(values, 2)
    return float(first.mean()), float(second.mean())


def curve(
    title: str,
    x: str,
    y: str,
    places: Iterable[float],
    lines: Mapping[str, Iterable[float]],
    guides: Mapping[str, float] | None = None,
    log: Literal["", "x", "y", "xy"] = "",
) -> Curve:
    """A curve whose lines all have their values at the same `places`."""
    at = [float(place) for place in places]
    series = {name: list(zip(at, line, strict=True)) for name, line in lines.items()}
    return Curve(title, x, y, series, dict(guides or {}), log)


def line_table(
    title: str, x: str, places: Iterable[object], lines: Mapping[str, Iterable[float]], form: str
) -> TableSection:
    """The same lines as a table, with a row for each of the `places`."""
    rows = zip(places, *lines.values(), strict=True)
    return TableSection(title, (x, *lines), [[str(place), *(format(y, form) for y in ys)] for place, *ys in rows])


def share_table(title: str, header: tuple[str, str], shares: Mapping[str, float], form: str = ".1%") -> TableSection:
    """One number a row, percent by default."""
    name, value = header
    return line_table(title, name, shares, {value: shares.values()}, form)


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """b of the exponential `y = a e^(bx)` fitted by least squares of the logarithms; NaN when a y is 0 or less."""
    logs = [math.log(y) if y > 0 else math.nan for y in ys]
    mx, my = fmean(xs), fmean(logs)
    return sum((x - mx) * (y - my) for x, y in zip(xs, logs, strict=True)) / sum((x - mx) ** 2 for x in xs)


def power(xs: Sequence[float], ys: Sequence[float]) -> float:
    """b of the power law `y = a x^b` fitted by least squares of the logarithms; NaN when a y is 0 or less."""
    return growth([math.log(x) for x in xs], ys)


def geometric_mean(values: Sequence[float]) -> float:
    """0 where one of them is."""
    return math.exp(fmean(map(math.log, values))) if all(values) else 0.0
