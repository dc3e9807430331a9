"""`lab single-parts` passes, and fails where a part computes something else than its definition."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab_results import failed, passes
from triptych import ops
from triptych.attention.rope import rotation
from triptych.generate import sampling
from triptych.nn import feedforward, linear, positions, stack
from triptych.ops import ACTIVATIONS
from triptych.train import data
from triptych.train.objectives import Example
from triptych_lectures import labs
from triptych_lectures.labs import single_parts
from triptych_lectures.labs.lab import Setup
from triptych_lectures.labs.single_parts import SingleParts

pytestmark = pytest.mark.usefixtures("unchecked")
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", [0, 1, 7100])
def test_passes(seed: int) -> None:
    passes(labs.run("single-parts", Setup(seed=seed)))


def smaller_base(patch: Patch) -> None:
    sinusoidal = single_parts.sinusoidal
    patch.setattr(single_parts, "sinusoidal", lambda at, spec: sinusoidal(at, replace(spec, theta=100.0)))


def squared_positions(patch: Patch) -> None:
    """Angles that are not proportional to the position."""
    patch.setattr(positions, "rotation", lambda spec, at, *rest: rotation(spec, at.square(), *rest))


def one_term_less(patch: Patch) -> None:
    bias = positions.disentangled_bias
    patch.setattr(positions, "disentangled_bias", lambda *places, pos_q, pos_k: bias(*places, pos_k=pos_k))


def no_mean(patch: Patch) -> None:
    """LayerNorm that does not subtract the mean."""
    patch.setattr(linear.LayerNorm, "forward", lambda self, x: ops.rms_norm(x, self.weight, 0.0, self.spec.eps))


def mixing_mlp(patch: Patch) -> None:
    forward = feedforward.MLP.forward
    patch.setattr(feedforward.MLP, "forward", lambda self, x, *rest: forward(self, x + x.mean(0), *rest))


def diagonal_projection(patch: Patch) -> None:
    """An output projection that keeps every head in its slice."""
    model = SingleParts._model

    def made(self: SingleParts, *sizes: Any, **rest: Any) -> Any:
        new = model(self, *sizes, **rest)
        new.module.get_parameter("decoder.blocks.0.attn.out.weight").data *= torch.eye(single_parts.WIDTH)
        return new

    patch.setattr(SingleParts, "_model", made)


def no_mask(patch: Patch) -> None:
    attend = single_parts.attend
    patch.setattr(single_parts, "attend", lambda *qkv, mask=None, **rest: attend(*qkv, **rest))


def unscaled_dropout(patch: Patch) -> None:
    def dropped(x: Tensor, rate: float, training: bool, random: ops.Noise | None = None) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(1 - rate)

    patch.setattr(ops, "dropout", dropped)


def all_masked(patch: Patch) -> None:
    patch.setattr(single_parts, "TokenMasking", partial(single_parts.TokenMasking, rate=0.3, shares=(1.0, 0.0)))


def one_random_word(patch: Patch) -> None:
    """Every word that is read in place of another is the same."""
    hide = single_parts.TokenMasking.__call__

    def hidden(self: Any, *of: Any) -> Example:
        row = hide(self, *of)
        other = row.trained & (row.ids != self.mask) & (row.ids != row.targets)
        return replace(row, ids=np.where(other, 7, row.ids))

    patch.setattr(single_parts.TokenMasking, "__call__", hidden)


def unrotated(patch: Patch) -> None:
    """Equal tokens then have equal scores at all offsets."""
    patch.setattr(ops, "rotate", lambda x, rotation: x)


def cut_gradients(patch: Patch) -> None:
    recomputed = stack._recomputed
    patch.setattr(stack, "_recomputed", lambda block, x, *rest: recomputed(block, x.detach().requires_grad_(), *rest))


def static_masking(patch: Patch) -> None:
    numbers = data.random_numbers
    patch.setattr(data, "random_numbers", lambda seed, use, step: numbers(seed, use, 0))


def all_chosen_replaced(patch: Patch) -> None:
    """ELECTRA's labels say which tokens were chosen, and not which are others now."""
    row = single_parts.ReplacedText.row

    def labelled(self: Any, piece: Any, random: np.random.Generator) -> Example:
        seen: list[Any] = []
        made = row(replace(self, replacer=lambda *of: seen.append(of[1]) or self.replacer(*of)), piece, random)
        return replace(made, goal=np.isin(np.arange(len(made.ids)), seen[0]).astype(np.int64))

    patch.setattr(single_parts.ReplacedText, "row", labelled)


def nothing_recomputed(patch: Patch) -> None:
    patch.setattr(stack, "_recomputed", lambda block, *inputs: block(*inputs))


def no_filters(patch: Patch) -> None:
    draw = sampling.draw
    plain = partial(replace, top_k=0, top_p=1.0, min_p=0.0)
    patch.setattr(sampling, "draw", lambda scores, samplings, *rest: draw(scores, [*map(plain, samplings)], *rest))


def one_bucket(patch: Patch) -> None:
    patch.setattr(single_parts, "t5_bucket", lambda relative, **how: 0 * relative)


def other_text(patch: Patch) -> None:
    tokenizer = single_parts.bpe_tokenizer
    patch.setattr(single_parts, "bpe_tokenizer", lambda texts, size: tokenizer(["told", "lot"], size))


BROKEN: dict[Callable[[Patch], None], set[str]] = {
    smaller_base: {"PE(1) for d 4, distance", "PE(p + 5), distance from PE(p) rotated"},
    squared_positions: {"RoPE: spread at one offset"},
    one_term_less: {"score, distance from three terms"},
    no_mean: {"both norms, distance", "LayerNorm: change by adding 10"},
    mixing_mlp: {"MLP: change elsewhere, over own"},
    diagonal_projection: {"written outside a head's slice"},
    no_mask: {"boolean less 0/-∞ or 0/-1e9 mask"},
    unscaled_dropout: {"p 0.2: factor, distance from 1.25", "mean of 10,000 ones", "change outside training"},
    all_masked: {"share predicted by BERT", "share read as [MASK]", "share read unchanged"},
    one_random_word: {"other words read, different ones over expected"},
    unrotated: {"RoPE: spread at one offset"},
    cut_gradients: {"checkpointed: gradients, distance"},
    static_masking: {"hidden next epoch too"},
    all_chosen_replaced: {"wrong labels of ELECTRA", "labelled replaced, of chosen"},
    nothing_recomputed: {"checkpointed: block calls, ratio", "checkpointed: bytes kept, ratio"},
    one_bucket: {"distances in another bucket than by hand", "buckets of distances 0 to 7", "buckets of keys ahead"},
    no_filters: {"four settings: standard deviations off"},
    other_text: {"right merges, of 3"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_fails_where_a_part_computes_something_else(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    result = labs.run("single-parts")
    assert BROKEN[broken] <= failed(result)
    assert not any(clause.text == clause.statement for clause in result.conclusion if not clause.held)


def test_the_form_with_tanh_is_not_gelu(monkeypatch: Patch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "gelu", ACTIVATIONS["gelu_tanh"])
    assert failed(labs.run("single-parts")) == {"GELU and ReLU of ±1, distance", "the form with tanh, from GELU"}


def test_recomputed_with_other_numbers(monkeypatch: Patch) -> None:
    """Gradients differ where the second forward of a block draws other noise than the first."""
    block = stack.Block.forward
    monkeypatch.setattr(
        stack.Block, "forward", lambda self, x, *rest: block(self, x * (1 + 0.1 * torch.rand(())), *rest)
    )
    assert "checkpointed: gradients, distance" in failed(labs.run("single-parts"))
