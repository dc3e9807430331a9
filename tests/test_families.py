"""Families against the reference library: every key and every tensor understood, in both directions."""

import ast
import json
import math
import re
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch

import references
from references import COMPUTED, CONTEXT, HEADERS, SPARE, UNSAID, D, F, G, H, K, L, V, read, stored
from triptych import families, spec
from triptych.errors import CheckpointError, ConfigError
from triptych.mapping.config_keys import METADATA, ConfigKeys
from triptych.mapping.tensor_plan import PlusOne, TensorPlan
from triptych.mapping.weight_table import WeightTableRow, table
from triptych.spec.positions import Interpolate, Llama3, LongRope, YaRN


def fill(plan: TensorPlan, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for load in plan.loads:
        assert tuple(tensors[load.source].shape) == load.source_shape, load.source
        for ours, value in load.to_ours(tensors[load.source]).items():
            if load.duplicate:
                assert torch.equal(found[ours], value)
            else:
                assert ours not in found
                found[ours] = value
    return found


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# ---------------------------------------------------------------- every reference


SPARES = set(SPARE.values())
LEFT = SPARES | COMPUTED | references.UNREAD
FLAT = [name for name in references.NAMES if name not in references.NESTED]


@pytest.mark.parametrize("name", references.NAMES)
def test_every_tensor_is_used_once_and_written_back_bit_for_bit(name: str) -> None:
    hf, tensors = stored(name)
    model = families.read_config(hf, stored=tensors)
    plan = families.plan(model, "hf", tensors)
    assert sorted([*(load.source for load in plan.loads), *plan.ignored]) == sorted(tensors)
    assert plan.ignored.keys() <= LEFT
    parameters = fill(plan, tensors)
    assert shapes(parameters) == model.shapes()
    back = {load.source: load.to_source(parameters) for load in families.save_plan(model)}
    assert tensors.keys() - COMPUTED - references.UNREAD <= back.keys() <= tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors.keys() - plan.ignored.keys())


@pytest.mark.parametrize("name", references.NAMES)
def test_specs_survive_json_and_our_own_config(name: str) -> None:
    hf, tensors = stored(name)
    model = families.read_config(hf, stored=tensors)
    assert spec.from_json(json.loads(json.dumps(spec.to_json(model)))) == model
    own = families.read_config(json.loads(json.dumps(families.to_config(model))))
    assert own == replace(model, family="triptych")
    assert [load.source for load in families.save_plan(own)] == list(model.shapes())


