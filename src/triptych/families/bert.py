"""BERT (Devlin et al. 2019): post-norm encoder with learned positions, token types and GELU.

Reference: transformers `models/bert`; its class says which head sits on top.  GGUF files hold the encoder alone.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import encoders, gguf_config

hf_types = {"bert"}
ids = {"pad_token_id": 0}
gguf_archs = {"bert"}
prefix = "bert."
renames = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # exports from TensorFlow
ignore = names_in("""
directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
pooler_size_per_head pooler_type  # the multilingual configs describe a pooler no reference builds
""")

ROWS = table("""
encoder.embed.tokens.weight          bert.embeddings.word_embeddings.weight                     token_embd.weight
encoder.embed.position.weight        bert.embeddings.position_embeddings.weight                 position_embd.weight
encoder.embed.token_types.weight     bert.embeddings.token_type_embeddings.weight               token_types.weight
encoder.embed.norm.*                 bert.embeddings.LayerNorm.*                                token_embd_norm.*
encoder.blocks.{i}.attn.<q,k,v>.*    bert.encoder.layer.{i}.attention.self.<query,key,value>.*  blk.{i}.attn_<q,k,v>.*
encoder.blocks.{i}.attn.out.*        bert.encoder.layer.{i}.attention.output.dense.*            blk.{i}.attn_output.*
encoder.blocks.{i}.attn_norm.post.*  bert.encoder.layer.{i}.attention.output.LayerNorm.*  blk.{i}.attn_output_norm.*
encoder.blocks.{i}.mlp.<up,down>.*   bert.encoder.layer.{i}.<intermediate,output>.dense.*       blk.{i}.ffn_<up,down>.*
encoder.blocks.{i}.mlp_norm.post.*  bert.encoder.layer.{i}.output.LayerNorm.*  blk.{i}.layer_output_norm.*
-  bert.embeddings.position_ids  -  # 0, 1, 2, ...
-  bert.pooler.dense.*  -  # where no head reads it
head.ends.*                          qa_outputs.*
[Pooling]
head.dense.*                         bert.pooler.dense.*
[TokenHead]
head.classes.*                       classifier.*
""")
MASKED = table("""
[MaskedLMHead]
head.transform.<dense,norm>.*  cls.predictions.transform.<dense,LayerNorm>.*
head.proj.weight               cls.predictions.decoder.weight
[tie:head.proj.weight]
head.proj.bias                 cls.predictions.bias
head.proj.bias                 cls.predictions.decoder.bias
[own:head.proj.weight]
head.proj.bias                 cls.predictions.decoder.bias
head.proj.bias                 cls.predictions.bias|spare  -  # added to a tied head alone
""")
weights = (
    ROWS
    + table("""
[ClassHead]
head.transform.dense.*                bert.pooler.dense.*
head.classes.*                        classifier.*
[MaskedLMHead]
-                                     cls.seq_relationship.*  -  # next-sentence head
""")
    + MASKED
)


def config(keys: ConfigKeys) -> spec.ModelSpec:
    stack = encoders.post_norm(keys)
    pooler = keys.has_tensor("pooler.dense.weight", default=True)  # is written in no config
    act = keys.act("hidden_act", default="gelu")
    heads = encoders.heads(keys, "Bert", stack, masked=act, label="tanh", pooler=pooler)
    heads["BertForPreTraining"] = heads["BertForMaskedLM"]
    return encoders.model(keys, stack, keys.architecture(heads, default="BertModel"))


def from_gguf(keys: ConfigKeys) -> Values:
    return {
        "architectures": ["BertModel"],
        **gguf_config.sizes(keys),
        "max_position_embeddings": keys.int("context_length"),
        "type_vocab_size": keys.int("token_types", default=0, low=0),
        "layer_norm_eps": keys.float("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "triptych_pooling": gguf_config.pooling(keys),
    }
