"""`lab gates`, `lab convolution`, `lab order` and `lab probe`: PASS, and FAIL when what they test is broken."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab_results import failed, passes, shuffle_rows
from triptych.attention import FlatKeys
from triptych.model import Model
from triptych.nn import new
from triptych.nn.positions import Learned
from triptych.probe import Where
from triptych.spec import full
from triptych_lectures import labs
from triptych_lectures.labs import convolution, gates, order, probe
from triptych_lectures.labs.convolution import ConvolutionLab
from triptych_lectures.labs.counting import longest_chain
from triptych_lectures.labs.gates import GatesLab
from triptych_lectures.labs.generated_tasks import TrainedRun
from triptych_lectures.labs.lab import LabResult, Setup, Size
from triptych_lectures.labs.order import FirstOfTwo
from triptych_lectures.labs.probe import ProbeLab

# ---------------------------------------------------------------- gates

ATTENDED = "attention: initializations of 5 that learn a lag, the fewest"
GATED = "best gated network: initializations of 5 that learn the longest lag"
FACTORS = "before training: factor with forget bias 1, less with 0"


def few_steps() -> set[str]:
    """What fails where hardly anything is trained."""
    sizes: dict[str, Size] = {"lags": (4, 8), "steps": 10, "tested": 50, "back": (8, 16, 32)}
    return failed(labs.run("gates", Setup(seed=3, sizes=sizes)))


def test_gates_tells_forget_biases_apart() -> None:
    claims = few_steps()
    assert FACTORS not in claims
    assert ATTENDED in claims


def test_gates_says_in_words_that_a_lag_was_not_learned() -> None:
    lab, back = GatesLab(), GatesLab().back
    falling = {name: [0.5**steps for steps in back] for name in gates.READERS}
    needed = {name: dict.fromkeys((4, 8, 16), 50) for name in gates.RECURRENT}
    needed |= {name: dict.fromkeys((4, 8), 50) for name in (gates.PLAIN, gates.LSTMS[0])}
    tried = {name: {lag: [30.0] * 5 for lag in lab.lags} for name in gates.READERS}
    tried[gates.PLAIN][8] = [130.0, *[math.inf] * 4]
    measured = gates.Measured(lab, falling, falling, needed, tried, gates.GRU, 0.1)
    text = [*measured.conclusion][1].text
    assert "8 (plain RNN)" in text
    assert "lags that one initialization learned" in text
    assert "the median of 5 is beyond these steps in the plain RNN and 30 steps with forget bias 1" in text


def test_gates_fails_when_all_forget_biases_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BIASES", (0.0, 0.0, 0.0))
    assert {FACTORS, "before training: factor with forget bias 3, less with 1"} <= few_steps()


def test_gates_fails_when_the_gated_networks_have_no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "GRU", nn.RNN)
    assert "before training: factor of the gated network with the least, less the plain one's" in few_steps()


@pytest.mark.heavy
def test_gates_passes_and_fails_when_attention_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(seed=12)
    passes(labs.run("gates", setup))
    monkeypatch.setattr(gates, "attend", lambda q, k, v: 0 * q)
    monkeypatch.setattr(GatesLab, "_gradients", lambda self, reader, seed: [0.5**back for back in self.back])
    assert ATTENDED in failed(labs.run("gates", setup))


def test_gates_fails_when_a_gated_network_learns_the_longest_lag() -> None:
    """A lag of 8 in place of the longest: attention learns it, and so do LSTMs."""
    sizes: dict[str, Size] = {"lags": (4, 8), "steps": 200, "tested": 50, "back": (8, 16, 32)}
    claims = failed(labs.run("gates", Setup(seed=3, sizes=sizes)))
    assert GATED in claims
    assert ATTENDED not in claims


def test_an_open_forget_gate_keeps_the_state() -> None:
    """With a forget bias of 30, and input gates shut, the cell of the first step is that of the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "BIASES", (30.0, 30.0, 30.0))
        cell = gates.Reader(gates.LSTMS[0], 5, 2, 6).cell
    assert cell is not None
    nn.init.constant_(cell.get_parameter("bias_ih_l0")[:6], -60.0)
    begun = torch.ones(1, 1, 6)
    _, (_, kept) = cell(torch.randn(1, 9, 6), (torch.zeros(1, 1, 6), begun))
    assert torch.allclose(kept, begun, atol=1e-5)


