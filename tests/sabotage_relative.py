"""Sabotages of disentangled attention, and of what else DeBERTa brought."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from torch import Tensor
from torch.nn import Identity, Module, Parameter

from sabotage import change, changed, fill, filled, of, parity
from triptych import spec
from triptych.attention import Rows, disentangled_bias
from triptych.model import Model
from triptych.nn import Context, positions, stack

Places = dict[str, Tensor]


def scored(patch: pytest.MonkeyPatch, bias: Callable[[Tensor, Tensor, Tensor, Places], Tensor]) -> None:
    """Another bias, of q, k, the rows of the table and `pos_q`, `pos_k`."""
    patch.setattr(positions, "disentangled_bias", lambda q, k, row, **placed: bias(q, k, row, placed))


def occupy(module: Module, patch: pytest.MonkeyPatch, slot: str, value: Module) -> None:
    """Something in an empty slot, which is a plain attribute that holds None."""
    patch.setitem(module.__dict__, slot, value)


@parity("deberta", "Disentangled")
@parity("deberta-v3", "Disentangled")
def distances_the_other_way(model: Model, patch: pytest.MonkeyPatch) -> None:
    scored(patch, lambda q, k, row, placed: disentangled_bias(q, k, row.mT, **placed))


@parity("deberta", "Disentangled")
@parity("deberta-v2-p2c", "Disentangled")
def position_to_content_as_in_the_paper(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Equation 4 reads it at the distance from the key to the query."""

    def as_written(q: Tensor, k: Tensor, row: Tensor, placed: Places) -> Tensor:
        terms = {"pos_q": row.mT, "pos_k": row}
        return sum(disentangled_bias(q, k, terms[name], **{name: value}) for name, value in placed.items())  # type: ignore[return-value]

    scored(patch, as_written)


@parity("deberta-base", "Disentangled")
@parity("deberta-v2-p2c", "Disentangled")
def position_to_content_not_transposed(model: Model, patch: pytest.MonkeyPatch) -> None:
    scored(patch, lambda q, k, row, placed: disentangled_bias(q, k, row, **placed).mT)


@parity("deberta-base", "Disentangled")
@parity("deberta-v2-p2c", "Disentangled")
def position_to_content_reads_the_query(model: Model, patch: pytest.MonkeyPatch) -> None:
    scored(patch, lambda q, k, row, placed: disentangled_bias(q, q, row, **placed))


@parity("deberta-c2p", "Disentangled")
def content_to_position_reads_the_key(model: Model, patch: pytest.MonkeyPatch) -> None:
    scored(patch, lambda q, k, row, placed: disentangled_bias(k, k, row, **placed))


@parity("deberta-v2", "Disentangled")
def distances_not_scaled(model: Model, patch: pytest.MonkeyPatch) -> None:
    scale = model.spec.encoder.blocks[0].attn.scale
    scored(patch, lambda q, k, row, placed: disentangled_bias(q, k, row, **placed) / scale)


changed("one_term_of_two", spec.DisentangledSpec, "deberta-v3", "deberta-v2", slot="Disentangled", terms=("c2p",))
changed("scale_that_does_not_count_the_terms", spec.AttentionSpec, "deberta-c2p", "deberta-v3", "deberta", scale=None)


@parity("deberta", "Disentangled.span")
@parity("deberta-v2-conv", "Disentangled.span")
def distance_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    def next_row(q: Tensor, k: Tensor, row: Tensor, placed: Places) -> Tensor:
        last = min(len(table) for table in placed.values()) - 1
        return disentangled_bias(q, k, (row + 1).clamp(max=last), **placed)

    scored(patch, next_row)


changed("far_distances_are_one", spec.DisentangledSpec, "deberta-v2-p2c", "deberta-v3", max_distance=None)
changed("distances_shared_twice_as_far", spec.DisentangledSpec, "deberta-v3", max_distance=24)
filled("missing_norm_of_the_distances", spec.DisentangledSpec, "deberta-v3", norm=None)
filled("distances_asked_like_words", spec.AttentionSpec, "deberta-v2", "deberta-base", pos_q=None)
filled("distances_offered_like_words", spec.AttentionSpec, "deberta-v2", "deberta-c2p", pos_k=None)


@parity("deberta-v3", "Attention.pos_q", "Attention.pos_k")
def shared_maps_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    for attn in of(model, spec.AttentionSpec):
        occupy(attn, patch, "pos_q", attn.k)
        occupy(attn, patch, "pos_k", attn.q)


@parity("deberta", "Attention")
def three_matrices_in_thirds(model: Model, patch: pytest.MonkeyPatch) -> None:
    """q and k of each head where the file's rows stand."""
    for attn in of(model, spec.AttentionSpec):
        first, second = attn.q.weight.detach(), attn.k.weight.detach()
        rows = first.unflatten(0, (attn.spec.heads, -1)), second.unflatten(0, (attn.spec.heads, -1))
        fill(attn.q, patch, "weight", Parameter(rows[0].flip(0).flatten(0, 1)))
        fill(attn.k, patch, "weight", Parameter(rows[1].roll(1, 0).flatten(0, 1)))


@parity("deberta-plain", "Embed.widen")
@parity("deberta-v2-conv", "Embed.widen")
def widened_from_the_wrong_end(model: Model, patch: pytest.MonkeyPatch) -> None:
    widen = model.module.encoder.embed.widen
    fill(widen, patch, "weight", Parameter(widen.weight.detach().flip(1)))


@parity("deberta-v2-conv", "Block.branch")
@parity("deberta-v2-p2c", "Block.branch")
def branch_forgotten(model: Model, patch: pytest.MonkeyPatch) -> None:
    fill(model.module.encoder.blocks[0], patch, "branch", None)


@parity("deberta-v2-conv", "Block.branch")
def branch_beside_the_second_block(model: Model, patch: pytest.MonkeyPatch) -> None:
    first, second = model.module.encoder.blocks[:2]
    occupy(second, patch, "branch", first.branch)
    fill(first, patch, "branch", None)


@parity("deberta-v2-conv", "Branch")
def branch_reads_what_the_block_made(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Branch.forward
    patch.setattr(stack.Branch, "forward", lambda self, x, made, ctx, taps: forward(self, made, made, ctx, taps))


@parity("deberta-v2-conv", "Branch")
def branch_sees_the_next_row(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = stack.Branch.forward

    def joined(self: Any, x: Tensor, made: Tensor, ctx: Context, taps: Any) -> Tensor:
        one_row = copy(ctx)
        one_row.rows = Rows((ctx.rows.total,))
        return forward(self, x, made, one_row, taps)

    patch.setattr(stack.Branch, "forward", joined)


filled("branch_without_its_norm", spec.BranchSpec, "deberta-v2-conv", slot="Branch", norm=Identity())


@parity("deberta-v2-conv", "Branch.act:gelu")
@parity("deberta-v2-p2c", "Branch.act:tanh")
def relu_in_the_branch(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.BranchSpec, act="relu")