@pytest.mark.parametrize("name", references.NAMES)
def test_what_is_not_understood_is_refused(name: str) -> None:
    hf, tensors = stored(name)
    with pytest.raises(ConfigError, match=r"'attn_sauce' .* is not understood"):
        families.read_config(hf | {"attn_sauce": 1}, stored=tensors)
    assert families.read_config(hf | {"attn_sauce": 1}, stored=tensors, ignore=["attn_sauce"])
    model = families.read_config(hf, stored=tensors)
    with pytest.raises(CheckpointError, match="missing 1 tensors"):
        families.plan(model, "hf", tensors.keys() - {max(tensors.keys() - SPARES - references.UNREAD)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors: 'x\.0\.weight'.*ignore=\['x"):
        families.plan(model, "hf", tensors.keys() | {"x.0.weight"})
    asked = families.plan(model, "hf", tensors.keys() | {"x.0.weight"}, ignore=["x.*"]).ignored
    assert asked.keys() - LEFT == {"x.0.weight"}
    assert asked["x.0.weight"] == "as asked"


@pytest.mark.parametrize("name", FLAT)
def test_every_key_that_is_read_is_checked(name: str) -> None:
    hf, tensors = stored(name)
    keys = ConfigKeys(hf, stored=tensors)
    families.find(hf["model_type"]).config(keys)
    checked = keys.read & hf.keys() - METADATA
    assert len(checked) > 8
    for key in checked:
        with pytest.raises(ConfigError):
            families.read_config(hf | {key: ["a", -1]}, stored=tensors)


# Where an absent key means something else to us, and why.
OTHERWISE = {
    ("deberta", "legacy"): "the head that is stored",
    ("deberta-v2", "legacy"): "the head that is stored",
}


@pytest.mark.parametrize("name", FLAT)
def test_an_absent_key_means_what_the_reference_means_by_it(name: str) -> None:
    hf, tensors = stored(name)
    reference = type(references.saved(name)[0].config)
    keys = ConfigKeys(hf, stored=tensors)
    families.find(hf["model_type"]).config(keys)
    tried = 0
    for key in keys.read & hf.keys() - METADATA:
        less = {k: v for k, v in hf.items() if k != key}
        try:
            model = families.read_config(less, stored=tensors)
        except ConfigError:
            continue  # needed, or the default of a large model does not fit this small one
        tried += 1
        filled = json.loads(reference.from_dict(dict(less)).to_json_string(use_diff=False))
        if (hf["model_type"], key) not in OTHERWISE:
            assert model == families.read_config(filled, stored=tensors), key
    assert tried > 3


IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad", "decoder_start_token_id": "start"}


@pytest.mark.parametrize("name", [name for name in references.VARIANTS if name in FLAT])
def test_an_absent_special_token_is_the_reference_s(name: str) -> None:
    hf = {key: value for key, value in stored(name)[0].items() if key not in IDS}
    hf |= {key: 2**17 for key in hf if key.endswith("vocab_size")}  # all ids are inside
    theirs = type(references.saved(name)[0].config).from_dict(dict(hf))
    expected = {ours: getattr(theirs, key, None) for key, ours in IDS.items()}
    if name.startswith(("t5", "mt5")):  # its class leaves it to each checkpoint, all of which say the pad
        expected["start"] = expected["pad"]
    found = families.read_config(hf).ids
    eos = () if expected["eos"] is None else (expected["eos"],)
    assert found == spec.SpecialIds(**{**expected, "eos": eos})
    assert families.read_config(hf | {"eos_token_id": None}).ids.eos == ()  # null is not absent


def test_every_type_with_special_tokens_is_compared() -> None:
    tried = {stored(name)[0]["model_type"] for name in references.VARIANTS}
    assert tried >= {name for family in families.all_families() for name in family.hf_types} - {"triptych"}


SIZES = {
    "gpt2": ("vocab_size", "n_embd", "n_inner", "n_layer", "n_positions"),
    "llama": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    "bert": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "type_vocab_size"),
    "t5": ("vocab_size", "d_model", "d_ff", "d_kv", "num_layers", "num_decoder_layers", "num_heads"),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in SIZES.items() for key in keys])
def test_a_wrong_size_does_not_fit_the_tensors(name: str, key: str) -> None:
    hf, tensors = stored(name)
    step = {"num_attention_heads": G, "n_embd": H, "hidden_size": H}.get(key, 2)
    model = families.read_config(hf | {key: hf[key] + step}, stored=tensors)
    with pytest.raises((CheckpointError, AssertionError)):
        fill(families.plan(model, "hf", tensors), tensors)
    for bad in (0, -1, 2**31, True, 2.5, "12", None):
        if (key, bad) in (("n_inner", None), ("num_decoder_layers", None), ("head_dim", None), ("type_vocab_size", 0)):
            continue  # these mean something
        with pytest.raises(ConfigError, match=key):
            families.read_config(hf | {key: bad}, stored=tensors)


# ---------------------------------------------------------------- what the configs mean


def test_llama_in_numbers() -> None:
    model = read("llama")
    attn = model.decoder.blocks[0].attn
    assert (attn.heads, attn.kv_heads, attn.head_width, model.vocab, model.context) == (H, G, K, V, CONTEXT)
    assert model.shapes()["decoder.blocks.2.mlp.gate.weight"] == (F, D)
    assert len(model.decoder.blocks) == L
    assert model.ids == spec.SpecialIds(pad=0, bos=1, eos=(2,))
    assert model.decoder.kinds == {
        "self": spec.KindSpec(mask=spec.causal(), position=spec.RopeSpec(width=K, theta=10_000.0))
    }
    assert not model.ties
    assert read("llama-tied").ties == {"head.proj.weight": "decoder.embed.tokens.weight"}
    assert read("llama", eos_token_id=[2, 7, 999]).ids.eos == (2, 7)
    assert read("llama", pad_token_id=-1).ids.pad is None


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("llama-linear", Interpolate(factor=2.5)),
        ("llama-yarn", YaRN(factor=4.0, original_length=13)),
        ("llama-llama3", Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_length=13)),
        (
            "llama-longrope",
            LongRope(
                short=(1.0, 1.1, 1.2, 1.4, 1.7),
                long=(1.3, 1.9, 2.5, 3.1, 3.7),
                original_length=13,
                max_length=52,
                attention_factor=math.sqrt(1 + math.log(4) / math.log(13)),
            ),
        ),
    ],
)
def test_rope_scalings_in_both_spellings(name: str, scaling: Any) -> None:
    hf, tensors = stored(name)
    expected = spec.RopeSpec(width=K, theta=1000.0, scaling=scaling)
    assert families.read_config(hf, stored=tensors).decoder.kinds["self"].position == expected
    old = {key: value for key, value in hf.items() if key != "rope_parameters"}
    given = dict(hf["rope_parameters"])
    old |= {"rope_theta": given.pop("rope_theta"), "rope_scaling": given | {"type": given.pop("rope_type")}}
    assert families.read_config(old, stored=tensors).decoder.kinds["self"].position == expected


