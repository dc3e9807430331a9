"""One attention layer of a model: projections, heads, rotation, what a head draws, and the projection back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.labs.walk import again
from triptych.labs.walk.attending import Attending, Forward
from triptych.labs.walk.places import angles, relative
from triptych.labs.walk.stack import Applied, Stack, leaving
from triptych.labs.walk.steps import Given, Shown, Step
from triptych.spec import AttentionSpec, RopeSpec, full
from triptych.spec.parts import NormsSpec

TURNING = "Each pair of dimensions turns by position × its own speed, so a product q·k knows how far apart they stand."
AXES = {"q": "H T K", "k": "G S K", "v": "G S V"}


@dataclass(frozen=True)
class Held:
    """Under which names a cache's keys and values were printed; positions and tokens of all keys, the new included."""

    k: str
    v: str
    places: Sequence[int]
    labels: Sequence[str]


def attention(
    at: Stack, part: str, entered: str, sub: str, spec: AttentionSpec, norms: NormsSpec, held: Held | None = None
) -> list[Step]:
    """From what entered the layer to what leaves it; the keys and values of earlier tokens from a cache, if `held`."""
    kind = None if sub == "cross" else at.spec.kinds[spec.kind]
    turned = _rotation(at, part, sub, spec, None if kind is None else kind.position)
    q, k, v = (by_head(at, sub, spec, leaf) for leaf in ("q", "k", "v"))
    if turned is not None:
        q, k = turned.makes
    extended = [] if held is None else [_extension(at, part, sub, k, v, held)]
    for step in extended:
        k, v = step.makes
    k_pos = at.places if held is None else torch.tensor(list(held.places))
    sinks = at.parameter(f"{at.block}.{sub}.sinks", "sink", "H").value if spec.sinks else None
    scores, pattern, z = (at.read(f"{at.block}.{sub}.{leaf}") for leaf in ("scores", "pattern", "z"))
    if held is not None:  # a column a position there, also of those a window has let go
        scores, pattern = scores[..., k_pos], pattern[..., k_pos]
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
        bias=None if kind is None else relative(at, q, k, k_pos, kind.position, spec.kind),
        q_pos=None if kind is None else at.places,
        k_pos=None if kind is None else k_pos,
        head=at.head,
        forward=Forward(scores, pattern, z.transpose(0, 1)),
    )
    begin = [_projections(at, part, entered, sub, spec), _split(at, part, sub, spec)]
    begin += [] if turned is None else [turned]
    return [*begin, *extended, *core.steps(), *_joined(at, part, sub, spec, norms)]


def by_head(at: Stack, sub: str, spec: AttentionSpec, leaf: str, name: str = " by head") -> Shown:
    """q, k or v as `[H, T, K]`, `[G, S, K]`, `[G, S, V]`: one matrix a head, a row a token."""
    letter = leaf[0]
    group = at.head if letter == "q" else at.head * spec.kv_heads // spec.heads
    of_source = sub == "cross" and letter != "q"
    tokens = at.source if of_source and at.source is not None else at
    value = at.read(f"{at.block}.{sub}.{leaf}").transpose(0, 1)
    shown = Shown(f"{at.prefix}{at.block}.{sub}.{leaf}{name}", letter, AXES[letter], value, tokens.labels, head=group)
    return shown if of_source else replace(shown, focus=at.focus)


def _projections(at: Stack, part: str, entered: str, sub: str, spec: AttentionSpec) -> Step:
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


def _split(at: Stack, part: str, sub: str, spec: AttentionSpec) -> Step:
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


def _rotation(at: Stack, part: str, sub: str, spec: AttentionSpec, position: object) -> Step | None:
    """Norms of single heads and RoPE: what stands between a projection and the scores."""
    rope = position if isinstance(position, RopeSpec) else None
    if rope is None and spec.q_norm is None and spec.k_norm is None:
        return None
    under = f"{at.block}.{sub}"
    norms: dict[str, Applied | None] = {
        leaf: None if (one := getattr(spec, f"{leaf}_norm")) is None else at.norm(f"{under}.{leaf}_norm", one, "K")
        for leaf in ("q", "k")
    }
    uses = [use for one in norms.values() if one is not None for use in one.uses]
    turns = [] if rope is None else angles(at, under, rope)
    before = {leaf: f"{at.prefix}{under}.{leaf} by head" for leaf in ("q", "k")}

    def once_more(g: Given) -> list[Tensor]:
        made = []
        for leaf, norm in norms.items():
            x = g[before[leaf]] if norm is None else norm.run(g, g[before[leaf]])
            made.append(x if rope is None else again.rotate(x, g[turns[0].name], g[turns[1].name], rope.pairing))
        return made

    normed = next((one.formula for one in norms.values() if one is not None), "")
    title = " and ".join(["Norm of each head"] * bool(normed) + ["Rotation"] * (rope is not None)).capitalize()
    turning = "(a, b) ← (a cos − b sin, b cos + a sin)" if rope is not None else ""
    formula = ",  ".join(filter(None, [f"q ← norm(q), norm(x) = {normed}" if normed else "", turning]))
    whys = ["Each head's queries and keys are brought to one scale."] * bool(normed)
    whys += [TURNING] * (rope is not None)
    makes = [by_head(at, sub, spec, f"{leaf}_rot", "") for leaf in ("q", "k")]
    return Step(part, title, formula, " ".join(whys), makes, once_more, [*uses, *turns])


def _extension(at: Stack, part: str, sub: str, k: Shown, v: Shown, held: Held) -> Step:
    under, focus = f"{at.prefix}{at.block}.{sub}", len(held.places) - 1
    makes = []
    for leaf, new in (("k", k), ("v", v)):
        value = at.read(f"{at.block}.{sub}.{leaf}_ctx").transpose(0, 1)
        makes.append(replace(new, name=f"{under}.{leaf}_ctx", value=value, labels=held.labels, focus=focus))
    pairs = ((held.k, k.name), (held.v, v.name))
    formula = "k = [k of the cache; k new],  v = [v of the cache; v new]"
    why = "The new key and value join those kept: nothing of the earlier tokens is computed again."
    return Step(part, "Cache", formula, why, makes, lambda g: [torch.cat([g[old], g[new]], 1) for old, new in pairs])


def _joined(at: Stack, part: str, sub: str, spec: AttentionSpec, norms: NormsSpec) -> list[Step]:
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
