"""Attention of the native step over several ranges of positions: equal to the modules, the same bits with any kernels,
threads and chunks, and nothing of what a query does not see."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import parity
import tiny
from native_models import ANY, EXACT, Run, llama, needs_native
from triptych import nn
from triptych.attention import CacheType, Rows
from triptych.native import library
from triptych.native.loader import LEVELS
from triptych.program.native_executor import NativeStep
from triptych.quantize import kernel_matrix

pytestmark = needs_native

MODELS: dict[str, Callable[[], nn.Transformer]] = {
    "grouped": llama, "one group, odd width": lambda: llama(head_dim=20, num_key_value_heads=1),
    "window": lambda: llama(model_type="mistral", sliding_window=300), "bias": lambda: tiny.decoder("t5"),
    "softcap": lambda: parity.ours("gemma2").module,
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    library().use(LEVELS[-1])


def usable() -> list[str]:
    native = library()
    return [isa for isa in LEVELS if native.use(isa) == isa]


@torch.inference_mode()
def logits(
    module: nn.Transformer, ids: list[int], pieces: list[int], threads: int, cache_type: CacheType = "auto"
) -> Tensor:  # fmt: skip
    """The logits of a row whose tokens run in these pieces."""
    assert len(ids) == sum(pieces)
    torch.set_num_threads(threads)
    cache = module.decoder.cache(1, cache_type)
    step = NativeStep(module, cache, matrix_of=kernel_matrix, most_dense=ANY)
    out, done = [], 0
    for length in pieces:
        some = step.logits(ids[done : done + length], Rows((length,), (done,)), range(length))
        assert some is not None, step.why_modules
        out.append(some)
        done += length
    return torch.cat(out)


def _bits_agree(module: nn.Transformer, length: int, middle: int, cache_type: CacheType = "auto") -> None:
    ids, native, expected = [i * 7 % 37 for i in range(length)], library(), None
    for isa in usable():
        native.use(isa)
        for pieces, threads in (([length], 1), ([length - 1, 1], 2), ([middle, 1, 2, length - middle - 3], 8)):
            found = logits(module, ids, pieces, threads, cache_type)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (isa, pieces, threads)


@pytest.mark.parametrize("name", ["grouped", "bias", pytest.param("softcap", marks=pytest.mark.heavy)])
def test_all_kernels_give_the_same_bits(name: str) -> None:
    _bits_agree(MODELS[name](), 20, 12)


@pytest.mark.parametrize("cache_type", ["fp16", "bf16", "int8"])
def test_all_types_of_the_cache_give_the_same_bits(cache_type: CacheType) -> None:
    _bits_agree(MODELS["grouped"](), 20, 12, cache_type)


@pytest.mark.heavy
@pytest.mark.parametrize("cache_type", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("name", ["one group, odd width", "window"])
def test_rows_of_several_ranges_have_the_same_bits_with_any_cache(name: str, cache_type: CacheType) -> None:
    _bits_agree(MODELS[name](), 600, 510, cache_type)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["grouped", "one group, odd width", "window"])
def test_rows_of_several_ranges_have_the_same_bits(name: str) -> None:
    module = MODELS[name]()
    _bits_agree(module, 600, 510)
    assert Run(module).gap(((530, 3, 250), (1, 1, 1), (2, 75, 20))) <= EXACT


@torch.inference_mode()
@pytest.mark.parametrize("isa", LEVELS)
def test_what_a_query_does_not_see_never_reaches_it(isa: str) -> None:
    """NaN in later tokens of the same call, in other rows and in places of the cache beyond a row."""
    native = library()
    if native.use(isa) != isa:
        pytest.skip(f"this processor lacks {isa}")
    module = llama(tie_word_embeddings=False)
    ids = [3 + i % 20 for i in range(90)]
    expected = logits(module, ids, [90], 2)
    for weight in module.parameters():
        if weight.shape == (41, 64):  # the ids' table; the head has another row for each id
            weight[40] = torch.nan
            break
    found = logits(module, [*ids, 40, 40], [92], 2)
    assert torch.equal(found[:90, :40], expected[:, :40])
    assert found[90:, :40].isnan().all()
    cache = module.decoder.cache(2)
    step = NativeStep(module, cache, matrix_of=kernel_matrix, most_dense=ANY)
    step.logits([*ids[:80], 40], Rows((80, 1)), [0])
    (_, last), (other,) = cache.pages.tables
    for store in cache.stores:
        for x in store.pages(other, other + 1):
            assert x[:, 0].isnan().any()
            x[:] = torch.nan
        for x in store.pages(last, last + 1):
            x[:, 80 - cache.pages.size :] = torch.nan
    for i in range(80, 90):
        after = step.logits([ids[i]], Rows((1,), (i,)), [0])
        assert torch.equal(after[0, :40], expected[i, :40])