def test_where_the_original_length_is_written() -> None:
    """Beside the scaling it wins over inside it, and without either it is the context: as in the reference."""
    scaling = {"rope_type": "yarn", "factor": 2.0}
    inside = scaling | {"original_max_position_embeddings": 13}
    for changes, expected in (
        ({"rope_parameters": inside}, 13),
        ({"rope_parameters": inside, "original_max_position_embeddings": 17}, 17),
        ({"rope_parameters": scaling}, CONTEXT),
    ):
        position = read("llama", **changes).decoder.kinds["self"].position
        assert position == spec.RopeSpec(width=K, scaling=YaRN(factor=2.0, original_length=expected))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic"}, "needs the key 'factor'"),
        ({"rope_type": "mystery"}, "rope_type 'mystery' is not default, linear"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, "'beta' .* is not understood"),
        ({"rope_type": "linear"}, "needs the key 'factor'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.4}, "of this family rotates whole heads"),
    ],
)
def test_rope_refusals(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("llama", rope_parameters=rope)


def test_partial_rotary_in_both_spellings() -> None:
    inside = read("phi3", rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.4})
    beside = read("phi3", rope_parameters=None, partial_rotary_factor=0.4)
    assert inside.decoder.kinds == beside.decoder.kinds
    assert inside.decoder.kinds["self"].position == spec.RopeSpec(width=4)
    with pytest.raises(ConfigError, match="must be even"):
        read("phi3", rope_parameters=None, partial_rotary_factor=0.1)


def test_windows() -> None:
    assert read("mistral").decoder.kinds["self"].mask == spec.causal() & spec.window(4)
    assert read("mistral-full").decoder.kinds["self"].mask == spec.causal()
    stack = read("qwen2-window").decoder
    assert [block.attn.kind for block in stack.blocks] == ["self", "window", "window"]
    assert stack.kinds["window"].mask == spec.causal() & spec.window(4)
    assert {k.mask for k in read("qwen2").decoder.kinds.values()} == {spec.causal()}
    turned = ["sliding_attention", "full_attention", "full_attention"]
    assert [b.attn.kind for b in read("qwen2-window", layer_types=turned).decoder.blocks] == [
        "window",
        "self",
        "self",
    ]
    assert read("qwen2-window", layer_types=None).decoder == stack  # from max_window_layers on
    with pytest.raises(ConfigError, match="layer_types"):
        read("qwen2", layer_types=turned)


def test_absent_keys_mean_the_reference_s_defaults() -> None:
    hf, tensors = stored("mistral")
    del hf["sliding_window"]
    assert families.read_config(hf, stored=tensors).decoder.kinds["self"].mask == spec.causal() & spec.window(4096)


def test_gpt2_scales() -> None:
    assert [b.attn.scale for b in read("gpt2").decoder.blocks] == [None] * L
    assert [b.attn.scale for b in read("gpt2-unscaled").decoder.blocks] == [1.0] * L
    scales = [b.attn.scale for b in read("gpt2-layer-scale").decoder.blocks]
    assert scales == [(D / H) ** -0.5 / (i + 1) for i in range(L)]


