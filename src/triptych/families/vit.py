"""ViT (Dosovitskiy et al. 2021): an encoder of the patches of an image after one learned vector, whose last state
stands for the image.  Norms before each sublayer and at the end, biases everywhere, learned positions.

Reference: transformers `models/vit`.
"""

from math import prod

from triptych import spec
from triptych.mapping import COUNT, ConfigKeys, table

hf_types = {"vit"}
prefix = "vit."
ignore = {"encoder_stride"}  # of a head that paints hidden patches

weights = table("""
encoder.embed.first                 vit.embeddings.cls_token|one_row|one_row
encoder.embed.<weight,bias>         vit.embeddings.patch_embeddings.projection.<weight,bias>
encoder.embed.position.weight       vit.embeddings.position_embeddings|one_row
encoder.blocks.{i}.attn_norm.pre.*  vit.encoder.layer.{i}.layernorm_before.*
encoder.blocks.{i}.attn.<q,k,v>.*   vit.encoder.layer.{i}.attention.attention.<query,key,value>.*
encoder.blocks.{i}.attn.out.*       vit.encoder.layer.{i}.attention.output.dense.*
encoder.blocks.{i}.mlp_norm.pre.*   vit.encoder.layer.{i}.layernorm_after.*
encoder.blocks.{i}.mlp.<up,down>.*  vit.encoder.layer.{i}.<intermediate,output>.dense.*
encoder.final_norm.*                vit.layernorm.*
head.<dense,classes>.*              <vit.pooler.dense,classifier>.*
""")
_MODULES = {
    "encoder.layer.": "layers.", "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
}  # fmt: skip


def module_name(stored: str) -> str:
    """Transformers 5 renamed the modules and still stores the old names.  A decoder's, beside a ViT, have one name."""
    for old, new in () if stored.startswith("decoder.") else _MODULES.items():
        stored = stored.replace(old, new)
    return stored


def config(keys: ConfigKeys) -> spec.ModelSpec:
    stack = encoder(keys)
    width, pooled = stack.width, keys.optional_int("pooler_output_size")
    dense = spec.LinearSpec(inputs=width, outputs=pooled or width, bias=True)
    dense_act = keys.act("pooler_act", default="tanh")
    heads: dict[str, spec.Head] = {
        "ViTModel": spec.PoolingSpec(
            dense=dense if keys.has_tensor("pooler.dense.weight", default=True) else None, act=dense_act
        ),
        "ViTForImageClassification": spec.ClassHeadSpec(
            classes=spec.LinearSpec(inputs=width, outputs=keys.labels(), bias=True)
        ),
    }
    assert isinstance(stack.embed, spec.PatchesSpec)
    return spec.ModelSpec(
        family="vit",
        encoder=stack,
        head=keys.architecture(heads, default="ViTModel"),
        context=stack.embed.position.length,
        init_std=keys.float("initializer_range", default=0.02),
    )


def encoder(keys: ConfigKeys) -> spec.StackSpec:
    """The stack of a config with ViT's keys."""
    width, heads = keys.int("hidden_size"), keys.count("num_attention_heads")
    sides, (patch, across) = _sides(keys, "image_size", 224), _sides(keys, "patch_size", 16)
    norm = spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_eps", default=1e-12))
    dropout = keys.dropout("hidden_dropout_prob")
    if patch != across or any(side % patch for side in sides):
        raise keys.error(f"image_size {list(sides)} is no multiple of one square patch_size {[patch, across]}")
    block = spec.BlockSpec(
        attn=spec.attention(
            width, heads, bias=keys.bool("qkv_bias", default=True), out_bias=True,
            dropout=keys.dropout("attention_probs_dropout_prob"),
        ),
        mlp=spec.mlp(width, keys.int("intermediate_size"), keys.act("hidden_act", default="gelu"), bias=True),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
        dropout=dropout,
    )  # fmt: skip
    embed = spec.PatchesSpec(
        channels=keys.count("num_channels", default=3),
        image=sides,
        patch=patch,
        width=width,
        position=spec.LearnedSpec(length=prod(side // patch for side in sides) + 1, width=width),
        dropout=dropout,
    )
    layers = keys.count("num_hidden_layers")
    kinds = {"self": spec.KindSpec(mask=spec.full())}
    return spec.StackSpec(embed=embed, kinds=kinds, blocks=(block,) * layers, final_norm=norm)


def _sides(keys: ConfigKeys, name: str, default: int) -> tuple[int, int]:
    """Height and width: two numbers, or one for both."""
    if isinstance(keys.get(name, default), int):
        return (keys.int(name, default, high=COUNT),) * 2
    both = keys.ints(name)
    if len(both) != 2 or not 1 <= min(both) <= max(both) <= COUNT:
        raise keys.error(f"{name} must be one side or two, each between 1 and {COUNT}, not {list(both)}")
    return both[0], both[1]
