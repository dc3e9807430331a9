"""The shift, the mask, the loss and the order of the data."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from test_train_loop import LLAMA, V
from triptych import nn
from triptych.errors import InputError
from triptych.families import read_config
from triptych.train import CausalText, MaskedText, Pairs, TokenMasking, causal, collate, loss, seq2seq
from triptych.train.data import DocumentStream, check, micro_batches


@pytest.fixture
def llama() -> nn.Transformer:
    return nn.new(read_config(LLAMA), seed=3)


# ---------------------------------------------------------------- the shift


def test_causal_predicts_the_next_token() -> None:
    example = causal([5, 7, 7, 2])
    assert example.ids.tolist() == [5, 7, 7]
    assert example.targets.tolist() == [7, 7, 2]
    assert example.trained.all()


def test_seq2seq_starts_the_decoder_and_trains_the_end() -> None:
    example = seq2seq([4, 5, 1], [8, 9, 1], start=0)
    assert example.source.tolist() == [4, 5, 1]
    assert example.ids.tolist() == [0, 8, 9]
    assert example.targets.tolist() == [8, 9, 1]
    assert example.trained.all()


def test_the_loss_is_that_of_the_shift_and_not_of_the_row_itself(llama: nn.Transformer) -> None:
    row = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    batch = collate([causal(row.tolist())])
    nats, count = loss(llama, batch)
    logits = llama.logits(nn.Batch(inputs=batch.ids, rows=batch.rows))
    oracle = -sum(math.log(torch.softmax(logits[t].double(), -1)[row[t + 1]].item()) for t in range(7))
    assert count == 7
    assert nats.item() == pytest.approx(oracle, abs=1e-4)
    unshifted = F.cross_entropy(logits, row[:-1], reduction="sum")
    assert abs(nats.item() - unshifted.item()) > 1e-2


def test_a_pad_id_in_the_text_is_trained_like_any_token() -> None:
    assert collate([causal([0, 0, 0, 0])]).trained == 3


@pytest.mark.parametrize("most", [1, 3, 9])
def test_the_loss_in_parts_is_the_loss(llama: nn.Transformer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary the logits are never in memory as a whole, and no part is computed twice; every gradient
    is the same, times any factor."""
    model = copy.deepcopy(llama).double()
    batch = collate([causal([3, 1, 4, 1, 5, 9, 2, 6, 5]), causal([2, 7, 1])])
    (loss(model, batch)[0] * 0.3).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(expected) == len(list(model.parameters()))
    model.zero_grad()
    sizes, unembed = [], model.unembed
    monkeypatch.setattr(model, "unembed", lambda x, rows: (sizes.append(len(x)), unembed(x, rows))[1])
    parts, _ = loss(model, batch, max_logits=most * V)
    (parts * 0.3).backward()
    assert max(sizes) == most
    assert sum(sizes) == batch.trained
    assert parts.item() == pytest.approx(loss(model, batch)[0].item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-12, rtol=1e-10)


def test_parts_give_gradients_to_what_is_trained_alone(llama: nn.Transformer) -> None:
    """Without a trained head, without anything trained, and once only."""
    model = copy.deepcopy(llama).requires_grad_(False)
    batch = collate([causal([3, 1, 4, 1, 5, 9, 2, 6, 5])])
    assert not loss(model, batch, max_logits=3 * V)[0].requires_grad
    weight = model.get_parameter("decoder.blocks.0.attn.q.weight").requires_grad_()
    expected = torch.autograd.grad(loss(model, batch)[0], weight)[0]
    parts, _ = loss(model, batch, max_logits=3 * V)
    torch.testing.assert_close(torch.autograd.grad(parts, weight, retain_graph=True)[0], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="used already"):
        torch.autograd.grad(parts, weight)


def test_the_loss_is_fp32_under_autocast(llama: nn.Transformer) -> None:
    batch = collate([causal([3, 1, 4, 1, 5])])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nats, _ = loss(llama, batch)
    assert nats.dtype == torch.float32


# ---------------------------------------------------------------- hiding


MASKING = TokenMasking(mask=4, vocab=400, special=frozenset({0, 1, 2, 3, 4}))


def test_hiding_follows_berts_shares() -> None:
    row = np.arange(5, 400, dtype=np.int32).repeat(40)
    example = MASKING(row, np.random.default_rng(1))
    trained = example.trained
    assert trained.sum() == round(0.15 * len(row))
    kinds = [example.ids[trained] == 4, example.ids[trained] == row[trained]]
    assert np.mean(kinds[0]) == pytest.approx(0.8, abs=0.02)
    assert np.mean(kinds[1]) == pytest.approx(0.1, abs=0.02)
    others = example.ids[trained & (example.ids != 4) & (example.ids != row)]
    assert len(others)
    assert not np.isin(others, [0, 1, 2, 3, 4]).any()
    assert (example.ids[~trained] == row[~trained]).all()
    assert (example.targets == row).all()