def test_bert_heads() -> None:
    assert isinstance(read("bert").head, spec.MaskedLMHeadSpec)
    classes, tokens = read("bert-classes").head, read("bert-tokens").head
    assert isinstance(classes, spec.ClassHeadSpec)
    assert isinstance(tokens, spec.TokenHeadSpec)
    assert classes.classes.outputs == tokens.classes.outputs == 5
    with_pooler, without = read("bert-pooler").head, read("bert-no-pooler").head
    assert with_pooler == spec.PoolingSpec(dense=spec.LinearSpec(inputs=D, outputs=D, bias=True))
    assert without == spec.PoolingSpec()
    pooled = read("bert-no-pooler", triptych_pooling={"mode": "first", "normalize": True}).head
    assert pooled == spec.PoolingSpec(mode="first", normalize=True)
    with pytest.raises(ConfigError, match="needs the pooler"):
        read("bert-no-pooler", triptych_pooling={"mode": "dense"})
    with pytest.raises(ConfigError, match="BertForChess"):
        read("bert", architectures=["BertForChess"])


def test_old_bert_exports() -> None:
    """TensorFlow's names of norms, stored positions, and the parts of pretraining a masked LM has no use for."""
    _, tensors = stored("bert")
    model = read("bert")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for k in tensors
    }
    extra = {"bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.bias"}
    aliases = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    plan = families.plan(model, "hf", old | extra | aliases)
    assert plan.ignored.keys() == extra
    assert all(plan.ignored.values())
    assert {load.source for load in plan.loads if load.duplicate} == aliases
    assert {load.source for load in plan.loads} == old | aliases


def test_old_gpt2_exports_and_missing_prefix() -> None:
    _, tensors = stored("gpt2")
    bare = {name.removeprefix("transformer.") for name in tensors}
    plan = families.plan(read("gpt2"), "hf", bare | {"h.0.attn.bias", "h.2.attn.masked_bias"})
    assert plan.ignored.keys() == {"h.0.attn.bias", "h.2.attn.masked_bias"}
    with pytest.raises(CheckpointError, match=r"h\.9\.attn\.bias"):
        families.plan(read("gpt2"), "hf", bare | {"h.9.attn.bias"})


def test_a_tied_model_may_store_its_head_under_either_name() -> None:
    _, tensors = stored("llama-tied")
    model = read("llama-tied")
    both = families.plan(model, "hf", tensors.keys() | {"lm_head.weight"})
    assert [load.source for load in both.loads if load.duplicate] == ["lm_head.weight"]
    only = families.plan(model, "hf", tensors.keys() - {"model.embed_tokens.weight"} | {"lm_head.weight"})
    head = next(load for load in only.loads if load.source == "lm_head.weight")
    assert head.ours == ("decoder.embed.tokens.weight",)
    assert not head.duplicate


def test_t5_heads() -> None:
    tied, unscaled, published = read("t5"), read("t5-unscaled"), read("t5-v1.1")
    assert isinstance(tied.head, spec.LMHeadSpec)
    assert isinstance(unscaled.head, spec.LMHeadSpec)
    assert (tied.head.scale, unscaled.head.scale) == (D**-0.5, None)
    assert "head.proj.weight" in tied.ties
    assert "head.proj.weight" in unscaled.ties
    assert published.ties == {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"}
    assert tied.ids.start == 0
    assert read("t5-encoder").layout == "encoder"
    _, tensors = stored("t5")
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    plan = families.plan(tied, "hf", tensors.keys() | copies)
    assert {load.source for load in plan.loads if load.duplicate} == copies


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "own code"),
        ({"quantization_config": {"bits": 4}}, "packed"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"hidden_act": "glue"}, r"'glue' is not one of .* \(did you mean 'gelu'\?\)"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"rms_norm_eps": -1.0}, "between"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"num_hidden_layers": 4097}, "between 1 and 4096"),
        ({"tie_word_embedding": True}, "tie_word_embedding"),
        ({"architectures": ["LlamaForChess"]}, "LlamaForChess"),
        ({"model_type": "lama"}, r"did you mean 'llama'\?"),
        ({"model_type": None}, "model_type must be a string"),
    ],
)
def test_refusals_name_file_key_and_reason(changes: dict[str, Any], message: str) -> None:
    hf, tensors = stored("llama")
    with pytest.raises(ConfigError, match=message) as caught:
        families.read_config(hf | changes, stored=tensors, where="x/config.json")
    assert str(caught.value).startswith("x/config.json: ")
    assert "\n" not in str(caught.value)


