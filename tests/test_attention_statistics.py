"""Statistics of attention without its pattern equal those of the pattern, for every mask, bias and layout of keys."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.attention import (
    LINEAR,
    AdditiveOver,
    AttentionStatistics,
    FlatKeys,
    Heads,
    KeyLabels,
    RowPlan,
    Rows,
    RowScores,
    SlotKeys,
    alibi_bias,
    attention_statistics,
    disentangled_bias,
    pattern_statistics,
    row_scores,
    t5_bias,
)
from triptych.errors import InputError
from triptych.native import library
from triptych.spec import causal, full, prefix, same_document, window

H, G, K = 6, 3, 5
CPU = torch.device("cpu")
T5 = torch.randn(8, H, generator=torch.Generator().manual_seed(0))
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"mask": causal() & window(4)},
    "both sides": {"mask": window(3, ahead=2)},
    "prefix": {"mask": causal() | prefix(5)},
    "encoder": {"mask": full()},
    "documents": {"mask": causal() & same_document(), "documents": True},
    "alibi": {"bias": lambda q, k: alibi_bias(H, q, k)},
    "t5": {"bias": lambda q, k: t5_bias(T5, q, k, max_distance=11), "mask": full()},
    "disentangled": {"content": True, "mask": full()},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 3.0},
    "one group": {"groups": 1},
    "a group a head": {"groups": H},
    "additive": {"additive": True},
    "nothing to see": {"mask": window(3, ahead=0) & window(2, ahead=0), "past": 40},
}
needs_native = pytest.mark.skipif(library() is None, reason="the native kernels were not built")
EXECUTORS = [pytest.param(False, id="torch"), pytest.param(True, id="native", marks=needs_native)]

PLAIN = Heads(heads=H, groups=G, width=K, value_width=K, dtype=torch.float32, device=CPU)


def one_row(length: int, mask: Any) -> RowPlan:
    rows = Rows((length,))
    return FlatKeys(rows).plan(rows, mask, PLAIN)


def planned(
    mask: Any = None, documents: bool = False, bias: Any = None, content: bool = False, softcap: float | None = None,
    sinks: bool = False, scale: float | None = None, groups: int = G, additive: bool = False, past: int = 0,
) -> tuple[RowPlan, dict[str, Any]]:  # fmt: skip
    """A plan of two rows, and what it runs on."""
    lengths, key_lengths = (23, 7), ((9, 4) if past else (23, 7))
    rows = Rows(lengths, documents=torch.arange(30) // 4 if documents else None)
    keys = rows if not past else Rows(key_lengths)
    if past:
        rows = Rows(lengths, past=(past, past))
    heads = replace(PLAIN, groups=groups, scale=scale, softcap=softcap, sinks=sinks)
    q, k = torch.randn(30, H, K) * 2, torch.randn(sum(key_lengths), groups, K)
    how: dict[str, Any] = {"q": q, "k": k, "sinks": torch.randn(H) if sinks else None}
    if content:
        tables = {"pos_q": torch.randn(8, H, K), "pos_k": torch.randn(8, groups, K)}
        bias = lambda a, b: (a[..., :, None] - b[..., None, :]).clamp(-4, 3) + 4  # noqa: E731
        how["content"] = lambda q, k, row: disentangled_bias(q, k, row, **tables)
    mechanism = {"mechanism": AdditiveOver(torch.randn(K))} if additive else {}
    return FlatKeys(keys).plan(rows, causal() if mask is None else mask, heads, bias=bias, **mechanism), how


def patterns(plan: RowPlan, q: Tensor, k: Tensor, sinks: Tensor | None = None, content: Any = None) -> list[Tensor]:
    """The explicit pattern [H, T, S] of each row, by the reference."""
    kept: dict[int, Tensor] = {}

    def hook(name: str, value: Tensor, row: int) -> Tensor:
        kept[row] = value
        return value

    plan.run_hooked(q, k, k, hook, sinks, content)
    return [kept[row] for row in sorted(kept)]


def by_hand(p: Tensor, q_pos: Tensor, k_pos: Tensor, top: int, labels: KeyLabels) -> dict[str, Tensor]:
    """The definitions, written anew."""
    p = p.double()
    logs = torch.where(p > 0, p, torch.ones_like(p)).log()
    out = {
        "entropy": -(p * logs).sum(-1),
        "distance": (p * (q_pos[:, None] - k_pos[None]).abs()).sum(-1),
        "first": (p * (k_pos == 0)).sum(-1),
        "previous": (p * ((k_pos[None] == q_pos[:, None] - 1) & (k_pos >= 0)[None])).sum(-1),
        "received": p.sum(1),
        "top_weights": p.sort(-1, descending=True).values[..., :top],
    }
    if labels.delimiters is not None:
        out["delimiters"] = (p * labels.delimiters).sum(-1)
    if labels.q_document is not None:
        out["own_document"] = (p * (labels.q_document[:, None] == labels.k_document[None])).sum(-1)
    return out


def check(found: AttentionStatistics, p: Tensor, q_pos: Tensor, k_pos: Tensor, labels: KeyLabels) -> None:
    top = found.top_keys.shape[-1]
    wanted = by_hand(p, q_pos, k_pos, top, labels)
    assert {name for name, _ in found.items()} == {*wanted, "top_keys"}
    for name, value in wanted.items():
        got = getattr(found, name).double()
        if name == "top_weights":
            value = torch.nn.functional.pad(value, (0, top - value.shape[-1]))
        torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    columns = (found.top_keys.long()[..., None] == k_pos).int()  # [h, t, top, S]
    chosen = (columns * p[:, :, None]).sum(-1)
    torch.testing.assert_close(chosen, found.top_weights, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.top_keys < 0, found.top_weights == 0)
    torch.testing.assert_close(found.effective_keys, found.entropy.exp())


@pytest.mark.parametrize("native", EXECUTORS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [1 << 20, 100], ids=["whole", "pieces"])
def test_statistics_are_those_of_the_pattern(
    case: str, native: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_scores, "PIECE", piece)
    plan, how = planned(**CASES[case])
    explicit = patterns(plan, **how)
    for row, p in enumerate(explicit):
        first, count = plan.rows.past[row], plan.rows.lengths[row]
        q_pos, k_pos = torch.arange(count) + first, torch.arange(p.shape[-1])
        labels = KeyLabels(
            delimiters=k_pos % 3 == 1, q_document=(q_pos // 5).int(), k_document=(k_pos // 5).int()
        )  # fmt: skip
        for marked in (labels, KeyLabels()):
            found = attention_statistics(RowScores(plan, row, **how), top=3, labels=marked, native=native)
            check(found, p, q_pos, k_pos, marked)
            check(pattern_statistics(p, q_pos, top=3, labels=marked), p, q_pos, k_pos, marked)


@needs_native
@pytest.mark.parametrize("case", ["causal", "window", "encoder", "sinks"])
def test_scores_that_torch_multiplies_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what processors without AVX-512 do."""
    monkeypatch.setattr(RowScores, "products", lambda self: None)
    test_statistics_are_those_of_the_pattern(case, True, 100, monkeypatch)


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_long_rows_are_shared_by_threads(threads: int) -> None:
    """Blocks of queries and panels of keys that are not full, a window, and keys that many blocks give something."""
    torch.set_num_threads(threads)
    for mask in (causal(), causal() & window(90), full()):
        plan = one_row(301, mask)
        q, k = torch.randn(301, H, K), torch.randn(301, G, K)
        found = attention_statistics(RowScores(plan, 0, q, k))
        check(found, patterns(plan, q, k)[0], torch.arange(301), torch.arange(301), KeyLabels())
        again = attention_statistics(RowScores(plan, 0, q, k))
        assert torch.equal(found.received, again.received)


