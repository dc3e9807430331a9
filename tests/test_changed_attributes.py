"""A model answers as its modules do after any change of a spec, an attribute or a weight, whatever ran before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import triptych
from native_models import EXACT, LLAMA, needs_native
from triptych import nn
from triptych.checkpoints.adapters import AdapterSettings, add_adapter
from triptych.generate import Engine, Request, Scheduler, generate
from triptych.model import Model, create
from triptych.program.module_changes import ROW, ModuleFingerprint, checksums, equal
from triptych.spec.masks import Mask, causal, window

pytestmark = needs_native

SIZES = {"vocab_size": 41, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 200, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
GEMMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 17,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "pad_token_id": 0}  # fmt: skip
T5 = {"vocab_size": 41, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
      "num_heads": 2, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
      "eos_token_id": None}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 3,
                "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "vocab_size": 41, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_inner": 96,
             "n_positions": 200, "bos_token_id": 1, "eos_token_id": None},
    "gptj": {"model_type": "gptj", "vocab_size": 41, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_inner": 96,
             "n_positions": 200, "rotary_dim": 16, "bos_token_id": 1, "eos_token_id": None},
    "t5": {"model_type": "t5", **T5},
    "bert": {"model_type": "bert", **SIZES, "type_vocab_size": 2},
}  # fmt: skip
PROMPTS = [[1, 7, 3, 9, 4, 11, 5, 13, 6, 15, 21], [1, 30, 8]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, config in FAMILIES.items():
        paths[name] = tmp_path_factory.mktemp(name)
        model, random = create(config, seed=3), torch.Generator().manual_seed(3)
        for weight in model.module.parameters():
            if weight.dim() == 2:  # large, so that every change shows
                torch.nn.init.normal_(weight, std=0.25, generator=random)
        model.save(paths[name])
    return paths


def opened(path: Path, packed: bool, executor: str = "auto") -> Model:
    model = triptych.load(path, quantize="int8" if packed else None)
    model.executor = executor
    add_adapter(model.module, AdapterSettings(rank=2))
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if name.endswith(".up") and weight.requires_grad:
                weight.copy_(torch.arange(weight.numel()).view(weight.shape).cos())
    model.module.eval()
    return model


# -- changes ----------------------------------------------------------------------------------------------------------


Change = Callable[[nn.Transformer], int]


def respecced(module: nn.Transformer, kind: Any, **changes: Any) -> int:
    """Give the specs of all parts of a kind that have these fields other values, and say how many there were."""
    found = [part for part in module.modules() if isinstance(part, kind) and not isinstance(part, nn.Transformer)]
    found = [part for part in found if changes.keys() <= vars(part.spec).keys()]
    for part in found:
        part.spec = replace(part.spec, **changes)
    return len(found)


def last_scale_of_attention(module: nn.Transformer) -> int:
    """Of one layer alone; layers that share a state are those that were alike before."""
    return respecced((module.encoder or module.decoder).blocks[0].attn, nn.attention.Attention, scale=1.7)  # type: ignore[union-attr]


def activation(module: nn.Transformer) -> int:
    found = [part for part in module.modules() if isinstance(part, nn.feedforward.MLP | nn.feedforward.GLU)]
    return sum(respecced(part, nn.Module, act="relu" if part.spec.act != "relu" else "silu") for part in found)


def activation_of_one_expert(module: nn.Transformer) -> int:
    found = [part for part in module.modules() if isinstance(part, nn.feedforward.MoE)]
    return sum(respecced(part.experts[1], nn.feedforward.GLU, act="relu") for part in found)


def scale_of_adapter(module: nn.Transformer) -> int:
    adapted = [part for part in module.modules() if isinstance(part, nn.LoraLinear)]
    for part in adapted:
        part.scale = 0.0
    return len(adapted)


def head_taken_out(module: nn.Transformer) -> int:
    """Values of half a head, in place and past torch's count; of packed matrices the bytes of its rows."""
    attn = (module.encoder or module.decoder).blocks[0].attn  # type: ignore[union-attr]
    weight = attn.v.weight
    if isinstance(weight, nn.packed_weight.PackedWeight):
        weight.blocks.data.view(-1)[200 : weight.blocks.numel() // 2 - 200] = 0
    else:
        weight.data[2 : attn.spec.value_width // 2 - 1] = 0  # rows between those whose bytes were compared once
    return 1


def column(module: nn.Transformer) -> int:
    weight = (module.encoder or module.decoder).blocks[0].attn.v.weight  # type: ignore[union-attr]
    if isinstance(weight, nn.packed_weight.PackedWeight):
        weight.blocks.data.view(-1)[200 : weight.blocks.numel() // 2 - 200 : 40] = 77
    else:
        weight.data[1:-1, 33] = 3.0
    return 1


CHANGES: dict[str, Change] = {
    "scale of attention": lambda module: respecced(module, nn.attention.Attention, scale=1.7),
    "scale of one attention": last_scale_of_attention,
    "eps of norms": lambda module: respecced(module, nn.Module, eps=3.0),
    "activation": activation,
    "activation of one expert": activation_of_one_expert,
    "scale of the head": lambda module: respecced(module, nn.LMHead, scale=0.3),
    "softcap of the head": lambda module: respecced(module, nn.LMHead, softcap=0.5),
    "scale of the adapter": scale_of_adapter,
    "head taken out": head_taken_out,
    "column": column,
}


# -- answers ----------------------------------------------------------------------------------------------------------


class Asked:
    """A model that is asked again and again in the same ways, with one engine for its streams."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.engine = None if model.module.decoder is None else model.engine(matmul="stored")

    def answer(self) -> torch.Tensor:
        """All numbers of its answers: log-probabilities of what it generates at once and of a text of the engine; or
        vectors."""
        model = self.model
        if self.engine is None:
            return torch.cat([x.flatten() for x in model.encode(PROMPTS, pooling="mean", matmul="stored")])
        texts = model.generate(PROMPTS, max_new_tokens=5, logprobs=41, matmul="stored")
        source = PROMPTS[0] if model.module.encoder is not None else None
        request = Request(prompt=[0] if source else PROMPTS[0], source=source, max_new_tokens=5, logprobs=41, number=0)
        texts += generate(Scheduler(self.engine), [request], None)
        return torch.tensor([sorted(one.top) for text in texts for one in text.logprobs or []])[..., 1]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_model_answers_as_its_modules_whatever_ran_before(
    family: str, packed: bool, change: str, saved: dict[str, Path]
) -> None:
    before, fresh = Asked(opened(saved[family], packed)), opened(saved[family], packed)
    modules = opened(saved[family], packed, "modules")
    first = before.answer()
    before.answer()  # the second text of the engine takes over what the first computed
    if not all(CHANGES[change](one.module) for one in (before.model, fresh, modules)):
        pytest.skip("the family has no such part")
    expected = Asked(modules).answer()
    assert float((first - expected).abs().max()) > 10 * EXACT, "the change does nothing"
    new = Asked(fresh).answer()
    for answer in (before.answer(), before.answer()):
        torch.testing.assert_close(answer, new, atol=EXACT, rtol=0)
    if not packed:  # which rounds what it multiplies: a number on an edge may go to either side
        torch.testing.assert_close(new, expected, atol=5 * EXACT, rtol=0)


@pytest.mark.parametrize(
    "change", ["scale of attention", "eps of norms", "activation", "scale of the head", "scale of the adapter"]
)
@pytest.mark.parametrize("way", ["on_token", "stream"])
def test_a_change_in_the_middle_of_a_generation_acts_from_the_next_token_on(
    way: str, change: str, saved: dict[str, Path]
) -> None:
    def answer(executor: str, changed: bool) -> tuple[list[int], list[float]]:
        model, calls = opened(saved["llama"], False, executor), list[object]()

        def called(*arguments: object) -> None:
            calls.append(arguments)
            if len(calls) == 3 and changed:
                CHANGES[change](model.module)

        if way == "on_token":
            (text,) = model.generate(PROMPTS[:1], max_new_tokens=8, logprobs=0, on_token=called)
            return text.ids, [one.logprob for one in text.logprobs or []]
        engine = model.engine()
        (row,) = engine.add(Request(prompt=PROMPTS[0], max_new_tokens=8, logprobs=0))
        logprobs = []
        while engine.rows:
            logprobs += [one.logprobs.logprob for one in engine.step() if one.logprobs is not None]
            called()
        return row.new, logprobs

    ids, logprobs = answer("auto", True)
    expected, theirs = answer("modules", True)
    _, unchanged = answer("auto", False)
    assert ids == expected
    assert logprobs == pytest.approx(theirs, abs=5 * EXACT)
    assert logprobs[:3] == unchanged[:3]
    assert max(abs(a - b) for a, b in zip(logprobs[3:], unchanged[3:], strict=True)) > 10 * EXACT


def test_a_changed_scale_of_an_adapter_is_merged_and_saved(saved: dict[str, Path]) -> None:
    model = opened(saved["llama"], False)
    adapted = [part for part in model.module.modules() if isinstance(part, nn.LoraLinear)]
    for part in adapted:
        part.scale = 0.5
    assert {part.factors.scale for part in adapted} == {part.scale for part in adapted} == {0.5}
    scale_of_adapter(model.module)
    for part in adapted:
        assert torch.equal(part.matrix(), part.weight)


def test_an_attribute_that_may_change_in_place_is_no_part_of_a_program(saved: dict[str, Path]) -> None:
    class Factor(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module, factors: Any) -> None:
            super().__init__()
            self.inner, self.factors = inner, factors

        def forward(self, *inputs: Any) -> torch.Tensor:
            return self.factors[0] * self.inner(*inputs)

    for factors, reason in (([1.5], "keeps a list in 'factors'"), ((1.5,), None)):
        model = opened(saved["llama"], False)
        block = model.module.decoder.blocks[0]
        block.mlp = Factor(block.mlp, factors).eval()
        engine = model.engine()
        engine.add(Request(prompt=[1, 2, 3], max_new_tokens=4))
        engine.step()
        assert (engine.why_modules is None) == (reason is None)
        assert reason is None or reason in str(engine.why_modules)


def test_changes_of_a_class_or_of_an_attribute_that_comes_or_goes_are_seen() -> None:
    module = create(LLAMA).module
    norm, fingerprint = module.decoder.blocks[0].attn_norm.pre, ModuleFingerprint(module)
    last = [part._parameters for part in module.modules() if part._parameters][-1]
    assert fingerprint.same(module)
    changes: list[Callable[[], object]] = [
        lambda: setattr(norm, "extra", 1),
        lambda: norm.__dict__.update(spec=replace(norm.spec, eps=0.5)),
        lambda: (delattr(norm, "dtype"), setattr(norm, "other", 1)),
        lambda: norm.register_parameter("table", torch.nn.Parameter(torch.zeros(1))),
        lambda: norm.add_module("part", torch.nn.Identity()),
        lambda: last.update(more=torch.nn.Parameter(torch.zeros(1))),
        lambda: last.pop("more"),
        lambda: module.register_forward_hook(lambda *arguments: None),
        lambda: setattr(type(norm), "helper", 1),
        lambda: setattr(module, "training", not module.training),
        lambda: setattr(module, "spec", replace(module.spec, context=77)),
    ]
    for change in changes:
        change()
        assert not fingerprint.same(module)
        fingerprint = ModuleFingerprint(module)
        assert fingerprint.same(module)
    delattr(type(norm), "helper")
    assert not fingerprint.same(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksums_change_with_any_one_number_and_with_numbers_that_change_places(dtype: torch.dtype) -> None:
    part = torch.nn.Module()
    sizes = [(1,), (3, 5), (700, 33), (1 << 18, 1)]  # less than a row of integers, rows and a rest, several pieces
    for i, size in enumerate(sizes):
        part.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(size).to(dtype)))
    part.register_parameter("transposed", torch.nn.Parameter(torch.randn(70, 90).to(dtype).T))
    part.register_buffer("odd", torch.arange(5001, dtype=torch.uint8)[3:])
    before = checksums(part)
    assert equal(before, checksums(part))
    random = torch.Generator().manual_seed(0)
    for tensor in (*part.parameters(), *part.buffers()):
        for _ in range(20):
            flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().T.reshape(-1)
            kept, place = tensor.detach().clone(), int(torch.randint(flat.numel(), (1,), generator=random))
            tensor.data[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))] += 1
            assert not equal(before, checksums(part))
            tensor.data.copy_(kept)
        if tensor.dim() == 2 and len(tensor) > 1:
            kept = tensor.detach().clone()
            for order in (tensor.detach().flip(0), tensor.detach().roll(1, 1) if tensor.shape[1] > 1 else None):
                if order is not None:
                    tensor.data.copy_(order)
                    assert not equal(before, checksums(part))
                    tensor.data.copy_(kept)
    assert equal(before, checksums(part))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_checksums_change_with_whole_rows_or_columns_that_change_places(axis: int) -> None:
    """Of a weight as wide as the sums, where those of columns are blind to the one, and those of rows to the other."""
    part = torch.nn.Linear(2 * ROW, 300)  # two numbers an integer
    before, order = checksums(part), torch.arange(part.weight.shape[axis])
    order[:4] = torch.tensor([2, 3, 0, 1])
    part.weight.data = part.weight.detach().index_select(axis, order)
    assert not equal(before, checksums(part))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_number_that_is_none_is_refused_whatever_ran_before(
    family: str, packed: bool, saved: dict[str, Path]
) -> None:
    for executor, ran in (("auto", True), ("auto", False), ("modules", False)):
        model = opened(saved[family], packed, executor)
        if ran:
            Asked(model).answer()
        module = model.module
        with torch.no_grad():
            part = next(part for part in (module.decoder or module).modules() if isinstance(part, nn.LoraLinear))
            part.up[0, 0] = torch.nan
        with pytest.raises(triptych.InputError, match="finite"):
            model.generate(PROMPTS, max_new_tokens=5)


def _masked(module: nn.Transformer, mask: Mask) -> None:
    for kind in module.decoder.kinds.values():
        kind.spec = replace(kind.spec, mask=mask)


@pytest.mark.parametrize("executor", ["auto", "modules"])
def test_an_engine_begins_again_where_a_window_has_changed(executor: str) -> None:
    """Its cache was made for the old one."""
    wide, narrow = causal(), causal() & window(4)
    for before, after in ((narrow, wide), (wide, narrow)):
        module = tiny.decoder()
        _masked(module, before)
        engine = Engine(module, executor=executor)
        texts = []
        for mask in (before, after):
            _masked(module, mask)
            fresh = Engine(module, executor="modules")
            rows = [one.add(Request(prompt=[*range(3, 20)], max_new_tokens=6))[0] for one in (engine, fresh)]
            for one in (engine, fresh):
                while one.rows:
                    one.step()
            assert rows[0].new == rows[1].new
            texts.append(rows[0].new)
        assert texts[0] != texts[1]
