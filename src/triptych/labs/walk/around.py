"""What stands around the chosen block: the embedding before it, the other blocks, the final norm."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import NULL_CACHE, EncoderOutput, Rows, sinusoidal
from triptych.labs.walk.stack import Stack
from triptych.labs.walk.steps import Given, Shown, Step
from triptych.spec import LearnedSpec
from triptych.spec.positions import Absolute

OUT = "Text out"  # the last part of every walk


def beginning(at: Stack) -> list[Step]:
    """The embedding, and the blocks before the chosen one."""
    steps = [_embedding(at)]
    if at.layer:
        steps.append(_through(at, at.part("text in"), 0, at.layer, "embed", f"{at.block}.resid_pre"))
    return steps


def ending(at: Stack) -> list[Step]:
    """The blocks after the chosen one, and the final norm."""
    last = len(at.spec.blocks) - 1
    part, end = at.part("output") if at.prefix else OUT, f"blocks.{last}.resid_post"
    steps = []
    if at.layer < last:
        steps.append(_through(at, part, at.layer + 1, last + 1, f"{at.block}.resid_post", end))
    if at.spec.final_norm is not None:
        norm, x = at.norm("final_norm", at.spec.final_norm), at.prefix + end
        formula = f"h = norm(x),  norm(x) = {norm.formula}"
        why = "Every token's vector brought to one scale before it is read out."
        steps.append(
            Step(part, "Final norm", formula, why, [at.shown("final", "h")], lambda g: norm.run(g, g[x]), norm.uses)
        )
    return steps


def _embedding(at: Stack) -> Step:
    spec, after, project, widen = at.spec.embed, None, None, None
    rows = at.parameter("embed.tokens.weight", "E", "V D").value[torch.tensor(list(at.ids))]
    table = at.row_each(f"{at.name}.embed.tokens.weight[ids]", "E[ids]", rows)
    uses, scale = [table], 1.0 if spec.scale is None else spec.scale
    terms = ["E[ids]" if spec.scale is None else f"{scale:g} · E[ids]"]
    if spec.position is not None:
        uses.append(_positions(at, spec.position))
        terms.append("P")
    if spec.token_types:
        first = at.parameter("embed.token_types.weight", "S", "types D").value[:1]
        uses.append(Shown(f"{at.name}.embed.token_types.weight[0]", "S[0]", "types D", first))
        terms.append("S[0]")
    inner = " + ".join(terms)
    added = [one.name for one in uses[1:]]
    if spec.widen is not None:
        widen = at.linear("embed.widen", spec.widen, "e", "D E")
        uses += widen.uses
        inner = f"({inner}) {widen.formula}"
    formula = f"x = {inner}"
    if spec.norm is not None:
        after = at.norm("embed.norm", spec.norm)
        uses += after.uses
        formula = f"x = norm({inner}),  norm(x) = {after.formula}"
    if spec.project is not None:
        project = at.linear("embed.project", spec.project, "e", "D E")
        uses += project.uses
        formula = formula.replace("x = ", "e = ", 1) + f",  x = e {project.formula}"

    def once_more(g: Given) -> Tensor:
        x = g[table.name] * scale + sum(g[name] for name in added)
        x = x if widen is None else widen.run(g, x)
        x = x if after is None else after.run(g, x)
        return x if project is None else project.run(g, x)

    places = ", and a vector for its place is added." if spec.position is not None else "; places come in later."
    meaning = "Each id picks its row of a learned table" + places
    return Step(at.part("text in"), "Embedding", formula, meaning, [at.shown("embed", "x")], once_more, uses)


def _positions(at: Stack, spec: Absolute) -> Shown:
    places = at.places
    if not isinstance(spec, LearnedSpec):
        return at.row_each(f"{at.name}.embed.position", "P", sinusoidal(places, spec))
    rows = at.parameter("embed.position.weight", "P", "positions D").value[places + spec.offset]
    return at.row_each(f"{at.name}.embed.position.weight[positions]", "P", rows)


def _through(at: Stack, part: str, first: int, end: int, before: str, after: str) -> Step:
    """Blocks that are not walked through, run once more as modules."""
    which = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"

    @torch.inference_mode()
    def once_more(g: Given) -> Tensor:
        stack, rows = at.stack, Rows((len(at.ids),))
        x = g.raw[at.prefix + before].to(at.device)
        memory = None
        if at.source is not None:
            memory = EncoderOutput(g.raw[at.source.final].to(at.device), Rows((len(at.source.ids),)))
        ctx = stack.context(x, rows, NULL_CACHE.begin(rows, ""), memory)
        for i in range(first, end):
            x = stack.blocks[i](x, ctx, i, nn.NO_TAPS)
        return x.cpu()

    blocks = "A block" if end == first + 1 else f"{end - first} blocks"
    meaning = f"{blocks} of the same kind, adding to the stream; --layer walks through another one."
    return Step(part, which.capitalize(), f"x ← {which} of x", meaning, [at.shown(after, "x")], once_more)
