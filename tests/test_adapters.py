"""LoRA in the linear slots: what it computes, in training, generation and traces, and merging it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import parity
import references
import triptych
from cli_models import BLOCKS
from test_adapter_files import filled
from triptych import nn
from triptych.check import check
from triptych.checkpoints.convert import convert
from triptych.errors import CheckpointError, InputError
from triptych.generate import Engine, Request, Scheduler, generate
from triptych.model import Model, create
from triptych.native import library
from triptych.nn.packed_weight import PackedWeight
from triptych.probe import zero
from triptych.quantize import adapter_merging

needs_native = pytest.mark.skipif(library() is None, reason="the native kernels were not built")
LLAMA = BLOCKS | {"initializer_range": 0.2}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
ROWS = [[3, 7, 1, 22, 9], [30, 5, 11]]


def adapted(hf: dict[str, Any] = LLAMA, **options: Any) -> Model:
    model = create(hf, seed=3)
    model.add_adapter(**{"rank": 3, "targets": "all-linear", **options})
    return filled(model)


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-neox", "phi3", "gemma2", "bert", "t5", "deberta-v2", "mixtral"])
def test_merged_is_unmerged_and_a_new_adapter_changes_nothing(name: str) -> None:
    model = triptych.load(references.saved(name)[1])
    rows, targets = parity.rows_of(model), parity.targets_of(model)
    plain = parity.mine(model, rows, targets)
    trained = {n for n, p in model.module.named_parameters() if p.requires_grad}
    model.add_adapter(rank=2, alpha=1)
    assert apart(parity.mine(model, rows, targets), plain) == 0.0
    assert {n.rpartition(".")[2] for n, p in model.module.named_parameters() if p.requires_grad} == {"down", "up"}
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.module.parameters() if p.requires_grad):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    with_adapter = parity.mine(model, rows, targets)
    assert apart(with_adapter, plain) > 1e-2
    other = Model(copy.deepcopy(model.module), None, model.hf)
    other.remove_adapter()
    assert other.adapter is None
    assert apart(parity.mine(other, rows, targets), plain) == 0.0
    assert model.merge_adapter() == ()
    assert model.adapter is None
    assert {n for n, p in model.module.named_parameters() if p.requires_grad} == trained
    measured = [
        [parity.measured(x, model) for x in found] for found in (with_adapter, parity.mine(model, rows, targets))
    ]
    assert apart(*measured) < 1e-5 * max(1.0, float(measured[0][0].abs().max()))


def test_the_sabotaged_merge_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    model = adapted()
    before = model.logits(ROWS)
    monkeypatch.setattr(nn.LoraFactors, "delta", lambda self: self.up.detach() @ self.down.detach() * self.alpha)
    model.merge_adapter()
    assert apart(model.logits(ROWS), before) > 0.1


def test_a_new_dora_changes_nothing_and_its_norms_are_those_of_rows() -> None:
    model = create(LLAMA, seed=3)
    plain, weights = model.logits(ROWS), dict(model.module.named_parameters())
    model.add_adapter(rank=3, dora=True)
    assert apart(model.logits(ROWS), plain) < 1e-5
    factors = filled(model, seed=4)
    for slot, one in nn.factors_of(factors.module).items():
        assert one.magnitude is not None
        merged = one.merged(weights[f"{slot}.weight"]).detach()
        assert torch.allclose(merged.norm(dim=1), one.magnitude.detach().abs(), rtol=1e-5)
        part = model.module.get_submodule(slot)
        assert isinstance(part, nn.LoraLinear)
        assert torch.allclose(part.matrix(), merged)
        assert torch.allclose(part.matrix_rows(1, 3), merged[1:3])
    assert apart(model.logits(ROWS), plain) > 0.1
    model.remove_adapter()
    assert apart(model.logits(ROWS), plain) == 0.0
    with pytest.raises(
        InputError, match=r"DoRA needs all of transformer\.h\.0\.attn\.c_attn, of which decoder\.blocks\.0\.attn"
    ):
        triptych.load(references.saved("gpt2")[1]).add_adapter(rank=2, targets=["q"], dora=True)


def test_the_same_seed_gives_the_same_adapter() -> None:
    one, same, other = (create(LLAMA, seed=3) for _ in range(3))
    for model, seed in ((one, 5), (same, 5), (other, 6)):
        model.add_adapter(seed=seed)
    first, second, third = (m.module.get_parameter("decoder.blocks.1.attn.q.down") for m in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert float(first.detach().abs().max()) <= 64**-0.5


# ---------------------------------------------------------------- packed weights


def packed_file(dtype: str, directory: Path) -> Path:
    create(LLAMA, seed=3).save(directory / "hf")
    convert(directory / "hf", directory / f"{dtype}.gguf", dtype=dtype)
    return directory / f"{dtype}.gguf"


def opened(how: str, directory: Path, **options: Any) -> Model:
    if how == "int8":
        packed_file("q8_0", directory)
        return triptych.load(directory / "hf", **({"quantize": "int8"} | options))
    return triptych.load(packed_file(how, directory), **options)


def exact(model: Model) -> Model:
    """The same model with every packed weight as the numbers it holds."""
    twin = copy.deepcopy(model.module)
    for name, weight in list(twin.named_parameters()):
        if isinstance(weight, PackedWeight):
            path, _, leaf = name.rpartition(".")
            numbers = torch.nn.Parameter(torch.Tensor(weight.dense()), requires_grad=False)
            twin.get_submodule(path).register_parameter(leaf, numbers)
    return Model(twin, None, model.hf)


def gradients(model: Model) -> dict[str, Tensor]:
    module = model.module
    inputs, where = nn.flat(ROWS, model.device)
    logits = where.split(module.logits(nn.Batch(inputs=inputs, rows=where)))
    sum(F.cross_entropy(x[:-1], torch.tensor(row[1:])) for x, row in zip(logits, ROWS, strict=True)).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@needs_native
@pytest.mark.parametrize("how", ["q4_1", "q8_0", "int8"])
def test_gradients_over_packed_weights_are_those_of_their_numbers(how: str, tmp_path: Path) -> None:
    model = opened(how, tmp_path)
    model.add_adapter(rank=4)
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.module.parameters() if p.requires_grad):
            parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
    plain = exact(model)
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys() == {n for n, p in model.module.named_parameters() if p.requires_grad}
    limit = 0.1  # activations are rounded to 8 bits
    assert max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours) < limit
    with torch.no_grad():  # control
        plain.module.get_parameter("decoder.blocks.1.mlp.down.weight").mul_(1.5)
    plain.module.zero_grad()
    wrong = gradients(plain)
    assert max(float((ours[name] - wrong[name]).norm() / wrong[name].norm()) for name in ours) > 2 * limit


@needs_native
@pytest.mark.parametrize(("how", "kind"), [("q4_1", "Q4_1"), ("q4_0", "Q4_0"), ("q8_0", "Q8_0"), ("int8", "int8")])
def test_merging_rounds_to_the_same_type_or_gives_plain_numbers(how: str, kind: str, tmp_path: Path) -> None:
    model = opened(how, tmp_path)
    model.add_adapter(rank=2, alpha=0.1, targets=["q", "down"])
    filled(model)
    numbers = {slot: model.module.get_submodule(slot).matrix() for slot in model.adapter.slots}
    plain = Model(copy.deepcopy(model.module), None, model.hf)
    assert model.merge_adapter() == (f"4 packed matrices were rounded again to {kind}",)
    for slot, expected in numbers.items():
        weight = model.module.get_parameter(f"{slot}.weight")
        assert isinstance(weight, PackedWeight)
        step = float(expected.abs().max()) / (127 if "8" in kind else 7)
        assert float((weight.dense() - expected).abs().max()) <= 1.1 * step
    assert plain.merge_adapter(packed="dense") == ("4 packed matrices became plain numbers in float32",)
    assert all(torch.equal(plain.module.get_parameter(f"{slot}.weight"), numbers[slot]) for slot in numbers)
    saved = model.save(tmp_path / "merged.gguf")
    assert not saved.notes
    assert apart(triptych.load(tmp_path / "merged.gguf").logits(ROWS), model.logits(ROWS)) < 1e-6


@needs_native
def test_a_type_that_cannot_be_written_becomes_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_merging, "WRITABLE", ("Q8_0",))
    model = opened("q4_0", tmp_path)
    model.add_adapter(rank=2, targets=["q"])
    assert filled(model).merge_adapter() == ("2 packed matrices became plain numbers in float32",)


# ---------------------------------------------------------------- where else it works


@needs_native
def test_the_native_step_follows_an_adapter_that_comes_changes_and_goes() -> None:
    model = create(LLAMA, seed=3)
    engine, modules = Engine(model.module), Engine(model.module, executor="modules")

    def both() -> list[list[int]]:
        requests = [Request(prompt=row, max_new_tokens=12, number=i) for i, row in enumerate(ROWS)]
        ids = [[one.ids for one in generate(Scheduler(each), requests, None)] for each in (engine, modules)]
        assert engine.why_modules is None
        assert ids[0] == ids[1]
        return ids[0]

    plain = both()
    model.add_adapter(rank=3)
    assert both() == plain
    filled(model)
    changed = both()
    assert changed != plain
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.mul_(-0.7)
    in_place = both()
    assert in_place != changed
    model.merge_adapter()
    assert both() == in_place
    model.add_adapter(rank=2)
    filled(model, seed=9)
    assert both() != in_place
    model.remove_adapter()
    assert both() == in_place


KINDS: list[dict[str, bool]] = [{}, {"dora": True}, {"rank_stabilized": True}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_beams_traces_and_edits_are_those_of_the_merged_model(kind: dict[str, bool]) -> None:
    model = adapted(alpha=1.0, **kind)
    merged = Model(copy.deepcopy(model.module), None, model.hf)
    merged.merge_adapter()
    beams = [one.generate(ROWS, max_new_tokens=6, beams=3) for one in (model, merged)]
    assert [one.ids for one in beams[0]] == [one.ids for one in beams[1]]
    edit = zero("blocks.0.attn.z", heads=[1])
    traces = [one.trace(ROWS, read=["*.pattern", "blocks.1.mlp.out"], edit=[edit]) for one in (model, merged)]
    assert float((traces[0]["blocks.1.mlp.out"][0] - traces[1]["blocks.1.mlp.out"][0]).abs().max()) < 1e-4
    shares = [one.attribute_logit([3, 7, 1, 22], 9) for one in (model, merged)]
    assert shares[0].error < 1e-3
    assert abs(shares[0].logit - shares[1].logit) < 1e-3


def test_check_compares_the_adapted_model_with_transformers(tmp_path: Path) -> None:
    _, base = references.saved("gpt2")
    model = triptych.load(base)
    model.add_adapter(rank=2, targets=["c_attn", "up"])
    filled(model).save_adapter(tmp_path)
    report = check(base, adapter=tmp_path, against="transformers")
    assert report.passed
    with pytest.raises(InputError, match="a Model has its own"):
        check(model, adapter=tmp_path)
    with torch.no_grad():  # control: what transformers computes is without the change made here
        model.module.get_parameter("decoder.blocks.0.mlp.up.weight").mul_(1.1)
    assert not check(model, against="transformers").passed


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("out", ["hf", "x.gguf"])
def test_convert_writes_the_merged_model(out: str, kind: dict[str, bool], tmp_path: Path) -> None:
    create(LLAMA, seed=3).save(tmp_path / "base")
    model = triptych.load(tmp_path / "base")
    model.add_adapter(rank=3, alpha=2, **kind)
    filled(model).save_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"save_adapter\(\) writes it alone"):
        model.save(tmp_path / "whole")
    convert(tmp_path / "base", tmp_path / out, adapter=tmp_path / "adapter")
    assert apart(triptych.load(tmp_path / out).logits(ROWS), model.logits(ROWS)) < 1e-3
    convert(tmp_path / "adapter", tmp_path / f"again-{out}")  # which names its base
    ours, again = (triptych.load(path).module for path in (tmp_path / out, tmp_path / f"again-{out}"))
    assert all(map(torch.equal, ours.parameters(), again.parameters()))


@needs_native
def test_convert_rounds_packed_matrices_again_and_says_so(tmp_path: Path) -> None:
    base = packed_file("q4_1", tmp_path)
    model = triptych.load(base, dequantize=True)
    model.add_adapter(rank=2, alpha=0.5, targets=["q", "down"])
    filled(model).save_adapter(tmp_path / "adapter")
    done = convert(base, tmp_path / "merged.gguf", adapter=tmp_path / "adapter")
    (note,) = done.notes
    assert note.startswith("4 packed matrices with the adapter were rounded again to Q4_1; --dtype q8_0")
    model.merge_adapter()
    merged = triptych.load(tmp_path / "merged.gguf", dequantize=True).module
    for name, expected in ((name, parameter.detach()) for name, parameter in model.module.named_parameters()):
        found = merged.get_parameter(name).detach()
        step = float(expected.max() - expected.min()) / 15
        same = "attn.q" not in name and "mlp.down" not in name
        assert torch.equal(found, expected) if same else float((found - expected).abs().max()) < step
    done = convert(base, tmp_path / "f32.gguf", adapter=tmp_path / "adapter", dtype="f32")
    assert done.notes == ("4 packed matrices with the adapter were written as F32",)
    assert apart(triptych.load(tmp_path / "f32.gguf").logits(ROWS), model.logits(ROWS)) < 1e-4


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 must be an integer of at least 1"),
        ({"rank": -2}, "rank=-2 must be an integer"),
        ({"rank": True}, "rank=True must be an integer"),
        ({"rank": 97}, r"rank=97 is more than decoder\.blocks\.0\.attn\.q \[64, 64\] has rows or columns"),
        ({"alpha": float("nan")}, "alpha=nan must be finite and above 0"),
        ({"alpha": 0}, "alpha=0 must be finite and above 0"),
        ({"alpha": float("inf")}, "alpha=inf must be"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and less than 1"),
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"targets": []}, r"targets=\[\] must be 'all-linear' or a list of names"),
        ({"targets": [""]}, r"targets=\[''\] must be 'all-linear' or a list"),
        ({"targets": ["all-linear", "q"]}, "names every linear map; give it alone"),
        ({"targets": ["qq"]}, "'qq' names no linear map of this.*there are q, k, v, out, gate, up, down.*q_proj"),
        ({"targets": ["c_attn"]}, "names no linear map of this llama model"),
        ({"targets": ["tokens"]}, "is decoder.embed.tokens, a Table and no linear map"),
        ({"targets": ["embed_tokens"]}, "is decoder.embed.tokens, a Table and no linear map"),
        ({"targets": ["final_norm"]}, "is decoder.final_norm, a RMSNorm and no linear map"),
        ({"targets": ["decoder.blocks.7.attn.q"]}, "names no linear map"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_adapter_is_one_line(options: dict[str, Any], message: str) -> None:
    model = create(LLAMA, seed=3)
    with pytest.raises(InputError, match=message) as caught:
        model.add_adapter(**options)
    assert "\n" not in str(caught.value)
    assert model.adapter is None
    assert all(p.requires_grad for p in model.module.parameters())


def test_targets_that_would_not_be_trained() -> None:
    tied = create(LLAMA | {"tie_word_embeddings": True}, seed=3)
    for name in ("head", "head.proj", "proj", "lm_head"):
        with pytest.raises(InputError, match="target"):
            tied.add_adapter(targets=[name])
    with pytest.raises(InputError, match=r"shares its matrix with decoder\.embed\.tokens; a shared matrix takes no"):
        tied.add_adapter(targets=["lm_head"])
    mixture = create(MIXTRAL, seed=3)
    for name in ("experts.1.up", "up", "router"):
        with pytest.raises(InputError, match="is inside a mixture of experts"):
            mixture.add_adapter(targets=[name])
    mixture.add_adapter()
    assert {slot.rpartition(".")[2] for slot in mixture.adapter.slots} == {"q", "k", "v", "out"}


def test_a_second_adapter_and_none(unchecked: None) -> None:
    model = create(LLAMA, seed=3)
    for method in (model.merge_adapter, model.remove_adapter):
        with pytest.raises(InputError, match="the model has no adapter"):
            method()
    with pytest.raises(InputError, match="the model has no adapter"):
        model.save_adapter("x")
    model.add_adapter()
    with pytest.raises(InputError, match=r"has an adapter already; merge_adapter\(\) or remove_adapter\(\) first"):
        model.add_adapter()
    with pytest.raises(InputError, match="packed='q4' is not one of requantize, dense"):
        adapter_merging.merge(model.module, "q4")


def test_names_of_ours_and_of_transformers_name_the_same_slots() -> None:
    for ours, theirs in ((["q", "o"], ["q_proj", "o_proj"]), (["attn.v"], ["v_proj"]), (["gate"], ["mlp.gate_proj"])):
        found = []
        for targets in (ours, theirs):
            model = create(LLAMA, seed=3)
            found.append(model.add_adapter(targets=targets).slots)
        assert found[0] == found[1]
    one = create(LLAMA, seed=3).add_adapter(targets="decoder.blocks.1.mlp.up")
    assert one.slots == ("decoder.blocks.1.mlp.up",)


def test_an_adapter_directory_is_no_model(tmp_path: Path) -> None:
    create(LLAMA, seed=3).save(tmp_path / "base")
    model = triptych.load(tmp_path / "base")
    model.add_adapter()
    model.save_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match="is an adapter itself; name its base"):
        triptych.load(tmp_path / "adapter", adapter=tmp_path / "adapter")
    from triptych.checkpoints.header import read_header

    with pytest.raises(CheckpointError, match=r"is an adapter, not a model; name its base, '.*base', and the adapter"):
        read_header(tmp_path / "adapter")