def test_refused_keys_are_harmless_while_off() -> None:
    assert read("llama", auto_map=None, pruned_heads={}, add_cross_attention=False) == read("llama")


# ---------------------------------------------------------------- GGUF

ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def arch_of(header: dict[str, Any]) -> str:
    return str(header["general.architecture"])


def test_every_architecture_that_a_family_reads_has_a_header() -> None:
    read = {arch for family in families.all_families() for arch in family.gguf_archs}
    assert read == {arch_of(header) for header in HEADERS.values()}


@pytest.mark.parametrize("name", HEADERS)
def test_gguf_round_trip_and_names(name: str) -> None:
    hf, tensors = stored(name)
    model = families.read_config(hf, stored=tensors)
    parameters = fill(families.plan(model, "hf", tensors), tensors)
    packed = {load.source: load.to_source(parameters) for load in families.save_plan(model, "gguf")}
    back = fill(families.plan(model, "gguf", packed), packed)
    assert back.keys() == parameters.keys()
    shifted = {load.ours[0] for load in families.save_plan(model, "gguf") if PlusOne() in load.ops}
    assert all(torch.equal(back[key], parameters[key]) for key in back.keys() - shifted)
    assert all(torch.allclose(back[key], parameters[key], rtol=0, atol=1e-6) for key in shifted)
    names = gguf.get_tensor_name_map(ARCHS[arch_of(HEADERS[name])], L + 1)
    merged = {re.sub(r"(experts)\.\d+", r"\1", key) for key in tensors}  # of all experts one tensor
    expected = {names.get_name(key, try_suffixes=(".weight", ".bias")) for key in merged}
    assert packed.keys() == expected


def test_gguf_rope_permutation_is_the_reference_s() -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    hf, tensors = stored("llama")
    model = families.read_config(hf, stored=tensors)
    parameters = fill(families.plan(model, "hf", tensors), tensors)
    processor = LlamaTensorProcessor({"num_attention_heads": H, "num_key_value_heads": G})
    moved = 0
    for load in families.save_plan(model, "gguf"):
        if ".attn_q." in load.source or ".attn_k." in load.source:
            kv = G if ".attn_k." in load.source else None
            packed = load.to_source(parameters)
            theirs = processor._reverse_permute_weights(packed.numpy(), H, kv)
            assert torch.equal(torch.from_numpy(theirs), parameters[load.ours[0]])
            assert load.rows_only
            moved += not torch.equal(packed, parameters[load.ours[0]])
    assert moved == 2 * L


def test_only_row_ops_may_touch_packed_columns() -> None:
    _, tensors = stored("gpt2")
    model = read("gpt2")
    by_name = {load.source: load for load in families.plan(model, "hf", tensors).loads}
    assert not by_name["transformer.h.0.attn.c_attn.weight"].rows_only
    assert by_name["transformer.wte.weight"].rows_only
    assert all(load.rows_only for load in families.save_plan(model, "gguf"))


def packed_shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {load.source: load.source_shape for load in families.save_plan(read(name), "gguf")}


@pytest.mark.parametrize("name", HEADERS)
def test_a_gguf_header_gives_the_spec_of_the_hf_config(name: str) -> None:
    config, model = families.read_gguf(HEADERS[name], packed_shapes(name))
    hf = read(name, **UNSAID.get(name, {}))  # ids and the initial scale are not the architecture's
    assert model == replace(hf, ids=spec.SpecialIds(eos=(2,), start=hf.ids.start), init_std=0.02)
    assert families.read_config(json.loads(json.dumps(config)), stored=()) == model


def test_gguf_refusals() -> None:
    shapes = packed_shapes("llama")
    for change, message in {
        "llama.attention.sauce": "'attention.sauce' .* not understood",
        "llama.attention.value_length": "widths of a head differ",
        "llama.block_count": "block_count must be",
    }.items():
        with pytest.raises(ConfigError, match=message):
            families.read_gguf(HEADERS["llama"] | {change: K + 2 if "length" in change else "many"}, shapes)
    with pytest.raises(ConfigError, match="architecture 'lama' is not one of"):
        families.read_gguf({"general.architecture": "lama"}, shapes)
    with pytest.raises(ConfigError, match="must be a string"):
        families.read_gguf({}, shapes)


