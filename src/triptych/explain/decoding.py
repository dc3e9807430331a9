"""One decoding step with the KV cache: what is computed, what is reused, and how many bytes the cache takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.attention.store import Store
from triptych.count import count, visible
from triptych.errors import InputError
from triptych.explain.from_program import OUT, CachedKeys, StepBuilder
from triptych.explain.stack_run import Sections, StackRun, sections
from triptych.explain.steps import Printed, Shown, Step, Walk
from triptych.explain.walking import checked, facts, tokens
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.probe import Plan, Session, Trace
from triptych.program import lower
from triptych.spec import LMHeadSpec

BEFORE, COST = "Before this step", "What it costs"


def explain_cache(model: Model, text: str | Sequence[int], *, layer: int = 0, head: int = 0) -> Walk:
    """One step of cached decoding: all tokens of `text` but the last are in the cache, the last one is computed.

    Beside an encoder the decoder's own tokens are those it generates.  Shows one layer's attention with the keys and
    values it reuses, the bytes they take in all layers by the arithmetic of `count` and in the cache's tensors, and
    that the logits are those of a whole forward.

    Raises InputError for an encoder, for a text of one token, and as `explain`.
    """
    ids, target = checked(model, text, layer, head)
    if model.spec.layout == "encoder":
        raise InputError("an encoder keeps no cache: every token sees the new one, so all of them are computed again")
    if not isinstance(model.spec.head, LMHeadSpec):
        raise InputError("this model labels texts and decodes nothing, so it has no decoding step")
    row = ids if target is None else target
    if len(row) < 2:
        raise InputError("one decoding step needs a token before it; give a text of two tokens or more")
    at, program = min(layer, len(model.spec.stacks["decoder"].blocks) - 1), lower(model.module)
    part = _attention_of(sections(model.module, program, "decoder", at))
    step = _step(model, row, None if target is None else ids, at, part)
    whole, one = (
        StackRun(
            module=model.module, program=program, sections=part, trace=trace, name="decoder",
            labels=tokens(model, row[first:]), ids=row[first:], layer=at, head=head, focus=len(row) - 1 - first,
            first=first,
        )
        for trace, first in ((step.whole, 0), (step.one, len(row) - 1))
    )  # fmt: skip
    source = 0 if target is None else len(ids)
    steps = [
        _tokens(whole),
        _cached(whole, one),
        _entered(whole, one),
        *_attention(whole, one),
        _bytes(model, step, source),
        _logits(step),
    ]
    token = int(step.logits.argmax())
    name = tokens(model, [token])[0]
    flops = count(model.spec)
    done = flops.decode_flops(len(row) - 1, source=source) / flops.prefill_flops(len(row), source=source)
    summary = f"next token: “{name}” (id {token}), with 1 token computed, {len(row) - 1} reused: {done:.0%} of the work"
    return Walk("One decoding step with the cache", facts(model, text, [one]), steps, summary, token)


@dataclass(frozen=True, eq=False)
class Decoded:
    """One token after a cached prompt, and a whole forward of the same row: what was read of each."""

    whole: Trace
    one: Trace
    engine: Engine
    layer: int
    logits: Tensor  # [V] of the step


def _attention_of(block: Sections) -> Sections:
    """What lies between the sites `attn.in` and `attn.out` of a block."""
    at = {step.out[0]: i for i, step in enumerate(block.inside)}
    inside = block.inside[at[f"{block.block}attn.in"] : at[f"{block.block}attn.out"] + 1]
    return replace(block, inside=inside, embed=(), source=(), final=())


@torch.inference_mode()
def _step(model: Model, row: list[int], source: list[int] | None, layer: int, part: Sections) -> Decoded:
    sites, context = part.reads, [f"{part.block}attn.{leaf}" for leaf in ("k_ctx", "v_ctx")]
    rows, target = ([row], None) if source is None else ([source], [row])
    whole = model.trace(rows, target, read=sites)
    engine, session = Engine(model.module), Session(Plan.of(model.spec, [*sites, *context]))
    (live,) = engine.add(Request(prompt=row[:-1], source=source, max_new_tokens=1))
    engine.logits()
    live.ids.append(row[-1])
    logits = engine.logits(session)[0]
    return Decoded(whole, session.close(), engine, layer, logits.cpu())


def _tokens(whole: StackRun) -> Step:
    ids = Shown("ids", "ids", "N", torch.tensor(list(whole.ids)), columns=whole.labels)
    n = len(whole.ids) - 1
    meaning = f"{n} token{'s' * (n != 1)} went through the model before; the last one is new."
    return Step(BEFORE, "Tokens", "ids = [… read, new]", meaning, [ids], lambda g: torch.tensor(list(whole.ids)))


def _kept(one: StackRun) -> tuple[int, ...]:
    """Positions of the keys that this step reads; a window has dropped the first ones."""
    return one.trace.positions(f"{one.block}attn.k_ctx")[0]


def _cached(whole: StackRun, one: StackRun) -> Step:
    """The cache's keys and values beside those a whole forward computes."""
    earlier = _kept(one)[:-1]
    labels = [whole.labels[i] for i in earlier]
    uses, makes = [], []
    for leaf, site, letters in (("k", "k_rot", "G S K"), ("v", "v", "G S V")):
        computed, value = (
            of.read(f"{one.block}attn.{name}").transpose(0, 1) for of, name in ((whole, site), (one, f"{leaf}_ctx"))
        )
        group = one.head * len(computed) // one.heads
        name = f"{one.block}attn.{site} of a whole forward"
        uses.append(replace(whole.by_token(name, f"{leaf} whole", computed, letters), head=group))
        name = f"{one.block}attn.{leaf} cached"
        makes.append(Shown(name, f"{leaf} cached", letters, value[:, :-1], labels, head=group))
    at = torch.tensor(list(earlier))
    why = (
        f"{len(earlier)} keys and values for each group, in each of {len(one.stack.blocks)} layers, computed once and"
        " kept: the same numbers as in a forward of the whole text."
    )
    equation = "k cached = k whole[earlier],  v cached = v whole[earlier]"
    return Step(BEFORE, "The cache", equation, why, makes, lambda g: [g[use.name][:, at] for use in uses], uses)


