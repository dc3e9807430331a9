"""One decoding step with the KV cache: what is computed, what is reused, and how many bytes the cache takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych import arguments
from triptych.count import count, visible
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.probe import Plan, Session
from triptych.probe.prompts import name_tokens
from triptych.program import lower
from triptych.spec import AttentionSpec, LMHeadSpec
from .forward_steps import checked, facts
from .from_program import OUT, StepBuilder
from .stack_run import StackRun
from .steps import PrintedTensors, ShownTensor, Walk, WalkStep

BEFORE, COST = "Before this step", "What it costs"


@arguments.checked
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
    program, new = lower(model.module), len(row) - 1
    full_run, step_run = (
        StackRun(
            model=model, program=program, name="decoder", ids=row[first:], layer=layer, head=head, focus=new - first,
            first=first,
        )
        for first in (0, new)
    )  # fmt: skip
    for run in (full_run, step_run):  # the attention of the block alone
        places = {step.out[0]: i for i, step in enumerate(run.inside)}
        run.inside = run.inside[places[f"{run.block}attn.in"] : places[f"{run.block}attn.out"] + 1]
        run.embed = run.crossed = run.final = ()
    engine, logits = _run(model, row, None if target is None else ids, full_run, step_run)
    source = 0 if target is None else len(ids)
    steps = [
        _tokens(full_run),
        _cached(full_run, step_run),
        _entered(full_run, step_run),
        *_attention(full_run, step_run),
        _bytes(model, engine, step_run.layer, source),
        _logits(full_run, logits),
    ]
    token = int(logits.argmax())
    name = name_tokens(model, [token])[0]
    flops = count(model.spec)
    done = flops.decode_flops(new, source=source) / flops.prefill_flops(len(row), source=source)
    summary = f"next token: “{name}” (id {token}), with 1 token computed, {new} reused: {done:.0%} of the work"
    return Walk("One decoding step with the cache", facts(model, text, [step_run]), steps, summary, token)


@torch.inference_mode()
def _run(
    model: Model, row: list[int], source: list[int] | None, full_run: StackRun, step_run: StackRun
) -> tuple[Engine, Tensor]:
    """Run a whole forward and one token after a cached prompt: their traces, and the logits [V] of the step."""
    context = [f"{step_run.block}attn.{leaf}" for leaf in ("k_ctx", "v_ctx")]
    rows, target = ([row], None) if source is None else ([source], [row])
    full_run.trace = model.trace(rows, target, read=full_run.reads)
    engine, session = Engine(model.module), Session(Plan.of(model.spec, [*step_run.reads, *context]))
    (live,) = engine.add(Request(prompt=row[:-1], source=source, max_new_tokens=1))
    engine.logits()
    live.ids.append(row[-1])
    logits = engine.logits(session)[0]
    step_run.trace = session.close()
    return engine, logits.cpu()


def _tokens(full_run: StackRun) -> WalkStep:
    ids, n = torch.tensor(list(full_run.ids)), len(full_run.ids) - 1
    shown = ShownTensor("ids", "ids", "N", ids, columns=full_run.labels)
    meaning = f"{n} token{'s' * (n != 1)} went through the model before; the last one is new."
    return WalkStep(BEFORE, "Tokens", "ids = [… read, new]", meaning, [shown], lambda g: ids)


def _cached_positions(step_run: StackRun) -> tuple[int, ...]:
    """Positions of the keys that this step reads; a window has dropped the first ones."""
    return step_run.trace.positions(f"{step_run.block}attn.k_ctx")[0]


def _cached(full_run: StackRun, step_run: StackRun) -> WalkStep:
    """The cache's keys and values beside those a whole forward computes."""
    earlier = _cached_positions(step_run)[:-1]
    labels = [full_run.labels[i] for i in earlier]
    uses, makes = [], []
    for leaf, site, letters in (("k", "k_rot", "G S K"), ("v", "v", "G S V")):
        computed, value = (
            of.read(f"{step_run.block}attn.{name}").transpose(0, 1)
            for of, name in ((full_run, site), (step_run, f"{leaf}_ctx"))
        )
        group = step_run.head * len(computed) // step_run.heads
        name = f"{step_run.block}attn.{site} of a whole forward"
        uses.append(replace(full_run.by_token(name, f"{leaf} whole", computed, letters), head=group))
        name = f"{step_run.block}attn.{leaf} cached"
        makes.append(ShownTensor(name, f"{leaf} cached", letters, value[:, :-1], labels, head=group))
    at = torch.tensor(list(earlier))
    why = (
        f"{len(earlier)} keys and values for each group, in each of {len(step_run.stack.blocks)} layers, computed once"
        " and kept: the same numbers as in a forward of the whole text."
    )
    equation = "k cached = k whole[earlier],  v cached = v whole[earlier]"
    return WalkStep(BEFORE, "The cache", equation, why, makes, lambda g: [g[use.name][:, at] for use in uses], uses)


