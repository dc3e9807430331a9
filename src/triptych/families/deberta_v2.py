"""DeBERTa v2 and v3 (He et al. 2021, 2023): far distances share logarithmic buckets, their table has a norm, words and
distances share their maps, and the largest models have a convolution beside the first block.

Reference: transformers `models/deberta_v2`.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import COUNT, ConfigKeys, table
from . import deberta, disentangled

hf_types = {"deberta-v2"}
ids = {"pad_token_id": 0}
prefix = deberta.prefix
ignore = deberta.ignore

weights = deberta.ROWS + table("""
encoder.blocks.{i}.attn.<q,k,v,pos_k>.*  deberta.encoder.layer.{i}.attention.self.<query,key,value,pos_key>_proj.*
encoder.blocks.{i}.attn.pos_q.*          deberta.encoder.layer.{i}.attention.self.pos_query_proj.*
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads = keys.int("hidden_size"), keys.count("num_attention_heads")
    attn = spec.attention(width, heads, head_width=keys.optional_int("attention_head_size"), bias=True)
    if not keys.flag("share_att_key"):
        attn = replace(attn, pos_q=attn.q, pos_k=attn.k)
    most, buckets = disentangled.max_distance_of(keys), keys.int("position_buckets", default=-1, low=-1, high=COUNT)
    return disentangled.model(
        keys, "DebertaV2", attn,
        span=buckets if buckets > 0 else most,
        max_distance=most if buckets > 0 else None,
        norm_distances=keys.choice("norm_rel_ebd", {"none": False, "layer_norm": True}, default="none"),
        branch=_branch(keys, width),
    )  # fmt: skip


def _branch(keys: ConfigKeys, width: int) -> spec.BranchSpec | None:
    """The convolution beside the first block, where the kernel has a size."""
    kernel, groups = keys.int("conv_kernel_size", default=0, low=0, high=COUNT), keys.count("conv_groups", default=1)
    act, norm = keys.act("conv_act", default="tanh"), keys.float("layer_norm_eps", default=1e-7)
    if not kernel:
        return None
    if kernel % 2 == 0 or groups != 1:
        raise keys.error(f"conv_kernel_size {kernel} in {groups} groups: odd ones in one group can be read")
    return spec.BranchSpec(
        conv=spec.ConvSpec(inputs=width, outputs=width, kernel=kernel),
        act=act,
        norm=spec.LayerNormSpec(width=width, eps=norm),
        dropout=keys.dropout("hidden_dropout_prob", default=0.1),
    )
