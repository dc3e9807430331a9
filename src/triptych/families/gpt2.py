"""GPT-2 (Radford et al. 2019): pre-norm decoder, learned positions, tanh GELU, biases everywhere, tied head.

Reference: transformers `models/gpt2`; its Conv1D stores matrices as [inputs, outputs], q, k and v in one.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder

hf_types = {"gpt2"}
ids = {"bos_token_id": 50_256, "eos_token_id": 50_256}
gguf_archs = {"gpt2"}
ignore = names_in("""
n_ctx  # an old duplicate of n_positions
n_special predict_special_tokens  # of the library that read GPT-1; in medium, large and xl
reorder_and_upcast_attn  # the order of a product; softmax is in fp32 here anyway
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
""")
prefix = "transformer."

weights = table("""
decoder.embed.<tokens,position>.weight  transformer.<wte,wpe>.weight                   <token,position>_embd.weight
decoder.blocks.{i}.attn_norm.pre.*      transformer.h.{i}.ln_1.*                       blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.(q,k,v).*       transformer.h.{i}.attn.c_attn.*|transpose      blk.{i}.attn_qkv.*
decoder.blocks.{i}.attn.out.*           transformer.h.{i}.attn.c_proj.*|transpose      blk.{i}.attn_output.*
decoder.blocks.{i}.mlp_norm.pre.*       transformer.h.{i}.ln_2.*                       blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.<up,down>.*      transformer.h.{i}.mlp.c_<fc,proj>.*|transpose  blk.{i}.ffn_<up,down>.*
decoder.final_norm.*                    transformer.ln_f.*                             output_norm.*
head.proj.weight                        lm_head.weight                                 output.weight
-  transformer.h.{i}.attn.<bias,masked_bias>  -  # old exports store the causal mask, and its -1e4
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads, context = keys.int("n_embd"), keys.count("n_head"), keys.int("n_positions")
    hidden = keys.optional_int("n_inner") or 4 * width
    norm = spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_epsilon", default=1e-5))
    scale = None if keys.bool("scale_attn_weights", default=True) else 1.0
    by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
    first = (scale or (width / heads) ** -0.5) if by_layer else 0.0
    act, attn_dropout = keys.act("activation_function", default="gelu_new"), keys.dropout("attn_pdrop", default=0.1)
    blocks = [
        spec.BlockSpec(
            attn=spec.attention(
                width, heads, bias=True, scale=first / (i + 1) if by_layer else scale, dropout=attn_dropout
            ),
            mlp=spec.mlp(width, hidden, act, bias=True),
            attn_norm=spec.NormsSpec(pre=norm),
            mlp_norm=spec.NormsSpec(pre=norm),
            dropout=keys.dropout("resid_pdrop", default=0.1),
        )
        for i in range(keys.count("n_layer"))
    ]
    position = spec.LearnedSpec(length=context, width=width)
    stack = decoder.stack(keys, blocks, norm, position, dropout=keys.dropout("embd_pdrop", default=0.1))
    known = {"GPT2LMHeadModel": True, "GPT2Model": False}
    return decoder.model(keys, known, stack, context=context, tied=True)


def from_gguf(keys: ConfigKeys) -> Values:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": keys.int("embedding_length"),
        "n_head": keys.count("attention.head_count"),
        "n_layer": keys.count("block_count"),
        "n_positions": keys.int("context_length"),
        "n_inner": keys.int("feed_forward_length"),
        "layer_norm_epsilon": keys.float("attention.layer_norm_epsilon"),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
    }