def test_llama3_divisors_come_from_a_tensor() -> None:
    factors = [1.0, 1.0, 2.5, 6.0, 8.0]
    shapes = packed_shapes("llama") | {"rope_freqs.weight": (K // 2,)}
    config, model = families.read_gguf(HEADERS["llama"], shapes, read=lambda name: factors)
    position = model.decoder.kinds["self"].position
    assert position == spec.RopeSpec(
        width=K,
        scaling=LongRope(
            short=tuple(factors), long=tuple(factors), original_length=CONTEXT, max_length=CONTEXT, attention_factor=1.0
        ),
    )
    assert config["rope_parameters"]["rope_type"] == "longrope"
    assert "rope_freqs.weight" in families.plan(model, "gguf", shapes).ignored


def test_gguf_scalings() -> None:
    shapes = packed_shapes("llama")
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    _, linear = families.read_gguf(HEADERS["llama"] | scaled, shapes)
    assert linear.decoder.kinds["self"].position == spec.RopeSpec(width=K, scaling=Interpolate(factor=2.5))
    scaled = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 13,
    }
    _, yarn = families.read_gguf(HEADERS["llama"] | scaled, shapes)
    position = yarn.decoder.kinds["self"].position
    assert position == spec.RopeSpec(width=K, scaling=YaRN(factor=4.0, original_length=13))


# ---------------------------------------------------------------- the engine itself


def test_discovery_finds_each_type_once() -> None:
    types = [name for family in families.all_families() for name in family.hf_types]
    assert len(types) == len(set(types))
    assert {"gpt2", "llama", "mistral", "qwen2", "qwen3", "bert", "t5", "triptych"} <= set(types)
    assert families.find("qwen3") is families.find_gguf("qwen3")
    for family in families.all_families():
        assert all(families.find(name) is family for name in family.hf_types)
        assert all(families.find_gguf(name) is family for name in family.gguf_archs)


def test_a_family_file_defines_nothing_that_is_not_read() -> None:
    """A misspelt optional name would be silently without effect.  beartype checks the types of those that are read."""
    read = {one.name for one in fields(families.Family)} | {"TYPE_CHECKING"}
    for family in families.all_families():
        module = import_module(f"triptych.families.{family.name}")
        tree = ast.parse(Path(str(module.__file__)).read_text())
        plain = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                 if isinstance(target, ast.Name)}  # fmt: skip
        assert {name for name in plain if not name.startswith("_") and not name.isupper()} <= read, family.name
        assert (family.from_gguf is not None) == bool(family.gguf_archs), family.name


def test_an_incomplete_family_file_is_refused() -> None:
    module = ModuleType("triptych.families.half")
    assert families.Family.of(module) is None
    module.hf_types = frozenset({"half"})
    with pytest.raises(TypeError, match=r"triptych.families.half defines hf_types and lacks config, weights"):
        families.Family.of(module)


def test_a_family_fits_two_screens() -> None:
    files = {path.name: path.read_text().count("\n") for path in Path(families.__file__).parent.glob("*.py")}
    assert not {name: lines for name, lines in files.items() if lines > 120}


def test_tables_are_read_as_written() -> None:
    rows = table("""
    a.(q,k).*    x.{i}.qk.*|transpose  -   # a reason
    -            x.junk                y.junk
    [GLU]
    b.weight     x.b
    """)
    assert rows[0] == WeightTableRow(("a.q.*", "a.k.*"), "x.{i}.qk.*", None, ("transpose",), (), None, "a reason")
    assert rows[1] == WeightTableRow((), "x.junk", "y.junk")
    assert rows[2] == WeightTableRow(("b.weight",), "x.b", None, part="GLU")


def test_own_configs_are_checked() -> None:
    good = families.to_config(read("llama"))
    for bad, message in (
        (good | {"triptych_version": 2}, "version 2 is not 1"),
        (good | {"spec": {"part": "RMSNorm", "width": 3}}, "is a part, not a model"),
        (good | {"spec": {"part": "os.system"}}, "unknown part"),
        (good | {"more": 1}, "'more'"),
    ):
        with pytest.raises(ConfigError, match=message):
            families.read_config(bad)
