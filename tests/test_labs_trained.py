"""The labs that look at gradients and train small models: PASS in small, FAIL when what they test is broken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab_results import failed, passes
from triptych import nn, page
from triptych.attention import FlatKeys
from triptych.nn.positions import UNPOSITIONED, Alibi, Rope, T5Buckets
from triptych.page import render
from triptych.probe import Edit, zero
from triptych.spec import Mask, full
from triptych_lectures import labs
from triptych_lectures.labs import bottleneck, depth, induction, mask_leak
from triptych_lectures.labs.lab import LabResult, Setup, Size


def every_mask(patch: pytest.MonkeyPatch, mask: Mask) -> None:
    """All attention of every model gets `mask` in place of its own."""
    plan = FlatKeys.plan
    patch.setattr(FlatKeys, "plan", lambda self, rows, own, *rest: plan(self, rows, mask, *rest))


# ---------------------------------------------------------------- depth


def shallow(seed: int = 0) -> LabResult:
    sizes: dict[str, Size] = {"depths": (2, 8, 32), "draws": 1}
    return labs.run("depth", Setup(seed=seed, sizes=sizes, full=True))


def test_depth_passes() -> None:
    result = passes(shallow(3))
    assert [len(section.rows) for section in result.sections if section.kind == "table"] == [3]


def test_the_page_says_of_the_gradient_what_the_lab_measures() -> None:
    """With norms it does not vanish without the addition, so that the chapter must not say so of every stack."""
    measured = {check.claim: check.measured for check in shallow(3).checks}
    kept = measured["no residual, with norms, 32 layers: gradient at the first block over the last"]
    lost = measured["control: no residual, without norms, 32 layers: gradient at the first block over the last"]
    assert kept > 1e-3 > 1e-6 > lost
    chapters = (Path(page.__file__).parent / "live_chapters.js").read_text("utf-8")
    answer = chapters.partition("need these additions?")[2].partition("},")[0]
    assert "Without additions and norms, the gradient" in answer


def test_depth_fails_without_the_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Block, "forward", depth.NoResidualBlock.forward)
    assert "pre-norm: the last block's gradient grows as depth to the power" in failed(shallow())


def test_depth_fails_when_the_control_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth.NoResidualBlock, "forward", nn.Block.forward)
    result = shallow()
    assert "control: no residual, without norms, 32 layers: gradient at the first block over the last" in failed(result)
    assert "without the addition either" not in result.meaning


def test_depth_fails_when_pre_norm_norms_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Block.forward

    def normed(block: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return forward(block, block.attn_norm.pre(x), *given)

    monkeypatch.setattr(nn.Block, "forward", normed)
    assert "pre-norm: the last block's gradient grows as depth to the power" in failed(shallow())


# ---------------------------------------------------------------- mask-leak


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Twenty words in random order: learned in few steps, and not memorized."""
    noise = np.random.default_rng(0)
    words = ["".join(noise.choice(list("abcdefghijklmnop"), noise.integers(2, 7))) for _ in range(20)]
    file = tmp_path / "words.txt"
    file.write_text(" ".join(noise.choice(words, 6000)), encoding="utf-8")
    return str(file)


def leak(text: str) -> LabResult:
    sizes: dict[str, Size] = {"steps": 280, "rows": 4, "held_out": 900, "written": 12, "prompt": "abc de"}
    return labs.run("mask-leak", Setup(data=text, sizes=sizes, full=True))


def test_mask_leak_passes_and_shows_what_each_writes(text: str) -> None:
    result = passes(leak(text))
    (samples,) = (section for section in result.sections if section.kind == "samples")
    assert [sample.label for sample in samples.items] == [
        f"trained {trained}, writing {used}" for trained in mask_leak.MASKS for used in mask_leak.MASKS
    ]
    assert samples.title == "What they write after 'abc de'"
    assert "trained without" in render("labs", result.sections, subtitle="")


def test_mask_leak_fails_when_causal_hides_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_mask(monkeypatch, full())
    claims = failed(leak(text))
    assert "trained without and used with it, nats above trained with it" in claims


@pytest.mark.heavy
def test_mask_leak_fails_on_shuffled_characters(text: str) -> None:
    """With nothing to learn but frequencies, the control does not beat them."""
    file = Path(text)
    mixed = np.random.default_rng(1).permutation(list(file.read_text(encoding="utf-8")))
    file.write_text("".join(mixed), encoding="utf-8")
    result = leak(text)
    assert "trained and used with the mask, over guessing by frequency" in failed(result)
    assert result.meaning.startswith("That one model learns and the one without the mask copies was not seen")