# ---------------------------------------------------------------- convolution


def stacks(**sizes: Size) -> LabResult:
    small: dict[str, Size] = {"layers": 3, "length": 16, "apart": (4, 8), "tokens": (16, 32), "width": 48}
    return labs.run("convolution", Setup(seed=5, sizes=small | sizes))


def test_convolution_passes() -> None:
    passes(stacks())


def test_convolution_fails_when_a_layer_reads_the_next_token_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = F.pad
    monkeypatch.setattr(F, "pad", lambda x, of: pad(x, (of[0] - 1, 1)))
    claims = failed(stacks(steps=20))
    assert "layers needed, by gradients: the largest difference from the formula" in claims
    assert "inside the receptive field: right, the worst distance" in claims


def test_convolution_fails_when_a_layer_sees_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receptive field then says nothing: what is beyond is learned too."""
    states = convolution.Convolutions.states

    def seen(self: convolution.Convolutions, x: Tensor) -> Tensor:
        return states(self, x) + sum(0.8**n * x.roll(n, 1) for n in range(1, 12))

    monkeypatch.setattr(convolution.Convolutions, "states", seen)
    assert "beyond it: right, the best distance" in failed(stacks())


def test_the_longest_chain_is_counted_by_hand() -> None:
    a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    assert longest_chain((a @ b).relu() @ a + b @ b) == 2
    assert longest_chain(a + b) == 0
    x = torch.randn(1, 7, 3, requires_grad=True)
    assert longest_chain(nn.GRU(3, 3, batch_first=True)(x)[0]) == 7
    attended = ConvolutionLab()._cost(convolution.ATTENTION, 16)
    assert attended.chain == 4  # a projection, the scores, the weighted sum, the output, whatever kernels there are
    assert attended.flops == 2 * 16 * 4 * 64 * 64 + 4 * 16 * 16 * 64


# ---------------------------------------------------------------- order


def shallow() -> LabResult:
    return labs.run("order", Setup(seed=4, sizes={"depths": (1, 2), "read": 100}))


@pytest.mark.heavy
def test_order_passes() -> None:
    passes(shallow())


@pytest.mark.heavy
def test_order_fails_without_the_mask_or_positions_or_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    deep, placed = (
        "decoders of more layers, without positions: right, the worst",
        "with positions: right, the worst model",
    )
    with monkeypatch.context() as patch:
        plan = FlatKeys.plan
        patch.setattr(FlatKeys, "plan", lambda self, rows, own, *rest: plan(self, rows, full(), *rest))
        claims = failed(shallow())
        assert deep in claims
        assert placed not in claims
    with monkeypatch.context() as patch:
        patch.setattr(Learned, "embed", lambda self, positions: 0 * self.weight[:1])
        claims = failed(shallow())
        assert placed in claims
        assert deep not in claims
    shuffle_rows(monkeypatch, FirstOfTwo)
    claims = failed(shallow())
    assert {deep, placed} <= claims
    assert "encoder, 2 layers, without positions: right, less the best guess from counts" in claims


def test_order_fails_when_the_control_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainedRun([(float(step), 1.0) for step in range(20)], guess=1.0)
    monkeypatch.setattr(order, "train", lambda *given: run)
    result = labs.run("order", Setup(sizes={"depths": (1, 2), "read": 50, "tested": 200}))
    claim = "encoder, 2 layers, with positions, order shuffled: right, less the best guess from counts"
    assert claim in failed(result)


@pytest.mark.parametrize("most", [2, 3])
def test_what_counts_give_is_that_of_all_orders(most: int) -> None:
    """Every order of every count, written out."""
    shares = []
    for zeros in range(1, most + 1):
        for ones in range(1, most + 1):
            first = [order[0] for order in permutations([0] * zeros + [1] * ones)]
            shares.append(max(first.count(0), first.count(1)) / len(first))
    assert FirstOfTwo(most, 2, 9).from_counts == pytest.approx(np.mean(shares), abs=1e-12)


def test_the_answer_is_the_first_of_the_two_unless_the_order_is_shuffled() -> None:
    same = []
    for mixed in (False, True):
        rows = FirstOfTwo(3, 2, 10, mixed).rows(np.random.default_rng(0), 400)
        same.append(np.mean([row.ids[row.ids < 2][0] == row.targets[-1] for row in rows]))
        assert all(row.trained.sum() == 1 and row.trained[-1] for row in rows)
    assert same[0] == 1.0
    assert 0.4 < same[1] < 0.65


# ---------------------------------------------------------------- probe


def test_subjects_and_contexts_of_the_tests_are_held_out() -> None:
    lab = ProbeLab()
    sentences = lab._sentences(np.random.default_rng(1))
    known, seen, unseen = (sentences[a:b] for a, b in ((0, 160), (160, 240), (240, 320)))
    forms = [{own.form for own in part} for part in (known, seen, unseen)]
    assert forms[0] == forms[1]
    assert not forms[0] & forms[2]
    contexts = [{own.text.split(" ", 2)[2] for own in part} for part in (known, seen, unseen)]
    assert not contexts[0] & (contexts[1] | contexts[2])
    assert all(np.mean([own.number for own in part]) == 0.5 for part in (known, seen, unseen))
    labels = lab._labels(sentences, np.random.default_rng(1))
    by_form = {(own.form, tuple(row[2:])) for own, row in zip(sentences, labels.tolist(), strict=True)}
    assert len(by_form) == len(forms[0] | forms[2])


def test_without_its_direction_both_numbers_have_one_mean() -> None:
    states, labels, where = torch.randn(40, 12), np.arange(40) % 2, Where("blocks.0.resid_post", 0, (3,))
    states[1::2] += 3 * torch.randn(12)
    removed = probe.direction(states, labels, 0)
    after = removed(states, where)
    assert torch.allclose(after[::2].mean(0), after[1::2].mean(0), atol=1e-5)
    other = probe.direction(states, None, 0)(states, where)
    assert not torch.allclose(other[::2].mean(0), other[1::2].mean(0), atol=0.1)


@pytest.mark.heavy
@pytest.mark.weights
def test_probe_passes_and_fails_when_what_it_tests_is_broken(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setattr(probe, "decoder", lambda setup: smollm2)
    passes(labs.run("probe", Setup(seed=2)))
    with monkeypatch.context() as patch:
        direction = probe.direction
        patch.setattr(probe, "direction", lambda states, labels, seed: direction(states, None, seed))
        assert failed(labs.run("probe", Setup(seed=2))) == {
            "preference left without the subject's direction",
            "control: more left than without it in all these layers",
        }
    with monkeypatch.context() as patch:
        labels = ProbeLab._labels

        def shuffled(self: ProbeLab, sentences: Any, noise: np.random.Generator) -> Any:
            return noise.permutation(labels(self, sentences, noise))

        patch.setattr(ProbeLab, "_labels", shuffled)
        claims = failed(labs.run("probe", Setup(seed=2)))
        assert {
            "number of the subject, new words: right after the last layer",
            "selectivity after the last layer",
        } <= claims
    monkeypatch.setattr(probe, "decoder", lambda setup: Model(new(smollm2.spec, 0), smollm2.tokenizer))
    assert "verb of the right number preferred, in new sentences" in failed(labs.run("probe", Setup(seed=2)))
