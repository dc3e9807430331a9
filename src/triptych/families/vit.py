"""ViT (Dosovitskiy et al. 2021): an encoder of the patches of an image behind a vector of its own, whose last state is
the image's.  Norms before each sublayer and at the end, biases everywhere, learned positions.

Reference: transformers `models/vit`.
"""

from __future__ import annotations

from triptych import spec
from triptych.mapping.keys import COUNT, Keys
from triptych.mapping.table import table

hf_types = frozenset({"vit"})
prefix = "vit."
ignore = frozenset({"encoder_stride"})  # of a head that paints hidden patches

weights = table("""
encoder.embed.first                   vit.embeddings.cls_token|one_row|one_row
encoder.embed.weight                  vit.embeddings.patch_embeddings.projection.weight
encoder.embed.bias                    vit.embeddings.patch_embeddings.projection.bias
encoder.embed.position.weight         vit.embeddings.position_embeddings|one_row
encoder.blocks.{i}.attn_norm.pre.*    vit.encoder.layer.{i}.layernorm_before.*
encoder.blocks.{i}.attn.q.*           vit.encoder.layer.{i}.attention.attention.query.*
encoder.blocks.{i}.attn.k.*           vit.encoder.layer.{i}.attention.attention.key.*
encoder.blocks.{i}.attn.v.*           vit.encoder.layer.{i}.attention.attention.value.*
encoder.blocks.{i}.attn.out.*         vit.encoder.layer.{i}.attention.output.dense.*
encoder.blocks.{i}.mlp_norm.pre.*     vit.encoder.layer.{i}.layernorm_after.*
encoder.blocks.{i}.mlp.up.*           vit.encoder.layer.{i}.intermediate.dense.*
encoder.blocks.{i}.mlp.down.*         vit.encoder.layer.{i}.output.dense.*
encoder.final_norm.*                  vit.layernorm.*
head.dense.*                          vit.pooler.dense.*
head.classes.*                        classifier.*
""")


def config(keys: Keys) -> spec.Model:
    stack = _encoder(keys)
    width, pooled = stack.width, keys.optional_int("pooler_output_size")
    dense = spec.Linear(inputs=width, outputs=pooled or width, bias=True)
    if keys.str("pooler_act", default="tanh") != "tanh":
        raise keys.error("pooler_act is not 'tanh', the only one a pooler has here")
    heads: dict[str, spec.Head] = {
        "ViTModel": spec.Pooling(dense=dense if keys.has_tensor("pooler.dense.weight", default=True) else None),
        "ViTForImageClassification": spec.ClassHead(
            classes=spec.Linear(inputs=width, outputs=keys.labels(), bias=True)
        ),
    }
    assert isinstance(stack.embed, spec.Patches)
    return spec.Model(
        family="vit",
        encoder=stack,
        head=keys.architecture(heads, default="ViTModel"),
        context=stack.embed.position.length,
        init_std=keys.float("initializer_range", default=0.02),
    )


def _encoder(keys: Keys) -> spec.Stack:
    width, heads = keys.int("hidden_size"), keys.count("num_attention_heads")
    side, patch = keys.int("image_size", default=224, high=COUNT), keys.int("patch_size", default=16, high=COUNT)
    norm = spec.LayerNorm(width=width, eps=keys.float("layer_norm_eps", default=1e-12))
    dropout = keys.dropout("hidden_dropout_prob")
    if side % patch:
        raise keys.error(f"image_size {side} is not a multiple of patch_size {patch}")
    block = spec.Block(
        attn=spec.attention(
            width, heads, bias=keys.bool("qkv_bias", default=True), out_bias=True,
            dropout=keys.dropout("attention_probs_dropout_prob"),
        ),
        mlp=spec.mlp(width, keys.int("intermediate_size"), keys.act("hidden_act", default="gelu"), bias=True),
        attn_norm=spec.Norms(pre=norm),
        mlp_norm=spec.Norms(pre=norm),
        dropout=dropout,
    )  # fmt: skip
    embed = spec.Patches(
        channels=keys.count("num_channels", default=3),
        image=side,
        patch=patch,
        width=width,
        position=spec.Learned(length=(side // patch) ** 2 + 1, width=width),
        dropout=dropout,
    )
    layers = keys.count("num_hidden_layers")
    kinds = {"self": spec.Kind(mask=spec.full())}
    return spec.Stack(embed=embed, kinds=kinds, blocks=(block,) * layers, final_norm=norm)
