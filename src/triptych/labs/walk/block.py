"""The chosen block: norm, attention, residual, cross-attention where there is one, MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import Rows
from triptych.labs.walk import again
from triptych.labs.walk.heads import attention
from triptych.labs.walk.stack import Stack, leaving
from triptych.labs.walk.steps import Given, Step
from triptych.spec import GLUSpec, MoESpec, ParallelBlockSpec
from triptych.spec.parts import BranchSpec, FeedForward, NormsSpec

BETWEEN = "after attention"  # of a decoder's block: no site lies between its two attentions
BEFORE_BRANCH = "after the MLP"  # of a block with a convolution beside it: no site lies before the two meet
ADDED = {"attn": "what attention gathered", "cross": "what was read of the source", "mlp": "what the MLP made"}


def middle(at: Stack) -> list[Step]:
    """Every step of the block."""
    block, begins = at.spec.blocks[at.layer], f"block {at.layer}, "
    x = at.prefix + (f"{at.block}.resid_pre" if at.layer else "embed")
    if isinstance(block, ParallelBlockSpec):
        return _parallel(at, x, block)
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
    if block.branch is None:
        return [*steps, _residual(at, part, x, "mlp", block.mlp_norm, f"{at.block}.resid_post")]
    steps.append(_residual(at, part, x, "mlp", block.mlp_norm, f"{at.block}.{BEFORE_BRANCH}"))
    return [*steps, _branch(at, f"{at.prefix}{at.block}.{BEFORE_BRANCH}", block.branch)]


def _branch(at: Stack, made: str, spec: BranchSpec) -> Step:
    """The convolution beside the block, and where the two meet."""
    part, x = at.part(f"block {at.layer}, beside it"), at.prefix + (f"{at.block}.resid_pre" if at.layer else "embed")
    weight = at.parameter(f"{at.block}.branch.conv.weight", "W_c", "D D kernel")
    bias = at.parameter(f"{at.block}.branch.conv.bias", "b_c", "D")
    norm = at.norm(f"{at.block}.branch.norm", spec.norm)

    def once_more(g: Given) -> list[Tensor]:
        found = again.activation(spec.act, again.convolved(g[x], g[weight.name], g[bias.name]))
        return [found, norm.run(g, g[made] + found)]

    return Step(
        part,
        "Convolution",
        f"c = {spec.act}(Σ_j W_c[j] x₀[t + j] + b_c),  x ← norm(x + c),  norm(x) = {norm.formula}",
        f"Each token and its neighbours, {spec.conv.kernel} in all, as they entered the block: added to what it made.",
        [at.shown(f"{at.block}.branch.out", "c"), at.shown(f"{at.block}.resid_post", "x")],
        once_more,
        [weight, bias, *norm.uses],
    )


def _parallel(at: Stack, x: str, block: ParallelBlockSpec) -> list[Step]:
    """Attention and MLP side by side: both read the stream as it entered, and both are added to it at the end."""
    part, mlp = at.part(f"block {at.layer}, attention"), at.part(f"block {at.layer}, MLP")
    seen, entered = [], {"attn": x, "mlp": x}
    if block.norm is not None:
        norm, site = at.norm(f"{at.block}.norm", block.norm), f"{at.block}.attn.in"
        why = "Attention and MLP both read this, side by side."
        formula = f"h = norm(x),  norm(x) = {norm.formula}"
        seen = [Step(part, "Norm", formula, why, [at.shown(site, "h")], lambda g: norm.run(g, g[x]), norm.uses)]
        entered = dict.fromkeys(entered, at.prefix + site)
    norms, own = _entered(at, part, entered["attn"], "attn", block.attn_norm)
    steps = [*seen, *norms, *attention(at, part, own, "attn", block.attn, block.attn_norm)]
    norms, own = _entered(at, mlp, entered["mlp"], "mlp", block.mlp_norm)
    steps += [*norms, *_mlp(at, mlp, own, block.mlp, block.mlp_norm)]
    added = [f"{at.prefix}{at.block}.{sub}.out" for sub in ("attn", "mlp")]
    meaning = "Added, not replaced: what attention gathered and what the MLP made join what the token already carried."
    end = at.shown(f"{at.block}.resid_post", "x")
    return [*steps, Step(mlp, "Residual", "x ← x + o + o", meaning, [end], lambda g: g[x] + g[added[0]] + g[added[1]])]


def _entered(at: Stack, part: str, x: str, sub: str, norms: NormsSpec) -> tuple[list[Step], str]:
    """The norm before a sublayer, where it has one, and the name of what enters."""
    if norms.pre is None:
        return [], x
    norm, site = at.norm(f"{at.block}.{sub}_norm.pre", norms.pre), f"{at.block}.{sub}.in"
    why = "The stream itself stays as it is: only what this part reads is brought to one scale."
    formula = f"h = norm(x),  norm(x) = {norm.formula}"
    step = Step(part, "Norm", formula, why, [at.shown(site, "h")], lambda g: norm.run(g, g[x]), norm.uses)
    return [step], at.prefix + site


def _residual(at: Stack, part: str, x: str, sub: str, norms: NormsSpec, site: str) -> Step:
    added, after, value = f"{at.prefix}{at.block}.{sub}.out", None, None
    title, formula = "Residual", "x ← x + o"
    if norms.post is not None:
        after = at.norm(f"{at.block}.{sub}_norm.post", norms.post)
        title, formula = "Residual and norm", f"x ← norm(x + o),  norm(x) = {after.formula}"
    if site.endswith((BETWEEN, BEFORE_BRANCH)):  # the sum of two sites, as the block itself forms it
        post = getattr(at.stack.blocks[at.layer], f"{sub}_norm").post
        before = "resid_mid" if sub == "mlp" else "resid_pre"
        sites = (at.trace[f"{at.prefix}{at.block}.{leaf}"][0] for leaf in (before, f"{sub}.out"))
        value = post(sum(sites)).detach().cpu()

    def once_more(g: Given) -> Tensor:
        total = g[x] + g[added]
        return total if after is None else after.run(g, total)

    meaning = f"Added, not replaced: {ADDED[sub]} joins what the token already carried."
    uses = [] if after is None else after.uses
    return Step(part, title, formula, meaning, [at.shown(site, "x", value=value)], once_more, uses)


def _experts(at: Stack, part: str, entered: str, spec: MoESpec, norms: NormsSpec) -> list[Step]:
    """A mixture of experts: the router's scores, whom each token goes to, and the weighted sum of what they make."""
    under, count = f"{at.prefix}{at.block}.mlp", spec.top_k
    router = at.linear(f"{at.block}.mlp.router", spec.router, "r", "E D")
    after = None if norms.out is None else at.norm(f"{at.block}.mlp_norm.out", norms.out)

    def choice(scores: Tensor, softmax: Callable[[Tensor], Tensor]) -> list[Tensor]:
        weights, chosen = softmax(scores).topk(count)
        return [chosen, weights / weights.sum(-1, keepdim=True) if spec.normalize else weights]

    def mixed(g: Given) -> Tensor:
        h, weights = g.raw[entered].to(at.device), g[f"{under}.weights"]
        experts: Any = at.module.get_submodule(f"{at.name}.{at.block}.mlp.experts")
        ctx = nn.Context(Rows((1,)), (), ())
        out = torch.zeros_like(h, dtype=torch.float64, device="cpu")
        with torch.inference_mode():
            for token, chosen in enumerate(g[f"{under}.chosen"].tolist()):
                for place, e in enumerate(chosen):
                    made = experts[e](h[token : token + 1], ctx, nn.NO_TAPS)[0]
                    out[token] += weights[token, place] * made.double().cpu()
        return out if after is None else after.run(g, out)

    values = choice(at.read(f"{at.block}.mlp.router"), lambda s: s.softmax(-1))
    names = [str(i) for i in range(count)]
    chosen, weights = (
        replace(at.row_each(f"{under}.{name}", symbol, value, "N top"), columns=names)
        for name, symbol, value in zip(("chosen", "weights"), ("e", "w"), values, strict=True)
    )
    few = f"{count} of {spec.experts} experts"
    return [
        Step(part, "Router", f"r = h {router.formula}", f"A score for each of {spec.experts} experts.",
             [at.shown(f"{at.block}.mlp.router", "r", "N E")], lambda g: router.run(g, g[entered]), router.uses),
        Step(part, "Choice", f"e, w = the {count} largest of softmax(r)" + ",  w ← w / Σ w" * spec.normalize,
             f"Each token goes through {few}.", [chosen, weights],
             lambda g: choice(g[f"{under}.router"], again.softmax)),
        Step(part, "Experts", "o = Σ w · expert_e(h)" + (f",  o ← {after.formula}" if after else ""),
             "Their outputs, weighted and summed; an expert is an MLP like any other.",
             [at.shown(f"{at.block}.mlp.out", "o")], mixed, [] if after is None else after.uses),
    ]  # fmt: skip


def _mlp(at: Stack, part: str, entered: str, spec: FeedForward, norms: NormsSpec) -> list[Step]:
    if isinstance(spec, MoESpec):
        return _experts(at, part, entered, spec, norms)
    under = f"{at.block}.mlp"
    gated = at.linear(f"{under}.gate", spec.gate, "g", "F D") if isinstance(spec, GLUSpec) else None
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
