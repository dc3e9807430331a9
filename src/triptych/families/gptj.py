"""GPT-J (Wang & Komatsuzaki 2021): attention and MLP in parallel behind one LayerNorm, RoPE in neighbouring pairs on
the first dimensions of each head, biases in the MLP and the head alone.

Reference: transformers `models/gptj`.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, gpt2

hf_types = {"gptj"}
ids = {"bos_token_id": 50_256, "eos_token_id": 50_256}
gguf_archs = {"gptj"}
ignore = names_in("""
rotary  # whether positions are rotated; they always are
scale_attn_weights  # never read by the reference
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
""")
prefix = "transformer."

weights = table("""
decoder.embed.tokens.weight            transformer.wte.weight                     token_embd.weight
decoder.blocks.{i}.norm.*              transformer.h.{i}.ln_1.*                   blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.<q,k,v,out>.*  transformer.h.{i}.attn.<q,k,v,out>_proj.*  blk.{i}.attn_<q,k,v,output>.*
decoder.blocks.{i}.mlp.<up,down>.*     transformer.h.{i}.mlp.fc_<in,out>.*        blk.{i}.ffn_<up,down>.*
decoder.final_norm.*                   transformer.ln_f.*                         output_norm.*
head.proj.*                            lm_head.*                                  output.*
-  transformer.h.{i}.attn.<bias,masked_bias>  -  # old exports store the causal mask, and its -1e9
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads = keys.int("n_embd"), keys.count("n_head")
    hidden = keys.optional_int("n_inner") or 4 * width
    norm = spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_epsilon", default=1e-5))
    act, dropout = keys.act("activation_function", default="gelu_new"), keys.dropout("resid_pdrop")
    block = spec.ParallelBlockSpec(
        norm=norm,
        attn=spec.attention(width, heads, dropout=keys.dropout("attn_pdrop")),
        mlp=spec.mlp(width, hidden, act, bias=True),
        dropout=dropout,
    )
    turned = keys.int("rotary_dim", default=64)
    if turned % 2 or turned > width // heads:
        raise keys.error(f"rotary_dim {turned} must be even and at most the width of a head, {width // heads}")
    position = spec.RopeSpec(width=turned, pairing="interleaved")
    blocks = [block] * keys.count("n_layer")
    stack = decoder.stack(keys, blocks, norm, position, dropout=keys.dropout("embd_pdrop"))
    return decoder.model(keys, "GPTJ", stack, context=keys.int("n_positions"), bias=True)


def from_gguf(keys: ConfigKeys) -> Values:
    config = gpt2.from_gguf(keys)
    turned = keys.int("rope.dimension_count", default=config["n_embd"] // config["n_head"])
    return config | {"architectures": ["GPTJForCausalLM"], "rotary_dim": turned}


def to_gguf(model: spec.ModelSpec) -> Values:
    return {"rope.freq_base": None}  # the only base there is
