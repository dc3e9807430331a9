"""DistilBERT (Sanh et al. 2019): half of BERT's blocks, without token types and pooler.

Reference: transformers `models/distilbert`.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, table
from . import encoders

hf_types = {"distilbert"}
ids = {"pad_token_id": 0}
prefix = "distilbert."
ignore = {
    "sinusoidal_pos_embds",  # what the table of positions began as; it is stored either way
    "tie_weights_",  # of a training script
}  # fmt: skip

weights = table("""
encoder.embed.<tokens,position>.weight  distilbert.embeddings.<word,position>_embeddings.weight
encoder.embed.norm.*                    distilbert.embeddings.LayerNorm.*
encoder.blocks.{i}.attn.<q,k,v,out>.*   distilbert.transformer.layer.{i}.attention.<q,k,v,out>_lin.*
encoder.blocks.{i}.attn_norm.post.*     distilbert.transformer.layer.{i}.sa_layer_norm.*
encoder.blocks.{i}.mlp.<up,down>.*      distilbert.transformer.layer.{i}.ffn.<lin1,lin2>.*
encoder.blocks.{i}.mlp_norm.post.*      distilbert.transformer.layer.{i}.output_layer_norm.*
-  distilbert.embeddings.position_ids  -  # 0, 1, 2, ...
head.<classes,ends>.*                   <classifier,qa_outputs>.*
[ClassHead]
head.transform.dense.*                  pre_classifier.*
[MaskedLMHead]
head.transform.<dense,norm>.*           vocab_<transform,layer_norm>.*
head.proj.*                             vocab_projector.*
""")
_KEYS = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}  # fmt: skip


def config(keys: ConfigKeys) -> spec.ModelSpec:
    stack = encoders.post_norm(keys, names=_KEYS)
    heads = encoders.heads(keys, "DistilBert", stack, masked=keys.act("activation", default="gelu"), label="relu")
    head = keys.architecture(heads, default="DistilBertModel")
    dropouts = {
        spec.ClassHeadSpec: keys.dropout("seq_classif_dropout", default=0.2),
        spec.SpanHeadSpec: keys.dropout("qa_dropout", default=0.1),
    }
    if isinstance(head, spec.ClassHeadSpec | spec.SpanHeadSpec):
        head = replace(head, dropout=dropouts[type(head)])
    return encoders.model(keys, stack, head)
