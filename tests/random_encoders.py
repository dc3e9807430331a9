"""Random configurations of encoders, encoder-decoders, sound and image models, drawn from the reference's own classes.

`draw(family, seed)` gives the same one every time: names of the configuration and the model class, the keys, and what
an older file would say beside or instead of them.  Widths differ pairwise more often than not.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

ABSENT = object()  # of a key


@dataclass(frozen=True)
class Drawn:
    """One configuration; `file` changes what stands in config.json, the way old files say it."""

    config: str
    model: str
    keys: dict[str, Any]
    file: dict[str, Any] = field(default_factory=dict)
    pooler: bool = True
    types: int | None = None  # token types that count
    whole: bool = False  # every name in the file, those of one tensor too, as older files have it
    own_head: bool = False  # T5 v1.1 as published, which the reference's configs can no longer ask for

    @property
    def options(self) -> dict[str, bool]:
        """What else the reference's class is made with."""
        return {} if self.pooler else {"add_pooling_layer": False}

    @property
    def encodes(self) -> bool:
        """Whether a class of an encoder-decoder has the encoder alone."""
        return self.model.endswith(("EncoderModel", "TokenClassification"))


class Dice:
    """Draws of one seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def int(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def some(self, keys: dict[str, Any], chance: float = 0.5) -> dict[str, Any]:
        """Some of `keys`."""
        return {key: value for key, value in keys.items() if self.maybe(chance)}


ACTS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "relu", "silu", "swish", "tanh")
EPS = (1e-12, 1e-6, 1e-5, 0.05)


def draw(family: str, seed: int) -> Drawn:
    dice = Dice(f"{family} {seed}")
    return replace(FAMILIES[family](dice, family), whole=family != "vit" and dice.maybe())


def _labels(dice: Dice) -> dict[str, Any]:
    """How many labels, and how a config says so."""
    n = dice.int(1, 6)
    named = {"id2label": {i: f"L{i}" for i in range(n)}, "label2id": {f"L{i}": i for i in range(n)}}
    said = dice.of({"num_labels": n}, named)
    kinds = [None, "regression", "multi_label_classification", *(["single_label_classification"] if n > 1 else [])]
    return {**said, "problem_type": dice.of(*kinds)}


def _sizes(dice: Dice) -> tuple[int, int]:
    """How many heads, and the width of all of them together: a head may be of any width, odd ones too."""
    heads = dice.int(1, 6)
    return heads, heads * dice.int(2, 9)


def _bert(dice: Dice, family: str) -> Drawn:
    name = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert",
            "electra": "Electra"}[family]  # fmt: skip
    kinds = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
    more = {"bert": ["ForPreTraining"], "electra": ["ForPreTraining"]}
    kind = dice.of(*kinds, *more.get(family, []))
    heads, width = _sizes(dice)
    keys = {
        "vocab_size": dice.int(29, 43), "hidden_size": width, "num_attention_heads": heads,
        "num_hidden_layers": dice.int(1, 4), "intermediate_size": dice.int(11, 47), "hidden_act": dice.of(*ACTS),
        "max_position_embeddings": dice.int(26, 40), "type_vocab_size": dice.int(1, 4), "layer_norm_eps": dice.of(*EPS),
        "tie_word_embeddings": dice.maybe(0.7), "pad_token_id": 0, "classifier_dropout": dice.of(None, 0.0, 0.3),
    }  # fmt: skip
    if family in ("roberta", "xlm-roberta", "camembert"):
        keys["pad_token_id"] = dice.int(0, 5)
    if family == "electra":
        keys["embedding_size"] = dice.of(width, dice.int(3, 60))
    if kind in ("ForSequenceClassification", "ForTokenClassification"):
        keys |= _labels(dice)
    file = dice.some({
        "position_embedding_type": "absolute", "gradient_checkpointing": False, "output_past": True,
        "type_vocab_size": ABSENT if keys["type_vocab_size"] == 2 else keys["type_vocab_size"],
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform",
    } if family == "bert" else {"position_embedding_type": "absolute", "gradient_checkpointing": False})  # fmt: skip
    pooler = kind != "Model" or family == "electra" or dice.maybe(0.7)
    return Drawn(f"{name}Config", name + kind, keys, file, pooler, types=keys["type_vocab_size"])


def _distilbert(dice: Dice, family: str) -> Drawn:
    kinds = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    kind = dice.of(*kinds)
    heads, width = _sizes(dice)
    keys = {
        "vocab_size": dice.int(29, 43), "dim": width, "n_heads": heads, "n_layers": dice.int(1, 4),
        "hidden_dim": dice.int(11, 47), "activation": dice.of(*ACTS), "max_position_embeddings": dice.int(26, 40),
        "sinusoidal_pos_embds": dice.maybe(), "tie_word_embeddings": dice.maybe(0.7),
        "seq_classif_dropout": 0.3, "qa_dropout": 0.4,
    }  # fmt: skip
    if kind in ("ForSequenceClassification", "ForTokenClassification"):
        keys |= _labels(dice)
    return Drawn("DistilBertConfig", f"DistilBert{kind}", keys, dice.some({"tie_weights_": True, "output_past": True}))


def _modernbert(dice: Dice, family: str) -> Drawn:
    kinds = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    kind = dice.of(*kinds)
    heads = dice.int(1, 5)
    layers = dice.int(1, 6)
    keys = {
        "vocab_size": dice.int(29, 43), "hidden_size": heads * 2 * dice.int(1, 5), "num_attention_heads": heads,
        "num_hidden_layers": layers, "intermediate_size": dice.int(11, 47), "hidden_activation": dice.of(*ACTS),
        "max_position_embeddings": dice.int(26, 40), "local_attention": dice.int(2, 13), "norm_eps": dice.of(*EPS),
        "norm_bias": dice.maybe(), "attention_bias": dice.maybe(), "mlp_bias": dice.maybe(),
        "decoder_bias": dice.maybe(), "classifier_bias": dice.maybe(), "classifier_activation": dice.of(*ACTS),
        "classifier_pooling": dice.of("cls", "mean"), "tie_word_embeddings": dice.maybe(0.7),
        "classifier_dropout": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2, "sparse_prediction": dice.maybe(0.3),
    }  # fmt: skip
    if kind in ("ForSequenceClassification", "ForTokenClassification"):
        keys |= _labels(dice)
    far, near, every = dice.of(160000.0, 500.0, 10000.0), dice.of(10000.0, 70.0, 160000.0), dice.int(1, 4)
    types = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    file: dict[str, Any] = {}
    if dice.maybe():  # as ModernBERT-base itself says it
        file = {"rope_parameters": ABSENT, "layer_types": ABSENT, "global_rope_theta": far, "local_rope_theta": near,
                "global_attn_every_n_layers": every, "layer_norm_eps": 1e-5, "reference_compile": True,
                "position_embedding_type": "absolute", "repad_logits_with_grad": False}  # fmt: skip
    elif dice.maybe():
        types = [dice.of("sliding_attention", "full_attention") for _ in range(layers)]
    keys["layer_types"] = types
    keys["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": far},
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
    }
    return Drawn("ModernBertConfig", f"ModernBert{kind}", keys, file)


def _t5(dice: Dice, family: str) -> Drawn:
    name = family.upper()
    kinds = ("Model", "ForConditionalGeneration", "ForConditionalGeneration", "EncoderModel",
             "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")  # fmt: skip
    kind = dice.of(*kinds)
    layers = dice.int(1, 3)
    keys: dict[str, Any] = {
        "vocab_size": dice.int(29, 43), "d_model": dice.int(7, 33), "d_kv": dice.int(2, 9),
        "num_heads": dice.int(1, 6), "d_ff": dice.int(11, 47), "num_layers": layers,
        "relative_attention_num_buckets": 2 * dice.int(2, 9), "layer_norm_epsilon": dice.of(1e-6, 1e-5, 0.05),
        "feed_forward_proj": dice.of("relu", "gated-gelu", "gated-silu", "gelu", "gelu_new", "gated-relu"),
        "num_decoder_layers": dice.of(None, layers, dice.int(1, 4)), "decoder_start_token_id": 0,
        "classifier_dropout": dice.of(0.0, 0.2),
    }  # fmt: skip
    keys["relative_attention_max_distance"] = keys["relative_attention_num_buckets"] + dice.int(3, 30)
    if kind in ("ForSequenceClassification", "ForTokenClassification"):
        keys |= _labels(dice)
    own = dice.maybe() and kind == "ForConditionalGeneration"
    if family == "t5":
        keys["tie_word_embeddings"] = not own and dice.maybe(0.6)
    file = dice.some({"n_positions": 512, "output_past": True, "use_cache": True, "tokenizer_class": "T5Tokenizer"})
    if family == "t5" and (own or keys["tie_word_embeddings"]) and dice.maybe():  # as transformers 4 wrote it
        file |= {"tie_word_embeddings": keys["tie_word_embeddings"], "scale_decoder_outputs": ABSENT}
        file |= dice.some({"is_gated_act": ABSENT, "dense_act_fn": ABSENT})
    elif own and dice.maybe():
        file |= {"tie_word_embeddings": False}
    return Drawn(f"{name}Config", name + kind, keys, file, own_head=own)


def _bart(dice: Dice, family: str) -> Drawn:
    name = {"bart": "Bart", "mbart": "MBart", "marian": "Marian"}[family]
    kinds = ["Model", "ForConditionalGeneration", "ForConditionalGeneration", "ForSequenceClassification",
             "ForQuestionAnswering"]  # fmt: skip
    kind = dice.of("Model", "MTModel", "MTModel") if family == "marian" else dice.of(*kinds)
    heads, other = dice.of((1, 2), (2, 4), (3, 1), (4, 4), (2, 3))
    width = 2 * 12 * dice.int(1, 2) if family == "marian" else 12 * dice.int(1, 3)
    keys: dict[str, Any] = {
        "vocab_size": dice.int(29, 43), "d_model": width, "encoder_attention_heads": heads,
        "decoder_attention_heads": other, "encoder_layers": dice.int(1, 3), "decoder_layers": dice.int(1, 4),
        "encoder_ffn_dim": dice.int(11, 47), "decoder_ffn_dim": dice.int(11, 47), "scale_embedding": dice.maybe(),
        "activation_function": dice.of(*ACTS), "max_position_embeddings": dice.int(26, 40),
        "tie_word_embeddings": dice.maybe(0.7), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": dice.of(0, 2), "forced_eos_token_id": dice.of(None, 2), "classifier_dropout": 0.3,
        "forced_bos_token_id": dice.of(None, 0),
    }  # fmt: skip
    if kind == "ForSequenceClassification":
        keys |= _labels(dice)
    file = dice.some({"num_hidden_layers": keys["encoder_layers"], "add_bias_logits": False, "classif_dropout": 0.0,
                      "normalize_before": family == "mbart", "normalize_embedding": family != "marian",
                      "add_final_layer_norm": family == "mbart", "static_position_embeddings": family == "marian",
                      "extra_pos_embeddings": 2, "output_past": True, "_num_labels": 3})  # fmt: skip
    if family == "marian":
        two = dice.maybe()
        keys["share_encoder_decoder_embeddings"] = not two
        keys["tie_word_embeddings"] = True if not two else dice.maybe()
        keys["decoder_vocab_size"] = dice.int(29, 43) if two else dice.of(None, keys["vocab_size"])
    return Drawn(f"{name}Config", name + kind, keys, file)


def _whisper(dice: Dice, family: str) -> Drawn:
    heads, other = dice.of((1, 2), (2, 4), (3, 1), (4, 4))
    keys = {
        "vocab_size": dice.int(29, 43), "num_mel_bins": dice.of(5, 8, 13), "d_model": 12 * dice.int(1, 3),
        "encoder_attention_heads": heads, "decoder_attention_heads": other, "encoder_layers": dice.int(1, 3),
        "decoder_layers": dice.int(1, 4), "encoder_ffn_dim": dice.int(11, 47), "decoder_ffn_dim": dice.int(11, 47),
        "max_source_positions": dice.int(5, 17), "max_target_positions": dice.int(26, 40),
        "activation_function": dice.of(*ACTS), "scale_embedding": dice.maybe(), "pad_token_id": 2, "bos_token_id": 2,
        "eos_token_id": 2, "decoder_start_token_id": 0, "tie_word_embeddings": dice.maybe(0.7),
        "median_filter_width": dice.of(5, 7), "apply_spec_augment": False, "mask_time_prob": dice.of(0.0, 0.05),
    }  # fmt: skip
    file = dice.some({"num_hidden_layers": keys["encoder_layers"], "max_length": 448, "forced_decoder_ids": None,
                      "suppress_tokens": [1, 2], "begin_suppress_tokens": [3]})  # fmt: skip
    return Drawn("WhisperConfig", dice.of("WhisperForConditionalGeneration", "WhisperModel"), keys, file)


def _vit(dice: Dice, family: str) -> Drawn:
    kind = dice.of("Model", "ForImageClassification", "ForImageClassification")
    heads, width = _sizes(dice)
    patch = dice.int(2, 5)
    keys: dict[str, Any] = {
        "hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": dice.int(1, 4),
        "intermediate_size": dice.int(11, 47), "hidden_act": dice.of(*ACTS), "layer_norm_eps": dice.of(*EPS),
        "image_size": patch * dice.int(2, 5), "patch_size": patch, "num_channels": dice.int(1, 4),
        "qkv_bias": dice.maybe(0.7),
    }  # fmt: skip
    pooler = True
    if kind == "Model":
        pooler = dice.maybe(0.7)
        keys |= {"pooler_output_size": dice.of(None, width, dice.int(3, 50)), "pooler_act": dice.of(*ACTS, "tanh")}
    else:
        keys |= _labels(dice)
    shapes = {1: [patch * 2, patch * 3], 2: [keys["image_size"]] * 2}
    keys["image_size"] = shapes.get(dice.int(1, 6), keys["image_size"])
    return Drawn("ViTConfig", f"ViT{kind}", keys, dice.some({"encoder_stride": 16}), pooler)


FAMILIES: dict[str, Callable[[Dice, str], Drawn]] = {
    "bert": _bert, "roberta": _bert, "xlm-roberta": _bert, "camembert": _bert, "electra": _bert,
    "distilbert": _distilbert, "modernbert": _modernbert, "t5": _t5, "mt5": _t5, "bart": _bart, "mbart": _bart,
    "marian": _bart, "whisper": _whisper, "vit": _vit,
}  # fmt: skip
