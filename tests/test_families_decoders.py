"""What the configs and GGUF headers of the younger decoders mean: two spellings of one thing, defaults, leftovers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from references import EVEN, HEADERS, D, H, K, L, metadata, read, stored
from test_families import fill, packed_shapes
from triptych import families, spec
from triptych.errors import ConfigError
from triptych.spec.positions import Interpolate, LongRope


def test_gemma_3_in_both_spellings() -> None:
    """Two bases, of which transformers 5 keeps a table; before, the second had a key and a scaling was the first's."""
    hf, tensors = stored("gemma3-linear")
    old = {key: value for key, value in hf.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    stack = families.read_config(old | {"sliding_window_pattern": 2}, stored=tensors).decoder
    assert [block.attn.kind for block in stack.blocks] == ["window", "self", "window"]
    assert stack.kinds["self"].position == spec.RopeSpec(width=K, theta=500.0, scaling=Interpolate(factor=2.5))
    assert stack.kinds["window"].position == spec.RopeSpec(width=K, theta=50.0)
    hf["rope_parameters"]["full_attention"]["rope_theta"] = 500.0
    assert families.read_config(hf, stored=tensors).decoder == stack
    bare = {key: value for key, value in old.items() if not key.startswith("rope_")}
    kinds = families.read_config(bare | {"sliding_window_pattern": 2}, stored=tensors).decoder.kinds
    assert [kinds[name].position for name in ("self", "window")] == [
        spec.RopeSpec(width=K, theta=1_000_000.0),
        spec.RopeSpec(width=K, theta=10_000.0),
    ]
    pattern = [block.attn.kind for block in families.read_config(bare | {"num_hidden_layers": 7}).decoder.blocks]
    assert pattern == ["window"] * 5 + ["self", "window"]


def test_gemma_defaults() -> None:
    capped = read("gemma2").decoder.blocks[0].attn
    assert (capped.softcap, capped.scale) == (5.0, 17**-0.5)
    hf, tensors = stored("gemma2")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "layer_types"):
        del hf[key]
    model = families.read_config(hf, stored=tensors)
    attn = model.decoder.blocks[0].attn
    assert isinstance(model.head, spec.LMHeadSpec)
    assert (attn.softcap, model.head.softcap, attn.scale) == (50.0, 30.0, 256**-0.5)
    assert [block.attn.kind for block in model.decoder.blocks] == ["window", "self", "window"]
    assert read("gemma3", attn_logit_softcapping=5.0).decoder.blocks[0].attn.softcap is None
    assert read("gemma", hidden_act="gelu").decoder.blocks[0].mlp.act == "gelu_tanh"
    with pytest.raises(ConfigError, match="attend to later ones"):
        read("gemma3", use_bidirectional_attention=True)


def test_layers_of_qwen3_moe() -> None:
    def mixed(**changes: Any) -> list[bool]:
        hf, _ = stored("qwen3-moe-normed")
        return [isinstance(b.mlp, spec.MoESpec) for b in families.read_config(hf | changes).decoder.blocks]

    assert mixed() == [True] * L
    assert mixed(mlp_only_layers=[0, 2]) == [False, True, False]
    assert mixed(decoder_sparse_step=2) == [False, True, False]
    assert mixed(mlp_only_layers=None) == [True] * L
    hf, _ = stored("qwen3-moe")
    old = {key: value for key, value in hf.items() if key != "num_local_experts"} | {"num_experts": 5}
    assert families.read_config(old) == families.read_config(hf)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_gguf_norms_of_gemma_are_the_reference_s(name: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import Gemma2TensorProcessor

    hf, tensors = stored(name)
    model = families.read_config(hf, stored=tensors)
    parameters = fill(families.plan(model, "hf", tensors), tensors)
    shifted = 0
    for load in families.save_plan(model, "gguf"):
        packed = load.to_source(parameters)
        theirs = Gemma2TensorProcessor({}).process(packed.numpy(), load.source).weights
        assert torch.allclose(torch.from_numpy(theirs), parameters[load.ours[0]], rtol=0, atol=1e-6), load.source
        shifted += not load.rows_only
    assert shifted == 1 + L * {"gemma": 2, "gemma2": 4, "gemma3": 6}[name]


@pytest.mark.parametrize(
    ("name", "layers", "scalar"), [("gemma2", 46, D // H), ("gemma3", 62, D // H), ("gemma2", 62, K)]
)
def test_the_largest_gemmas_in_gguf_scale_scores_by_the_model_s_width(name: str, layers: int, scalar: int) -> None:
    header = HEADERS[name] | {f"{name}.block_count": layers}
    config, model = families.read_gguf(header, packed_shapes(name))
    assert config["query_pre_attn_scalar"] == scalar
    assert {block.attn.scale for block in model.decoder.blocks} == {scalar**-0.5}


def test_phi3_s_factors_come_from_two_tensors() -> None:
    factors = {"rope_factors_short.weight": [1.0, 1.1], "rope_factors_long.weight": [1.3, 1.9]}
    hf, shapes = read("phi3-long"), packed_shapes("phi3-long") | dict.fromkeys(factors, (2,))
    header = metadata(
        "phi3",
        **EVEN | {"attention.layer_norm_rms_epsilon": 9.999999747378752e-06},
        **{"rope.freq_base": 1000.0, "rope.scaling.original_context_length": 13},
    )
    _, model = families.read_gguf(header, shapes, read=factors.__getitem__)
    assert model == replace(hf, ids=spec.SpecialIds(eos=(2,)), init_std=0.02)
    _, other = families.read_gguf(header | {"phi3.rope.scaling.attn_factor": 1.5}, shapes, read=factors.__getitem__)
    position = other.decoder.kinds["self"].position
    assert isinstance(position, spec.RopeSpec)
    assert isinstance(position.scaling, LongRope)
    assert position.scaling.attention_factor == 1.5
    assert factors.keys() == families.plan(model, "gguf", shapes).ignored.keys()