def test_special_tokens_are_never_hidden_and_never_drawn() -> None:
    row = [2, *[7] * 4, 3]
    for seed in range(200):
        example = MASKING(row, np.random.default_rng(seed))
        assert not example.trained[[0, -1]].any()
        assert example.trained.sum() == 1  # 15% of four is less than one token: at least one
        assert not np.isin(example.ids[1:-1], [0, 1, 2, 3]).any()
    everything = TokenMasking(mask=4, vocab=400, special=frozenset())  # the control: now they are
    assert any(everything(row, np.random.default_rng(seed)).trained[[0, -1]].any() for seed in range(50))


# ---------------------------------------------------------------- batches


def test_zero_trained_tokens_is_an_error() -> None:
    row = MASKING([2, 3], np.random.default_rng(0))
    with pytest.raises(InputError, match="no trained token"):
        collate([row])
    with pytest.raises(InputError, match="no trained token"):
        collate([])


def test_eos_never_trained_is_an_error() -> None:
    pairs = Pairs.of([([5, 1], [6, 7, 1])], start=0, length=8)
    check(pairs, end=1, ends=True)
    with pytest.raises(InputError, match="never trained"):
        check(Pairs.of([([5, 1], [6, 7])], start=0, length=8), end=1, ends=True)
    with pytest.raises(InputError, match="no EOS"):
        check(pairs, end=None, ends=True)


def test_a_pair_too_long_is_refused_rather_than_cut() -> None:
    with pytest.raises(InputError, match=r"1 of 2 pairs .* 3 tokens, the longest 4"):
        Pairs.of([([5], [6, 1]), ([5, 5, 5, 1], [6, 1])], start=0, length=3)


# ---------------------------------------------------------------- documents


def test_packed_documents_do_not_see_each_other(llama: nn.Transformer) -> None:
    """Changing one document leaves every logit of its neighbour bit-identical, though one window holds both."""

    def logits(first: int) -> torch.Tensor:
        data = CausalText.of([[1, first, 3, 4, 2], [1, 5, 6, 7, 8, 2]], length=9)
        batch = collate(list(data.held_out_rows()))
        assert batch.rows.lengths == (4, 5)
        return llama.logits(nn.Batch(inputs=batch.ids, rows=batch.rows))

    a, b = logits(9), logits(10)
    assert not torch.equal(a[:4], b[:4])
    assert torch.equal(a[4:], b[4:])
    joined = [collate([causal([1, first, 3, 4, 2, 1, 5, 6, 7, 8, 2])]) for first in (9, 10)]  # the control
    a, b = (llama.logits(nn.Batch(inputs=batch.ids, rows=batch.rows)) for batch in joined)
    assert not torch.equal(a[5:], b[5:])


def test_a_stream_is_cut_where_documents_end() -> None:
    stream = DocumentStream.of([(np.arange(3, dtype=np.int32),), (np.arange(10, 14, dtype=np.int32),)])
    pieces = [[piece.tolist() for (piece,) in stream.cut(*window)] for window in ((1, 4), (0, 3), (3, 2), (5, 9))]
    assert pieces == [[[1, 2], [10, 11]], [[0, 1, 2]], [[10, 11]], [[12, 13]]]


def test_held_out_rows_cover_every_token_once() -> None:
    documents = [[1, *range(5, 5 + n), 2] for n in (3, 8, 1)]
    data = CausalText.of(documents, length=4)
    assert np.concatenate([e.targets for e in data.held_out_rows()]).tolist() == [t for d in documents for t in d[1:]]


# ---------------------------------------------------------------- order


def _masked() -> MaskedText:
    return MaskedText.of([list(range(5, 90)), list(range(90, 130))], 12, MASKING, before=[2], after=[3])


def _all_data() -> list[CausalText | MaskedText | Pairs]:
    text = CausalText.of([list(range(1, 60)), list(range(70, 110))], length=11)
    pairs = Pairs.of([([i, 1], [i, i, 1]) for i in range(5, 16)], start=0, length=4)
    return [text, _masked(), pairs]


@pytest.mark.parametrize("data", _all_data(), ids=lambda data: type(data).__name__)
def test_a_draw_is_a_function_of_seed_and_step(data: CausalText | MaskedText | Pairs) -> None:
    def ids(seed: int, step: int) -> list[list[int]]:
        return [example.ids.tolist() for example in data.draw(seed, step, rows=5)]

    first = ids(7, 3)
    ids(7, 0)
    assert ids(7, 3) == first
    assert ids(7, 4) != first
    assert ids(8, 3) != first


def test_an_epoch_has_every_pair_once() -> None:
    data = _all_data()[2]
    drawn = [example.targets[0] for step in range(22) for example in data.draw(1, step, rows=5)]
    epochs = [drawn[i : i + 11] for i in range(0, 110, 11)]
    assert all(sorted(epoch) == list(range(5, 16)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_framed_windows_keep_their_length() -> None:
    for example in _masked().draw(0, 0, rows=20):
        assert len(example.targets) <= 12
        assert example.targets[0] == 2
        assert example.targets[-1] == 3


def test_micro_batches_are_the_rows_in_order() -> None:
    rows = [causal([i, i]) for i in range(7)]
    parts = micro_batches(rows, 3)
    assert [len(part) for part in parts] == [2, 3, 2]
    assert [row for part in parts for row in part] == rows
    assert len(micro_batches(rows, 10)) == 7
