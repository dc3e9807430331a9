"""A position bias is computed once a forward for all layers of a kind, and never for other positions than its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from triptych import nn
from triptych.attention import Rows
from triptych.generate import Engine, Request
from triptych.nn import positions

CPU = torch.device("cpu")
RAGGED = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
LONG = [list(range(1, 41)), [7] * 23, [3] * 17]  # two buckets of an encoder: the shorter ones are padded together


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The positions for which a bias was computed."""
    given: list[tuple[Tensor, Tensor]] = []
    t5, alibi = positions.t5_bias, positions.alibi_bias

    def counted(of: Any, q_pos: Tensor, k_pos: Tensor, **how: Any) -> Tensor:
        given.append((q_pos, k_pos))
        return (t5 if isinstance(of, Tensor) else alibi)(of, q_pos, k_pos, **how)

    monkeypatch.setattr(positions, "t5_bias", counted)
    monkeypatch.setattr(positions, "alibi_bias", counted)
    return given


def read(module: nn.Transformer, ids: Tensor, rows: Rows) -> Tensor:
    return module(nn.Batch(inputs=ids, rows=rows))


@pytest.mark.parametrize("position", ["t5", "alibi"])
@pytest.mark.parametrize("rows", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
def test_a_forward_computes_it_once_for_all_layers_of_a_kind(
    position: str, rows: list[list[int]], asked: list[tuple[Tensor, Tensor]]
) -> None:
    module = tiny.decoder(position, blocks=3)  # two layers of one kind, one of the other
    read(module, *nn.flat(rows, CPU))
    assert len(asked) == 2


def test_each_bucket_of_an_encoder_computes_it_once(asked: list[tuple[Tensor, Tensor]]) -> None:
    module = tiny.encoder("t5")
    read(module, *nn.flat(LONG, CPU))
    assert [len(q_pos) for q_pos, _ in asked] == [40, 23]


def test_each_step_of_a_ragged_generation_computes_it_once(asked: list[tuple[Tensor, Tensor]]) -> None:
    engine = Engine(tiny.decoder("t5", blocks=3), executor="modules")
    engine.add(*(Request(prompt=row, max_new_tokens=4) for row in RAGGED))
    assert len([engine.step() for _ in range(4)]) == 4
    assert not engine.rows
    assert len(asked) == 2 * 4


@pytest.mark.parametrize("position", ["t5", "alibi"])
def test_every_forward_asks_for_its_own_positions(position: str, asked: list[tuple[Tensor, Tensor]]) -> None:
    """Steps of one length at other positions, over memory that is used again: none gets the bias of another."""
    engine = tiny.engine(tiny.decoder(position), [[3, 1, 4], [1, 5, 9]], executor="modules")
    for step in range(20):
        asked.clear()
        engine.logits()
        first, last = (0, 3) if step == 0 else (step + 2, step + 3)
        assert [q_pos.tolist() for q_pos, _ in asked] == [list(range(first, last))] * 2
        assert [k_pos.tolist() for _, k_pos in asked] == [list(range(last))] * 2
        for row in engine.rows:
            row.ids.append(7)


def test_another_forward_shares_nothing(asked: list[tuple[Tensor, Tensor]]) -> None:
    """The weight may have learned in between."""
    module = tiny.encoder("t5")
    flat, rows = nn.flat(RAGGED[:1], CPU)
    with torch.inference_mode():
        before = read(module, flat, rows)
        module.encoder.kinds["self"].position.weight[0] += 1
        assert not read(module, flat, rows).equal(before)
    assert len(asked) == 2


def test_a_forward_reads_no_tensor_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would wait for all that was asked for before."""
    engine = tiny.engine(tiny.decoder("t5"), RAGGED)
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, lambda self, name=name: pytest.fail(f"Tensor.{name} was called"))
        for row in engine.rows:
            row.ids.append(3)
        engine.logits()
    assert Rows((3,)).positions().tolist() == [0, 1, 2]
