"""Optimizers, schedules, the loop: what a step does, exactly."""

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from triptych import nn, ops, train
from triptych.errors import ConfigError, InputError
from triptych.families import read_config
from triptych.train.data import micro_batches
from triptych.train.evaluate import FEWEST, _spread
from triptych.train.optimizer import roles
from triptych.train.precision import WIDE, autocast, chosen, has_dropout

V = 23
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": V}
LLAMA = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
BERT = SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 32,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 24, "d_ff": 40, "d_kv": 8, "num_heads": 3, "num_layers": 2, "vocab_size": V,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MASKING = train.TokenMasking(mask=4, vocab=V, special=frozenset(range(5)), rate=0.3)


def make(hf: dict[str, Any], seed: int = 3) -> nn.Transformer:
    return nn.new(read_config(hf), seed)


def trainer(module: nn.Transformer, data: Any, steps: int, rows: int = 8, **options: Any) -> train.Trainer:
    settings = train.OptimizerSettings(**options.pop("optimizer", {}))
    schedule = options.pop("schedule", train.Schedule(warmup=0.1))
    held = options.pop("held", None)
    run = train.RunSettings(steps=steps, rows=rows, length=options.pop("length", 12), precision="fp32", **options)
    return train.Trainer(module, data, train.Optimizer(module, settings), schedule, run, held)


# ---------------------------------------------------------------- learning


def copies(count: int = 200, length: int = 4) -> np.ndarray:
    return np.random.default_rng(5).integers(5, V, size=(count, length), dtype=np.int32)


def copied_rows() -> train.CausalText:
    """[1, a, b, c, d, 2, a, b, c, d]: the second half is a copy of the first."""
    return train.CausalText.of([[1, *row, 2, *row] for row in copies().tolist()], length=9)


def one_letter() -> train.MaskedText:
    """Documents of one letter each, so a hidden one is known from its neighbours."""
    return train.MaskedText.of([[letter] * 400 for letter in range(5, V)], 12, MASKING, before=[2], after=[3])


def copied_pairs() -> train.Pairs:
    return train.Pairs.of([([*row, 1], [*row, 1]) for row in copies().tolist()], start=0, length=6)


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
        return [train.causal(row) for row in RAGGED]

    def held_out_rows(self) -> Any:
        return iter(self.draw(0, 0, 8))

    def targets(self) -> np.ndarray:
        return np.concatenate([example.targets for example in self.draw(0, 0, 8)])


class KeepsGradients(train.Optimizer):
    """An optimizer that neither clips nor updates, and keeps the gradients of its last step."""

    gradients: dict[str, torch.Tensor]

    def clip(self) -> float:
        return 0.0

    def step(self, factor: float) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}


def gradients(data: Any, accumulate: int) -> dict[str, torch.Tensor]:
    """The gradients of one step of `data`."""
    module = make(LLAMA)
    optimizer = KeepsGradients(module, train.OptimizerSettings())
    run = train.RunSettings(steps=1, rows=8, length=12, precision="fp32", accumulate=accumulate)
    train.Trainer(module, data, optimizer, train.Schedule(), run).step()
    return optimizer.gradients


def mean_of_means(examples: Sequence[train.Example], parts: int) -> dict[str, torch.Tensor]:
    """The common mistake: the mean of the micro-batches' means."""
    module = make(LLAMA)
    for part in micro_batches(examples, parts):
        nats, count = train.loss(module, train.collate(part))
        (nats / count / parts).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_accumulation_is_exact_over_ragged_rows() -> None:
    whole, parts, wrong = gradients(Rows8(), 1), gradients(Rows8(), 8), mean_of_means(Rows8().draw(0, 0, 8), 8)
    assert whole.keys() == parts.keys() == wrong.keys()
    largest = max((whole[name] - parts[name]).abs().max().item() for name in whole)
    assert largest < 1e-6
    assert max((whole[name] - wrong[name]).abs().max().item() for name in whole) > 1e-3


