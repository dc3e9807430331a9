"""Optimizers, schedules, the loop: what a step does, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from triptych import nn
from triptych.errors import ConfigError, InputError
from triptych.families import read_config
from triptych.train import (
    CausalText,
    DivergedError,
    Event,
    HeldOut,
    Hide,
    MaskedText,
    Optimizer,
    OptimizerSettings,
    Pairs,
    RunSettings,
    Schedule,
    Trainer,
    causal,
    collate,
    evaluate,
    loss,
    show_batch,
)
from triptych.train.optim import roles
from triptych.train.precision import autocast

V = 23
LLAMA = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64, "vocab_size": V,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 32, "vocab_size": V,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 24, "d_ff": 40, "d_kv": 8, "num_heads": 3, "num_layers": 2, "vocab_size": V,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HIDE = Hide(mask=4, vocab=V, special=frozenset(range(5)), rate=0.3)


def make(hf: dict[str, Any], seed: int = 3) -> nn.Transformer:
    return nn.new(read_config(hf), seed)


def trainer(module: nn.Transformer, data: Any, steps: int, rows: int = 8, **options: Any) -> Trainer:
    settings = OptimizerSettings(**options.pop("optimizer", {}))
    schedule = options.pop("schedule", Schedule(warmup=0.1))
    held = options.pop("held", None)
    run = RunSettings(steps=steps, rows=rows, length=options.pop("length", 12), precision="fp32", **options)
    return Trainer(module, data, Optimizer(module, settings), schedule, run, held)


# ---------------------------------------------------------------- learning


def copies(count: int = 200, length: int = 4) -> np.ndarray:
    return np.random.default_rng(5).integers(5, V, size=(count, length), dtype=np.int32)


def copied_rows() -> CausalText:
    """[1, a, b, c, d, 2, a, b, c, d]: the second half is a copy of the first."""
    return CausalText.of([[1, *row, 2, *row] for row in copies().tolist()], length=9)


def one_letter() -> MaskedText:
    """Documents of one letter each, so a hidden one is known from its neighbours."""
    return MaskedText.of([[letter] * 400 for letter in range(5, V)], 12, HIDE, before=[2], after=[3])


def copied_pairs() -> Pairs:
    return Pairs.of([([*row, 1], [*row, 1]) for row in copies().tolist()], start=0, length=6)


@pytest.mark.parametrize(
    ("hf", "data", "bound"),
    [(LLAMA, copied_rows(), 0.8), (BERT, one_letter(), 0.3), (T5, copied_pairs(), 0.6)],
    ids=["decoder", "encoder", "encoder-decoder"],
)
def test_each_layout_learns_to_copy(hf: dict[str, Any], data: Any, bound: float) -> None:
    module = make(hf)
    losses: list[float] = []
    run = trainer(module, data, steps=120, rows=16, optimizer={"lr": 0.02, "muon_lr": 0.03})
    run.on_step = lambda event: losses.append(event.loss)
    run.run()
    assert losses[0] > 0.9 * math.log(V)
    assert np.mean(losses[-10:]) < bound * losses[0]


# ---------------------------------------------------------------- a step


RAGGED = [[1, *range(5, 5 + n), 2] for n in (2, 9, 4, 7, 1, 11, 3, 6)]


class Rows8:
    """Eight rows of unequal lengths, always the same."""

    def draw(self, seed: int, step: int, rows: int) -> list[Any]:
        return [causal(row) for row in RAGGED]

    def held(self) -> Any:
        return iter(self.draw(0, 0, 8))

    def targets(self) -> np.ndarray:
        return np.concatenate([example.targets for example in self.draw(0, 0, 8)])


def gradients(accumulate: int, divide_by_batch: bool = False) -> dict[str, torch.Tensor]:
    module = make(LLAMA)
    run = trainer(module, Rows8(), steps=1, accumulate=accumulate)
    found: dict[str, torch.Tensor] = {}
    run.optimizer.step = lambda factor: found.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    )
    run.optimizer.clip = lambda: 0.0  # type: ignore[method-assign]
    if divide_by_batch:  # the control: the mean of the batches' means, which is what everybody gets wrong
        run._backward = lambda batch, total: mean_of_means(module, batch, accumulate)  # type: ignore[method-assign]
    run.step()
    return found


def mean_of_means(module: nn.Transformer, batch: Any, parts: int) -> float:
    nats, count = loss(module, batch)
    (nats / count / parts).backward()
    return nats.item()


def test_accumulation_is_exact_over_ragged_rows() -> None:
    whole, parts, wrong = gradients(1), gradients(8), gradients(8, divide_by_batch=True)
    assert whole.keys() == parts.keys() == wrong.keys()
    largest = max((whole[name] - parts[name]).abs().max().item() for name in whole)
    assert largest < 1e-6
    assert max((whole[name] - wrong[name]).abs().max().item() for name in whole) > 1e-3


def test_a_run_is_a_function_of_its_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        module = make({**T5, "dropout_rate": 0.2})  # dropout draws from (seed, step) too
        torch.manual_seed(torch.seed() % 2**31)  # whatever the state of the global generator
        trainer(module, copied_pairs(), steps=3, seed=seed).run()
        return module.get_parameter("decoder.blocks.1.cross.q.weight").detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    trainer(make(LLAMA), copied_rows(), steps=2).run()
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------- optimizer


def test_roles_come_from_the_tree() -> None:
    found = roles(read_config(T5))
    assert found["encoder.blocks.0.attn.q.weight"] == "matrix"
    assert found["decoder.blocks.1.cross.out.weight"] == "matrix"
    assert found["encoder.embed.tokens.weight"] == "other"  # the tied head with it
    assert found["encoder.kinds.self.position.weight"] == "other"  # two-dimensional and no matrix
    assert "head.proj.weight" not in found
    assert roles(read_config(LLAMA))["head.proj.weight"] == "head"
    bert = roles(read_config(BERT))
    assert bert["encoder.blocks.0.attn.q.bias"] == "other"
    assert bert["head.transform.dense.weight"] == "head"


def test_muon_has_the_matrices_and_only_they_and_the_head_decay() -> None:
    module = make(LLAMA)
    adam, muon = Optimizer(module, OptimizerSettings(weight_decay=0.3)).parts
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    named = dict(module.named_parameters())
    assert in_muon == {id(p) for name, p in named.items() if ".blocks." in name and p.dim() == 2}
    decayed = {id(p) for group in adam.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(named["head.proj.weight"])}
    both = [p for part in (adam, muon) for group in part.param_groups for p in group["params"]]
    assert len(both) == len({id(p) for p in both}) == len(named)


def test_adamw_alone_takes_everything() -> None:
    module = make(LLAMA)
    (adam,) = Optimizer(module, OptimizerSettings(name="adamw")).parts
    assert sum(len(group["params"]) for group in adam.param_groups) == len(list(module.parameters()))


def test_clipping_is_to_the_global_norm() -> None:
    module = make(LLAMA)
    optimizer = Optimizer(module, OptimizerSettings(clip=0.5))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    expected = 0.1 * math.sqrt(sum(p.numel() for p in module.parameters()))
    assert optimizer.clip() == pytest.approx(expected, rel=1e-5)
    assert optimizer.clip() == pytest.approx(0.5, rel=1e-4)
    optimizer = Optimizer(module, OptimizerSettings(clip=0.0))
    before = optimizer.clip()
    assert optimizer.clip() == before


def test_schedules() -> None:
    cosine = Schedule(shape="cosine", warmup=0.1, floor=0.2)
    assert cosine.factor(0.0) == 0.0
    assert cosine.factor(0.05) == pytest.approx(0.5)
    assert cosine.factor(0.1) == pytest.approx(1.0)
    assert cosine.factor(0.55) == pytest.approx(0.6)
    assert cosine.factor(1.0) == pytest.approx(0.2)
    linear = Schedule(shape="linear", warmup=0.0)
    assert [linear.factor(x) for x in (0.0, 0.25, 1.0)] == pytest.approx([1.0, 0.75, 0.0])
    assert Schedule(shape="constant", warmup=0.5).factor(0.9) == 1.0


def test_progress_is_by_whichever_budget_is_nearer_its_end() -> None:
    run = RunSettings(rows=1, length=4, steps=100, seconds=50.0)
    assert run.progress(20, 5.0) == 0.2
    assert run.progress(20, 25.0) == 0.5
    assert run.left(20, 5.0) == pytest.approx(20.0)
    assert run.left(20, 45.0) == pytest.approx(5.0)


def test_a_time_budget_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("triptych.train.loop.time.monotonic", lambda: float(next(clock)))
    run = trainer(make(LLAMA), copied_rows(), steps=1000, rows=2, seconds=20.0)
    events: list[Event] = []
    run.on_step = events.append
    run.run()
    assert 5 < len(events) <= 20
    assert events[-1].progress == 1.0
    assert events[0].lr > events[-1].lr


# ---------------------------------------------------------------- evaluation


def test_evaluation_counts_nats_characters_and_right_answers() -> None:
    module = make(LLAMA)
    held = HeldOut.of(Rows8(), Rows8(), tokens=16, text="x" * 100)  # type: ignore[arg-type]
    assert len(held.batches) > 2
    score = evaluate(module, held)
    nats, count = loss(module, collate([causal(row) for row in RAGGED]))
    assert score.tokens == count
    assert score.nats == pytest.approx(nats.item(), rel=1e-5)
    assert score.nats_per_character == pytest.approx(nats.item() / 100, rel=1e-5)
    targets = [t for row in RAGGED for t in row[1:]]
    assert score.baseline == pytest.approx(max(targets.count(t) for t in set(targets)) / len(targets))
    assert not module.training


def test_a_float64_model_is_scored_in_float64_and_a_bf16_one_in_fp32() -> None:
    held = HeldOut.of(Rows8(), Rows8(), tokens=16)  # type: ignore[arg-type]

    def nats(module: nn.Transformer, exact: torch.dtype) -> float:
        with torch.no_grad():
            forwards = [nn.Batch(inputs=batch.ids, rows=batch.rows) for batch in held.batches]
            told = [(module.logits(x).to(exact), batch.targets) for x, batch in zip(forwards, held.batches, strict=True)]
        return sum(float(-x.log_softmax(-1).gather(-1, y[:, None]).sum()) for x, y in told)

    double = make(LLAMA).double()
    assert evaluate(double, held).nats == pytest.approx(nats(double, torch.float64), rel=1e-13)
    assert nats(double, torch.float32) != pytest.approx(nats(double, torch.float64), rel=1e-11)
    half = make(LLAMA).bfloat16()
    assert evaluate(half, held).nats == pytest.approx(nats(half, torch.float64), rel=1e-6)


def test_evaluation_happens_at_shares_of_the_run() -> None:
    held = HeldOut.of(Rows8(), Rows8(), tokens=16)  # type: ignore[arg-type]
    run = trainer(make(LLAMA), Rows8(), steps=10, held=held, evaluate_every=0.25)
    events: list[Event] = []
    run.on_step = events.append
    run.run()
    assert [event.step for event in events if event.score is not None] == [3, 5, 8, 10]


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize("where", ["decoder.blocks.1.mlp.up", "head"])
def test_a_loss_that_is_not_finite_names_the_module(where: str) -> None:
    module = make(LLAMA)
    part = module.get_submodule(where)
    part.register_forward_hook(lambda *_: torch.full((), torch.inf) * _[2])
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(module, copied_rows(), steps=3)
    with pytest.raises(DivergedError, match=rf"step 1: the loss is not finite; {where} was the first"):
        run.run()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


def test_a_parameter_that_is_not_finite_is_named() -> None:
    module = make(LLAMA)
    with torch.no_grad():
        module.get_parameter("decoder.blocks.0.attn.v.weight")[2, 3] = torch.nan
    with pytest.raises(DivergedError, match=r"parameter decoder\.blocks\.0\.attn\.v\.weight holds"):
        trainer(module, copied_rows(), steps=1).run()


def test_a_gradient_that_is_not_finite_is_named() -> None:
    module = make(LLAMA)
    name = "decoder.blocks.0.mlp.down.weight"
    module.get_parameter(name).register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(DivergedError, match=rf"a gradient is not finite; .* the gradient of {name} is not"):
        trainer(module, copied_rows(), steps=1).run()


def test_bf16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.train.precision.has_bf16", lambda device: False)
    with pytest.raises(InputError, match="no bf16"):
        autocast("bf16", torch.device("cpu"))
    with autocast("auto", torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_recomputing_activations_changes_no_gradient() -> None:
    def weights(recompute: bool) -> list[torch.Tensor]:
        module = make(LLAMA)
        trainer(module, copied_rows(), steps=2, recompute=recompute).run()
        return [p.detach() for p in module.parameters()]

    for plain, again in zip(weights(False), weights(True), strict=True):
        torch.testing.assert_close(plain, again)


def test_a_batch_can_be_read() -> None:
    from triptych.text import byte_tokenizer

    tokenizer = byte_tokenizer()
    row = show_batch([causal(tokenizer.encode("to be"))], tokenizer)[0]
    assert [token.token for token in row.tokens] == ["t", "o", "␣", "b"]
    assert [token.target for token in row.tokens] == ["o", "␣", "b", "e"]
    assert row.trained == 4
    hidden = show_batch([Hide(7, 256, frozenset())(tokenizer.encode("to be"), np.random.default_rng(0))], tokenizer)[0]
    assert hidden.trained == 1


def test_a_run_keeps_to_its_threads() -> None:
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        made = trainer(make(LLAMA), copied_rows(), 2, length=9, threads=1)
        made.on_step = lambda _: seen.append(torch.get_num_threads())
        made.run()
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_needs_an_end() -> None:
    with pytest.raises(ValueError, match="needs an end"):
        RunSettings(rows=1, length=4)
    assert issubclass(ConfigError, Exception)