def _entered(full_run: StackRun, step_run: StackRun) -> WalkStep:
    site = f"{step_run.block}attn.in"
    full = full_run.by_token(f"{site} of a whole forward", "h whole", full_run.read(site))
    why = "Only the new token runs through the model: one row enters each layer where a whole forward has them all."
    makes = [step_run.by_token(site, "h", step_run.read(site))]
    part = step_run.part("this step")
    return WalkStep(part, "One row", "h = h whole[last]", why, makes, lambda g: g[full.name][-1:], [full])


def _attention(full_run: StackRun, step_run: StackRun) -> list[WalkStep]:
    """The block's attention by its program, with the keys and values of earlier tokens from the cache."""
    builder = StepBuilder(step_run, {at: full_run.labels[at] for at in _cached_positions(step_run)})
    builder.enter(f"{step_run.block}attn.in", f"{step_run.block}attn.in", "h")
    values = builder.computed(step_run.entry, step_run.inside[1:])
    return builder.steps(values, step_run.part("this step"))


def _bytes(model: Model, engine: Engine, layer: int, source: int) -> WalkStep:
    """Bytes of keys and values, by `count` and in the cache's own tensors."""
    spec, length = model.spec, engine.cache.lengths[0]
    decoder = spec.stacks["decoder"]
    used = [sum(x.nbytes for x in engine.cache.kept(i, 0)) for i in range(len(engine.cache.stores))]
    size = model.module.dtype.itemsize
    cross = 0 if engine.cross is None else engine.cross.nbytes
    total = count(spec).cache_bytes(length, dtype="fp32", source=source) * size // 4
    shown = ShownTensor(
        "bytes", "bytes", "· ·", torch.tensor([[total, sum(used) + cross], [used[layer], used[layer]]]),
        ["all layers", "this layer"], ["by count", "tensors"],
    )  # fmt: skip

    def once_more(g: PrintedTensors) -> Tensor:
        layers, read = [], 0
        for block in decoder.blocks:
            window = visible(decoder.kinds[block.attn.kind].mask)
            layers.append(_numbers(block.attn) * size * (length if window is None else min(length, window)))
            read += 0 if block.cross is None else _numbers(block.cross) * size * source
        return torch.tensor([[sum(layers) + read] * 2, [layers[layer]] * 2])

    attn = decoder.blocks[layer].attn
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
    return WalkStep(COST, "Bytes", f"a layer: {formula}", why, [shown], once_more)


def _numbers(attn: AttentionSpec) -> int:
    """Of the keys and values of a token."""
    return attn.kv_heads * (attn.head_width + attn.value_width)


def _logits(run: StackRun, logits: Tensor) -> WalkStep:
    whole = ShownTensor("logits of a whole forward", "l whole", "V", run.trace.logits[0][-1].cpu())
    shown = ShownTensor("logits", "l cached", "V", logits)
    why = "The cache changes what is computed, not what comes out: the logits are those of a forward over all tokens."
    return WalkStep(OUT, "Logits", "l cached = l whole", why, [shown], lambda g: g[whole.name], [whole])
