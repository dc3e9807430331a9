"""What training keeps in memory, what a step reads, and the speed that follows, beside torch and closed forms."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

import triptych
from cli_models import Captured, checkpoint, said
from triptych import families, nn, ops
from triptych.attention import Rows
from triptych.attention.layer_cache import StoredForm
from triptych.cli import main
from triptych.count import (
    MAX_LOGITS,
    TrainingMemory,
    TrainingRow,
    activation_bytes,
    activation_numbers,
    count,
    predict,
)
from triptych.families.named_configs import NAMED
from triptych.model import Model
from triptych.ops import native_training
from triptych.train.optimizer import Optimizer, OptimizerSettings

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 6, "max_position_embeddings": 512}  # fmt: skip
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 3}
BERT = SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
T5 = {
    "model_type": "t5", "vocab_size": 61, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 3, "num_heads": 6,
    "decoder_start_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 512},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512},
    "bert": BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bert, dropout": BERT,
    "deberta": BERT | {
        "model_type": "deberta-v2", "architectures": ["DebertaV2ForMaskedLM"],
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 64, "position_biased_input": False, "type_vocab_size": 0,
    },
    "t5": T5,
    "t5, no dropout": T5 | {"dropout_rate": 0.0},
}  # fmt: skip


class Saved:
    """A tensor that a node of the graph saved: it lives as long as the node."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_by_torch(model: Model, tokens: int, *, recompute: bool = False) -> float:
    """Numbers in the tensors that the graph of a forward and its loss holds: each storage once, no parameters."""
    module = model.module.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: WeakSet[Saved] = WeakSet()

    def save(tensor: Tensor) -> Saved:
        one = Saved(tensor)
        saved.add(one)
        return one

    for stack in (module.encoder, module.decoder):
        if stack is not None:
            stack.recompute = recompute
    ids, rows = torch.randint(5, 61, (tokens,)), Rows((tokens,))
    source = (ids, rows) if model.spec.layout == "encoder-decoder" else None
    with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one.tensor):
        batch = nn.Batch(inputs=ids, rows=rows, source=source, random=ops.RowNoise(0, range(len(rows))))
        loss = torch.nn.functional.cross_entropy(module.logits(batch), ids)
    assert loss.grad_fn is not None
    storages = (one.tensor.untyped_storage() for one in saved if one.tensor.is_floating_point())
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(nbytes for address, nbytes in held.items() if address not in weights) / 4


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_training, "kernels_for", lambda dtype: None)


def counted_and_model(name: str, tokens: int) -> tuple[int, Model]:
    model = triptych.create(CONFIGS[name])
    source = tokens if model.spec.layout == "encoder-decoder" else 0
    return sum(activation_numbers(model.spec, tokens, source).values()), model


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_those_that_autograd_keeps(name: str) -> None:
    counted, model = counted_and_model(name, 256)
    assert counted == pytest.approx(kept_by_torch(model, 256), rel=0.05)


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_of_a_training_step_keep_no_more(name: str) -> None:
    counted, model = counted_and_model(name, 256)
    assert 0.5 * counted < kept_by_torch(model, 256) <= counted / 0.95


@pytest.mark.usefixtures("torch_alone")
def test_under_a_window_no_more_is_counted_than_is_kept() -> None:
    model = triptych.create(CONFIGS["gemma2"] | {"sliding_window": 24})
    counted = sum(activation_numbers(model.spec, 256).values())
    whole = sum(activation_numbers(triptych.create(CONFIGS["gemma2"]).spec, 256).values())
    kept = kept_by_torch(model, 256)
    assert 0.5 * kept < counted <= 1.02 * kept < whole


@pytest.mark.usefixtures("torch_alone")
def test_recomputed_activations_are_the_inputs_of_blocks() -> None:
    model, tokens = triptych.create(LLAMA), 256
    again = activation_numbers(model.spec, tokens, recompute=True)
    whole = activation_numbers(model.spec, tokens)
    assert again["blocks"] == 3 * tokens * 48
    of_head = whole["head"] + whole["logits"]
    one_block = (sum(whole.values()) - of_head - whole["embedding"] - tokens * (2 * 48 + 1)) / 3
    assert sum(again.values()) == pytest.approx(one_block + again["blocks"] + of_head + tokens * (2 * 48 + 1), rel=1e-3)
    # Between forward and backward torch holds the inputs of blocks, and no block is computed again yet.
    assert sum(again.values()) - one_block == pytest.approx(kept_by_torch(model, tokens, recompute=True), rel=0.05)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_of_an_optimizer_is_that_of_ours(name: Any) -> None:
    model = triptych.create(LLAMA)
    optimizer = Optimizer(model.module, OptimizerSettings(name=name))
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0)
    held = sum(tensor.nbytes for tensor in optimizer.state().values() if tensor.dim())
    memory = count(model.spec).training_memory(8, optimizer=name)
    assert memory.optimizer_state == held
    assert memory.weights == memory.gradients == sum(p.nbytes for p in model.module.parameters())


def test_at_the_peak_gradients_or_activations_are_whole() -> None:
    few, many = (TrainingMemory(10, 10, 20, number, 2) for number in (3, 30))
    assert (few.peak, many.peak) == (10 + 20 + 10, 10 + 20 + 30 + 2)
    assert replace(many, accumulated=True).peak == many.peak + 10
    assert many.to_dict()["peak"] == many.peak


def test_logits_are_in_memory_in_parts() -> None:
    spec = families.read_config(LLAMA | {"vocab_size": 50_000}, where="test")
    _, few = activation_bytes(spec, {TrainingRow(100): 1})
    _, many = activation_bytes(spec, {TrainingRow(100): 1000})
    _, hidden = activation_bytes(spec, {TrainingRow(100, trained=15): 1})
    assert (few, hidden) == (3 * 4 * 100 * 50_000, 3 * 4 * 15 * 50_000)
    assert many == 3 * 4 * MAX_LOGITS