class PartlyTrained(Rows8):
    """`Rows8`, of which only the rows `trained` have trained tokens."""

    def __init__(self, trained: set[int]) -> None:
        self.trained = trained

    def draw(self, seed: int, step: int, rows: int) -> list[train.Example]:
        examples = super().draw(seed, step, rows)
        return [replace(e, trained=e.trained & (i in self.trained)) for i, e in enumerate(examples)]


def test_a_micro_batch_without_a_trained_token_adds_nothing() -> None:
    data = PartlyTrained({1, 5})
    whole, parts = gradients(data, 1), gradients(data, 8)
    assert whole.keys() == parts.keys()
    assert max((whole[name] - parts[name]).abs().max().item() for name in whole) < 1e-6
    wrong = mean_of_means([data.draw(0, 0, 8)[i] for i in (1, 5)], 2)  # the control: a mean for each micro-batch
    assert max((whole[name] - wrong[name]).abs().max().item() for name in whole) > 1e-3


def test_a_step_without_a_trained_token_is_an_error() -> None:
    with pytest.raises(InputError, match="a batch of 8 rows and 51 tokens has no trained token"):
        gradients(PartlyTrained(set()), 4)


# ---------------------------------------------------------------- random numbers


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


DROPOUT_KEYS = {"attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"}
DROPOUT = {
    "decoder": ({**LLAMA, "attention_dropout": 0.2}, copied_rows()),
    "encoder": ({**BERT, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1}, one_letter()),
    "encoder-decoder": ({**T5, "dropout_rate": 0.2}, copied_pairs()),
}


def draw_elsewhere() -> None:
    """Another thread draws from torch's global generator."""
    thread = threading.Thread(target=lambda: torch.rand(100))
    thread.start()
    thread.join()


@pytest.mark.parametrize("layout", DROPOUT)
def test_another_thread_that_draws_changes_nothing(layout: str) -> None:
    hf, data = DROPOUT[layout]

    def weights(disturbed: bool) -> list[torch.Tensor]:
        module = make(hf)
        if disturbed:
            for part in module.modules():
                part.register_forward_pre_hook(lambda *_: draw_elsewhere())
        trainer(module, data, steps=2, accumulate=2).run()
        return [p.detach() for p in module.parameters()]

    undisturbed = weights(False)
    assert all(map(torch.equal, undisturbed, weights(True)))
    trainer(without := make({**hf, **dict.fromkeys(hf.keys() & DROPOUT_KEYS, 0.0)}), data, steps=2, accumulate=2).run()
    assert not all(map(torch.equal, undisturbed, without.parameters()))  # the control: dropout took part


def test_training_changes_no_number_another_thread_draws() -> None:
    hf, data = DROPOUT["encoder-decoder"]
    module = make(hf)
    states: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    for block in module.get_submodule("decoder.blocks").children():
        block.register_forward_hook(lambda *_: states.append(torch.get_rng_state()))
    trainer(module, data, steps=2).run()
    assert len(states) >= 4
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
def test_dropout_is_drawn_by_row_layer_and_site(p: float, dtype: torch.dtype) -> None:
    """The numbers of a row are the same in any batch; others for other rows, layers, sites, parts and seeds."""
    x, lengths, numbers = torch.ones(60, 129, dtype=dtype), (11, 20, 29), (4, 9, 2)

    def noise(seed: int = 5, layer: int = 0, part: int = 0, rows: Sequence[int] = (0, 1, 2)) -> list[torch.Tensor]:
        random = ops.RowNoise(seed, [numbers[i] for i in rows]).of(part, [lengths[i] for i in rows])
        random.begin(layer)
        here = torch.cat([x.split(lengths)[i] for i in rows])
        return [ops.dropout(here, p, True, random), ops.dropout(here, p, True, random)]

    (first, second), (swapped, _) = noise(), noise(rows=(2, 0))
    assert torch.equal(torch.cat([first[31:], first[:11]]), swapped)
    kept = first[first != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))
    assert abs(len(kept) / x.numel() - (1 - p)) < 0.02
    assert torch.equal(ops.dropout(x, p, False, ops.RowNoise(5, numbers)), x)
    if p:
        others = [second, noise(seed=6)[0], noise(layer=1)[0], noise(part=1)[0], first.roll(11, 0)]
        assert all((first != other).float().mean() > p * (1 - p) for other in others)
        assert (first[:11] != first[11:22]).any()


