"""Tiny random models of the reference library, one line a variant: the oracles of every family.

`saved(name)` gives the transformers model (fp32, evaluation mode) and the directory it was saved in, made once a run.
Sizes differ pairwise, so that no axis can stand in for another.
"""

import json
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file

from triptych.families import read_config
from triptych.spec import ModelSpec

V, D, F, L, H, G, K, CONTEXT = 41, 24, 37, 3, 6, 3, 10, 52
INIT = 0.3  # large, so that a wrong head or norm moves the logits far
EPS = 0.05  # in a variant of each norm, for the same reason

_DECODER = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L,
            "num_attention_heads": H, "num_key_value_heads": G, "head_dim": K, "max_position_embeddings": CONTEXT,
            "initializer_range": INIT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_inner": F, "n_positions": CONTEXT,
         "initializer_range": INIT, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# Heads of 30 / 5 dimensions, where a config cannot say another width.
_EVEN = {"vocab_size": V, "hidden_size": 30, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": 5,
         "max_position_embeddings": CONTEXT, "initializer_range": INIT, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0}  # fmt: skip
_GPTJ = {"vocab_size": V, "n_embd": 30, "n_layer": L, "n_head": 5, "n_inner": F, "n_positions": CONTEXT,
         "rotary_dim": 4, "initializer_range": INIT, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# One expert after the other: their grouped kernel refuses widths that are no multiple of 16 bytes.
_MIXTURE = {**_DECODER, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_GEMMA2 = {**_DECODER, "sliding_window": 4, "query_pre_attn_scalar": 17, "attn_logit_softcapping": 5.0,
           "final_logit_softcapping": 7.0}  # fmt: skip
_GEMMA3 = {**_DECODER, "sliding_window": 4, "query_pre_attn_scalar": 17,
           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
_GRANITE = {**_DECODER, "embedding_multiplier": 2.5, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
            "logits_scaling": 3.0}  # fmt: skip
_BERT = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
         "max_position_embeddings": CONTEXT, "type_vocab_size": 4, "initializer_range": INIT}  # fmt: skip
_DISTIL = {"vocab_size": V, "dim": D, "hidden_dim": F, "n_layers": L, "n_heads": H, "max_position_embeddings": CONTEXT,
           "initializer_range": INIT}  # fmt: skip
_ELECTRA = {**_BERT, "embedding_size": 15}
_DEBERTA = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
            "max_position_embeddings": CONTEXT, "initializer_range": INIT, "relative_attention": True,
            "max_relative_positions": 9, "pos_att_type": "c2p|p2c"}  # fmt: skip
_DEBERTA3 = {**_DEBERTA, "max_relative_positions": 12, "position_buckets": 6, "norm_rel_ebd": "layer_norm",
             "share_att_key": True, "position_biased_input": False}  # fmt: skip
_MODERN = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
           "max_position_embeddings": CONTEXT, "local_attention": 6, "initializer_range": INIT,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
_BART = {"vocab_size": V, "d_model": D, "encoder_layers": 2, "decoder_layers": L, "encoder_attention_heads": H,
         "decoder_attention_heads": G, "encoder_ffn_dim": F, "decoder_ffn_dim": F + 2, "init_std": INIT,
         "max_position_embeddings": CONTEXT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
         "decoder_start_token_id": 0}  # fmt: skip
_WHISPER = {"vocab_size": V, "num_mel_bins": 7, "d_model": D, "encoder_layers": 2, "decoder_layers": L,
            "encoder_attention_heads": H, "decoder_attention_heads": G, "encoder_ffn_dim": F, "decoder_ffn_dim": F + 2,
            "max_source_positions": 13, "max_target_positions": CONTEXT, "init_std": INIT, "pad_token_id": 2,
            "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
_VIT = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H, "image_size": 20,
        "patch_size": 5, "num_channels": 2, "initializer_range": INIT}  # fmt: skip
_SEEING = {**_VIT, "hidden_size": 18, "intermediate_size": F + 4, "num_hidden_layers": 2, "num_attention_heads": G}
_READING = {"is_decoder": True, "add_cross_attention": True}
_START = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_T5 = {"vocab_size": V, "d_model": D, "d_kv": K, "d_ff": F, "num_layers": 2, "num_decoder_layers": L, "num_heads": H,
       "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "pad_token_id": 0,
       "decoder_start_token_id": 0, "initializer_factor": 1.0}  # fmt: skip
_FAR = {**_T5, "relative_attention_max_distance": 128, "num_layers": 4}  # as llama.cpp opens them


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


_SHORT, _LONG = [1.0, 1.1, 1.2, 1.4, 1.7], [1.3, 1.9, 2.5, 3.1, 3.7]  # K / 2 factors

_HEAD = re.compile("(For[A-Z].*|LMHeadModel|MTModel|EncoderModel|Model)$")


def _config_class(model_class: str) -> str:
    kind = _HEAD.sub("", model_class)
    return f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config"


# name -> (configuration class, model class, its keys)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (_config_class(model), model, keys) for name, (model, keys) in {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", _GPT2 | {"tie_word_embeddings": False, "layer_norm_epsilon": EPS}),
    "gpt2-base": ("GPT2Model", _GPT2),
    "gpt2-layer-scale": ("GPT2LMHeadModel", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("GPT2LMHeadModel", _GPT2 | {"scale_attn_weights": False, "n_inner": None}),
    "llama": ("LlamaForCausalLM", _DECODER),
    "llama-base": ("LlamaModel", _DECODER),
    "llama-mqa": ("LlamaForCausalLM", _DECODER | {"num_key_value_heads": 1}),
    "llama-mha": ("LlamaForCausalLM", _DECODER | {"num_key_value_heads": H, "head_dim": D // H, "rms_norm_eps": EPS}),
    "llama-biased": ("LlamaForCausalLM", _DECODER | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "llama-linear": ("LlamaForCausalLM", _DECODER | _rope("linear", factor=2.5)),
    "llama-yarn": ("LlamaForCausalLM", _DECODER | _rope("yarn", factor=4.0, original_max_position_embeddings=13)),
    "llama-llama3": ("LlamaForCausalLM", _DECODER | _rope("llama3", factor=4.0, low_freq_factor=1.0,
        high_freq_factor=3.0, original_max_position_embeddings=13)),
    "llama-longrope": ("LlamaForCausalLM", _DECODER | _rope("longrope", short_factor=_SHORT, long_factor=_LONG,
        factor=4.0, original_max_position_embeddings=13)),
    "mistral": ("MistralForCausalLM", _DECODER | {"sliding_window": 4}),
    "mistral-full": ("MistralForCausalLM", _DECODER | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in _DECODER.items() if k != "head_dim"}),
    "qwen2-window": ("Qwen2ForCausalLM", {k: v for k,
        v in _DECODER.items() if k != "head_dim"} | {"use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", _DECODER),
    "qwen3-tied": ("Qwen3ForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2ForCausalLM", _DECODER),
    "starcoder2-untied": ("Starcoder2ForCausalLM", _EVEN | {"num_key_value_heads": 1, "use_bias": False,
        "tie_word_embeddings": False, "sliding_window": 4, "norm_epsilon": EPS} | _rope("linear", factor=2.5)),
    "granite": ("GraniteForCausalLM", _GRANITE),
    "granite-tied": ("GraniteForCausalLM", _GRANITE | {"tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", _EVEN | _rope("default", partial_rotary_factor=0.7) | {"layer_norm_eps": EPS}),
    "gpt-neox-in-turn": ("GPTNeoXForCausalLM", _EVEN | {"use_parallel_residual": False} | _rope("linear", factor=2.5,
        partial_rotary_factor=0.4)),
    "gpt-neox-tied": ("GPTNeoXForCausalLM", _EVEN | {"tie_word_embeddings": True,
        "attention_bias": False} | _rope("default", partial_rotary_factor=1.0)),
    "gpt-neox-base": ("GPTNeoXModel", _EVEN | _rope("default", partial_rotary_factor=0.7)),
    "gptj": ("GPTJForCausalLM", _GPTJ),
    "gptj-tied": ("GPTJForCausalLM", _GPTJ | {"tie_word_embeddings": True, "n_inner": None}),
    "phi": ("PhiForCausalLM", _EVEN | _rope("default", partial_rotary_factor=0.7)),
    "phi-normed": ("PhiForCausalLM", _EVEN | {"qk_layernorm": True, "num_key_value_heads": 1, "head_dim": 6,
        "layer_norm_eps": EPS, "tie_word_embeddings": True} | _rope("default", partial_rotary_factor=0.4)),
    "phi3": ("Phi3ForCausalLM", _DECODER | _rope("default", partial_rotary_factor=0.4)),
    "phi3-window": ("Phi3ForCausalLM", _DECODER | {"sliding_window": 4, "num_key_value_heads": 1,
        "tie_word_embeddings": True, "rms_norm_eps": EPS}),
    "phi3-long": ("Phi3ForCausalLM", _EVEN | {"original_max_position_embeddings": 13} | _rope("longrope",
        short_factor=_SHORT[:2], long_factor=_LONG[:2], partial_rotary_factor=0.7)),
    "gemma": ("GemmaForCausalLM", _DECODER | {"rms_norm_eps": EPS}),
    "gemma-biased": ("GemmaForCausalLM", _DECODER | {"attention_bias": True, "num_key_value_heads": 1,
        "tie_word_embeddings": False}),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA2),
    "gemma2-uncapped": ("Gemma2ForCausalLM", _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None,
        "num_key_value_heads": H, "tie_word_embeddings": False, "query_pre_attn_scalar": K}),
    "gemma2-plain": ("Gemma2ForCausalLM", _GEMMA2 | {"query_pre_attn_scalar": K}),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA3),
    "gemma3-linear": ("Gemma3ForCausalLM", _GEMMA3 | {"num_key_value_heads": 1, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": K, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}),
    "gemma3-base": ("Gemma3TextModel", _GEMMA3),
    "mixtral": ("MixtralForCausalLM", _MIXTURE | {"num_local_experts": 5}),
    "mixtral-window": ("MixtralForCausalLM", _MIXTURE | {"num_local_experts": 4, "num_experts_per_tok": 3,
        "sliding_window": 4, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _MIXTURE | {"num_experts": 5, "moe_intermediate_size": 17,
        "mlp_only_layers": [1], "attention_bias": True}),
    "qwen3-moe-normed": ("Qwen3MoeForCausalLM", _MIXTURE | {"num_experts": 7, "num_experts_per_tok": 4,
        "moe_intermediate_size": 17, "norm_topk_prob": True}),
    "bert": ("BertForMaskedLM", _BERT),
    "bert-pooler": ("BertModel", _BERT),
    "bert-classes": ("BertForSequenceClassification", _BERT | {"num_labels": 5}),
    "bert-tokens": ("BertForTokenClassification", _BERT | {"num_labels": 5}),
    "bert-spans": ("BertForQuestionAnswering", _BERT),
    "bert-untied": ("BertForMaskedLM", _BERT | {"tie_word_embeddings": False, "hidden_act": "relu"}),
    "roberta": ("RobertaForMaskedLM", _BERT),
    "roberta-untied": ("RobertaForMaskedLM", _BERT | {"tie_word_embeddings": False, "hidden_act": "relu",
        "pad_token_id": 0}),
    "roberta-pooler": ("RobertaModel", _BERT),
    "roberta-classes": ("RobertaForSequenceClassification", _BERT | {"num_labels": 5}),
    "roberta-tokens": ("RobertaForTokenClassification", _BERT | {"num_labels": 5}),
    "roberta-spans": ("RobertaForQuestionAnswering", _BERT),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _BERT | {"type_vocab_size": 1}),
    "camembert": ("CamembertForSequenceClassification", _BERT | {"num_labels": 5}),
    "distilbert": ("DistilBertForMaskedLM", _DISTIL),
    "distilbert-untied": ("DistilBertForMaskedLM", _DISTIL | {"tie_word_embeddings": False}),
    "distilbert-base": ("DistilBertModel", _DISTIL | {"sinusoidal_pos_embds": True}),
    "distilbert-classes": ("DistilBertForSequenceClassification", _DISTIL | {"num_labels": 5}),
    "distilbert-tokens": ("DistilBertForTokenClassification", _DISTIL | {"num_labels": 5}),
    "distilbert-spans": ("DistilBertForQuestionAnswering", _DISTIL),
    "electra": ("ElectraForPreTraining", _ELECTRA),
    "electra-wide": ("ElectraForPreTraining", _BERT | {"embedding_size": D, "hidden_act": "relu"}),
    "electra-generator": ("ElectraForMaskedLM", _ELECTRA),
    "electra-untied": ("ElectraForMaskedLM", _ELECTRA | {"tie_word_embeddings": False}),
    "electra-base": ("ElectraModel", _ELECTRA),
    "electra-classes": ("ElectraForSequenceClassification", _ELECTRA | {"num_labels": 5}),
    "electra-tokens": ("ElectraForTokenClassification", _ELECTRA | {"num_labels": 5}),
    "electra-spans": ("ElectraForQuestionAnswering", _ELECTRA),
    "deberta": ("DebertaForMaskedLM", _DEBERTA | {"position_biased_input": False}),
    "deberta-c2p": ("DebertaForMaskedLM", _DEBERTA | {"max_relative_positions": -1, "pos_att_type": ["c2p"],
        "type_vocab_size": 4, "legacy": False, "layer_norm_eps": EPS}),
    "deberta-plain": ("DebertaForMaskedLM", _DEBERTA | {"relative_attention": False, "pos_att_type": None,
        "embedding_size": 15, "tie_word_embeddings": False, "hidden_act": "relu"}),
    "deberta-base": ("DebertaModel", _DEBERTA | {"pos_att_type": "p2c"}),
    "deberta-classes": ("DebertaForSequenceClassification", _DEBERTA | {"num_labels": 5, "pooler_hidden_act": "tanh"}),
    "deberta-tokens": ("DebertaForTokenClassification", _DEBERTA | {"num_labels": 5}),
    "deberta-spans": ("DebertaForQuestionAnswering", _DEBERTA),
    "deberta-v2": ("DebertaV2ForMaskedLM", _DEBERTA | {"type_vocab_size": 4}),
    "deberta-v2-conv": ("DebertaV2ForMaskedLM", _DEBERTA3 | {"conv_kernel_size": 3, "conv_act": "gelu",
        "embedding_size": 15, "attention_head_size": D // H}),
    "deberta-v2-p2c": ("DebertaV2ForMaskedLM", _DEBERTA | {"pos_att_type": "p2c", "position_buckets": 8,
        "conv_kernel_size": 5, "tie_word_embeddings": False}),
    "deberta-v2-classes": ("DebertaV2ForSequenceClassification", _DEBERTA3 | {"num_labels": 5, "cls_dropout": 0.2}),
    "deberta-v2-tokens": ("DebertaV2ForTokenClassification", _DEBERTA3 | {"num_labels": 5}),
    "deberta-v2-spans": ("DebertaV2ForQuestionAnswering", _DEBERTA3),
    "deberta-v3": ("DebertaV2ForMaskedLM", _DEBERTA3 | {"legacy": False}),
    "deberta-v3-base": ("DebertaV2Model", _DEBERTA3),
    "modernbert": ("ModernBertForMaskedLM", _MODERN),
    "modernbert-untied": ("ModernBertForMaskedLM", _MODERN | {"tie_word_embeddings": False, "decoder_bias": False,
        "norm_eps": EPS, "hidden_activation": "silu", "classifier_activation": "tanh"}),
    "modernbert-biased": ("ModernBertForMaskedLM", _MODERN | {"attention_bias": True, "mlp_bias": True,
        "norm_bias": True, "classifier_bias": True}),
    "modernbert-base": ("ModernBertModel", _MODERN | {"layer_types": ["sliding_attention", "full_attention",
        "sliding_attention"]}),
    "modernbert-classes": ("ModernBertForSequenceClassification", _MODERN | {"num_labels": 5,
        "classifier_pooling": "mean"}),
    "modernbert-first": ("ModernBertForSequenceClassification", _MODERN | {"num_labels": 5}),
    "modernbert-tokens": ("ModernBertForTokenClassification", _MODERN | {"num_labels": 5}),
    "modernbert-spans": ("ModernBertForQuestionAnswering", _MODERN),
    "bart": ("BartForConditionalGeneration", _BART),
    "bart-untied": ("BartForConditionalGeneration", _BART | {"tie_word_embeddings": False, "scale_embedding": True,
        "activation_function": "relu"}),
    "bart-base": ("BartModel", _BART),
    "bart-classes": ("BartForSequenceClassification", _BART | {"num_labels": 5}),
    "mbart": ("MBartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "mbart-base": ("MBartModel", _BART),
    "marian": ("MarianMTModel", _BART | {"scale_embedding": True, "activation_function": "swish",
        "decoder_vocab_size": V}),
    "marian-two": ("MarianMTModel", _BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": V + 2}),
    "marian-untied": ("MarianMTModel", _BART | {"share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False}),
    "marian-base": ("MarianModel", _BART),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
    "whisper-untied": ("WhisperForConditionalGeneration", _WHISPER | {"tie_word_embeddings": False,
        "scale_embedding": True, "activation_function": "relu"}),
    "whisper-base": ("WhisperModel", _WHISPER),
    "vit": ("ViTForImageClassification", _VIT | {"num_labels": 5}),
    "vit-unbiased": ("ViTForImageClassification", _VIT | {"num_labels": 5, "qkv_bias": False, "hidden_act": "gelu_new",
        "layer_norm_eps": EPS}),
    "vit-base": ("ViTModel", _VIT),
    "vision-gpt2": ("VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **_SEEING},
        "decoder": {"model_type": "gpt2", **_GPT2, **_READING}} | _START),
    "vision-gpt2-even": ("VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **_VIT},
        "decoder": {"model_type": "gpt2", **_GPT2, **_READING, "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True}} | _START),
    "vision-bert": ("VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **_SEEING},
        "decoder": {"model_type": "bert", **_BERT, **_READING}} | _START),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5-published": ("T5ForConditionalGeneration", _FAR),
    # Weights that tell GELUs apart.
    "t5-gated": ("T5ForConditionalGeneration", _FAR | {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.5}),
    "t5-unscaled": ("T5ForConditionalGeneration", _FAR | {"feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False}),
    "mt5": ("MT5ForConditionalGeneration", _FAR),
    "mt5-encoder": ("MT5EncoderModel", _FAR),
    "t5-encoder": ("T5EncoderModel", _T5),
    "t5-classes": ("T5ForSequenceClassification", _T5 | {"num_labels": 5}),
}.items()}  # fmt: skip


def _untied_head(model: Any) -> None:
    """T5 v1.1 as published has a head of its own, which the reference's configs can no longer ask for."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn(V, D) * INIT)


def _without_pooler(model: Any) -> None:
    model.pooler = None


# name -> (the variant it begins as, what is done to it)
CHANGED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "mt5-published": ("mt5", _untied_head),
    "bert-no-pooler": ("bert-pooler", _without_pooler),
    "t5-v1.1": ("t5-unscaled", _untied_head),
}
NAMES = [*VARIANTS, *CHANGED]
_ROOT = tempfile.TemporaryDirectory(prefix="references-")


def build(name: str) -> Any:
    """The reference model, random but the same every time.  Norms are random too: at 1 they hide a wrong offset."""
    import transformers

    base, change = CHANGED.get(name, (name, None))
    config_class, model_class, keys = VARIANTS[base]
    torch.manual_seed(crc32(name.encode()))  # its own, whatever is listed beside it
    config = getattr(transformers, config_class)(**keys)
    model = getattr(transformers, model_class)(config).eval().float()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name == "final_logits_bias"]
        for vector in (*(parameter for parameter in model.parameters() if parameter.dim() == 1), *biases):
            vector.add_(torch.randn_like(vector) * 0.2)
    if change is not None:
        change(model)
    return model


# What the reference stores beside a head of its own and does not read: a second bias, a third embedding.
SPARE = {"bert": "cls.predictions.bias", "deberta": "cls.predictions.bias", "deberta-v2": "cls.predictions.bias",
         "roberta": "lm_head.bias", "xlm-roberta": "lm_head.bias",
         "camembert": "lm_head.bias", "bart": "model.shared.weight", "mbart": "model.shared.weight"}  # fmt: skip
COMPUTED = {f"{prefix}{side}.embed_positions.weight" for prefix in ("", "model.") for side in ("encoder", "decoder")}
UNREAD = {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}  # of the ViT that a decoder reads
# Of these the config is two others in one, which `test_vision_encoder_decoder.py` tries.
NESTED = {name for name in VARIANTS if name.startswith("vision-")}


def numbers(name: str) -> int:
    """How many numbers the reference computes with: parameters, tied ones once, and the buffers it saves, but for the
    bias on logits, which is zeros."""
    model = saved(name)[0]
    kind = model.config.model_type
    tied = getattr(model.config, "tie_word_embeddings", True)
    unread = COMPUTED if kind == "marian" else set() if tied else UNREAD | {SPARE.get(kind)}
    unread |= {"final_logits_bias"}
    return sum({x.data_ptr(): x.numel() for key, x in model.state_dict().items() if key not in unread}.values())


@cache
def saved(name: str) -> tuple[Any, Path]:
    """The reference model and the directory `save_pretrained` wrote it to."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, path = build(name), Path(_ROOT.name) / name
    model.save_pretrained(path)
    return model, path


# ---------------------------------------------------------------- GGUF


def stored(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a reference checkpoint."""
    path = saved(name)[1]
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def read(name: str, **changes: Any) -> ModelSpec:
    """What its config, with some `changes`, means."""
    hf, tensors = stored(name)
    return read_config(hf | changes, stored=tensors)


def metadata(arch: str, **values: Any) -> dict[str, Any]:
    """The metadata of a tiny GGUF file, in llama.cpp's names."""
    common = {
        "context_length": CONTEXT,
        "embedding_length": D,
        "feed_forward_length": F,
        "block_count": L,
        "attention.head_count": H,
    }
    return {"general.architecture": arch, "general.name": "tiny", "tokenizer.ggml.eos_token_id": 2} | {
        f"{arch}.{key}": value for key, value in (common | values).items()
    }


ABOUT_1E5, ABOUT_1E6 = 9.999999747378752e-06, 9.999999974752427e-07  # as float32 has them
RMS = {"attention.layer_norm_rms_epsilon": ABOUT_1E6}
NORM = {"attention.layer_norm_epsilon": ABOUT_1E5}
GROUPED_HEADS = {"attention.head_count_kv": G, "attention.key_length": K, "attention.value_length": K}
GROUPED = RMS | GROUPED_HEADS
EXPERTS = {"expert_count": 5, "expert_used_count": 2}
EVEN = {"embedding_length": 30, "attention.head_count": 5, "rope.dimension_count": 4}
T5 = {"block_count": 2, "attention.key_length": K, "attention.value_length": K, "attention.relative_buckets_count": 8,
      "decoder_start_token_id": 0, "attention.layer_norm_epsilon": ABOUT_1E6} | RMS  # fmt: skip
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
WINDOW, PATTERN = {"attention.sliding_window": 4}, {"attention.sliding_window_pattern": 2}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
# variant -> the metadata of a GGUF file of it: the oracle of `from_gguf`, and with it the names of its tensors
HEADERS = {variant: metadata(arch, **values) for variant, (arch, values) in {
    "gemma": ("gemma", GROUPED | {"attention.layer_norm_rms_epsilon": 0.05}),
    "gemma2": ("gemma2", GROUPED | CAPS | WINDOW),
    "gemma3": ("gemma3", GROUPED | WINDOW | PATTERN | {"rope.freq_base": 1e6}),
    "gemma3-linear": ("gemma3", GROUPED | WINDOW | PATTERN | LINEAR | {
        "attention.head_count_kv": 1, "final_logit_softcapping": 3.0, "rope.freq_base_swa": 50.0}),
    "phi3": ("phi3", GROUPED | {
        "attention.layer_norm_rms_epsilon": ABOUT_1E5, "attention.sliding_window": 0, "rope.dimension_count": 4,
        "rope.freq_base": 1000.0, "rope.scaling.original_context_length": 4096}),
    "phi3-window": ("phi3", GROUPED | WINDOW | {
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 0.05}),
    "mixtral": ("llama", GROUPED | EXPERTS | {"attention.layer_norm_rms_epsilon": ABOUT_1E5, "rope.freq_base": 1e6}),
    "qwen3-moe-normed": ("qwen3moe", GROUPED | {
        "expert_count": 7, "expert_used_count": 4, "expert_feed_forward_length": 17}),
    "gpt-neox": ("gptneox", EVEN | {"attention.layer_norm_epsilon": 0.05, "rope.freq_base": 1000.0}),
    "gpt-neox-in-turn": ("gptneox", EVEN | NORM | LINEAR | {
        "rope.dimension_count": 2, "rope.freq_base": 1000.0, "use_parallel_residual": False}),
    "gptj": ("gptj", EVEN | NORM),
    "phi": ("phi2", EVEN | NORM | {"attention.head_count_kv": 5, "rope.freq_base": 1000.0}),
    "llama": ("llama", GROUPED | {"rope.dimension_count": K, "vocab_size": V}),
    "llama-biased": ("llama", GROUPED),
    "llama-tied": ("llama", GROUPED),
    "qwen2": ("qwen2", RMS | {"attention.head_count_kv": G, "rope.freq_base": 10000.0}),
    "qwen3": ("qwen3", GROUPED),
    "starcoder2": ("starcoder2", GROUPED_HEADS | NORM),
    "granite": ("granite", GROUPED | {
        "embedding_scale": 2.5, "attention.scale": 0.20000000298023224, "residual_scale": 0.4000000059604645,
        "logit_scale": 3.0}),
    "gpt2": ("gpt2", NORM),
    "t5": ("t5", T5 | {"decoder_block_count": L}),
    "t5-v1.1": ("t5", T5 | {"block_count": 4, "decoder_block_count": L}),
    "t5-encoder": ("t5encoder", T5 | {"attention.head_count_kv": H}),
    "bert-no-pooler": ("bert", {
        "attention.layer_norm_epsilon": 9.999999960041972e-13, "attention.causal": False, "pooling_type": 1}),
}.items()}  # fmt: skip


# What GGUF has no key for: what Gemma's scores are scaled by, how far T5's last bucket begins.
_SCALAR = {"query_pre_attn_scalar": K}
_LAST = {"relative_attention_max_distance": 128}
UNSAID = {"gemma2": _SCALAR, "gemma3": _SCALAR, "t5": _LAST, "t5-encoder": _LAST}
