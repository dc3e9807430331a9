"""RoBERTa (Liu et al. 2019) and what is built like it, XLM-RoBERTa and CamemBERT: BERT whose positions begin after the
padding id, with heads of its own.

Reference: transformers `models/roberta`, whose masked-LM head has GELU whatever `hidden_act` says.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, renamed, table
from . import bert, encoders

_NAMES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
hf_types = _NAMES.keys()
ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
prefix = "roberta."
renames = bert.renames

weights = renamed(bert.ROWS, "bert.", "roberta.") + table("""
[ClassHead]
head.transform.dense.*         classifier.dense.*
head.classes.*                 classifier.out_proj.*
[MaskedLMHead]
head.transform.<dense,norm>.*  lm_head.<dense,layer_norm>.*
head.proj.weight               lm_head.decoder.weight
[tie:head.proj.weight]
head.proj.bias                 lm_head.bias
head.proj.bias                 lm_head.decoder.bias
[own:head.proj.weight]
head.proj.bias                 lm_head.decoder.bias
head.proj.bias                 lm_head.bias|spare  -  # added to a tied head alone
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    # Row `pad` of the table is for padding and the first token is at `pad + 1`.
    stack = encoders.post_norm(keys, offset=keys.int("pad_token_id", default=1, low=0) + 1)
    name, pooler = _NAMES[keys.str("model_type")], keys.has_tensor("pooler.dense.weight", default=True)
    heads = encoders.heads(keys, name, stack, label="tanh", pooler=pooler)
    return encoders.model(keys, stack, keys.architecture(heads, default=f"{name}Model"))
