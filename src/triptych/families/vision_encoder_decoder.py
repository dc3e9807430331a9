"""A ViT and a decoder of text that reads it through cross-attention: captions of images.  The decoder is GPT-2 or
BERT with a cross-attention in every block; where the widths of the two stacks differ, a linear map takes the encoder's
vectors to the decoder's width.

Reference: transformers `models/vision_encoder_decoder`, whose config holds those of its two models.
"""

from dataclasses import replace

from triptych import spec
from triptych.mapping import ConfigKeys, of_decoder, renamed, table, within
from . import bert, decoder, encoders, gpt2, seq2seq, vit
from .registry import find

hf_types = {"vision-encoder-decoder"}
module_name = vit.module_name
ignore = {"tie_word_embeddings"}  # of the two stacks, which are never tied; the decoder's config has its own


weights = (
    within("encoder.", renamed(vit.weights, "vit.", ""))
    + table("""
encoder.project.*                     enc_to_dec_proj.*
-                                     encoder.pooler.dense.*  -  # the decoder reads all vectors, not the pooled one
""")
    + of_decoder("gpt2", gpt2.weights + table("""
decoder.blocks.{i}.cross_norm.pre.*   transformer.h.{i}.ln_cross_attn.*
decoder.blocks.{i}.cross.q.*          transformer.h.{i}.crossattention.q_attn.*|transpose
decoder.blocks.{i}.cross.(k,v).*      transformer.h.{i}.crossattention.c_attn.*|transpose
decoder.blocks.{i}.cross.out.*        transformer.h.{i}.crossattention.c_proj.*|transpose
"""))
    + of_decoder("bert", bert.ROWS + bert.MASKED + table("""
decoder.blocks.{i}.cross.<q,k,v>.*    bert.encoder.layer.{i}.crossattention.self.<query,key,value>.*
decoder.blocks.{i}.cross.out.*        bert.encoder.layer.{i}.crossattention.output.dense.*
decoder.blocks.{i}.cross_norm.post.*  bert.encoder.layer.{i}.crossattention.output.LayerNorm.*
"""))
)  # fmt: skip


def config(keys: ConfigKeys) -> spec.ModelSpec:
    seq2seq.as_built(keys)
    seeing, writing = _config_of(keys, "encoder", "vit"), _config_of(keys, "decoder", "gpt2", "bert")
    encoder, naming = vit.encoder(seeing), writing.str("model_type")
    for name in ("add_cross_attention", "is_decoder"):
        if not writing.flag(name) and (name, naming) != ("is_decoder", "gpt2"):
            raise writing.error(f"{name} must be true for a {naming} that writes about an image")
    writing.data = {**writing.data, "architectures": None}  # it has the head that writes, whatever its class was
    model = _bert(writing) if naming == "bert" else gpt2.config(writing)
    width, cross_width = model.reads.width, writing.optional_int("cross_attention_hidden_size")
    if cross_width is not None and not cross_width == encoder.width == width:
        raise writing.error(
            f"cross_attention_hidden_size is {cross_width}, the encoder's width {encoder.width} and the decoder's "
            f"{width}; the cross-attention of {naming} needs all three to be equal, or no cross_attention_hidden_size"
        )
    if encoder.width != width:
        encoder = replace(encoder, project=spec.LinearSpec(inputs=encoder.width, outputs=width, bias=True))
    ids = {key: table.data[key] for table in (writing, keys) for key in _IDS if table.data.get(key) is not None}
    seeing.finish(find("vit").ignore | _OTHER_HEADS)
    writing.finish(find(naming).ignore | _OTHER_HEADS)
    return replace(
        model,
        family="vision-encoder-decoder",
        encoder=encoder,
        decoder=_reading(model.reads),
        ids=ConfigKeys(ids, keys.where).special_ids(model.vocab),
        naming=naming,
    )


_OTHER_HEADS = {"pooler_act", "pooler_output_size", "classifier_dropout"}  # of what is not built here
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def _config_of(keys: ConfigKeys, name: str, *kinds: str) -> ConfigKeys:
    """The config of one of the two models, which must be of one of these families."""
    inner = keys.table(name)
    if inner is None:
        raise keys.error(f"{name} is missing or empty; it holds the config of the {name}")
    kind = inner.choice("model_type", {one: one for one in kinds})
    inner.assume(**find(kind).ids)
    return inner


def _bert(keys: ConfigKeys) -> spec.ModelSpec:
    """BERT's stack, in which a token sees those before it, with the head of its masked language model."""
    stack = replace(encoders.post_norm(keys), kinds={"self": spec.KindSpec(mask=spec.causal())})
    model = decoder.model(keys, "Bert", stack, tied=True, bias=True)
    assert isinstance(model.head, spec.LMHeadSpec)
    dense = spec.LinearSpec(inputs=stack.width, outputs=stack.width, bias=True)
    transform = spec.TransformSpec(dense=dense, act=keys.act("hidden_act", default="gelu"), norm=stack.words.norm)
    return replace(model, head=replace(model.head, transform=transform))


def _reading(stack: spec.StackSpec) -> spec.StackSpec:
    """The stack with a cross-attention in every block, shaped like its self-attention and with the same norms."""
    blocks = tuple(
        replace(block, cross=replace(block.attn, kind="cross"), cross_norm=block.attn_norm)
        for block in stack.blocks
        if isinstance(block, spec.BlockSpec)
    )
    return replace(stack, blocks=blocks)