def test_models_with_dropout_are_recognized() -> None:
    assert all(has_dropout(make(hf)) for hf, _ in DROPOUT.values())
    assert not any(has_dropout(make(hf)) for hf in (LLAMA, BERT, T5))
    module = make(LLAMA)
    module.add_module("adapter", torch.nn.Dropout(0.1))
    assert has_dropout(module)


@pytest.mark.parametrize(("hf", "data"), [(LLAMA, copied_rows()), *DROPOUT.values()], ids=["plain", *DROPOUT])
def test_recomputing_activations_changes_no_gradient(hf: dict[str, Any], data: Any) -> None:
    """Recomputed blocks draw the same dropout again."""

    def weights(recompute: bool) -> list[torch.Tensor]:
        module = make(hf)
        trainer(module, data, steps=2, accumulate=2, recompute=recompute).run()
        return [p.detach() for p in module.parameters()]

    for plain, again in zip(weights(False), weights(True), strict=True):
        torch.testing.assert_close(plain, again)


# ---------------------------------------------------------------- optimizer


def test_roles_come_from_the_tree() -> None:
    t5 = roles(read_config(T5))
    assert t5["encoder.blocks.0.attn.q.weight"] == "matrix"
    assert t5["decoder.blocks.1.cross.out.weight"] == "matrix"
    assert t5["encoder.embed.tokens.weight"] == "other"  # the tied head with it
    assert t5["encoder.kinds.self.position.weight"] == "other"  # two-dimensional and no matrix
    assert "head.proj.weight" not in t5
    assert roles(read_config(LLAMA))["head.proj.weight"] == "head"
    bert = roles(read_config(BERT))
    assert bert["encoder.blocks.0.attn.q.bias"] == "other"
    assert bert["head.transform.dense.weight"] == "head"


def test_muon_has_the_matrices_and_only_they_and_the_head_decay() -> None:
    module = make(LLAMA)
    adam, muon = train.Optimizer(module, train.OptimizerSettings(weight_decay=0.3)).parts
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    named = dict(module.named_parameters())
    assert in_muon == {id(p) for name, p in named.items() if ".blocks." in name and p.dim() == 2}
    decayed = {id(p) for group in adam.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(named["head.proj.weight"])}
    both = [p for part in (adam, muon) for group in part.param_groups for p in group["params"]]
    assert len(both) == len({id(p) for p in both}) == len(named)


