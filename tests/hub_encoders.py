"""What `config.json` says in well-known repositories of encoders, encoder-decoders, sound and image models: every key
as it stands there, only the sizes made small.

Vocabularies end after the largest id a config names, or are as small as the rest where none is large.
"""

from typing import Any

_BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 24, "initializer_range": 0.02,
    "intermediate_size": 37, "layer_norm_eps": 1e-12, "max_position_embeddings": 30, "model_type": "bert",
    "num_attention_heads": 3, "num_hidden_layers": 2, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 41,
}  # fmt: skip
_ROBERTA = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 24, "initializer_range": 0.02,
    "intermediate_size": 37, "layer_norm_eps": 1e-05, "max_position_embeddings": 32, "model_type": "roberta",
    "num_attention_heads": 3, "num_hidden_layers": 2, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 41,
}  # fmt: skip
_DISTIL = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 24,
    "dropout": 0.1, "hidden_dim": 37, "initializer_range": 0.02, "max_position_embeddings": 30,
    "model_type": "distilbert", "n_heads": 3, "n_layers": 2, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
    "transformers_version": "4.10.0.dev0", "vocab_size": 41,
}  # fmt: skip
_ELECTRA = {
    "architectures": ["ElectraForPreTraining"], "attention_probs_dropout_prob": 0.1, "embedding_size": 13,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 24, "initializer_range": 0.02,
    "intermediate_size": 37, "layer_norm_eps": 1e-12, "max_position_embeddings": 30, "model_type": "electra",
    "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "summary_activation": "gelu",
    "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True, "type_vocab_size": 2,
    "vocab_size": 41,
}  # fmt: skip
_MODERN = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 31, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "cls_token_id": 31, "decoder_bias": True, "deterministic_flash_attn": False,
    "embedding_dropout": 0.0, "eos_token_id": 32, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 24, "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02, "intermediate_size": 37, "layer_norm_eps": 1e-05, "local_attention": 8,
    "local_rope_theta": 10000.0, "max_position_embeddings": 64, "mlp_bias": False, "mlp_dropout": 0.0,
    "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 3,
    "num_hidden_layers": 5, "pad_token_id": 33, "position_embedding_type": "absolute", "sep_token_id": 32,
    "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "vocab_size": 41,
}  # fmt: skip
_T5_TASKS = {
    "summarization": {"early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
                      "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: "},
    "translation_en_to_de": {"early_stopping": True, "max_length": 300, "num_beams": 4,
                             "prefix": "translate English to German: "},
}  # fmt: skip
_T5 = {
    "architectures": ["T5WithLMHeadModel"], "d_ff": 37, "d_kv": 7, "d_model": 24, "decoder_start_token_id": 0,
    "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 3, "num_layers": 2,
    "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 8, "task_specific_params": _T5_TASKS,
    "vocab_size": 41,
}  # fmt: skip
_T5_V11 = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 37, "d_kv": 7, "d_model": 24,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5",
    "num_decoder_layers": 3, "num_heads": 3, "num_layers": 2, "output_past": True, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "tie_word_embeddings": False, "transformers_version": "4.0.0",
    "use_cache": True, "vocab_size": 41,
}  # fmt: skip
_THREE = {"id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"},
          "label2id": {"contradiction": 0, "entailment": 2, "neutral": 1}}  # fmt: skip
