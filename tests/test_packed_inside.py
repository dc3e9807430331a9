"""Analyses of packed models are those of the same numbers as plain weights, and threads that look into one model at
once do not see each other's values."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from native_models import needs_native
from test_native_step import packed, unpacked, with_rounded_inputs
from triptych.model import Model
from triptych.probe import add, sites

CLEAN, CORRUPT = [3, 1, 4, 1, 5], [3, 9, 4, 1, 5]
HEADS = [(0, 0), (0, 1)]


@cache
def models(kind: str) -> tuple[Model, Model, Model]:
    """A packed model, the same numbers as plain weights, and these with inputs rounded as the kernels round them."""
    module = packed(kind)
    rounded = unpacked(module)
    with_rounded_inputs(rounded)
    return Model(module), Model(unpacked(module)), Model(rounded)


def analyses(model: Model) -> dict[str, Tensor]:
    """Numbers of each analysis, in nats or probabilities."""
    answer: dict[str, Any] = {"answer": (7, 8)}
    return {
        "patch": model.patch(CLEAN, CORRUPT, **answer).values,
        "patch heads": model.patch(CLEAN, CORRUPT, heads=True, positions=None, **answer).values,
        "paths": model.path_patch(CLEAN, CORRUPT, HEADS, [(1, 0)], **answer).values,
        "ablate": model.ablate([CLEAN, CORRUPT], **answer).values,
        "ablate mlps": model.ablate([CLEAN], "mlp", how="mean", reference=[CLEAN, CORRUPT], **answer).values,
        "lens": model.lens(CLEAN, top=model.spec.vocab).probabilities.sort(-1).values,
        "steered": model.logits([CLEAN], edit=add("blocks.0.resid_post", torch.ones(64)))[0],
    }


def furthest(ours: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two models' analyses, over what patching changes at most, and where it is."""
    spread = float(other["patch"].max() - other["patch"].min())
    return max((float((values - other[name]).abs().max()) / spread, name) for name, values in ours.items())


@needs_native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_patches_ablations_and_lenses_of_packed_weights(kind: str) -> None:
    """Within 3% of what a patch can change beside inputs that are rounded alike, and a tenth beside others."""
    ours, plain, rounded = map(analyses, models(kind))
    assert furthest(ours, rounded)[0] < 0.03
    assert furthest(ours, plain)[0] < 0.1


@needs_native
def test_one_wrong_head_of_packed_weights_would_show() -> None:
    ours, plain = analyses(models("Q8_0")[0]), unpacked(models("Q8_0")[0].module)
    plain.decoder.blocks[0].attn.out.weight[:, :16].detach().neg_()  # type: ignore[union-attr,index,operator]
    assert furthest(ours, analyses(Model(plain)))[0] > 0.2


@needs_native
def test_parts_of_a_packed_logit_sum_to_it() -> None:
    for kind in ("Q8_0", "Q4_1"):
        ours, plain, _ = models(kind)
        parts, exact = ours.attribute_logit(CLEAN, 7), plain.attribute_logit(CLEAN, 7)
        assert exact.error < 1e-5
        assert parts.error < 0.02
        assert [name for name, _ in parts.largest(1)] == [name for name, _ in exact.largest(1)]


ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [8, 2, 8, 1, 8, 2, 8, 4], [1, 6, 1]]


@needs_native
@pytest.mark.parametrize("kind", ["modules", "packed"])
def test_threads_that_read_one_model_get_their_own_values(kind: str) -> None:
    """Each of four threads traces, edits and writes its own text again and again: the bits are those of a run alone."""
    model = Model(tiny.decoder()) if kind == "modules" else models("Q8_0")[0]
    width = model.spec.stacks["decoder"].width
    reads = [name for name in sites(model.spec) if not name.endswith(("scores", "pattern", "_ctx"))]

    def looked(number: int) -> list[Tensor]:
        row = [ROWS[number]]
        edit = add("blocks.0.resid_post", torch.full((width,), 0.1 * number + 0.1))
        traces = [model.trace(row, read="*"), model.trace(row, read="*", edit=edit)]
        (written,) = model.generate(row, max_new_tokens=4, read=reads)
        (steered,) = model.generate(row, max_new_tokens=3, read="final", edit=edit)
        (searched,) = model.generate(row, max_new_tokens=3, read="final", beams=2)
        every = [*traces, *(one.trace for one in (written, steered, searched) if one.trace is not None)]
        return [value for trace in every for site in trace for value in trace[site]]

    alone = [looked(number) for number in range(len(ROWS))]
    with ThreadPoolExecutor(len(ROWS)) as pool:
        for _ in range(3):
            for found, expected in zip(pool.map(looked, range(len(ROWS))), alone, strict=True):
                assert len(found) == len(expected)
                assert all(map(torch.equal, found, expected))
