"""One attention layer of a model: projections, heads, rotation, what a head draws, and the projection back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.attention import alibi_slopes, rope_angles, t5_bucket
from triptych.labs.walk import again
from triptych.labs.walk.attending import Attending, Bias, Forward
from triptych.labs.walk.stack import Applied, Stack, leaving
from triptych.labs.walk.steps import Given, Shown, Step
from triptych.spec import Alibi, Attention, Rope, T5Buckets, full
from triptych.spec.parts import Norms

AXES = {"q": "H T K", "k": "G S K", "v": "G S V"}


def attention(at: Stack, part: str, entered: str, sub: str, spec: Attention, norms: Norms) -> list[Step]:
    """From what entered the layer to what leaves it."""
    kind = None if sub == "cross" else at.spec.kinds[spec.kind]
    turned = _rotation(at, part, sub, spec, None if kind is None else kind.position)
    q, k, v = (by_head(at, sub, spec, leaf) for leaf in ("q", "k", "v"))
    if turned is not None:
        q, k = turned.makes
    sinks = at.parameter(f"{at.block}.{sub}.sinks", "sink", "H").value if spec.sinks else None
    scores, pattern, z = (at.read(f"{at.block}.{sub}.{leaf}") for leaf in ("scores", "pattern", "z"))
    core = Attending(
        part=part,
        prefix=f"{at.prefix}{at.block}.{sub}.",
        q=q,
        k=k,
        v=v,
        mask=full() if kind is None else kind.mask,
        scale=spec.scale,
        softcap=spec.softcap,
        sinks=sinks,
        bias=None if kind is None else _bias(at, kind.position, f"{at.name}.kinds.{spec.kind}.position"),
        head=at.head,
        forward=Forward(scores, pattern, z.transpose(0, 1)),
    )
    begin = [_projections(at, part, entered, sub, spec), _split(at, part, sub, spec)]
    begin += [] if turned is None else [turned]
    return [*begin, *core.steps(), *_joined(at, part, sub, spec, norms)]


def by_head(at: Stack, sub: str, spec: Attention, leaf: str, name: str = " by head") -> Shown:
    """q, k or v as `[H, T, K]`, `[G, S, K]`, `[G, S, V]`: one matrix a head, a row a token."""
    letter = leaf[0]
    group = at.head if letter == "q" else at.head * spec.kv_heads // spec.heads
    of_source = sub == "cross" and letter != "q"
    tokens = at.source if of_source and at.source is not None else at
    value = at.read(f"{at.block}.{sub}.{leaf}").transpose(0, 1)
    shown = Shown(f"{at.prefix}{at.block}.{sub}.{leaf}{name}", letter, AXES[letter], value, tokens.labels, head=group)
    return shown if of_source else replace(shown, focus=at.focus)


def _projections(at: Stack, part: str, entered: str, sub: str, spec: Attention) -> Step:
    under, source = f"{at.block}.{sub}", at.source if sub == "cross" else None
    widths = {"q": "H·K", "k": "G·K", "v": "G·V"}
    maps = {
        leaf: at.linear(f"{under}.{leaf}", getattr(spec, leaf), leaf, f"{width} D") for leaf, width in widths.items()
    }
    makes = []
    for leaf in maps:
        value = at.read(f"{under}.{leaf}").flatten(1)
        shown = at.row_each(f"{at.prefix}{under}.{leaf}", leaf, value, f"N {widths[leaf]}")
        makes.append(shown if source is None or leaf == "q" else replace(shown, labels=source.labels, focus=None))
    inputs = {"q": entered, "k": entered, "v": entered}
    if source is not None:
        inputs |= {"k": source.final, "v": source.final}
    read = {leaf: "h" if source is None or leaf == "q" else "encoder" for leaf in maps}
    why = "Three views of each token: what it looks for, what it offers to be found by, what it hands over."
    if source is not None:
        why = "Queries come from the decoder; keys and values from the encoder's output, once for the whole text."
    return Step(
        part,
        "Projections",
        ",  ".join(f"{leaf} = {read[leaf]} {one.formula}" for leaf, one in maps.items()),
        why,
        makes,
        lambda g: [one.run(g, g[inputs[leaf]]) for leaf, one in maps.items()],
        [use for one in maps.values() for use in one.uses],
    )


def _split(at: Stack, part: str, sub: str, spec: Attention) -> Step:
    makes = [by_head(at, sub, spec, leaf) for leaf in ("q", "k", "v")]
    sizes = ((spec.heads, spec.head_width), (spec.kv_heads, spec.head_width), (spec.kv_heads, spec.value_width))
    names = [f"{at.prefix}{at.block}.{sub}.{leaf}" for leaf in ("q", "k", "v")]
    why = f"The same numbers, cut into {spec.heads} heads of width {spec.head_width}; each head attends by itself."
    if spec.kv_heads != spec.heads:
        why += f" Each {spec.heads // spec.kv_heads} of them share one of {spec.kv_heads} groups of keys and values."
    return Step(
        part,
        "Heads",
        "q[N, H·K] → q[H, N, K]",
        why,
        makes,
        lambda g: [torch.stack(g[name].split(width, dim=-1)) for name, (_, width) in zip(names, sizes, strict=True)],
    )


def _rotation(at: Stack, part: str, sub: str, spec: Attention, position: object) -> Step | None:
    """Norms of single heads and RoPE: what stands between a projection and the scores."""
    rope = position if isinstance(position, Rope) else None
    if rope is None and spec.q_norm is None and spec.k_norm is None:
        return None
    under = f"{at.block}.{sub}"
    norms: dict[str, Applied | None] = {
        leaf: None if (one := getattr(spec, f"{leaf}_norm")) is None else at.norm(f"{under}.{leaf}_norm", one, "K")
        for leaf in ("q", "k")
    }
    uses = [use for one in norms.values() if one is not None for use in one.uses]
    angles = [] if rope is None else _angles(at, under, rope)
    before = {leaf: f"{at.prefix}{under}.{leaf} by head" for leaf in ("q", "k")}

    def once_more(g: Given) -> list[Tensor]:
        made = []
        for leaf, norm in norms.items():
            x = g[before[leaf]] if norm is None else norm.run(g, g[before[leaf]])
            made.append(x if rope is None else again.rotate(x, *(g[one.name] for one in angles), rope.pairing))
        return made

    normed = next((one.formula for one in norms.values() if one is not None), "")
    title = " and ".join(["Norm of each head"] * bool(normed) + ["Rotation"] * (rope is not None)).capitalize()
    turning = "(a, b) ← (a cos − b sin, b cos + a sin)" if rope is not None else ""
    formula = ",  ".join(filter(None, [f"q ← norm(q), norm(x) = {normed}" if normed else "", turning]))
    why = "Each pair of dimensions turns by position × its own speed, so a product q·k knows how far apart they stand."
    makes = [by_head(at, sub, spec, f"{leaf}_rot", "") for leaf in ("q", "k")]
    return Step(part, title, formula, why if rope is not None else "", makes, once_more, [*uses, *angles])


def _angles(at: Stack, under: str, rope: Rope) -> list[Shown]:
    places = torch.arange(len(at.ids))
    values = rope_angles(rope, places, torch.full_like(places, len(at.ids)))
    names = zip(("cos", "sin"), values, strict=True)
    return [at.row_each(f"{at.prefix}{under}.{name}", name, value, "N K/2") for name, value in names]


def _bias(at: Stack, position: object, name: str) -> Bias | None:
    """What a relative position part adds to the scores."""
    places = torch.arange(len(at.ids))
    apart = places[None, :] - places[:, None]

    def matrix(what: str, symbol: str, value: Tensor) -> Shown:
        return Shown(f"{name}.{what}", symbol, "T S", value, at.labels, at.labels, focus=at.focus)

    if isinstance(position, T5Buckets):
        table = Shown(f"{name}.weight", "R", "buckets H", at.module.get_parameter(f"{name}.weight").detach().cpu())
        near, far = position.buckets, position.max_distance
        bucket = matrix(
            "bucket", "β", t5_bucket(apart, buckets=near, max_distance=far, bidirectional=position.bidirectional)
        )
        return Bias(
            at.stack.get_submodule(f"kinds.{name.split('.')[-2]}").position.bias()(places, places).detach().cpu(),
            "s ← s + b,  b = R[β(key − query)]",
            "Positions enter here: one learned number for each head and distance, near ones apart, far ones together.",
            [table, bucket],
            lambda g: g[table.name][g[bucket.name]].permute(2, 0, 1),
        )
    if isinstance(position, Alibi):
        slopes, distance = (
            Shown(f"{name}.slopes", "a", "H", alibi_slopes(position.heads)),
            matrix("distance", "|Δ|", apart.abs()),
        )
        return Bias(
            -slopes.value[:, None, None] * apart.abs(),
            "s ← s + b,  b = −a · |key − query|",
            "Positions enter here: the further a key, the lower its score, by a slope of the head's own.",
            [slopes, distance],
            lambda g: -g[slopes.name][:, None, None] * g[distance.name],
        )
    return None


def _joined(at: Stack, part: str, sub: str, spec: Attention, norms: Norms) -> list[Step]:
    under = f"{at.block}.{sub}"
    z = f"{at.prefix}{under}.z"
    joined = at.row_each(f"{z} side by side", "z", at.read(f"{under}.z").flatten(1), "N H·V")
    why = f"The {spec.heads} heads side by side again, {spec.heads * spec.value_width} numbers a token."
    concat = Step(
        part,
        "Concatenation",
        f"z = [z₀ … z_{spec.heads - 1}]",
        why,
        [joined],
        lambda g: torch.cat(list(g[z]), dim=-1),
    )
    down = at.linear(f"{under}.out", spec.out, "o", "D H·V")
    mixed = "One map mixes what the heads found into the width of the stream."
    return [concat, leaving(at, part, "Output projection", "z", joined.name, down, sub, norms, mixed)]