_BART = {
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["BartModel"], "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1,
    "classifier_dropout": 0.0, "d_model": 24, "decoder_attention_heads": 3, "decoder_ffn_dim": 37,
    "decoder_layerdrop": 0.0, "decoder_layers": 2, "decoder_start_token_id": 2, "dropout": 0.1, "early_stopping": True,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 35, "encoder_layerdrop": 0.0, "encoder_layers": 3,
    "eos_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2, "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02, "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "max_position_embeddings": 30, "model_type": "bart",
    "no_repeat_ngram_size": 3, "normalize_before": False, "normalize_embedding": True, "num_beams": 4,
    "num_hidden_layers": 3, "pad_token_id": 1, "scale_embedding": False, "task_specific_params": {"summarization": {}},
    "torch_dtype": "float32", "transformers_version": "4.12.0.dev0", "use_cache": True, "vocab_size": 41,
}  # fmt: skip
_MBART = {
    "_name_or_path": "/home/suraj/projects/mbart-50/hf_models/mbart-50-large", "activation_dropout": 0.0,
    "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": True,
    "architectures": ["MBartForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 0,
    "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 24, "decoder_attention_heads": 3,
    "decoder_ffn_dim": 37, "decoder_layerdrop": 0.0, "decoder_layers": 2, "decoder_start_token_id": 2, "dropout": 0.1,
    "early_stopping": True, "encoder_attention_heads": 4, "encoder_ffn_dim": 35, "encoder_layerdrop": 0.0,
    "encoder_layers": 3, "eos_token_id": 2, "forced_eos_token_id": 2, "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02, "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "max_length": 200, "max_position_embeddings": 30,
    "model_type": "mbart", "normalize_before": True, "normalize_embedding": True, "num_beams": 5,
    "num_hidden_layers": 3, "output_past": True, "pad_token_id": 1, "scale_embedding": True,
    "static_position_embeddings": False, "tokenizer_class": "MBart50Tokenizer", "transformers_version": "4.4.0.dev0",
    "use_cache": True, "vocab_size": 41,
}  # fmt: skip
_MARIAN = {
    "_name_or_path": "/tmp/Helsinki-NLP/opus-mt-en-de", "_num_labels": 3, "activation_dropout": 0.0,
    "activation_function": "swish", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"], "attention_dropout": 0.0, "bad_words_ids": [[40]], "bos_token_id": 0,
    "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 24, "decoder_attention_heads": 3,
    "decoder_ffn_dim": 37, "decoder_layerdrop": 0.0, "decoder_layers": 2, "decoder_start_token_id": 40,
    "decoder_vocab_size": 41, "dropout": 0.1, "encoder_attention_heads": 4, "encoder_ffn_dim": 35,
    "encoder_layerdrop": 0.0, "encoder_layers": 3, "eos_token_id": 0, "extra_pos_embeddings": 40,
    "force_bos_token_to_be_generated": False, "forced_eos_token_id": 0, "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02, "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "max_length": 512, "max_position_embeddings": 30,
    "model_type": "marian", "normalize_before": False, "normalize_embedding": False, "num_beams": 6,
    "num_hidden_layers": 3, "pad_token_id": 40, "save_step": 13, "scale_embedding": True,
    "share_encoder_decoder_embeddings": True, "static_position_embeddings": True, "torch_dtype": "float16",
    "transformers_version": "4.22.0.dev0", "unk_token_id": 1, "use_cache": True, "vocab_size": 41,
}  # fmt: skip
_WHISPER = {
    "_name_or_path": "openai/whisper-tiny", "activation_dropout": 0.0, "activation_function": "gelu",
    "apply_spec_augment": False, "architectures": ["WhisperForConditionalGeneration"], "attention_dropout": 0.0,
    "begin_suppress_tokens": [20, 27], "bos_token_id": 27, "classifier_proj_size": 256, "d_model": 24,
    "decoder_attention_heads": 3, "decoder_ffn_dim": 37, "decoder_layerdrop": 0.0, "decoder_layers": 2,
    "decoder_start_token_id": 28, "dropout": 0.0, "encoder_attention_heads": 4, "encoder_ffn_dim": 35,
    "encoder_layerdrop": 0.0, "encoder_layers": 3, "eos_token_id": 27,
    "forced_decoder_ids": [[1, 29], [2, 30], [3, 31]], "init_std": 0.02, "is_encoder_decoder": True,
    "mask_feature_length": 10, "mask_feature_min_masks": 0, "mask_feature_prob": 0.0, "mask_time_length": 10,
    "mask_time_min_masks": 2, "mask_time_prob": 0.05, "max_length": 448, "max_source_positions": 15,
    "max_target_positions": 30, "median_filter_width": 7, "model_type": "whisper", "num_hidden_layers": 3,
    "num_mel_bins": 8, "pad_token_id": 27, "scale_embedding": False, "suppress_tokens": [1, 2, 7],
    "torch_dtype": "float32", "transformers_version": "4.27.0.dev0", "use_cache": True,
    "use_weighted_layer_sum": False, "vocab_size": 41,
}  # fmt: skip
_VIT = {
    "_name_or_path": "google/vit-base-patch16-224-in21k", "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0, "encoder_stride": 16, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
    "hidden_size": 24, "id2label": {"0": "tench", "1": "goldfish", "2": "shark", "3": "ray"}, "image_size": 20,
    "initializer_range": 0.02, "intermediate_size": 37, "label2id": {"goldfish": 1, "ray": 3, "shark": 2, "tench": 0},
    "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 3, "num_channels": 3, "num_hidden_layers": 2,
    "patch_size": 5, "qkv_bias": True, "transformers_version": "4.13.0.dev0",
}  # fmt: skip


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# repository -> its config
HUB: dict[str, dict[str, Any]] = {
    "google-bert/bert-base-uncased": _BERT,
    "google-bert/bert-base-multilingual-cased": _BERT | {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform"},
    "prajjwal1/bert-tiny": {key: _BERT[key] for key in (
        "hidden_size", "hidden_act", "initializer_range", "vocab_size", "hidden_dropout_prob", "num_attention_heads",
        "type_vocab_size", "max_position_embeddings", "num_hidden_layers", "intermediate_size",
        "attention_probs_dropout_prob", "model_type")},
    "cross-encoder/stsb-roberta-base": _ROBERTA | {
        "architectures": ["RobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "gradient_checkpointing": False, "position_embedding_type": "absolute",
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    "sentence-transformers/all-MiniLM-L6-v2": _BERT | {
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "transformers_version": "4.8.2"},
    "BAAI/bge-small-en-v1.5": _BERT | {
        "_name_or_path": "/root/.cache/torch/sentence_transformers/BAAI_bge-small-en/", "architectures": ["BertModel"],
        "classifier_dropout": None, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "torch_dtype": "float32"},
    "cross-encoder/ms-marco-MiniLM-L-6-v2": _BERT | {
        "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"}},
    "dslim/bert-base-NER": _without(_BERT, "gradient_checkpointing", "position_embedding_type") | {
        "_num_labels": 9, "architectures": ["BertForTokenClassification"], "output_past": True,
        "id2label": {"0": "O", "1": "B-MISC", "2": "I-MISC", "3": "B-PER", "4": "I-PER", "5": "B-ORG", "6": "I-ORG",
                     "7": "B-LOC", "8": "I-LOC"},
        "label2id": {"O": 0, "B-MISC": 1, "I-MISC": 2, "B-PER": 3, "I-PER": 4, "B-ORG": 5, "I-ORG": 6, "B-LOC": 7,
                     "I-LOC": 8}},
    "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad": _BERT | {
        "architectures": ["BertForQuestionAnswering"]},
    "nlptown/bert-base-multilingual-uncased-sentiment": _BERT | {
        "_num_labels": 5, "architectures": ["BertForSequenceClassification"], "finetuning_task": "sentiment",
        "directionality": "bidi", "output_past": True, "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "id2label": {"0": "1 star", "1": "2 stars", "2": "3 stars", "3": "4 stars", "4": "5 stars"},
        "label2id": {"1 star": 0, "2 stars": 1, "3 stars": 2, "4 stars": 3, "5 stars": 4}},
    "FacebookAI/roberta-base": _ROBERTA,
    "distilbert/distilroberta-base": _ROBERTA | {"hidden_act": "gelu", "num_hidden_layers": 1},
    "FacebookAI/roberta-large-mnli": _ROBERTA | _THREE | {
        "_num_labels": 3, "architectures": ["RobertaForSequenceClassification"]},
    "cardiffnlp/twitter-roberta-base-sentiment-latest": _ROBERTA | {
        "_name_or_path": "tweeteval_new/roberta-base-rt-sentiment/",
        "architectures": ["RobertaForSequenceClassification"],
        "classifier_dropout": None, "gradient_checkpointing": False, "position_embedding_type": "absolute",
        "id2label": {"0": "negative", "1": "neutral", "2": "positive"},
        "label2id": {"negative": 0, "neutral": 1, "positive": 2}, "torch_dtype": "float32",
        "transformers_version": "4.13.0.dev0", "use_cache": True},
    "deepset/roberta-base-squad2": _ROBERTA | {
        "architectures": ["RobertaForQuestionAnswering"], "gradient_checkpointing": False, "language": "english",
        "name": "Roberta", "position_embedding_type": "absolute", "transformers_version": "4.2.1", "use_cache": True},
    "FacebookAI/xlm-roberta-base": _ROBERTA | {
        "architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "output_past": True,
        "position_embedding_type": "absolute", "transformers_version": "4.17.0.dev0", "use_cache": True},
    "intfloat/multilingual-e5-small": _BERT | {
        "_name_or_path": "intfloat/multilingual-e5-small", "architectures": ["BertModel"], "classifier_dropout": None,
        "tokenizer_class": "XLMRobertaTokenizer", "torch_dtype": "float32"},
    "almanach/camembert-base": _ROBERTA | {
        "architectures": ["CamembertForMaskedLM"], "bos_token_id": 5, "eos_token_id": 6, "model_type": "camembert",
        "output_past": True},
    "distilbert/distilbert-base-uncased": _DISTIL,
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": _without(_DISTIL, "transformers_version") | {
        "architectures": ["DistilBertForSequenceClassification"], "finetuning_task": "sst-2", "output_past": True,
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}},
    "distilbert/distilbert-base-cased-distilled-squad": _DISTIL | {
        "architectures": ["DistilBertForQuestionAnswering"], "output_past": True},
    "google/electra-small-discriminator": _ELECTRA,
    "google/electra-small-generator": _ELECTRA | {"architectures": ["ElectraForMaskedLM"]},
    "jhu-clsp/ettin-encoder-17m": _MODERN | {
        "bos_token_id": 31, "causal_mask": False, "classifier_pooling": "mean", "is_causal": False,
        "norm_bias": False},
    "answerdotai/ModernBERT-base": _MODERN | {
        "repad_logits_with_grad": False, "sparse_pred_ignore_index": -100, "sparse_prediction": False},
    "nomic-ai/modernbert-embed-base": _MODERN | {
        "_name_or_path": "modernbert-contrastive", "architectures": ["ModernBertModel"], "reference_compile": False},
    "google-t5/t5-small": _T5,
    "google/t5-v1_1-small": _T5_V11 | {"output_past": True},
    "google/flan-t5-small": _T5_V11 | {
        "n_positions": 512, "relative_attention_max_distance": 128, "task_specific_params": _T5_TASKS,
        "transformers_version": "4.23.1"},
    "google/mt5-small": _T5_V11 | {
        "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "tokenizer_class": "T5Tokenizer",
        "transformers_version": "4.10.0.dev0"},
    "sentence-transformers/sentence-t5-base": _T5 | {
        "_name_or_path": "models/sentence-t5-base", "architectures": ["T5EncoderModel"], "dense_act_fn": "relu",
        "feed_forward_proj": "relu", "is_gated_act": False, "num_decoder_layers": 2, "torch_dtype": "float16"},
    "facebook/bart-base": _BART,
    "facebook/bart-large-mnli": _BART | _THREE | {
        "_num_labels": 3, "architectures": ["BartForSequenceClassification"], "output_past": False},
    "facebook/bart-large-cnn": _without(_BART, "activation_dropout") | {
        "_num_labels": 3, "architectures": ["BartForConditionalGeneration"], "activation_dropout": 0.0,
        "force_bos_token_to_be_generated": True, "length_penalty": 2.0, "max_length": 142, "min_length": 56,
        "output_past": True, "prefix": " "},
    "sshleifer/distilbart-cnn-12-6": _BART | {
        "architectures": ["BartForConditionalGeneration"], "eos_token_ids": [2], "extra_pos_embeddings": 2,
        "force_bos_token_to_be_generated": True, "output_past": True, "prefix": " ", "replacing_rate": 0,
        "save_step": 58, "static_position_embeddings": False, "student_decoder_layers": None,
        "student_encoder_layers": None, "unk_token_id": 3},
    "facebook/mbart-large-50": _MBART,
    "facebook/mbart-large-50-many-to-one-mmt": _MBART | {"forced_bos_token_id": 39},
    "Helsinki-NLP/opus-mt-en-de": _MARIAN,
    "openai/whisper-tiny": _WHISPER,
    "openai/whisper-tiny.en": _without(_WHISPER, "forced_decoder_ids") | {"forced_decoder_ids": [[1, 31]]},
    "openai/whisper-large-v3": _without(_WHISPER, "forced_decoder_ids", "suppress_tokens") | {
        "num_mel_bins": 16, "mask_time_prob": 0.05, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0"},
    "distil-whisper/distil-small.en": _WHISPER | {"apply_spec_augment": False, "decoder_layers": 1},
    "google/vit-base-patch16-224": _VIT,
    "google/vit-base-patch16-224-in21k": _without(_VIT, "id2label", "label2id", "encoder_stride") | {
        "architectures": ["ViTModel"]},
    "Falconsai/nsfw_image_detection": _VIT | {
        "id2label": {"0": "normal", "1": "nsfw"}, "label2id": {"normal": "0", "nsfw": "1"},
        "problem_type": "single_label_classification", "torch_dtype": "float32"},
}  # fmt: skip
