"""The walk through one decoding step with the KV cache: what is computed, what is reused, and how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.attention.caches import Store
from triptych.count import count, visible
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.labs.walk.around import OUT
from triptych.labs.walk.heads import Held, attention, by_head
from triptych.labs.walk.stack import LEAVES, Stack
from triptych.labs.walk.steps import Given, Shown, Step, Walk
from triptych.labs.walk.walking import checked, facts, tokens
from triptych.model import Model
from triptych.probe import Plan, Session, Trace
from triptych.spec import LMHeadSpec

BEFORE, COST = "Before this step", "What it costs"


def explain_cache(model: Model, text: str | Sequence[int], *, layer: int = 0, head: int = 0) -> Walk:
    """One step of cached decoding: all tokens of `text` but the last are in the cache, the last one is computed.

    Beside an encoder the decoder's own tokens are those it writes.  Shows one layer's attention with the keys and
    values it reuses, the bytes they take in all layers by the arithmetic of `count` and in the cache's tensors, and
    that the logits are those of a whole forward.

    Raises InputError for an encoder, for a text of one token, and as `explain`.
    """
    ids, target = checked(model, text, layer, head)
    if model.spec.layout == "encoder":
        raise InputError("an encoder keeps no cache: every token sees the new one, so nothing computed stays valid")
    if not isinstance(model.spec.head, LMHeadSpec):
        raise InputError("this model labels texts and decodes nothing, so there is no step with a cache")
    row = ids if target is None else target
    if len(row) < 2:
        raise InputError("one decoding step needs a token before it; give a text of two tokens or more")
    step = _step(model, row, None if target is None else ids, min(layer, len(model.spec.stacks["decoder"].blocks) - 1))
    whole, one = (
        _stack(model, step, trace, row, head, first) for trace, first in ((step.whole, 0), (step.one, len(row) - 1))
    )
    given = None if target is None else len(ids)
    steps = [
        _tokens(whole),
        _held(whole, one),
        _entered(whole, one),
        *_attention(whole, one),
        _bytes(model, step, given),
        _logits(step),
    ]
    token = int(step.logits.argmax())
    name = tokens(model, [token])[0]
    flops = count(model.spec)
    done = flops.decode_flops(len(row) - 1, source=given or 0) / flops.prefill_flops(len(row), source=given or 0)
    said = f"next token: “{name}” (id {token}), with 1 token computed, {len(row) - 1} reused: {done:.0%} of the work"
    return Walk("One decoding step with the cache", facts(model, text, [one]), steps, said, token)


@dataclass(frozen=True, eq=False)
class Decoded:
    """One token after a cached prompt, and a whole forward of the same row: what was read of each."""

    whole: Trace
    one: Trace
    engine: Engine
    layer: int
    logits: Tensor  # [V] of the step


@torch.inference_mode()
def _step(model: Model, row: list[int], source: list[int] | None, layer: int) -> Decoded:
    under = f"{'decoder.' if source is not None else ''}blocks.{layer}.attn."
    sites = [under + leaf for leaf in LEAVES]
    rows, target = ([row], None) if source is None else ([source], [row])
    whole = model.trace(rows, target, read=sites)
    engine, session = Engine(model.module), Session(Plan.of(model.spec, [*sites, under + "k_ctx", under + "v_ctx"]))
    (live,) = engine.add(Request(prompt=row[:-1], source=source, max_new_tokens=1))
    engine.logits()
    live.ids.append(row[-1])
    logits = engine.logits(session)[0]
    return Decoded(whole, session.close(), engine, layer, logits.cpu())


def _stack(model: Model, step: Decoded, trace: Trace, row: list[int], head: int, first: int) -> Stack:
    own = row[first:]
    return Stack(
        module=model.module, trace=trace, name="decoder", labels=tokens(model, own), ids=own, layer=step.layer,
        head=head, focus=len(own) - 1, first=first,
    )  # fmt: skip


def _tokens(whole: Stack) -> Step:
    ids = Shown("ids", "ids", "N", torch.tensor(list(whole.ids)), columns=whole.labels)
    n = len(whole.ids) - 1
    meaning = f"{n} token{'s' * (n != 1)} went through the model before; the last one is new."
    return Step(BEFORE, "Tokens", "ids = [… read, new]", meaning, [ids], lambda g: torch.tensor(list(whole.ids)))


def _kept(one: Stack) -> tuple[int, ...]:
    """Positions of the keys that this step reads; a window has let the first ones go."""
    return one.trace.positions(f"{one.prefix}{one.block}.attn.k_ctx")[0]


def _held(whole: Stack, one: Stack) -> Step:
    """The cache's keys and values beside those a whole forward computes."""
    spec, under = one.spec.blocks[one.layer].attn, f"{one.prefix}{one.block}.attn"
    earlier = _kept(one)[:-1]
    labels = [whole.labels[i] for i in earlier]
    uses, makes = [], []
    for leaf, computed in (("k", "k_rot"), ("v", "v")):
        shown = by_head(whole, "attn", spec, computed, " of a whole forward")
        shown = replace(shown, symbol=f"{leaf} whole")
        uses.append(shown)
        value = one.read(f"{one.block}.attn.{leaf}_ctx").transpose(0, 1)[:, :-1]
        letters = shown.letters
        makes.append(Shown(f"{under}.{leaf} cached", f"{leaf} cached", letters, value, labels, head=shown.head))
    at = torch.tensor(list(earlier))
    why = (
        f"{len(earlier)} keys and values a group, in each of {len(one.spec.blocks)} layers, computed once and kept: the"
        " same numbers as a forward over the whole text."
    )
    formula = "k cached = k whole[earlier],  v cached = v whole[earlier]"
    return Step(BEFORE, "The cache", formula, why, makes, lambda g: [g[use.name][:, at] for use in uses], uses)