# Totals that were published: by the papers, to their precision, and by the configs' checkpoints exactly.
PUBLISHED = {
    "bert-base": (109_514_298, 0), "gpt2": (124_439_808, 0), "gpt3-175b": (175e9, 0.003),
    "transformer-base": (65e6, 0.03), "transformer-big": (213e6, 0.01), "t5-base": (222_903_552, 0),
    "llama-7b": (6_738_415_616, 0), "qwen2.5-72b": (72_706_203_648, 0), "qwen3-4b": (4_022_468_096, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_known_models_have_the_parameters_that_were_published(name: str) -> None:
    published, precision = PUBLISHED[name]
    found = count(families.read_config(dict(NAMED[name]), where=name))
    assert found.total == pytest.approx(published, rel=precision, abs=0)


def test_caches_are_told_apart() -> None:
    both = count(families.read_config(dict(NAMED["t5-base"])))
    caches = both.caches_bytes(7, dtype="fp16", source=11)
    assert caches == {"self": 12 * 7 * 2 * 768 * 2, "cross": 12 * 11 * 2 * 768 * 2}
    assert both.cache_bytes(7, dtype="fp16", source=11) == sum(caches.values())


@pytest.mark.parametrize(
    ("name", "positions", "nbytes"),
    [
        ("gpt3-175b", 2048, 2 * 96 * 12_288 * 2048 * 2),
        ("llama-7b", 2048, 2**30),
        ("qwen2.5-72b", 32_768, 10 * 2**30),
        ("qwen3-4b", 4096, 603_979_776),
    ],
)
def test_caches_of_known_models_by_hand(name: str, positions: int, nbytes: int) -> None:
    assert count(families.read_config(dict(NAMED[name]), where=name)).cache_bytes(positions) == nbytes


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("width", [8, 32, 48])
def test_a_cache_takes_what_the_store_keeps(width: int, kind: str) -> None:
    spec = families.read_config(LLAMA | {"head_dim": width}, where="test")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}[kind]
    form = StoredForm(dtype, torch.float32)
    vectors = 2 * 3 * 3 * 17  # k and v, layers, groups, positions
    assert count(spec).cache_bytes(17, dtype=kind) == vectors * form.encode(torch.ones(width)).nbytes


def test_the_slower_of_reading_and_computing_is_the_limit() -> None:
    spec = families.read_config(dict(NAMED["llama-7b"]))
    counts = count(spec)
    read = counts.step_bytes("bf16")
    assert read == 2 * (counts.total - 32_000 * 4096)  # all but the table of embeddings
    cache = counts.cache_bytes(100, dtype="fp16")
    slow_memory = predict(counts, 100, read=1e9, flops=1e15)
    assert slow_memory.decode == pytest.approx(1e9 / (read + cache))
    assert slow_memory.prefill == pytest.approx(100 * 1e9 / read)
    slow_arithmetic = predict(counts, 100, read=1e15, flops=1e9)
    assert slow_arithmetic.decode == pytest.approx(1e9 / counts.decode_flops(100))
    assert slow_arithmetic.prefill == pytest.approx(100 * 1e9 / counts.prefill_flops(100))
    assert slow_arithmetic.machine_intensity == pytest.approx(1e-6)


def test_an_encoder_is_predicted_to_read_and_not_to_decode() -> None:
    predicted = predict(count(families.read_config(dict(NAMED["bert-base"]))), 128, read=1e10, flops=1e12)
    assert predicted.decode is None
    assert predicted.prefill > 0


def test_the_command_counts_a_known_model(capsys: Captured) -> None:
    found = json.loads(said(["count", "gpt3-175b", "--read", "2000", "--matmul", "300000", "--json"], capsys)[0])
    assert found["parameters"]["total"] == 174_604_259_328
    assert found["predicted"]["decode"] < 2000e9 / found["chosen"]["weight_bytes"]
    shown = said(["count", "gpt3-175b", "--read", "2000", "--matmul", "300000"], capsys)[0]
    for words in ("bytes of optimizer state", "FLOPs a byte read: a prompt", "tokens a second, decoding after 2,048"):
        assert words in shown


def test_the_command_shows_the_types_in_a_file(smollm2_gguf: Path, capsys: Captured) -> None:
    found = json.loads(said(["count", str(smollm2_gguf), "--json", "--dtype", "q4_1"], capsys)[0])
    assert found["stored_bytes"] == {"F32": 140_544, "Q8_0": 30_081_024, "Q4_1": 66_355_200}
    assert found["chosen"]["cache_dtype"] == "fp16"


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "gpt2").symlink_to(checkpoint("decoder"))
    monkeypatch.chdir(tmp_path)
    assert json.loads(said(["count", "gpt2", "--json"], capsys)[0])["family"] == "llama"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gtp2"], "did you mean 'gpt2'?"),
        (["gpt2", "--read", "3"], "--read and --matmul go together"),
        (["gpt2", "--read", "-1", "--matmul", "1"], "--read"),
        (["gpt2", "--read", "nan", "--matmul", "3"], "nan is not a finite number"),
        (["gpt2", "--read", "3", "--matmul", "inf"], "inf is not a finite number"),
        (["gpt2", "--dtype", "q9"], "--dtype 'q9' is not one of fp32"),
        (["gpt2", "--cache-dtype", "q9"], "--cache-dtype 'q9' is not one of fp32"),
        (["gpt2", "--context", "0"], "--context"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], says: str, capsys: Captured) -> None:
    assert main(["count", *arguments]) != 0
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
