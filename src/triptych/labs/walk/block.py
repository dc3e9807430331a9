"""The chosen block: norm, attention, residual, cross-attention where there is one, MLP."""

from __future__ import annotations

from torch import Tensor

from triptych.labs.walk import again
from triptych.labs.walk.heads import attention
from triptych.labs.walk.stack import Stack, leaving
from triptych.labs.walk.steps import Given, Step
from triptych.spec import GLU, MLP
from triptych.spec.parts import Norms

BETWEEN = "after attention"  # of a decoder's block: no site lies between its two attentions
ADDED = {"attn": "what attention gathered", "cross": "what was read of the source", "mlp": "what the MLP made"}


def middle(at: Stack) -> list[Step]:
    """Every step of the block."""
    block, begins = at.spec.blocks[at.layer], f"block {at.layer}, "
    x = at.prefix + (f"{at.block}.resid_pre" if at.layer else "embed")
    last, part = f"{at.block}.resid_mid", at.part(f"{begins}attention")
    steps, entered = _entered(at, part, x, "attn", block.attn_norm)
    steps += attention(at, part, entered, "attn", block.attn, block.attn_norm)
    if block.cross is not None:
        between = f"{at.block}.{BETWEEN}"
        steps.append(_residual(at, part, x, "attn", block.attn_norm, between))
        part, x = at.part(f"{begins}cross-attention"), at.prefix + between
        norms, entered = _entered(at, part, x, "cross", block.cross_norm)
        steps += [*norms, *attention(at, part, entered, "cross", block.cross, block.cross_norm)]
        steps.append(_residual(at, part, x, "cross", block.cross_norm, last))
    else:
        steps.append(_residual(at, part, x, "attn", block.attn_norm, last))
    if block.mlp is None:
        return steps
    part, x = at.part(f"{begins}MLP"), at.prefix + last
    norms, entered = _entered(at, part, x, "mlp", block.mlp_norm)
    steps += [*norms, *_mlp(at, part, entered, block.mlp, block.mlp_norm)]
    return [*steps, _residual(at, part, x, "mlp", block.mlp_norm, f"{at.block}.resid_post")]


def _entered(at: Stack, part: str, x: str, sub: str, norms: Norms) -> tuple[list[Step], str]:
    """The norm before a sublayer, where it has one, and the name of what enters."""
    if norms.pre is None:
        return [], x
    norm, site = at.norm(f"{at.block}.{sub}_norm.pre", norms.pre), f"{at.block}.{sub}.in"
    why = "The stream itself stays as it is: only what this part reads is brought to one scale."
    formula = f"h = norm(x),  norm(x) = {norm.formula}"
    step = Step(part, "Norm", formula, why, [at.shown(site, "h")], lambda g: norm.run(g, g[x]), norm.uses)
    return [step], at.prefix + site


def _residual(at: Stack, part: str, x: str, sub: str, norms: Norms, site: str) -> Step:
    added, after, value = f"{at.prefix}{at.block}.{sub}.out", None, None
    title, formula = "Residual", "x ← x + o"
    if norms.post is not None:
        after = at.norm(f"{at.block}.{sub}_norm.post", norms.post)
        title, formula = "Residual and norm", f"x ← norm(x + o),  norm(x) = {after.formula}"
    if site.endswith(BETWEEN):  # the sum of two sites, as the block itself forms it
        post = getattr(at.stack.blocks[at.layer], f"{sub}_norm").post
        sites = (at.trace[f"{at.prefix}{at.block}.{leaf}"][0] for leaf in ("resid_pre", f"{sub}.out"))
        value = post(sum(sites)).detach().cpu()

    def once_more(g: Given) -> Tensor:
        total = g[x] + g[added]
        return total if after is None else after.run(g, total)

    meaning = f"Added, not replaced: {ADDED[sub]} joins what the token already carried."
    uses = [] if after is None else after.uses
    return Step(part, title, formula, meaning, [at.shown(site, "x", value=value)], once_more, uses)


def _mlp(at: Stack, part: str, entered: str, spec: MLP | GLU, norms: Norms) -> list[Step]:
    under = f"{at.block}.mlp"
    gated = at.linear(f"{under}.gate", spec.gate, "g", "F D") if isinstance(spec, GLU) else None
    up = at.linear(f"{under}.up", spec.up, "u", "F D")
    maps = {"gate": gated, "up": up} if gated is not None else {"up": up}
    names = {leaf: f"{at.prefix}{under}.{leaf}" for leaf in ("gate", "up", "act")}
    widen = Step(
        part,
        "Widen",
        ",  ".join(f"{leaf[0]} = h {one.formula}" for leaf, one in maps.items()),
        f"From {spec.up.inputs:,} to {spec.up.outputs:,} numbers, each token by itself.",
        [at.shown(f"{under}.{leaf}", leaf[0], "N F") for leaf in maps],
        lambda g: [one.run(g, g[entered]) for one in maps.values()],
        [use for one in maps.values() for use in one.uses],
    )

    def acted(g: Given) -> Tensor:
        bent = again.activation(spec.act, g[names["up" if gated is None else "gate"]])
        return bent if gated is None else bent * g[names["up"]]

    formula, why = f"a = {spec.act}(u)", "The one bend in the block: everything else in the MLP is a linear map."
    if gated is not None:
        formula, why = f"a = {spec.act}(g) · u", "The gate decides, number by number, how much of u passes."
    bend = Step(part, "Activation", formula, why, [at.shown(f"{under}.act", "a", "N F")], acted)
    down = at.linear(f"{under}.down", spec.down, "d", "D F")
    return [
        widen,
        bend,
        leaving(at, part, "Narrow", "a", names["act"], down, "mlp", norms, "Back to the stream's width."),
    ]
