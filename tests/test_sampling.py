"""Sampling against transformers' warpers, its distribution, and its independence of the batch."""

import pytest
import torch

from triptych.errors import InputError
from triptych.generate import sampling
from triptych.generate.sampling import Sampling, draw, filter_top, penalize, sample, uniform
from triptych.native import library
from triptych.native.loader import LEVELS


def warped(scores: torch.Tensor, **how: float) -> torch.Tensor:
    from transformers.generation import logits_process as hf

    warpers = {"top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper, "min_p": hf.MinPLogitsWarper}
    for name, value in how.items():
        scores = warpers[name](value)(None, scores)
    return scores


@pytest.mark.parametrize(
    "how", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 11, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_filters_keep_what_transformers_keeps(how: dict[str, float]) -> None:
    scores = torch.randn(7, 31) * 2
    kept = filter_top(scores, Sampling(temperature=1.0, **how))
    assert torch.equal(kept.isfinite(), warped(scores.clone(), **how).isfinite())
    assert not kept.isfinite().all()


def test_the_likeliest_token_always_stays() -> None:
    scores = torch.tensor([[0.0, 5.0, 1.0]])
    kept = filter_top(scores, Sampling(temperature=1.0, top_k=1, top_p=1e-9, min_p=1.0))
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_repetition_penalty_is_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    scores, rows = torch.randn(3, 13), [[1, 2, 2], [5, 0, 12], [7, 7, 7]]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(rows), scores.clone())
    assert torch.allclose(penalize(scores, rows, 1.7), expected)
    assert not torch.allclose(penalize(scores, rows, 1.0 / 1.7), expected)


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    how = Sampling(temperature=1.0, seed=3)
    n = 4000
    drawn = torch.tensor([sample(probs.log()[None], how, [0], [[0] * i])[0] for i in range(n)])
    share = torch.bincount(drawn, minlength=4) / n
    sigma = (probs * (1 - probs) / n).sqrt()
    assert ((share - probs).abs() < 4 * sigma).all()


def test_noise_is_a_function_of_seed_request_and_position() -> None:
    logits, how = torch.randn(5, 17), Sampling(temperature=1.0, seed=11)
    rows = [[1], [1, 2], [1, 2, 3], [4], [5, 5]]
    together = sample(logits, how, [0, 1, 2, 3, 4], rows)
    alone = [sample(logits[i : i + 1], how, [i], [rows[i]])[0] for i in range(5)]
    backwards = sample(logits.flip(0), how, [4, 3, 2, 1, 0], rows[::-1])
    assert together == alone == backwards[::-1]
    assert len({uniform(11, 0, 1), uniform(11, 1, 1), uniform(11, 0, 2), uniform(12, 0, 1)}) == 4


SETTINGS = [
    {}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 7}, {"top_k": 400}, {"top_k": 10**12}, {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7}, {"temperature": 0.0},
    {"temperature": 1e-42}, {"top_p": 0.9999999}, {"top_p": 0.5, "temperature": 30.0},
]  # fmt: skip
SAMPLINGS = [Sampling(**{"temperature": 1.0, "seed": 5} | how) for how in SETTINGS]


@pytest.mark.parametrize("vocab", [1, 3, 16, 255, 257, 5003])
def test_the_kernels_draw_what_torch_draws(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the random number falls on the border of two tokens, which no draw here does; ties included."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40 * len(SETTINGS), vocab, generator=generator) * 3
    logits[::3] = logits[::3].round()  # many equal ones
    logits[1::4, ::2] = -torch.inf if vocab > 1 else 0.0
    samplings, numbers, lengths = SAMPLINGS * 40, range(len(logits)), [3] * len(logits)
    native = draw(logits, samplings, lengths, numbers)
    if (kernels := library()) is not None:
        for level in (*LEVELS, LEVELS[-1]):  # the last one is in use afterwards, as before
            kernels.use(level)
            assert draw(logits, samplings, lengths, numbers) == native
    monkeypatch.setattr(sampling, "library", lambda: None)
    assert draw(logits, samplings, lengths, numbers) == native
    assert len(set(native)) > 1 or vocab == 1
    shifted = draw(logits.roll(1, 1), samplings, lengths, numbers)  # another order of the vocabulary, other draws
    assert vocab == 1 or shifted != native


def test_tokens_as_likely_as_one_that_stays_stay_too() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]])
    for how in ({"top_k": 2}, {"top_p": 0.6}):
        kept = filter_top(scores, Sampling(temperature=1.0, **how))
        assert kept.isfinite().tolist() == [[True, True, True, True, False]]
        drawn = {draw(scores, [Sampling(temperature=1.0, seed=i, **how)], [1], [0])[0] for i in range(200)}
        assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}],
    ids=str,
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


def test_broken_logits_are_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), Sampling(), [0], [[0]])
