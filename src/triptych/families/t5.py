"""T5 (Raffel et al. 2020) and v1.1 / mT5 (Shazeer 2020's gated GELU): encoder-decoder with RMSNorm, no biases, learned
bucketed distances added to unscaled scores, one embedding for both sides.

Reference: transformers `models/t5`, which keeps each stack's distance table in its first block.
"""

from triptych import spec
from triptych.mapping import ACTIVATIONS, COUNT, ConfigKeys, names_in, table, within
from . import seq2seq, t5_gguf

hf_types = {"t5", "mt5"}
gguf_archs, gguf_arch, from_gguf, to_gguf = t5_gguf.archs, t5_gguf.arch, t5_gguf.from_gguf, t5_gguf.to_gguf
ids = {"eos_token_id": 1, "pad_token_id": 0}
prefix = "transformer."  # only classes over labels write it
overflows_fp16 = True  # trained in bf16: what the MLPs write passes 65504
ignore = names_in("""
dense_act_fn is_gated_act  # duplicates of feed_forward_proj
n_positions  # of the training data; distances are unbounded
num_hidden_layers hidden_size num_attention_heads head_dim  # duplicates of num_layers, d_model, ...
""")

unprefixed = (spec.LMHeadSpec, spec.SpanHeadSpec)
weights = within(prefix, seq2seq.table("""
SIDE.kinds.self.position.*          SIDE.block.0.layer.0.SelfAttention.relative_attention_bias.*  GG.blk.0.attn_rel_b.*
SIDE.blocks.{i}.attn_norm.pre.*     SIDE.block.{i}.layer.0.layer_norm.*                           GG.blk.{i}.attn_norm.*
SIDE.blocks.{i}.attn.<q,k,v,out>.*  SIDE.block.{i}.layer.0.SelfAttention.<q,k,v,o>.*  GG.blk.{i}.attn_<q,k,v,o>.*
SIDE.blocks.{i}.cross_norm.pre.*  SIDE.block.{i}.layer.1.layer_norm.*  GG.blk.{i}.cross_attn_norm.*
SIDE.blocks.{i}.cross.<q,k,v,out>.* SIDE.block.{i}.layer.1.EncDecAttention.<q,k,v,o>.* GG.blk.{i}.cross_attn_<q,k,v,o>.*
SIDE.blocks.{i}.mlp_norm.pre.*      SIDE.block.{i}.layer.LAST.layer_norm.*                        GG.blk.{i}.ffn_norm.*
SIDE.blocks.{i}.mlp.down.*          SIDE.block.{i}.layer.LAST.DenseReluDense.wo.*                 GG.blk.{i}.ffn_down.*
SIDE.final_norm.*                   SIDE.final_layer_norm.*                                       GG.output_norm.*
[MLP]
SIDE.blocks.{i}.mlp.up.*            SIDE.block.{i}.layer.LAST.DenseReluDense.wi.*                 GG.blk.{i}.ffn_up.*
[GLU]
SIDE.blocks.{i}.mlp.<gate,up>.*  SIDE.block.{i}.layer.LAST.DenseReluDense.wi_<0,1>.*  GG.blk.{i}.ffn_<gate,up>.*
""", LAST=("1", "2"), GG=("enc", "dec")) + table("""
encoder.embed.tokens.weight       shared.weight                                    token_embd.weight
encoder.embed.tokens.weight       encoder.embed_tokens.weight
decoder.embed.tokens.weight       decoder.embed_tokens.weight
# No reference reads the next one: cross-attention has no distances.
- decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight  dec.blk.0.cross_attn_rel_b.weight
""")) + seq2seq.HEADS + table("""
[TokenHead]
head.classes.*                    classifier.*
""")  # fmt: skip


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, vocab, name = keys.int("d_model"), keys.int("vocab_size"), keys.str("model_type").upper()
    layers = keys.count("num_layers")
    later = keys.optional_int("num_decoder_layers", high=COUNT) or layers
    keys.bool("is_encoder_decoder", default=True)
    tied, scaled = _head(keys)
    lm = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=width, outputs=vocab), scale=width**-0.5 if scaled else None)
    known = {f"{name}WithLMHeadModel": lm, **seq2seq.heads(keys, name, width, lm)}
    head = keys.architecture(
        known | seq2seq.encoder_heads(keys, name, width), default=f"{name}ForConditionalGeneration"
    )
    alone = isinstance(head, spec.PoolingSpec | spec.TokenHeadSpec)
    tables = ["decoder.embed.tokens.weight"] * (not alone) + ["head.proj.weight"] * (head is lm and tied)
    return spec.ModelSpec(
        family=name.lower(),
        encoder=_stack(keys, layers, "encoder"),
        decoder=None if alone else _stack(keys, later, "decoder"),
        head=head,
        ties=dict.fromkeys(tables, "encoder.embed.tokens.weight"),
        ids=keys.special_ids(vocab, start=keys.optional_int("pad_token_id", low=0)),
        init_std=0.02 * keys.float("initializer_factor", default=1.0),
    )


def _head(keys: ConfigKeys) -> tuple[bool, bool]:
    """Whether the head shares the embedding, and whether its input is scaled by 1/sqrt(D), which no mT5's is.

    Before transformers 5 `tie_word_embeddings` decided both; now it is always true, `scale_decoder_outputs` decides the
    second, and only a stored `lm_head` shows an untied head.
    """
    tied = keys.bool("tie_word_embeddings", default=True)
    scaled = keys.bool("scale_decoder_outputs", default=tied and keys.str("model_type") == "t5")
    return tied and (scaled or not keys.has_tensor("lm_head.weight")), scaled


def _stack(keys: ConfigKeys, layers: int, side: seq2seq.Side) -> spec.StackSpec:
    """One side: its blocks share kinds whose one table of distances all its layers add."""
    width, heads, hidden = keys.int("d_model"), keys.count("num_heads"), keys.int("d_ff")
    dropout = keys.dropout("dropout_rate", default=0.1)
    norm = spec.RMSNormSpec(width=width, eps=keys.float("layer_norm_epsilon", default=1e-6))
    kinds: dict[str, spec.MLPSpec | spec.GLUSpec] = {}
    for act, ours in ACTIVATIONS.items():
        kinds[act] = spec.mlp(width, hidden, ours, dropout=dropout)
        kinds[f"gated-{act}"] = spec.glu(width, hidden, "gelu_tanh" if act == "gelu" else ours, dropout=dropout)
    distances = spec.T5BucketsSpec(
        heads=heads,
        buckets=keys.int("relative_attention_num_buckets", default=32, low=4, high=4096),
        max_distance=keys.int("relative_attention_max_distance", default=128),
        bidirectional=side == "encoder",
    )
    return seq2seq.stack(
        side,
        spec.EmbedSpec(vocab=keys.int("vocab_size"), width=width, dropout=dropout),
        attn=spec.attention(width, heads, head_width=keys.int("d_kv"), scale=1.0, dropout=dropout),
        mlp=keys.choice("feed_forward_proj", kinds, default="relu" if keys.str("model_type") == "t5" else "gated-gelu"),
        norms=spec.NormsSpec(pre=norm),
        layers=layers,
        position=distances,
        final_norm=norm,
    )