def _entered(whole: Stack, one: Stack) -> Step:
    site = f"{one.block}.attn.in"
    shown = whole.shown(site, "h")
    full = Shown(f"{shown.name} of a whole forward", "h whole", "N D", shown.value, whole.labels, focus=whole.focus)
    why = "Only the new token runs through the model: one row enters each layer where a whole forward has them all."
    makes = [one.shown(site, "h")]
    return Step(one.part("this step"), "One row", "h = h whole[last]", why, makes, lambda g: g[full.name][-1:], [full])


def _attention(whole: Stack, one: Stack) -> list[Step]:
    block, under, kept = one.spec.blocks[one.layer], f"{one.prefix}{one.block}.attn", _kept(one)
    held = Held(f"{under}.k cached", f"{under}.v cached", kept, [whole.labels[i] for i in kept])
    return attention(one, one.part("this step"), f"{under}.in", "attn", block.attn, block.attn_norm, held)


def _bytes(model: Model, step: Decoded, source: int | None) -> Step:
    """Bytes of keys and values, by `count` and in the cache's own tensors."""
    spec, length = model.spec, step.engine.cache.lengths[0]
    decoder = spec.stacks["decoder"]
    used = [_used(store, length) for store in step.engine.cache.stores]
    size = model.module.dtype.itemsize
    cross = 0 if step.engine.cross is None else step.engine.cross.nbytes
    total = count(spec).cache_bytes(length, dtype="fp32", source=source or 0) * size // 4
    shown = Shown(
        "bytes", "bytes", "· ·", torch.tensor([[total, sum(used) + cross], [used[step.layer], used[step.layer]]]),
        ["all layers", "this layer"], ["by count", "tensors"],
    )  # fmt: skip

    def once_more(g: Given) -> Tensor:
        layers = []
        for block in decoder.blocks:
            seen, attn = visible(decoder.kinds[block.attn.kind].mask), block.attn
            kept = length if seen is None else min(length, seen)
            layers.append(size * kept * attn.kv_heads * (attn.head_width + attn.value_width))
        read = (block.cross for block in decoder.blocks if block.cross is not None)
        whole = sum(layers) + size * sum((source or 0) * c.kv_heads * (c.head_width + c.value_width) for c in read)
        return torch.tensor([[whole, whole], [layers[step.layer]] * 2])

    attn = decoder.blocks[step.layer].attn
    formula = (
        f"{length} tokens × {attn.kv_heads} groups × ({attn.head_width} + {attn.value_width}) numbers × {size} bytes"
    )
    why = "What the cache keeps after this step; " + (
        "beside its own tokens, the keys and values of the encoder's."
        if cross
        else "grouped heads make it smaller."
        if attn.kv_heads < attn.heads
        else "a group for every head, so nothing is shared."
    )
    return Step(COST, "Bytes", f"a layer: {formula}", why, [shown], once_more)


def _used(store: Store, length: int) -> int:
    """Bytes of the places that hold a token."""
    kept = min(length, store.k.shape[2])
    return store.k[:, :, :kept].nbytes + store.v[:, :, :kept].nbytes


def _logits(step: Decoded) -> Step:
    whole = Shown("logits of a whole forward", "l whole", "V", step.whole.logits[0][-1].cpu())
    shown = Shown("logits", "l cached", "V", step.logits)
    why = "The cache changes what is computed, not what comes out: the logits are those of a forward over all tokens."
    return Step(OUT, "Logits", "l cached = l whole", why, [shown], lambda g: g[whole.name], [whole])
