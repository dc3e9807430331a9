"""Whisper (Radford et al. 2022), tiny to large-v3: an encoder of 30 s of sound, as mel frames through two convolutions,
and a decoder of text.  Norms before each sublayer and at the end, no bias on keys, learned positions, a tied head.

Reference: transformers `models/whisper`.  The encoder's positions are sinusoids, stored as a table.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, names_in, table
from . import bart, seq2seq

hf_types = {"whisper"}
ids = {"bos_token_id": 50_256, "eos_token_id": 50_256, "pad_token_id": 50_256, "decoder_start_token_id": 50_257}
prefix = "model."
fixed = {"encoder.embed.position.weight"}  # the sinusoids
ignore = names_in("""
apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob
mask_feature_length mask_feature_min_masks decoder_layerdrop encoder_layerdrop  # training
num_hidden_layers hidden_size num_attention_heads  # duplicates of encoder_layers, d_model, ...
classifier_proj_size use_weighted_layer_sum  # of a head these classes do not have
scale_embedding  # no reference multiplies by it, whatever it says
median_filter_width  # of word times read off the attention, after the forward
forced_decoder_ids  # the first tokens of the decoder, which `transcribe` chooses
""")

weights = bart.ROWS + table("""
encoder.embed.<conv1,conv2>.*  model.encoder.<conv1,conv2>.*
decoder.embed.tokens.weight    model.decoder.embed_tokens.weight
head.proj.weight               proj_out.weight
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, vocab, context = keys.int("d_model"), keys.int("vocab_size"), keys.int("max_target_positions", default=448)
    seq2seq.as_built(keys)
    heads: dict[str, spec.Head | None] = {
        "WhisperModel": None,
        "WhisperForConditionalGeneration": spec.LMHeadSpec(proj=spec.LinearSpec(inputs=width, outputs=vocab)),
    }
    head = keys.architecture(heads, default="WhisperForConditionalGeneration")
    tied = keys.bool("tie_word_embeddings", default=True) and head is not None
    dropout = keys.dropout("dropout")
    position = spec.LearnedSpec(length=context, width=width)
    words = spec.EmbedSpec(vocab=vocab, width=width, position=position, dropout=dropout)
    frames = spec.FramesSpec(
        conv1=spec.ConvSpec(inputs=keys.count("num_mel_bins", default=80), outputs=width, kernel=3),
        conv2=spec.ConvSpec(inputs=width, outputs=width, kernel=3, stride=2),
        position=replace(position, length=keys.int("max_source_positions", default=1500)),
        dropout=dropout,
    )
    ties = {"head.proj.weight": "decoder.embed.tokens.weight"} if tied else {}
    return bart.model(keys, frames, words, head, ties, keys.special_ids(vocab), context, pre=True, k_bias=False)
