"""Checkpoints of published shapes with random weights, for measurements: each is made once, in a directory given.

The speed of a model depends on its shape and on the types of its weights, not on what they say.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_1B = {"layers": 22, "width": 2048, "heads": 32, "groups": 4, "hidden": 5632, "vocab": 49152}
T5_SMALL = {
    "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8,
    "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WHISPER_TINY = {
    "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "num_mel_bins": 80,
    "vocab_size": 51865, "max_source_positions": 1500, "max_target_positions": 448, "decoder_start_token_id": 50258,
    "eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip


def llama_1b(folder: Path, source: Path) -> Path:
    """A 1.1B Llama as Q4_0, tied; the tokenizer is that of the GGUF file `source`."""
    import gguf

    target = folder / "llama-1b-q4_0.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    shape, partial = LLAMA_1B, target.with_suffix(".part")
    reader, writer = gguf.GGUFReader(str(source)), gguf.GGUFWriter(str(partial), "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    width, groups = shape["width"], shape["width"] // shape["heads"] * shape["groups"]
    writer.add_block_count(shape["layers"])
    writer.add_embedding_length(width)
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["groups"])
    writer.add_feed_forward_length(shape["hidden"])
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // shape["heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab"])
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        """Blocks of 32 numbers: a scale in fp16, then 16 bytes of two codes each."""
        blocks = np.empty((rows * columns // 32, 18), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.02 / 8).tobytes(), np.uint8)
        blocks[:, 2:] = random.integers(0, 256, (len(blocks), 16), dtype=np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    matrix("token_embd.weight", shape["vocab"], width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(shape["layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(width, np.float32))
        for name, rows, columns in (
            ("attn_q", width, width), ("attn_k", groups, width), ("attn_v", groups, width),
            ("attn_output", width, width), ("ffn_gate", shape["hidden"], width), ("ffn_up", shape["hidden"], width),
            ("ffn_down", width, shape["hidden"]),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)


def t5_small(folder: Path) -> Path:
    """A T5-small with a vocabulary of made-up words, which CTranslate2 asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, T5_SMALL["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )  # fmt: skip
    return _saved(folder / "t5-small", T5ForConditionalGeneration, T5Config(**T5_SMALL), fast)


def whisper_tiny(folder: Path) -> Path:
    """A Whisper-tiny; its vocabulary is made up but for the special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

    named = {50257: "<|endoftext|>", 50258: "<|startoftranscript|>", 50362: "<|nospeech|>", 50363: "<|notimestamps|>"}
    words = {named.get(i, f"w{i}"): i for i in range(WHISPER_TINY["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    return _saved(
        folder / "whisper-tiny", WhisperForConditionalGeneration, WhisperConfig(**WHISPER_TINY), fast
    )  # fmt: skip


def _saved(target: Path, cls: Any, config: Any, tokenizer: Any) -> Path:
    """A random model and its tokenizer, as transformers saves them."""
    if (target / "config.json").exists():
        return target
    import torch

    torch.manual_seed(0)
    partial = target.with_suffix(".part")
    cls(config).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    generation = partial / "generation_config.json"
    settings = json.loads(generation.read_text()) if generation.exists() else {}
    generation.write_text(json.dumps({**settings, "eos_token_id": config.eos_token_id}))
    return partial.rename(target)