@pytest.mark.parametrize("together", [1, 1000, train.optimizer.TOGETHER])
def test_matrices_orthogonalized_together_are_those_of_torch(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, tall and square matrices, several of each, one without a gradient in the second step."""
    monkeypatch.setattr(train.optimizer, "TOGETHER", together)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    start = [torch.randn(shape) for shape in [(24, 40), (40, 24), (32, 32)] for _ in range(3)]
    ours, torchs = ([torch.nn.Parameter(one.clone()) for one in start] for _ in range(2))
    optimizers = [train.optimizer.Muon(ours, **settings), torch.optim.Muon(torchs, **settings)]
    for step in range(3):
        for one, other in zip(ours, torchs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        if step == 1:
            ours[4].grad = torchs[4].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)  # updates are about 0.02; bf16 rounds them by 0.4%
        momentum = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (one, other), strict=True)]
        assert torch.equal(*momentum)
    assert len(optimizers[0].state[ours[0]]) == len(optimizers[1].state[torchs[0]]) == 1


def test_adamw_alone_takes_everything() -> None:
    module = make(LLAMA)
    (adam,) = train.Optimizer(module, train.OptimizerSettings(name="adamw")).parts
    assert sum(len(group["params"]) for group in adam.param_groups) == len(list(module.parameters()))


def test_clipping_is_to_the_global_norm() -> None:
    module = make(LLAMA)
    optimizer = train.Optimizer(module, train.OptimizerSettings(clip=0.5))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    expected = 0.1 * math.sqrt(sum(p.numel() for p in module.parameters()))
    assert optimizer.clip() == pytest.approx(expected, rel=1e-5)
    assert optimizer.clip() == pytest.approx(0.5, rel=1e-4)
    optimizer = train.Optimizer(module, train.OptimizerSettings(clip=0.0))
    before = optimizer.clip()
    assert optimizer.clip() == before


def test_schedules() -> None:
    cosine = train.Schedule(shape="cosine", warmup=0.1, floor=0.2)
    assert cosine.factor(0.0) == 0.0
    assert cosine.factor(0.05) == pytest.approx(0.5)
    assert cosine.factor(0.1) == pytest.approx(1.0)
    assert cosine.factor(0.55) == pytest.approx(0.6)
    assert cosine.factor(1.0) == pytest.approx(0.2)
    linear = train.Schedule(shape="linear", warmup=0.0)
    assert [linear.factor(x) for x in (0.0, 0.25, 1.0)] == pytest.approx([1.0, 0.75, 0.0])
    assert train.Schedule(shape="constant", warmup=0.5).factor(0.9) == 1.0
    wsd = train.Schedule(shape="wsd", warmup=0.1, decay=0.25, floor=0.2)
    at = (0.05, 0.1, 0.4, 0.75, 0.85, 0.95, 1.0)
    assert [wsd.factor(x) for x in at] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.68, 0.36, 0.2])
    assert train.Schedule(shape="wsd", warmup=0.75, decay=0.25).factor(0.75) == pytest.approx(1.0)


def test_progress_is_by_whichever_budget_is_nearer_its_end() -> None:
    run = train.RunSettings(rows=1, length=4, steps=100, seconds=50.0)
    assert run.progress(20, 5.0) == 0.2
    assert run.progress(20, 25.0) == 0.5
    assert run.seconds_left(20, 5.0) == pytest.approx(20.0)
    assert run.seconds_left(20, 45.0) == pytest.approx(5.0)


def test_a_time_budget_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("triptych.train.loop.time.monotonic", lambda: float(next(clock)))
    run = trainer(make(LLAMA), copied_rows(), steps=1000, rows=2, seconds=60.0)
    events: list[train.Event] = []
    run.on_step = events.append
    run.run()
    assert 5 < len(events) <= 30
    assert events[-1].progress == 1.0
    assert events[0].lr > events[-1].lr


def test_freed_memory_goes_back_to_the_system_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths in each step leave gaps in the allocator's memory, which would only grow."""
    at: list[int] = []
    run = trainer(make(LLAMA), copied_rows(), steps=205, rows=1)
    monkeypatch.setattr("triptych.machine.give_back_memory", lambda: at.append(run.at.step))
    run.run()
    assert at == [100, 200]


def test_a_time_budget_holds_with_what_follows_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only these parts move: 3 s a step, 2 s a batch of an evaluation, 4 s a sample, 5 s a save."""
    now, kept = [0.0], [0.0]
    monkeypatch.setattr("triptych.train.loop.time.monotonic", lambda: now[0])

    def takes(seconds: float) -> Any:
        def advance(*_: object) -> None:
            now[0] += seconds

        return advance

    def timed_step() -> tuple[float, float, float]:
        now[0] += 3.0
        return step()

    few = train.HeldOut.of(Rows8(), Rows8(), tokens=1)
    held = train.HeldOut(few.batches * 20, few.commonest)
    for seconds, fewest in ((40.0, 4), (100.0, 18), (1000.0, 200), (2.0, 1)):
        module, now[0] = make(LLAMA), 0.0
        run = trainer(module, Rows8(), 10**6, held=held, seconds=seconds, rows=2)
        step, run.step = run.step, timed_step  # type: ignore[method-assign]
        run.on_sample, run.on_save = takes(4.0), lambda trainer: (takes(5.0)(), kept.append(trainer.done))[0]
        module.head.register_forward_hook(lambda part, *_: None if part.training else takes(2.0)())
        run.run()
        before = 5.0  # the save before the first step
        assert fewest <= run.at.step, seconds
        if seconds > 2.0:
            assert 0.75 * seconds <= now[0] - before <= seconds, (seconds, now[0])
        assert (run.at.elapsed >= seconds, run.done, kept[-1]) == (True, 1.0, 1.0)


# ---------------------------------------------------------------- evaluation


def test_evaluation_counts_nats_characters_and_right_answers() -> None:
    module = make(LLAMA)
    held = train.HeldOut.of(Rows8(), Rows8(), tokens=16, text="x" * 100)
    assert len(held.batches) > 2
    score = train.evaluate(module, held)
    nats, count = train.loss(module, train.collate([train.causal(row) for row in RAGGED]))
    assert score.tokens == count
    assert score.nats == pytest.approx(nats.item(), rel=1e-5)
    assert score.nats_per_character == pytest.approx(nats.item() / 100, rel=1e-5)
    targets = [t for row in RAGGED for t in row[1:]]
    assert score.baseline == pytest.approx(max(targets.count(t) for t in set(targets)) / len(targets))
    assert not module.training


def test_a_float64_model_is_scored_in_float64_and_a_bf16_one_in_fp32() -> None:
    held = train.HeldOut.of(Rows8(), Rows8(), tokens=16)

    def nats(module: nn.Transformer, exact: torch.dtype) -> float:
        with torch.no_grad():
            forwards = [nn.Batch(inputs=batch.ids, rows=batch.rows) for batch in held.batches]
            logits = [module.logits(x).to(exact) for x in forwards]
        pairs = zip(logits, held.batches, strict=True)
        return sum(float(F.cross_entropy(x, batch.targets, reduction="sum")) for x, batch in pairs)

    double = make(LLAMA).double()
    assert train.evaluate(double, held).nats == pytest.approx(nats(double, torch.float64), rel=1e-13)
    assert nats(double, torch.float32) != pytest.approx(nats(double, torch.float64), rel=1e-11)
    half = make(LLAMA).bfloat16()
    assert train.evaluate(half, held).nats == pytest.approx(nats(half, torch.float64), rel=1e-6)


def test_evaluation_happens_at_shares_of_the_run() -> None:
    held = train.HeldOut.of(Rows8(), Rows8(), tokens=16)
    run = trainer(make(LLAMA), Rows8(), steps=10, held=held, evaluate_every=0.25)
    events: list[train.Event] = []
    run.on_step = events.append
    run.run()
    assert [event.step for event in events if event.score is not None] == [3, 5, 8, 10]


def test_an_evaluation_out_of_time_uses_evenly_spaced_batches() -> None:
    module, held = make(LLAMA), train.HeldOut.of(Rows8(), Rows8(), tokens=1, text="x" * 100)
    batches = tuple(held.batches[i % len(held.batches)] for i in range(100))
    held = train.HeldOut(batches, held.commonest, 100, 100)
    whole, part = train.evaluate(module, held, seconds=1e9), train.evaluate(module, held, seconds=0.0)
    assert (whole.tokens, whole.characters) == (train.evaluate(module, held).tokens, 100)
    assert part.characters is None
    assert part.tokens < whole.tokens / 5
    numbered = [train.collate([train.causal([1] * (i + 2))]) for i in range(100)]
    places = sorted(len(batch.targets) for batch in _spread(numbered)[:FEWEST])
    assert all(5 <= b - a <= 25 for a, b in itertools.pairwise(places)), places


def test_a_time_budget_bounds_the_last_evaluation_and_a_number_of_steps_does_not() -> None:
    few = train.HeldOut.of(Rows8(), Rows8(), tokens=1)
    held = train.HeldOut(few.batches * 20, few.commonest)
    tokens = {}
    for seconds in (None, 1e-6, 1e9):
        run = trainer(make(LLAMA), Rows8(), steps=1, held=held, seconds=seconds)
        run.run()
        tokens[seconds] = run.last_score().tokens
    assert tokens[1e-6] < tokens[1e9] == tokens[None]


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize("where", ["decoder.blocks.1.mlp.up", "head"])
def test_a_loss_that_is_not_finite_names_the_module(where: str) -> None:
    module = make(LLAMA)
    part = module.get_submodule(where)
    part.register_forward_hook(lambda *_: torch.full((), torch.inf) * _[2])
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(module, copied_rows(), steps=3)
    with pytest.raises(train.DivergedError, match=rf"step 1: the loss is not finite; {where} was the first"):
        run.run()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


def test_a_parameter_that_is_not_finite_is_named() -> None:
    module = make(LLAMA)
    module.get_parameter("decoder.blocks.0.attn.v.weight").detach()[2, 3] = torch.nan
    with pytest.raises(train.DivergedError, match=r"parameter decoder\.blocks\.0\.attn\.v\.weight holds"):
        trainer(module, copied_rows(), steps=1).run()


def test_a_step_that_breaks_the_model_is_not_saved() -> None:
    rate = {"optimizer": {"name": "adamw", "lr": 1e38}, "schedule": train.Schedule(shape="constant", warmup=0.0)}
    run = trainer(make(LLAMA), copied_rows(), steps=1, **rate)
    saved: list[int] = []
    run.on_save = lambda trainer: saved.append(trainer.at.step)
    with pytest.raises(train.DivergedError, match=r"step 1 made parameter .* inf or NaN, and is not saved; lower the"):
        run.run()
    assert saved == [0]
    module = make(LLAMA)
    run = trainer(module, copied_rows(), steps=1, held=train.HeldOut.of(copied_rows(), copied_rows(), 100))
    run.on_save = lambda trainer: saved.append(trainer.at.step)
    module.head.register_forward_hook(lambda part, _, out: out if part.training else out * torch.inf)
    with pytest.raises(train.DivergedError, match="step 1 made the loss on the held-out data inf or NaN"):
        run.run()
    assert saved == [0, 0]


def test_a_gradient_that_is_not_finite_is_named() -> None:
    module = make(LLAMA)
    name = "decoder.blocks.0.mlp.down.weight"
    module.get_parameter(name).register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(train.DivergedError, match=rf"a gradient is not finite; .* the gradient of {name} is not"):
        trainer(module, copied_rows(), steps=1).run()


def test_bf16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.train.precision.has_bf16", lambda device: False)
    with pytest.raises(InputError, match="no bf16"):
        autocast("bf16", torch.device("cpu"))
    with autocast("auto", torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_auto_is_bf16_for_wide_models_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.train.precision.has_bf16", lambda device: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [chosen("auto", cpu, width) for width in (WIDE - 1, WIDE)] == ["fp32", "bf16"]
    assert [chosen(named, cpu, 8) for named in ("bf16", "fp32")] == ["bf16", "fp32"]
    assert chosen("auto", cuda, 8) == "bf16"
    settings = train.RunSettings(steps=1, rows=2, length=4)
    assert settings.precision == "auto"
    module = make(LLAMA)
    optimizer = train.Optimizer(module, train.OptimizerSettings())
    assert train.Trainer(module, copied_rows(), optimizer, train.Schedule(), settings).precision == "fp32"
    monkeypatch.setattr("triptych.train.precision.has_bf16", lambda device: False)
    assert chosen("auto", cpu, WIDE) == "fp32"


def test_a_batch_can_be_read() -> None:
    from triptych.text import byte_tokenizer

    tokenizer = byte_tokenizer()
    row = train.show_batch([train.causal(tokenizer.encode("to be"))], tokenizer)[0]
    assert [token.token for token in row.tokens] == ["t", "o", "␣", "b"]
    assert [token.target for token in row.tokens] == ["o", "␣", "b", "e"]
    assert row.trained == 4
    hidden = train.show_batch(
        [train.TokenMasking(7, 256, frozenset())(tokenizer.encode("to be"), np.random.default_rng(0))], tokenizer
    )[0]
    assert hidden.trained == 1


def test_a_run_keeps_to_its_threads() -> None:
    threads: list[int] = []
    torch.set_num_threads(2)
    run = trainer(make(LLAMA), copied_rows(), 2, length=9, threads=1)
    run.on_step = lambda _: threads.append(torch.get_num_threads())
    run.run()
    assert threads == [1, 1]
    assert torch.get_num_threads() == 2


def test_a_run_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="needs an end"):
        train.RunSettings(rows=1, length=4)
    assert issubclass(ConfigError, Exception)
