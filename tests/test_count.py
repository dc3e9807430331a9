"""Counting against closed forms, the lectures' figures, the reference library, and torch's own counter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import references
import triptych
from triptych import families, nn, spec
from triptych.checkpoints.header import read_header
from triptych.count import Count, count
from triptych.errors import CheckpointError, InputError

ROOT = Path(__file__).parents[1]
QWEN3_4B = ROOT / "docs" / "examples" / "qwen3-4b"


def qwen(**changes: Any) -> Count:
    """Qwen3-4B as published, or with other numbers."""
    return count(families.read_config(json.loads((QWEN3_4B / "config.json").read_text()) | changes))


def one_layer(width: int, heads: int) -> Count:
    """Attention alone counts here; the MLP is a stub."""
    hf = {"model_type": "llama", "vocab_size": 3, "hidden_size": width, "intermediate_size": 1, "num_hidden_layers": 1,
          "num_attention_heads": heads, "max_position_embeddings": 40_000, "tie_word_embeddings": True}  # fmt: skip
    return count(families.read_config(hf))


# ---------------------------------------------------------------- the lectures


def test_qwen3_4b_as_published() -> None:
    found = qwen()
    assert found.total == 4_022_468_096
    assert found.parameters["embedding"] == 151_936 * 2_560 == 388_956_160
    assert found.parameters["mlp"] == 2_689_597_440
    assert found.parameters["norms"] == 196_096
    assert found.parameters["head"] == 0  # tied
    assert found.parameters["attention"] == 36 * 26_214_400
    shapes = found.spec.shapes()
    block = "decoder.blocks.0"
    assert shapes[f"{block}.attn.q.weight"] == (4096, 2560)
    assert shapes[f"{block}.attn.k.weight"] == shapes[f"{block}.attn.v.weight"] == (1024, 2560)
    assert shapes[f"{block}.attn.out.weight"] == (2560, 4096)
    assert shapes[f"{block}.attn.q_norm.weight"] == shapes[f"{block}.attn.k_norm.weight"] == (128,)
    assert shapes[f"{block}.mlp.gate.weight"] == shapes[f"{block}.mlp.up.weight"] == (9728, 2560)


def sizes(width: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096,
            **more}  # fmt: skip


NEOX = {k: v for k, v in sizes(6144, 24576, 44, 64, 64, 50432).items() if k != "num_key_value_heads"}
GPTJ = {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
PUBLISHED = {  # parameters of the published checkpoints
    "gpt_neox": (NEOX, 20_554_567_680),
    "gptj": (GPTJ, 6_050_882_784),
    "phi": (sizes(2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4), 2_779_683_840),
    "phi3": (sizes(3072, 8192, 32, 32, 32, 32064), 3_821_079_552),
    "gemma": (sizes(2048, 16384, 18, 8, 1, 256_000), 2_506_172_416),
    "gemma2": (sizes(2304, 9216, 26, 8, 4, 256_000), 2_614_341_888),
    "gemma3_text": (sizes(1152, 6912, 26, 4, 1, 262_144), 999_885_952),
    "mixtral": (sizes(4096, 14336, 32, 32, 8, 32_000), 46_702_792_704),
    "qwen3_moe": (sizes(2048, 6144, 48, 32, 4, 151_936, **EXPERTS), 30_532_122_624),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_families_as_published(family: str) -> None:
    config, total = PUBLISHED[family]
    assert count(families.read_config({"model_type": family, **config})).total == total


def test_what_a_token_of_a_mixture_goes_through() -> None:
    """Jiang et al. 2024: 13B of 47B; Yang et al. 2025: 3.3B of 30.5B."""
    for family, active in (("mixtral", 12_879_925_248), ("qwen3_moe", 3_353_032_704)):
        found = count(families.read_config({"model_type": family, **PUBLISHED[family][0]}))
        assert found.active == active
        assert found.to_dict(7)["parameters"]["active"] == active
    assert qwen().active == qwen().total


def test_qwen3_4b_cache() -> None:
    assert qwen().cache_bytes(4096) == 603_979_776 == 576 * 2**20
    assert qwen(num_key_value_heads=32).cache_bytes(4096) == 2_415_919_104
    assert qwen().cache_bytes(4096, batch=3, dtype="fp32") == 6 * 603_979_776
    assert qwen().cache_bytes(4096, dtype="q8_0") == 603_979_776 // 2 * 34 // 32


def test_the_lecture_s_smaller_count_and_where_its_gap_is() -> None:
    """L0 exercise 6 blames the embedding; its total already holds it, and the gap is the MLP and the norms."""
    lecture = qwen(intermediate_size=6912, head_dim=80, num_key_value_heads=32)
    without_norms = lecture.total - lecture.parameters["norms"]
    assert without_norms == 3_243_704_320
    assert lecture.parameters["attention"] == qwen().parameters["attention"]
    assert qwen().parameters["mlp"] - lecture.parameters["mlp"] == 3 * 2560 * (9728 - 6912) * 36 == 778_567_680
    assert qwen().total - without_norms == 778_567_680 + 196_096


def test_attention_is_quadratic() -> None:
    """L4 exercise 9: 16 times the tokens, 256 times the score FLOPs, and 16 times everything else."""
    short, long = qwen().flops(2_048), qwen().flops(32_768)
    assert long["scores"] == 256 * short["scores"]
    assert all(long[part] == 16 * short[part] for part in ("projections", "mlp", "head"))


def test_heads_cost_scores_and_nothing_else() -> None:
    """L4 exercise 7: H heads of width D/H against one of width D."""
    many, one = one_layer(512, 8), one_layer(512, 1)
    assert many.parameters == one.parameters
    assert many.flops(10) == one.flops(10)
    assert (many.score_elements(10), one.score_elements(10)) == (800, 100)


# ---------------------------------------------------------------- closed forms


def test_flops_by_hand() -> None:
    layer = one_layer(12, 2)
    assert layer.flops(5, cached=8, logits=1) == {
        "projections": 4 * 2 * 5 * 12 * 12,
        "scores": 2 * 2 * 5 * 13 * 12,
        "mlp": 3 * 2 * 5 * 12 * 1,
        "head": 2 * 1 * 12 * 3,
    }
    assert layer.training_flops(5) == 3 * sum(layer.flops(5).values())
    assert layer.decode_flops(11) == sum(layer.flops(1, cached=11).values())


def test_windows_bound_cache_and_scores() -> None:
    hf = json.loads((references.saved("qwen2-window")[1] / "config.json").read_text())
    found = count(families.read_config(hf))
    a_position = 2 * references.G * (references.D // references.H) * 2  # keys and values, fp16
    assert found.cache_bytes(50) == a_position * (50 + 4 + 4)
    assert found.cache_bytes(3) == a_position * (3 + 3 + 3)
    assert found.cache_bytes(50, page=64) == a_position * (64 + 4 + 4)  # a ring has no pages
    assert found.cache_bytes(64, page=64) == found.cache_bytes(64)
    assert found.cache_bytes(65, batch=3, page=64) == 3 * a_position * (128 + 4 + 4)
    assert found.score_elements(50) == references.H * 50 * (50 + 4 + 4)
    assert found.decode_flops(49) < found.decode_flops(50)


def test_layouts_and_caches() -> None:
    t5, bert = (count(_spec(name)) for name in ("t5", "bert"))
    a_position = 2 * references.H * references.K * 2
    assert t5.cache_bytes(11, source=17) == references.L * a_position * (11 + 17)
    assert bert.cache_bytes(11) == 0
    assert t5.parameters["embedding"] == references.V * references.D
    assert t5.parameters["position"] == 2 * 8 * references.H


def test_weight_bytes() -> None:
    assert qwen().weight_bytes("fp32") == 4 * 4_022_468_096
    assert qwen().weight_bytes("q4_0") == 4_022_468_096 * 18 // 32
    with pytest.raises(InputError, match=r"'bf61' is not one of .* \(did you mean 'bf16'\?\)"):
        qwen().weight_bytes("bf61")


def test_value_width_free_of_key_width() -> None:
    norm = spec.RMSNormSpec(width=6)
    block = spec.BlockSpec(
        attn=spec.attention(6, 2, head_width=5, value_width=7),
        mlp=spec.mlp(6, 3, "relu"),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
    )
    embed = spec.EmbedSpec(vocab=11, width=6)
    stack = spec.StackSpec(embed=embed, kinds={"self": spec.KindSpec(mask=spec.causal())}, blocks=(block,))
    found = count(spec.ModelSpec(family="x", decoder=stack))
    assert found.cache_bytes(13, dtype="fp32") == 13 * 2 * (5 + 7) * 4
    assert found.flops(13)["scores"] == 2 * 13 * 13 * 2 * (5 + 7)


# ---------------------------------------------------------------- oracles


def _spec(name: str) -> spec.ModelSpec:
    from safetensors import safe_open

    path = references.saved(name)[1]
    with safe_open(path / "model.safetensors", "pt") as file:
        return families.read_config(json.loads((path / "config.json").read_text()), stored=list(file.keys()))


@pytest.mark.parametrize("name", references.NAMES)
def test_parts_add_up_to_the_reference(name: str) -> None:
    assert count(_spec(name)).total == references.numbers(name)


COUNTED = ["gpt2", "llama", "llama-mqa", "qwen3", "mixtral", "qwen3-moe", "gpt-neox", "phi", "whisper", "vit",
           "vision-gpt2", "vision-bert"]  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTED, "bert", "bert-classes", "electra-generator", "t5", "t5-v1.1"])
def test_flops_are_torch_s(name: str) -> None:
    model, tokens, source = references.build(name), 7, 13
    model.set_attn_implementation("eager")
    ids = torch.ones(1, tokens, dtype=torch.long)
    inputs = {"input_ids": ids}
    if name == "whisper":
        inputs = {"input_features": torch.ones(1, 7, 2 * source), "decoder_input_ids": ids}
    if name == "vit":
        inputs, tokens = {"pixel_values": torch.ones(1, 2, 20, 20)}, 17
    if name.startswith("vision"):
        model.encoder.pooler = None  # whose result the decoder does not read
        inputs, source = {"pixel_values": torch.ones(1, 2, 20, 20), "decoder_input_ids": ids}, 17
    if name.startswith("t5"):
        inputs = {"input_ids": torch.ones(1, source, dtype=torch.long), "decoder_input_ids": ids}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    spec = _spec(name)
    source *= spec.layout == "encoder-decoder"
    assert sum(count(spec).flops(tokens, source=source).values()) == counter.get_total_flops()


@pytest.mark.parametrize("name", ["deberta", "deberta-c2p", "deberta-v2-conv", "deberta-v3"])
def test_flops_of_distances_are_torch_s(name: str) -> None:
    """Of our own forward: the reference also maps rows of the table that are further than any word."""
    model = triptych.load(references.saved(name)[1])
    model.module.requires_grad_(False)  # the counter's hooks mind a parameter that is handed to a module
    with FlopCounterMode(display=False) as counter:
        ids, rows = model.module.flat([list(range(17))])
        model.module.logits(nn.Batch(inputs=ids, rows=rows))
    assert sum(count(model.spec).flops(17).values()) == counter.get_total_flops()


def test_decode_flops_are_torch_s() -> None:
    model = references.build("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        past = model(torch.ones(1, 7, dtype=torch.long), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=past)
    assert count(_spec("llama")).decode_flops(7) == counter.get_total_flops()


def test_decoding_runs_the_encoder_once() -> None:
    model, source = references.build("t5"), torch.ones(1, 13, dtype=torch.long)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        memory = model.get_encoder()(source)
        past = model(encoder_outputs=memory, decoder_input_ids=source[:, :7], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(encoder_outputs=memory, decoder_input_ids=source[:, :1], past_key_values=past)
    assert count(_spec("t5")).decode_flops(7, source=13) == counter.get_total_flops()


# ---------------------------------------------------------------- from a path


def test_counting_a_path_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from triptych.count import count\n"
        "from triptych.checkpoints.header import read_header\n"
        f"print(count(read_header({str(QWEN3_4B)!r}).spec).total, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert out.stdout.split() == ["4022468096", "False"]


def test_headers(tmp_path: Path) -> None:
    path = references.saved("bert-no-pooler")[1]
    header = read_header(path)
    assert header.source is not None
    assert header.spec == _spec("bert-no-pooler")
    alone = read_header(path / "config.json")  # without the weights nobody knows that there is no pooler
    assert alone.source is None
    assert alone.spec.head != header.spec.head
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(tmp_path / "weights.bin")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_header(tmp_path)


def test_smollm2_from_its_header(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf)
    assert count(header.spec).total == 134_515_008
    plan = families.plan(header.spec, "gguf", header.source.names)
    assert len(plan.loads) == 272
    assert all(header.source.infos[load.source].shape == load.source_shape for load in plan.loads)


def test_minilm_from_its_directory(minilm_dir: Path) -> None:
    header = read_header(minilm_dir)
    assert count(header.spec).total == 22_713_216
    assert families.plan(header.spec, "hf", header.source.names).ignored.keys() <= {"embeddings.position_ids"}


def test_everything_as_plain_data() -> None:
    found = json.loads(json.dumps(qwen().to_dict(4096)))
    assert found["parameters"]["total"] == 4_022_468_096
    assert found["cache_bytes"]["fp16"] == 603_979_776
    assert found["flops"]["prefill"] == qwen().prefill_flops(4096)
    assert found["flops"]["train"] == 3 * sum(found["flops"]["forward"].values())
