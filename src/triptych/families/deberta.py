"""DeBERTa (He et al. 2021): BERT whose scores also compare content with relative positions.

Reference: transformers `models/deberta`, which keeps q, k and v in one matrix, head by head, and has no bias for keys.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, table
from . import bert, disentangled

hf_types = {"deberta"}
ids = {"pad_token_id": 0}
prefix = "deberta."
ignore = {
    "padding_idx",  # of the embedding's gradient
    "pooler_dropout",  # of training, before the pooler: after it is `cls_dropout`
}  # fmt: skip

ROWS = (
    table("""
encoder.embed.<tokens,position,token_types>.weight  deberta.embeddings.<word,position,token_type>_embeddings.weight
encoder.embed.<widen,norm>.*                        deberta.embeddings.<embed_proj,LayerNorm>.*
encoder.kinds.self.position.weight                  deberta.encoder.rel_embeddings.weight
encoder.kinds.self.position.norm.*                  deberta.encoder.LayerNorm.*
encoder.blocks.{i}.attn.out.*                       deberta.encoder.layer.{i}.attention.output.dense.*
encoder.blocks.{i}.attn_norm.post.*                 deberta.encoder.layer.{i}.attention.output.LayerNorm.*
encoder.blocks.{i}.mlp.<up,down>.*                  deberta.encoder.layer.{i}.<intermediate,output>.dense.*
encoder.blocks.{i}.mlp_norm.post.*                  deberta.encoder.layer.{i}.output.LayerNorm.*
encoder.blocks.0.branch.<conv,norm>.*               deberta.encoder.conv.<conv,LayerNorm>.*
-  deberta.embeddings.position_ids  -  # 0, 1, 2, ...
-  deberta.embeddings.position_embeddings.weight  -  # unused by the encoder; of the decoder used in pre-training
-  lm_predictions.lm_head.<dense.*,LayerNorm.*,bias>  -  # a head of the pre-training
-  mask_predictions.<dense,LayerNorm,classifier>.*  -  # a head of the pre-training
head.<ends,classes>.*                               <qa_outputs,classifier>.*
[ClassHead]
head.transform.dense.*                              pooler.dense.*
[as:lm_predictions]
head.transform.<dense,norm>.*                       lm_predictions.lm_head.<dense,LayerNorm>.*
head.proj.bias                                      lm_predictions.lm_head.bias
""")
    + bert.MASKED
)
weights = ROWS + table("""
encoder.blocks.{i}.attn.(q,k,v).weight  deberta.encoder.layer.{i}.attention.self.in_proj.weight|by_head
encoder.blocks.{i}.attn.<q,v>.bias      deberta.encoder.layer.{i}.attention.self.<q,v>_bias
encoder.blocks.{i}.attn.pos_k.*         deberta.encoder.layer.{i}.attention.self.pos_proj.*
encoder.blocks.{i}.attn.pos_q.*         deberta.encoder.layer.{i}.attention.self.pos_q_proj.*
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    if keys.flag("talking_head"):
        raise keys.error("talking_head is set: scores of different heads are mixed, which no published DeBERTa does")
    attn = spec.attention(keys.int("hidden_size"), keys.count("num_attention_heads"), bias=True)
    without = replace(attn.k, bias=False)
    attn = replace(attn, k=without, pos_k=without, pos_q=attn.q)
    return disentangled.model(keys, "Deberta", attn, span=disentangled.max_distance_of(keys))