@pytest.mark.parametrize("native", EXECUTORS)
@pytest.mark.parametrize("case", ["causal", "alibi", "sinks", "disentangled", "documents", "one group"])
def test_statistics_of_some_heads_and_queries(case: str, native: bool) -> None:
    plan, how = planned(**CASES[case])
    p = patterns(plan, **how)[0]
    heads, queries = [4, 1], [0, 5, 22]
    found = attention_statistics(RowScores(plan, 0, **how, heads=heads, queries=queries), native=native)
    check(found, p[heads][:, queries], torch.tensor(queries), torch.arange(23), KeyLabels())


@pytest.mark.parametrize("native", EXECUTORS)
def test_statistics_of_keys_in_a_ring(native: bool) -> None:
    """Places of a cache are not positions: the keys of row 0 stand at 5, 3, 4, those of row 1 at 0 and 1."""
    positions = torch.tensor([[5, 3, 4], [0, 1, -1]])
    plan = SlotKeys((3, 2), (1, 0), positions).plan(Rows((1, 1), past=(5, 1)), causal() & window(3), PLAIN)
    how = {"q": torch.randn(2, H, K), "k": torch.randn(2, G, 3, K)}
    for row, p in enumerate(patterns(plan, **how)):
        found = attention_statistics(RowScores(plan, row, **how), native=native)
        check(found, p, torch.tensor(plan.rows.past[row])[None], torch.arange(p.shape[-1]), KeyLabels())


@pytest.mark.parametrize("native", EXECUTORS)
def test_even_weights_and_one_key(native: bool) -> None:
    """Queries of zeros see all keys alike; the first sees itself alone."""
    plan, how = planned()
    how["q"] = how["q"] * 0
    found = attention_statistics(RowScores(plan, 0, **how), native=native)
    n = torch.arange(1, 24).float()
    torch.testing.assert_close(found.effective_keys, n.expand(H, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.distance, ((n - 1) / 2).expand(H, -1), rtol=1e-5, atol=1e-5)
    assert found.top_keys[0, 0].tolist() == [0, -1, -1, -1]


@needs_native
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("top", [0, 1, 32])
def test_native_rows_of_every_length(keys: int, top: int) -> None:
    """Beyond the last key nothing is read: what follows it in memory would change every sum."""
    plan = one_row(keys, full())
    q, k = torch.randn(keys, H, K), torch.randn(keys, G, K)
    found = attention_statistics(RowScores(plan, 0, q, k), top=top)
    check(found, patterns(plan, q, k)[0], torch.arange(keys), torch.arange(keys), KeyLabels())


def test_linear_attention_has_no_statistics() -> None:
    plan, how = planned()
    with pytest.raises(InputError, match="no scores"):
        attention_statistics(RowScores(replace(plan, mechanism=LINEAR), 0, **how))


@pytest.mark.parametrize("native", EXECUTORS)
def test_memory_grows_with_the_length_alone(native: bool) -> None:
    """Of 1 GB of scores nothing larger than a piece is ever there."""
    t = 3000
    scores = RowScores(one_row(t, causal()), 0, torch.randn(t, H, K), torch.randn(t, G, K), queries=range(0, t, 4))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        found = attention_statistics(scores, native=native)
    assert largest <= max(8 * row_scores.PIECE, *(value.nbytes for _, value in found.items()))
    assert largest < 4 * H * t * t / 10
    assert partial(torch.isfinite, found.entropy)().all()