# ---------------------------------------------------------------- induction


TRAINED: dict[int, Any] = {}


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests that break nothing they are trained by."""
    train = induction.InductionLab._train

    def once(self: induction.InductionLab, layers: int, *given: Any) -> Any:
        if layers not in TRAINED:
            TRAINED[layers] = train(self, layers, *given)
        return TRAINED[layers]

    monkeypatch.setattr(induction.InductionLab, "_train", once)


def short() -> LabResult:
    sizes: dict[str, Size] = {"shortest": 8, "longest": 20, "vocab": 28, "steps": 300, "rows": 24}
    return labs.run("induction", Setup(seed=1, sizes=sizes, full=True))


def test_induction_passes(trained_once: None) -> None:
    result = passes(short())
    (table,) = (section for section in result.sections if section.kind == "table")
    assert len(table.rows) == 2 * induction.InductionLab().heads


def test_induction_fails_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Alibi, Rope, T5Buckets):
        monkeypatch.setattr(part, "prepare", lambda self, *given: UNPOSITIONED)
    assert "copied right by two layers" in failed(short())


def test_induction_fails_when_the_wrong_head_is_removed(trained_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(site: str, heads: list[int]) -> Edit:
        return zero(site, heads=[(head + 1) % induction.InductionLab().heads for head in heads])

    monkeypatch.setattr(induction, "zero", another)
    assert any(claim.startswith("copied right without layer 1") for claim in failed(short()))


def test_induction_fails_when_the_head_below_reads_another_place(
    trained_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its previous-token score decides, and not its removal alone."""
    heads = induction._heads

    def shifted(*inputs: Any) -> list[induction.Head]:
        return [head._replace(most=3, previous=0.1) if head.layer == 0 else head for head in heads(*inputs)]

    monkeypatch.setattr(induction, "_heads", shifted)
    claims = failed(short())
    assert all("places back" in claim or "token before" in claim for claim in claims)
    assert len(claims) == 2


def test_a_repeated_row_is_one_sequence_twice_and_trains_what_is_determined() -> None:
    row = induction.InductionLab()._repeated(np.random.default_rng(5))
    n = (len(row.ids) + 1) // 2
    assert np.flatnonzero(row.trained).tolist() == list(range(n, 2 * n - 1))
    assert (row.targets[row.trained] == row.ids[1:n]).all()


# ---------------------------------------------------------------- bottleneck


def brief(steps: int = 220) -> LabResult:
    """Shorter sources, so that fewer steps suffice."""
    sizes: dict[str, Size] = {"lengths": (1, 4, 10), "rows": 48, "tested": 64}
    return labs.run("bottleneck", Setup(seed=2, sizes=sizes | {"steps": steps}, full=True))


def test_bottleneck_passes() -> None:
    passes(brief())


def test_bottleneck_fails_when_attention_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its narrow vector is all it has."""
    monkeypatch.setattr(bottleneck, "attend", lambda q, k, v: torch.zeros_like(q))
    claims = failed(brief())
    assert "attention: symbols right, the worst over all lengths" in claims
    assert "parameters, attention over vector of 64" not in claims


def test_bottleneck_fails_when_a_wider_vector_holds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = bottleneck.Copier
    monkeypatch.setattr(bottleneck, "Copier", lambda code, *rest: copier(4, *rest))
    result = brief(steps=20)
    assert "vector of 64: symbols right at length 10, more than 4" in failed(result)
    assert "That a fixed vector loses long sources, and a narrow one more, was not seen" in result.meaning


def test_sources_are_distinct_symbols() -> None:
    source = bottleneck._sources(12, 30, 20, torch.Generator().manual_seed(0))
    assert source.shape == (30, 12)
    assert all(len(set(row)) == 12 and max(row) < 20 for row in source.tolist())


def test_the_copier_sees_the_source_through_its_code_alone() -> None:
    """Without attention a change of the source that leaves the code as it was changes no logit of the first symbol."""
    model = bottleneck.Copier(3, False, 20, 64)
    torch.nn.init.zeros_(model.code.weight)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    assert torch.equal(model(a)[:, 0], model(b)[:, 0])


# ---------------------------------------------------------------- at full size


FULL = (
    "depth", "induction", "bottleneck", "quadratic", "scaling", "permutation", "soft-vs-hard", "heads-vs-width",
    "additive-vs-dot", "alignment", pytest.param("mask-leak", marks=pytest.mark.weights),
)  # fmt: skip


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("seed", range(5))
def test_at_full_size_with_any_seed(name: str, seed: int, unchecked: None) -> None:
    passes(labs.run(name, Setup(seed=seed, full=True)))
