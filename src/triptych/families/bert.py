"""BERT (Devlin et al. 2019): post-norm encoder with learned positions, token types and GELU.

Reference: transformers `models/bert`; its class says which head sits on top.  GGUF files hold the encoder alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych import spec
from triptych.families.keys import Keys
from triptych.families.weights import table
from triptych.spec.parts import Activation

hf_types = frozenset({"bert"})
gguf_archs = frozenset({"bert"})
prefix = "bert."
renames = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # exports from TensorFlow
ignore = frozenset(
    {
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",  # the multilingual configs describe a pooler no reference builds
    }
)  # fmt: skip

weights = table("""
encoder.embed.tokens.weight           bert.embeddings.word_embeddings.weight               token_embd.weight
encoder.embed.position.weight         bert.embeddings.position_embeddings.weight           position_embd.weight
encoder.embed.token_types.weight      bert.embeddings.token_type_embeddings.weight         token_types.weight
encoder.embed.norm.*                  bert.embeddings.LayerNorm.*                          token_embd_norm.*
encoder.blocks.{i}.attn.q.*           bert.encoder.layer.{i}.attention.self.query.*        blk.{i}.attn_q.*
encoder.blocks.{i}.attn.k.*           bert.encoder.layer.{i}.attention.self.key.*          blk.{i}.attn_k.*
encoder.blocks.{i}.attn.v.*           bert.encoder.layer.{i}.attention.self.value.*        blk.{i}.attn_v.*
encoder.blocks.{i}.attn.out.*         bert.encoder.layer.{i}.attention.output.dense.*      blk.{i}.attn_output.*
encoder.blocks.{i}.attn_norm.post.*   bert.encoder.layer.{i}.attention.output.LayerNorm.*  blk.{i}.attn_output_norm.*
encoder.blocks.{i}.mlp.up.*           bert.encoder.layer.{i}.intermediate.dense.*          blk.{i}.ffn_up.*
encoder.blocks.{i}.mlp.down.*         bert.encoder.layer.{i}.output.dense.*                blk.{i}.ffn_down.*
encoder.blocks.{i}.mlp_norm.post.*    bert.encoder.layer.{i}.output.LayerNorm.*            blk.{i}.layer_output_norm.*
-                                     bert.embeddings.position_ids                         -  # 0, 1, 2, ...
[Pooling]
head.dense.*                          bert.pooler.dense.*                                  -
[ClassHead]
head.dense.*                          bert.pooler.dense.*                                  -
head.classes.*                        classifier.*                                         -
[TokenHead]
head.classes.*                        classifier.*                                         -
[MaskedLMHead]
head.dense.*                          cls.predictions.transform.dense.*                    -
head.norm.*                           cls.predictions.transform.LayerNorm.*                -
head.proj.weight                      cls.predictions.decoder.weight                       -
head.proj.bias                        cls.predictions.bias                                 -
head.proj.bias                        cls.predictions.decoder.bias                         -
-                                     bert.pooler.dense.*                                  -  # fills no masked word
-                                     cls.seq_relationship.*                               -  # next-sentence head
""")


def config(keys: Keys) -> spec.Model:
    width, heads, vocab = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.int("vocab_size")
    context, types = keys.int("max_position_embeddings"), keys.int("type_vocab_size", default=2, low=0)
    hidden, act = keys.int("intermediate_size"), keys.act("hidden_act", default="gelu")
    norm = spec.LayerNorm(width=width, eps=keys.float("layer_norm_eps", default=1e-12))
    dropout = keys.dropout("hidden_dropout_prob", default=0.1)
    keys.choice("position_embedding_type", {"absolute": None}, default="absolute")
    block = spec.Block(
        attn=spec.attention(width, heads, bias=True, dropout=keys.dropout("attention_probs_dropout_prob", default=0.1)),
        mlp=spec.mlp(width, hidden, act, bias=True),
        attn_norm=spec.Norms(post=norm),
        mlp_norm=spec.Norms(post=norm),
        dropout=dropout,
    )
    embed = spec.Embed(
        vocab=vocab,
        width=width,
        position=spec.Learned(length=context, width=width),
        token_types=types,
        norm=norm,
        dropout=dropout,
    )
    blocks = (block,) * keys.count("num_hidden_layers")
    head = _head(keys, width, vocab, act, norm, dropout)
    tied = isinstance(head, spec.MaskedLMHead)
    if not keys.bool("tie_word_embeddings", default=True) and tied:
        raise keys.error("tie_word_embeddings is false: such heads store two biases of which the reference adds one")
    return spec.Model(
        family="bert",
        encoder=spec.Stack(embed=embed, kinds={"self": spec.Kind(mask=spec.full())}, blocks=blocks),
        head=head,
        ties={"head.proj.weight": "encoder.embed.tokens.weight"} if tied else {},
        ids=keys.special_ids(vocab),
        context=context,
        init_std=keys.float("initializer_range", default=0.02),
    )


def _head(
    keys: Keys, width: int, vocab: int, act: Activation, norm: spec.LayerNorm, dropout: float
) -> spec.MaskedLMHead | spec.ClassHead | spec.TokenHead | spec.Pooling:
    """The head of the class the checkpoint was saved from; a bare encoder pools."""
    kind = keys.architecture(
        {
            "BertModel": spec.Pooling,
            "BertForMaskedLM": spec.MaskedLMHead,
            "BertForPreTraining": spec.MaskedLMHead,
            "BertForSequenceClassification": spec.ClassHead,
            "BertForTokenClassification": spec.TokenHead,
        },
        default="BertModel",
    )
    last = keys.optional_float("classifier_dropout", high=1.0)
    last = dropout if last is None else last
    dense = spec.Linear(inputs=width, outputs=width, bias=True)
    if kind is spec.MaskedLMHead:
        proj = spec.Linear(inputs=width, outputs=vocab, bias=True)
        return spec.MaskedLMHead(dense=dense, act=act, norm=norm, proj=proj)
    if kind is spec.Pooling:  # whether BertModel was saved with its pooler is written in no config
        pooler = keys.has_tensor("pooler.dense.weight", default=True)
        return spec.Pooling(dense=dense if pooler else None)
    classes = spec.Linear(inputs=width, outputs=keys.labels(), bias=True)
    if kind is spec.ClassHead:
        return spec.ClassHead(dense=dense, classes=classes, dropout=last)
    return spec.TokenHead(classes=classes, dropout=last)


_GGUF_POOLING = {1: "mean", 2: "first"}


def from_gguf(keys: Keys) -> Mapping[str, Any]:
    if keys.bool("attention.causal", default=False):
        raise keys.error("attention.causal is set, which no BERT is")
    return {
        "architectures": ["BertModel"],
        "hidden_size": keys.int("embedding_length"),
        "intermediate_size": keys.int("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.count("attention.head_count"),
        "max_position_embeddings": keys.int("context_length"),
        "type_vocab_size": keys.int("token_types", default=0, low=0),
        "layer_norm_eps": keys.float("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "triptych_pooling": {"mode": _GGUF_POOLING[keys.int("pooling_type", default=1, low=1, high=2)]},
    }