def _entered(whole: StackRun, one: StackRun) -> Step:
    site = f"{one.block}attn.in"
    full = whole.by_token(f"{site} of a whole forward", "h whole", whole.read(site))
    why = "Only the new token runs through the model: one row enters each layer where a whole forward has them all."
    makes = [one.by_token(site, "h", one.read(site))]
    return Step(one.part("this step"), "One row", "h = h whole[last]", why, makes, lambda g: g[full.name][-1:], [full])


def _attention(whole: StackRun, one: StackRun) -> list[Step]:
    """The block's attention by its program, with the keys and values of earlier tokens from the cache."""
    under, positions = f"{one.block}attn.", _kept(one)
    cached = CachedKeys(f"{under}k cached", f"{under}v cached", positions, [whole.labels[i] for i in positions])
    builder = StepBuilder(one, cached)
    builder.enter(f"{under}in", f"{under}in", "h")
    values = builder.computed(one.sections.entry, one.sections.inside[1:])
    return builder.steps(values, one.part("this step"))


def _bytes(model: Model, step: Decoded, source: int) -> Step:
    """Bytes of keys and values, by `count` and in the cache's own tensors."""
    spec, length = model.spec, step.engine.cache.lengths[0]
    decoder = spec.stacks["decoder"]
    used = [_used(store, length) for store in step.engine.cache.stores]
    size = model.module.dtype.itemsize
    cross = 0 if step.engine.cross is None else step.engine.cross.nbytes
    total = count(spec).cache_bytes(length, dtype="fp32", source=source) * size // 4
    shown = Shown(
        "bytes", "bytes", "· ·", torch.tensor([[total, sum(used) + cross], [used[step.layer], used[step.layer]]]),
        ["all layers", "this layer"], ["by count", "tensors"],
    )  # fmt: skip

    def once_more(g: Printed) -> Tensor:
        layers = []
        for block in decoder.blocks:
            window, attn = visible(decoder.kinds[block.attn.kind].mask), block.attn
            tokens_cached = length if window is None else min(length, window)
            layers.append(size * tokens_cached * attn.kv_heads * (attn.head_width + attn.value_width))
        read = (block.cross for block in decoder.blocks if block.cross is not None)
        every = sum(layers) + size * sum(source * c.kv_heads * (c.head_width + c.value_width) for c in read)
        return torch.tensor([[every, every], [layers[step.layer]] * 2])

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
    used = min(length, store.k.shape[2])
    return store.k[:, :, :used].nbytes + store.v[:, :, :used].nbytes


def _logits(step: Decoded) -> Step:
    whole = Shown("logits of a whole forward", "l whole", "V", step.whole.logits[0][-1].cpu())
    shown = Shown("logits", "l cached", "V", step.logits)
    why = "The cache changes what is computed, not what comes out: the logits are those of a forward over all tokens."
    return Step(OUT, "Logits", "l cached = l whole", why, [shown], lambda g: g[whole.name], [whole])
