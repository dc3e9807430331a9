"""ELECTRA (Clark et al. 2020): BERT whose embedding may be narrower than its blocks.  The generator predicts masked
tokens, the discriminator classifies each token as original or replaced.

Reference: transformers `models/electra`, whose heads over words and labels have GELU whatever `hidden_act` says.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, renamed, table
from . import bert, encoders

hf_types = {"electra"}
ids = {"pad_token_id": 0}
prefix = "electra."
renames = bert.renames
# They shape a summary that only the multiple-choice class has.
ignore = {"summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"}

weights = renamed(bert.ROWS, "bert.", "electra.") + table("""
encoder.embed.project.*        electra.embeddings_project.*
[ClassHead]
head.transform.dense.*         classifier.dense.*
head.classes.*                 classifier.out_proj.*
[MaskedLMHead]
head.transform.<dense,norm>.*  generator_predictions.<dense,LayerNorm>.*
head.proj.*                    generator_lm_head.*
[ReplacedHead]
head.transform.dense.*         discriminator_predictions.dense.*
head.proj.*                    discriminator_predictions.dense_prediction.*
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    stack = encoders.post_norm(keys, embed_width=keys.int("embedding_size", default=128))
    dense = spec.LinearSpec(inputs=stack.width, outputs=stack.width, bias=True)
    heads = encoders.heads(keys, "Electra", stack)
    heads["ElectraForPreTraining"] = spec.ReplacedHeadSpec(
        transform=spec.TransformSpec(dense=dense, act=keys.act("hidden_act", default="gelu")),
        proj=replace(dense, outputs=1),
    )
    return encoders.model(keys, stack, keys.architecture(heads, default="ElectraModel"))
