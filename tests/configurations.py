"""Random configurations of every decoder-only family, drawn from a seed, as the `config.json` a repository would carry.

What is drawn is what the reference's configuration class takes and what occurs: heads, widths, biases, ties, windows,
scalings, mixtures, multipliers - each in the words of today or, for half of the seeds, in those of transformers 4.
"""

import copy
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONTEXT = 52
Config = dict[str, Any]
ACTS = ["silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "tanh"]
EPS = [1e-5, 1e-6, 1e-12, 0.03]


def draw(family: str, seed: int) -> Config:
    """The config of this family and seed, the same every time."""
    r = random.Random(f"{family} {seed}")
    config = FAMILIES[family](r) | _everywhere(r)
    return _as_before_5(config) if r.random() < 0.5 else config


def _everywhere(r: random.Random) -> Config:
    vocab = r.choice([41, 48, 64, 67])  # padded to a multiple of eight, or not
    ids: Config = {"bos_token_id": r.choice([None, 1, 50256]), "eos_token_id": r.choice([2, [2, 5], 50256, None])}
    return {"vocab_size": vocab, "initializer_range": 0.3, "use_cache": r.random() < 0.5, "dtype": "float32"} | ids


def _sometimes(r: random.Random, **choices: list[Any]) -> Config:
    """Each key with one of its values, or absent: then the family's default holds."""
    return {key: r.choice(values) for key, values in choices.items() if r.random() < 0.7}


def _heads(r: random.Random, *, grouped: bool = True, free: bool = True) -> Config:
    """Widths: kv heads 1, some or all, D / H odd or even, the width of a head that or another."""
    heads = r.choice([1, 2, 3, 4, 6])
    inner = 2 * r.choice([3, 4, 5, 7])
    config: Config = {"hidden_size": heads * inner, "num_attention_heads": heads}
    if grouped:
        config["num_key_value_heads"] = r.choice([g for g in range(1, heads + 1) if heads % g == 0])
    if free and r.random() < 0.6:
        config |= {"hidden_size": heads * r.choice([3, 5, 7, 8]), "head_dim": inner}
    return config


def _body(r: random.Random) -> Config:
    return {"intermediate_size": r.choice([19, 32, 37]), "num_hidden_layers": r.choice([1, 2, 3, 5]),
            "max_position_embeddings": CONTEXT} | _sometimes(r, hidden_act=ACTS)  # fmt: skip


def _width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(r: random.Random, width: int, *, share: float | None = None, kinds: str = "dldyrt") -> Config:
    """`rope_parameters` for heads that turn `width` dimensions: (d)efault, (l)inear, d(y)namic, ya(r)n, llama3 (t),
    (g) longrope."""
    theta: Config = {"rope_theta": r.choice([100.0, 10_000.0, 500_000.0, 1_000_000])}
    if share is not None:
        theta["partial_rotary_factor"] = share
    match r.choice(kinds):
        case "l":
            return {"rope_type": "linear", "factor": r.choice([2.0, 3.5, 8])} | theta
        case "y" if width > 2:
            return {"rope_type": "dynamic", "factor": r.choice([2.0, 4.0])} | theta
        case "r":
            return {"rope_type": "yarn", "factor": r.choice([2.0, 4.0, 40])} | _yarn(r) | theta
        case "t":
            factors = {"factor": r.choice([4.0, 32.0]), "low_freq_factor": 1.0, "high_freq_factor": r.choice([3.0, 4])}
            return {"rope_type": "llama3", "original_max_position_embeddings": r.choice([13, 26])} | factors | theta
        case "g":
            short, long = ([round(r.uniform(1, high), 3) for _ in range(width // 2)] for high in (1.5, 9))
            found: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long} | theta
            found |= {"original_max_position_embeddings": r.choice([7, 13, 26])}
            return found | _sometimes(r, factor=[4.0, 1.0, None], attention_factor=[None, 1.3])
        case _:
            return {"rope_type": "default"} | theta


def _yarn(r: random.Random) -> Config:
    found: Config = {"original_max_position_embeddings": r.choice([13, 26, 20])}
    found |= _sometimes(r, beta_fast=[32, 4.0, None], beta_slow=[1, 2.0, None], truncate=[True, False])
    if r.random() < 0.4:
        found["attention_factor"] = r.choice([None, 0.8, 1.4])
    if r.random() < 0.4:
        found |= {"mscale": r.choice([1.0, 0.707]), "mscale_all_dim": r.choice([1.0, 0.5, 0])}
    return found


def _as_before_5(config: Config) -> Config:
    """The same in the words of transformers 4: `rope_theta` beside `rope_scaling`, whose kind is a `type`."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": config["dtype"], "transformers_version": "4.40.2", "_name_or_path": "somewhere/else"}
    given = dict(config.get("rope_parameters") or {})
    if "full_attention" in given:  # Gemma 3
        local, given = given["sliding_attention"], dict(given["full_attention"])
        old["rope_local_base_freq"] = local["rope_theta"]
    names = ("rotary_pct", "rotary_emb_base") if config["model_type"] == "gpt_neox" else ()
    for name, other in zip(("partial_rotary_factor", "rope_theta"), names or (None, None), strict=True):
        if name in given:
            old[other or name] = given.pop(name)
    kind = given.pop("rope_type", "default")
    if config["model_type"] == "phi3" and "original_max_position_embeddings" in given:
        old["original_max_position_embeddings"] = given.pop("original_max_position_embeddings")
    if given:
        named = "rope_type" if kind == "llama3" or config["model_type"] == "gemma3_text" else "type"
        old["rope_scaling"] = {named: kind} | given
    elif "rope_parameters" in config and len(old) % 2:
        old["rope_scaling"] = None
    return old


# ---------------------------------------------------------------- one a family


def _gpt2(r: random.Random) -> Config:
    heads = r.choice([1, 2, 3, 4])
    config: Config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": heads,
                      "n_embd": heads * r.choice([3, 5, 8]), "n_layer": r.choice([1, 2, 4]),
                      "n_positions": CONTEXT}  # fmt: skip
    on = [True, False]
    return config | _sometimes(
        r, n_inner=[None, 37], activation_function=ACTS, layer_norm_epsilon=EPS, scale_attn_weights=on,
        scale_attn_by_inverse_layer_idx=on, reorder_and_upcast_attn=on, tie_word_embeddings=on, n_ctx=[CONTEXT],
        attn_pdrop=[0.0, 0.1], summary_type=["cls_index"],
    )  # fmt: skip


def _gptj(r: random.Random) -> Config:
    heads, inner = r.choice([1, 2, 3, 4]), r.choice([6, 8, 10])
    config: Config = {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "n_head": heads,
                      "n_embd": heads * inner, "n_layer": r.choice([1, 2, 3]), "n_positions": CONTEXT,
                      "rotary_dim": r.choice([2, 4, inner])}  # fmt: skip
    return config | _sometimes(r, n_inner=[None, 37], activation_function=ACTS, layer_norm_epsilon=EPS,
                               tie_word_embeddings=[True, False], rotary=[True])  # fmt: skip


def _gpt_neox(r: random.Random) -> Config:
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **_body(r)}
    config |= _heads(r, grouped=False, free=False)
    width = _width(config)
    share = r.choice([2 / width, 4 / width, 1.0])
    config["rope_parameters"] = _rope(r, int(width * share), share=share)
    on = [True, False]
    return config | _sometimes(r, use_parallel_residual=on, attention_bias=on, tie_word_embeddings=on,
                               layer_norm_eps=EPS, attention_dropout=[0.0, 0.1])  # fmt: skip


def _llama_like(r: random.Random, model_type: str, name: str, *, grouped: bool = True, free: bool = True) -> Config:
    config = {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], **_body(r)}
    config |= _heads(r, grouped=grouped, free=free)
    config |= _sometimes(r, rms_norm_eps=EPS, tie_word_embeddings=[True, False], attention_dropout=[0.0, 0.1])
    if r.random() < 0.85:
        config["rope_parameters"] = _rope(r, _width(config))
    return config


def _llama(r: random.Random) -> Config:
    config, on = _llama_like(r, "llama", "Llama"), [True, False]
    if r.random() < 0.3:
        del config["num_key_value_heads"]
    if r.random() < 0.2:
        config["rope_parameters"] = _rope(r, _width(config), kinds="g")
    return config | _sometimes(r, attention_bias=on, mlp_bias=on, pretraining_tp=[1, 2])


def _mistral(r: random.Random) -> Config:
    config = _llama_like(r, "mistral", "Mistral")
    return config | ({"head_dim": None} if "head_dim" not in config and r.random() < 0.5 else {}) | _sometimes(
        r, sliding_window=[None, 3, 4, 4096])  # fmt: skip


def _mixtral(r: random.Random) -> Config:
    config = _llama_like(r, "mixtral", "Mixtral")
    config["head_dim"] = _width(config)  # without it the reference fails in some scalings
    experts = r.choice([1, 4, 5, 8])
    config |= {"num_local_experts": experts, "num_experts_per_tok": r.choice([1, min(2, experts), experts])}
    return config | _sometimes(r, sliding_window=[None, 4], router_jitter_noise=[0.0], output_router_logits=[False])


def _qwen_windows(r: random.Random, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    found = _sometimes(r, use_sliding_window=[True, False], sliding_window=[3, 4, 32768],
                       max_window_layers=[0, 1, layers, 28])  # fmt: skip
    if found.get("use_sliding_window") and found.get("sliding_window") and r.random() < 0.5:
        found["layer_types"] = [r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return found


def _qwen2(r: random.Random) -> Config:
    config = _llama_like(r, "qwen2", "Qwen2", free=r.random() < 0.2)
    return config | _qwen_windows(r, config)


def _qwen3(r: random.Random) -> Config:
    config = _llama_like(r, "qwen3", "Qwen3")
    config["head_dim"] = _width(config)  # 128 by default
    return config | _qwen_windows(r, config) | _sometimes(r, attention_bias=[True, False])


def _qwen3_moe(r: random.Random) -> Config:
    config = _llama_like(r, "qwen3_moe", "Qwen3Moe")
    experts, layers = r.choice([4, 5, 8]), config["num_hidden_layers"]
    config |= {r.choice(["num_experts", "num_local_experts"]): experts, "moe_intermediate_size": r.choice([7, 12])}
    config["num_experts_per_tok"] = r.choice([1, 3, experts])
    dense = [[], [0], [layers - 1], list(range(layers)), None]
    return config | _sometimes(
        r, norm_topk_prob=[True, False], decoder_sparse_step=[1, 2, 3], mlp_only_layers=dense,
        attention_bias=[True, False], use_sliding_window=[True, False], sliding_window=[None, 3, 4],
        max_window_layers=[1, 28],
    )  # fmt: skip


def _phi(r: random.Random) -> Config:
    config = {"model_type": "phi", "architectures": ["PhiForCausalLM"], **_body(r), **_heads(r, free=False)}
    width = _width(config)
    if r.random() < 0.3:
        config["num_key_value_heads"] = None
    on, share = [True, False], r.choice([2 / width, 4 / width, 1.0])
    config["rope_parameters"] = _rope(r, int(width * share), share=share)
    return config | _sometimes(r, qk_layernorm=on, tie_word_embeddings=on, layer_norm_eps=EPS, resid_pdrop=[0.1])


def _phi3(r: random.Random) -> Config:
    config = _llama_like(r, "phi3", "Phi3", free=False) | {"pad_token_id": r.choice([0, 32, None])}
    width = _width(config)
    share = r.choice([2 / width, 4 / width, 1.0])
    config["rope_parameters"] = _rope(r, int(width * share), share=share, kinds="dg")
    original = config["rope_parameters"].get("original_max_position_embeddings", CONTEXT)
    config["original_max_position_embeddings"] = original
    return config | _sometimes(r, sliding_window=[None, 4, 2047], attention_bias=[False], embd_pdrop=[0.0])


def _gemma_like(r: random.Random, model_type: str, name: str) -> Config:
    config = _llama_like(r, model_type, name) | {"pad_token_id": 0}
    config["head_dim"] = _width(config)  # 256 by default
    if model_type != "gemma":  # it has another name there
        config.pop("hidden_act", None)
        config |= _sometimes(r, hidden_activation=ACTS)
    return config | _sometimes(r, attention_bias=[True, False])


def _gemma(r: random.Random) -> Config:
    return _gemma_like(r, "gemma", "Gemma") | _sometimes(r, hidden_activation=["gelu_pytorch_tanh", None])


def _gemma2(r: random.Random) -> Config:
    config = _gemma_like(r, "gemma2", "Gemma2") | _alternating(r)
    return config | _sometimes(r, attn_logit_softcapping=[None, 5.0, 50.0], final_logit_softcapping=[None, 7.0, 30.0])


def _gemma3(r: random.Random) -> Config:
    config = _gemma_like(r, "gemma3_text", "Gemma3") | _alternating(r)
    config["architectures"] = ["Gemma3ForCausalLM"]
    config.pop("rope_parameters", None)
    width = _width(config)
    if r.random() < 0.8:
        sliding = {"rope_type": "default", "rope_theta": r.choice([10_000.0, 50])}
        config["rope_parameters"] = {"full_attention": _rope(r, width), "sliding_attention": sliding}
    if r.random() < 0.4:
        config |= {"sliding_window_pattern": r.choice([2, 3, 6])}
        config.pop("layer_types", None)
    return config | _sometimes(r, attn_logit_softcapping=[None, 5.0], final_logit_softcapping=[None, 7.0],
                               use_bidirectional_attention=[False])  # fmt: skip


def _alternating(r: random.Random) -> Config:
    layers = r.choice([1, 2, 4, 7])
    found: Config = {"num_hidden_layers": layers, "sliding_window": r.choice([3, 4])}
    if r.random() < 0.5:
        found["layer_types"] = [r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return found | _sometimes(r, query_pre_attn_scalar=[10, 17, 256], cache_implementation=["hybrid"])


def _starcoder2(r: random.Random) -> Config:
    config = _llama_like(r, "starcoder2", "Starcoder2")
    config.pop("rms_norm_eps", None)
    on = [True, False]
    return config | _sometimes(r, use_bias=on, norm_epsilon=EPS, sliding_window=[None, 3, 4096],
                               residual_dropout=[0.1], embedding_dropout=[0.1])  # fmt: skip


def _granite(r: random.Random) -> Config:
    config = _llama_like(r, "granite", "Granite")
    on, times = [True, False], [1.0, 0.22, 2, 12.0]
    return config | _sometimes(
        r, attention_bias=on, mlp_bias=on, embedding_multiplier=times, attention_multiplier=[0.015625, 0.2, 1],
        residual_multiplier=times, logits_scaling=[8.0, 1, 3.0],
    )  # fmt: skip


FAMILIES: dict[str, Callable[[random.Random], Config]] = {
    "gpt2": _gpt2, "gpt_neox": _gpt_neox, "gptj": _gptj, "llama": _llama, "mistral": _mistral, "mixtral": _mixtral,
    "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "phi": _phi, "phi3": _phi3, "gemma": _gemma,
    "gemma2": _gemma2, "gemma3_text": _gemma3, "starcoder2": _starcoder2, "granite": _granite,
}  # fmt: skip


# ---------------------------------------------------------------- a checkpoint of it


def reference(config: Config, seed: int) -> Any:
    """The reference library's model of `config`, as it reads it, random; norms too, at 1 they hide a wrong offset."""
    import transformers

    mixture = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}  # as in references.py
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # words of transformers 4
        read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class._from_config(read, dtype=torch.float32, **mixture).eval()
    with torch.no_grad():
        for vector in model.parameters():
            if vector.dim() == 1:
                vector.add_(torch.randn_like(vector) * 0.2)
    return model


def write(model: Any, config: Config, path: Path, r: random.Random) -> None:
    """The directory a repository would hold: `config` as it is, tensors in one file or several, beside them buffers
    that old exporters stored, a tied head stored again or not."""
    path.mkdir()
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    head = model.get_output_embeddings()
    if r.random() < 0.3 and head.weight is model.get_input_embeddings().weight:
        tensors["lm_head.weight" if config["model_type"] != "gpt_neox" else "embed_out.weight"] = head.weight.clone()
    if r.random() < 0.5:
        tensors |= _buffers(config["model_type"], tensors)
    if config["model_type"] == "gpt2" and r.random() < 0.5:
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    shards = r.choice([1, 1, 2, 5])
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    parts = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    if shards == 1:
        parts = {"model.safetensors": names}
    else:
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        save_file({name: tensors[name].contiguous() for name in part}, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def _buffers(model_type: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masks and frequencies, in every layer, which exporters of their day took for weights."""
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    masks = {"bias": mask, "masked_bias": torch.tensor(-1e4)}
    turns = {"rotary_emb.inv_freq": torch.ones(3)}
    where, stored = {
        "gpt2": ("transformer.h.{}.attn", masks),
        "gptj": ("transformer.h.{}.attn", masks),
        "gpt_neox": ("gpt_neox.layers.{}.attention", masks | turns),
    }.get(model_type, ("model.layers.{}.self_attn", turns))
    layers = {name.split(".")[2] for name in tensors if name.count(".") > 3}
    return {f"{where.format(i)}.{name}": value.clone() for i in layers for name, value in stored.items()}
