"""Marian (Junczys-Dowmunt et al. 2018, the OPUS-MT models): the Transformer of Vaswani et al. 2017, post-norm and
sinusoidal, with a bias on the logits.

Reference: transformers `models/marian`; names and blocks are BART's.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, table
from . import bart, seq2seq

hf_types = {"marian"}
ids = {"eos_token_id": 0, "pad_token_id": 58_100, "decoder_start_token_id": 58_100}
prefix = bart.prefix
fixed = bart.fixed
ignore = bart.ignore | {"classifier_dropout"}  # of a head no class has

weights = bart.ROWS + table("""
head.proj.weight                       lm_head.weight
head.proj.bias                         final_logits_bias|one_row
-  model.<encoder,decoder>.embed_positions.weight  -  # sines and cosines
[tie:decoder.embed.tokens.weight]
encoder.embed.tokens.weight            model.shared.weight
[Model]
<encoder,decoder>.embed.tokens.weight  model.<encoder,decoder>.embed_tokens.weight
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, vocab, context = keys.int("d_model"), keys.int("vocab_size"), keys.int("max_position_embeddings")
    seq2seq.as_built(
        keys, normalize_before=False, add_final_layer_norm=False, normalize_embedding=False,
        static_position_embeddings=True,
    )  # fmt: skip
    shared = keys.bool("share_encoder_decoder_embeddings", default=True)
    tied = keys.bool("tie_word_embeddings", default=True)
    target = keys.optional_int("decoder_vocab_size") or vocab
    if shared and (target != vocab or not tied):
        raise keys.error(
            "share_encoder_decoder_embeddings is set, so decoder_vocab_size must be vocab_size and "
            "tie_word_embeddings true"
        )
    lm = keys.architecture({"MarianMTModel": True, "MarianModel": False}, default="MarianMTModel")
    ties = {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"} if shared else {}
    if lm and tied:
        ties["head.proj.weight"] = f"{'encoder' if shared else 'decoder'}.embed.tokens.weight"
    position = spec.SinusoidalSpec(width=width, layout="halves")
    source, written = (bart.words(keys, size, position) for size in (vocab, target))
    head = seq2seq.lm_head(keys, width, target) if lm else None
    return bart.model(keys, source, written, head, ties, keys.special_ids(target), context, pre=False)
