"""BART (Lewis et al. 2020) and mBART (Liu et al. 2020): encoder-decoders with learned positions, a norm on the
embedding and a bias on the logits.  BART's norms come after each sublayer; mBART's before it, and one at the end.

References: transformers `models/bart`, `models/mbart`, whose tables of positions begin with two rows nobody reads.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, names_in, table
from triptych.spec.positions import Absolute
from . import seq2seq

_NAMES = {"bart": "Bart", "mbart": "MBart"}
hf_types = _NAMES.keys()
ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
prefix = "model."
fixed = {"head.proj.bias"}  # a buffer there
ignore = names_in("""
classif_dropout decoder_layerdrop encoder_layerdrop  # training
num_hidden_layers hidden_size num_attention_heads  # duplicates of encoder_layers, d_model, ...
add_bias_logits extra_pos_embeddings  # the bias and the two rows are always there
force_bos_token_to_be_generated save_step
replacing_rate student_decoder_layers student_encoder_layers  # of the training of DistilBART
""")

ROWS = seq2seq.table("""
SIDE.embed.position.weight               model.SIDE.embed_positions.weight
SIDE.embed.norm.*                        model.SIDE.layernorm_embedding.*
SIDE.blocks.{i}.attn.<q,k,v,out>.*       model.SIDE.layers.{i}.self_attn.<q,k,v,out>_proj.*
SIDE.blocks.{i}.attn_norm.<post,pre>.*   model.SIDE.layers.{i}.self_attn_layer_norm.*
SIDE.blocks.{i}.cross.<q,k,v,out>.*      model.SIDE.layers.{i}.encoder_attn.<q,k,v,out>_proj.*
SIDE.blocks.{i}.cross_norm.<post,pre>.*  model.SIDE.layers.{i}.encoder_attn_layer_norm.*
SIDE.blocks.{i}.mlp.<up,down>.*          model.SIDE.layers.{i}.<fc1,fc2>.*
SIDE.blocks.{i}.mlp_norm.<post,pre>.*    model.SIDE.layers.{i}.final_layer_norm.*
SIDE.final_norm.*                        model.SIDE.layer_norm.*
""")
weights = ROWS + seq2seq.HEADS + table("""
head.proj.bias                         final_logits_bias|one_row
[tie:decoder.embed.tokens.weight]
encoder.embed.tokens.weight            model.shared.weight
<encoder,decoder>.embed.tokens.weight  model.<encoder,decoder>.embed_tokens.weight
[own:decoder.embed.tokens.weight]
<encoder,decoder>.embed.tokens.weight  model.<encoder,decoder>.embed_tokens.weight
encoder.embed.tokens.weight            model.shared.weight|spare  -  # stored beside the two that are read
""")  # fmt: skip


def config(keys: ConfigKeys) -> spec.ModelSpec:
    name, pre = _NAMES[keys.str("model_type")], keys.str("model_type") == "mbart"
    width, vocab, context = keys.int("d_model"), keys.int("vocab_size"), keys.int("max_position_embeddings")
    seq2seq.as_built(
        keys, normalize_before=pre, add_final_layer_norm=pre, normalize_embedding=True, static_position_embeddings=False
    )
    position = spec.LearnedSpec(length=context, width=width, offset=2)
    embed = words(keys, vocab, position, spec.LayerNormSpec(width=width))
    lm = seq2seq.lm_head(keys, width, vocab)
    heads = seq2seq.heads(keys, name, width, lm, labels=2 if pre else 3)
    head = keys.architecture(heads, default=f"{name}ForConditionalGeneration")
    ids = keys.special_ids(vocab, start=None if pre else 2)
    if pre and isinstance(head, spec.ClassHeadSpec | spec.SpanHeadSpec):
        ids = replace(ids, start=None)  # each row begins with its own last token, whatever the config says
    tied = keys.bool("tie_word_embeddings", default=True)
    # Before transformers 5, `false` left one embedding to both sides; now each may have stored its own.
    shared = tied or not keys.has_tensor("decoder.embed_tokens.weight", default=True)
    ties = {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"} if shared else {}
    ties |= {"head.proj.weight": "encoder.embed.tokens.weight"} if tied and isinstance(head, spec.LMHeadSpec) else {}
    return model(keys, embed, embed, head, ties, ids, context, pre=pre)


def model(
    keys: ConfigKeys,
    source: spec.Input,
    target: spec.Input,
    head: spec.Head | None,
    ties: dict[str, str],
    ids: spec.SpecialIds,
    context: int,
    *,
    pre: bool,
    k_bias: bool = True,
) -> spec.ModelSpec:
    """The model whose two sides read `source` and `target`.  `pre`: norms before each sublayer and one at the end of a
    side, instead of after each."""
    width, norm = keys.int("d_model"), spec.LayerNormSpec(width=keys.int("d_model"))
    act, between = keys.act("activation_function", default="gelu"), keys.dropout("activation_dropout")
    inside = keys.dropout("attention_dropout")

    def side(name: seq2seq.Side, embed: spec.Input) -> spec.StackSpec:
        attn = spec.attention(width, keys.count(f"{name}_attention_heads"), bias=True, dropout=inside)
        return seq2seq.stack(
            name,
            embed,
            attn=replace(attn, k=replace(attn.k, bias=k_bias)),
            mlp=spec.mlp(width, keys.int(f"{name}_ffn_dim"), act, bias=True, dropout=between),
            norms=spec.NormsSpec(pre=norm) if pre else spec.NormsSpec(post=norm),
            layers=keys.count(f"{name}_layers"),
            final_norm=norm if pre else None,
        )

    return spec.ModelSpec(
        family=keys.str("model_type"),
        encoder=side("encoder", source),
        decoder=side("decoder", target),
        head=head,
        ties=ties,
        ids=ids,
        context=context,
        init_std=keys.float("init_std", default=0.02),
    )


def words(keys: ConfigKeys, vocab: int, position: Absolute, norm: spec.LayerNormSpec | None = None) -> spec.EmbedSpec:
    """The input of a side that reads tokens."""
    width, dropout = keys.int("d_model"), keys.dropout("dropout", default=0.1)
    scale = width**0.5 if keys.flag("scale_embedding") else None
    return spec.EmbedSpec(vocab=vocab, width=width, position=position, norm=norm, scale=scale, dropout=dropout)
