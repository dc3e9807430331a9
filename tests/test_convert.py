"""Formats into each other: GGUF blocks against ggml's own reference, files against independent readers, models
against themselves."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import references
from cli_models import BLOCKS, Captured, checkpoint, said
from triptych import families
from triptych.checkpoints import open_source
from triptych.checkpoints.convert import QUANTIZED, convert
from triptych.checkpoints.gguf_blocks import WRITABLE, block_format
from triptych.checkpoints.gguf_writer import GGUFTensor, write_gguf
from triptych.checkpoints.header import read_header
from triptych.cli import main
from triptych.errors import CheckpointError, InputError, TextError
from triptych.model import Model, create, load
from triptych.text import DECODER, Tokenizer, bpe_tokenizer, character_tokenizer, from_gguf, to_gguf

IDS = [3, 7, 1, 22, 9, 30, 5, 11, 17, 40, 2, 8]
SMALL = BLOCKS | {"num_hidden_layers": 1, "num_key_value_heads": 4}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# ---------------------------------------------------------------- blocks


def values(kind: str) -> torch.Tensor:
    """Rows with what goes wrong: zeros, constants, ties for the largest, halves, one sign, tiny and large numbers."""
    rows = torch.randn(12, 96)
    rows[0] = 0
    rows[1] = 3.25
    rows[2, :] = torch.tensor([1.0, -1.0]).repeat(48)
    rows[3, :] = torch.tensor([-1.0, 1.0]).repeat(48)
    rows[4] = torch.arange(96) / 2 - 8  # whole and half codes
    rows[5] = rows[5].abs()
    rows[6] = -rows[6].abs()
    rows[7] *= 1e-7
    rows[8] *= 1e4
    rows[9, 5] = 127.0
    rows[10] = (torch.arange(96) % 32 + 0.5) * 127 / 32
    return rows


@pytest.mark.parametrize("kind", WRITABLE)
def test_blocks_are_ggml_s_bit_for_bit(kind: str) -> None:
    rows = values(kind)
    expected = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(block_format(kind).pack(rows), torch.from_numpy(expected))
    assert torch.equal(block_format(kind).pack(rows.view(3, 4, 96)), torch.from_numpy(expected).view(3, 4, -1))
    many = torch.randn(300, 1024)  # more than one chunk
    expected = gguf.quants.quantize(many.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(block_format(kind).pack(many), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", WRITABLE)
def test_what_a_block_cannot_keep_is_refused(kind: str) -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="not finite"):
            block_format(kind).pack(torch.full((1, 32), bad))
    with pytest.raises(CheckpointError, match="too large for the fp16 scale"):
        block_format(kind).pack(torch.arange(32)[None] * 1e9)
    with pytest.raises(CheckpointError, match="rows of 33 are not whole blocks of 32"):
        block_format(kind).pack(torch.zeros(2, 33))
    with pytest.raises(CheckpointError, match="Q4_K can be read but not written; use Q4_0, Q4_1, Q8_0"):
        block_format("Q4_K").pack(torch.zeros(2, 256))


# ---------------------------------------------------------------- the file


def entries() -> list[GGUFTensor]:
    made = {"F32": (3, 5), "F16": (7,), "BF16": (2, 3, 4), "Q8_0": (4, 64), "Q4_0": (2, 3, 32), "Q4_1": (5, 96)}
    tensors = {kind: torch.randn(shape) for kind, shape in made.items()}
    return [GGUFTensor(f"t.{kind}", kind, shape, lambda t=tensors[kind]: t) for kind, shape in made.items()]


METADATA: dict[str, Any] = {
    "general.architecture": "llama", "n.yes": True, "n.int": 4_000_000_000, "n.float": 1.5, "n.text": "naïve\nline",
    "n.strings": ["a", "", "é"], "n.ints": [3, -4, 5], "n.floats": [0.5, -2.0], "n.flags": [True, False], "n.none": [],
}  # fmt: skip


def test_a_written_file_is_read_by_gguf_s_own_reader(tmp_path: Path) -> None:
    path, tensors = tmp_path / "x.gguf", entries()
    assert write_gguf(path, METADATA, tensors) == path.stat().st_size
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == [entry.name for entry in tensors]
    for theirs, entry in zip(reader.tensors, tensors, strict=True):
        assert theirs.data_offset % 32 == 0
        assert tuple(theirs.shape[::-1]) == entry.shape
        got = torch.from_numpy(gguf.quants.dequantize(theirs.data, theirs.tensor_type).astype(np.float32))
        assert torch.equal(got.view(entry.shape), open_source(path).read(entry.name).float())
    found = {key: reader.fields[key].contents() for key in METADATA}
    assert found == METADATA
    assert open_source(path).metadata == METADATA


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, entries())
    before = path.read_bytes()
    for bad, says in {
        GGUFTensor("t", "Q8_0", (1, 32), lambda: torch.full((1, 32), torch.nan)): "tensor 't': holds numbers",
        GGUFTensor("t", "F16", (1,), lambda: torch.tensor([1e6])): "tensor 't': holds numbers too large for f16",
        GGUFTensor("t", "F32", (3,), lambda: torch.zeros(4)): r"t is \[4\], not \[3\]",
    }.items():
        with pytest.raises(CheckpointError, match=says):
            write_gguf(path, METADATA, [*entries(), bad])
    with pytest.raises(CheckpointError, match="key 'x': a list of several types"):
        write_gguf(path, {"x": [1, "a"]}, [])
    with pytest.raises(CheckpointError, match="key 'x': None cannot be written"):
        write_gguf(path, {"x": None}, [])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


# ---------------------------------------------------------------- models

# Whatever has a header, but for what only HF can say, and more variants of it.
TOLD = [
    *(name for name in references.HEADERS if name not in references.UNSAID),
    "gpt2-untied", "llama-mqa", "llama-mha", "llama-linear", "llama-yarn", "llama-llama3", "llama-longrope",
    "mistral-full", "qwen3-tied", "phi3-long", "gemma-biased", "granite-tied", "gemma2-plain", "t5-published",
    "t5-gated", "mt5-published", "mt5-encoder",
]  # fmt: skip
UNTOLD = {
    "mistral": "'attention.sliding_window' .* is not understood",
    "starcoder2-untied": "'attention.sliding_window' .* is not understood",
    "gpt2-unscaled": r"decoder.blocks.0.attn.scale is 1.0, and would be lost",
    "gpt2-base": "head is absent, and would be read back as LMHead",
    "gemma2-uncapped": "attn.softcap is absent, and would be read back as 50",
    "gemma3": r"decoder.blocks.0.attn.scale is 0\.24.* and would be read back as 0\.31",
    "qwen3-moe": "decoder.blocks.1.mlp.part is GLU, and would be read back as MoE",
    "phi-normed": "gguf has no name for 'decoder.blocks.0.attn.q_norm.weight'",
    "bert-classes": "gguf has no name for 'head.transform.dense.weight'",
    "roberta": "GGUF has no names for models of family 'roberta'; convert it to hf",
    "t5": r"position.max_distance is 11, and would be lost",
    "t5-unscaled": r"head.scale is absent, and would be read back as 0\.2",
    "marian": "GGUF has no names for models of family 'marian'",
}


def outputs(model: Model) -> torch.Tensor:
    if model.spec.layout == "encoder":
        return model.encode([IDS])
    sources = [[IDS[::-1]]] if model.spec.layout == "encoder-decoder" else []
    return model.logits(*sources, [IDS])[0].log_softmax(-1)


@cache
def written(name: str, dtype: str | None = None) -> Path:
    path = references.saved(name)[1].parent / f"{name}-{dtype}.gguf"
    convert(references.saved(name)[1], path, dtype=dtype, force=True)
    return path


@pytest.mark.parametrize("name", TOLD)
def test_a_model_comes_back_from_gguf(name: str) -> None:
    path = references.saved(name)[1]
    before, after = load(path), load(written(name))
    rounded = "rope_f" in str(open_source(written(name)).names)  # divisors of RoPE are float32 there
    assert torch.allclose(outputs(after), outputs(before), rtol=0, atol=2e-5 if rounded else 1e-6)
    shifted = {load.ours for load in families.save_plan(before.spec, "gguf") if "PlusOne" in str(load.ops)}
    for key, parameter in before.module.named_parameters():
        close = {"rtol": 0, "atol": 3e-7 if (key,) in shifted else 0}
        assert torch.allclose(after.module.get_parameter(key), parameter, **close), key


# What other writers of GGUF cut apart or put together: variant -> (what we write, the names of its rows' parts).
PARTS = {
    "mixtral": {f"ffn_{part}_exps": [f"ffn_{part}.{e}" for e in range(5)] for part in ("gate", "up", "down")},
    "phi3-long": {"attn_qkv": ["attn_q", "attn_k", "attn_v"]},
    "phi": {"attn_qkv": ["attn_q", "attn_k", "attn_v"]},
}


def otherwise(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file as such a writer makes it."""
    found = {key: source.read(key) for source in [open_source(written(name))] for key in source.names}
    for whole, parts in PARTS[name].items():
        for i, leaf in ((i, leaf) for i in range(references.L) for leaf in ("weight", "bias")):
            names = [f"blk.{i}.{part}.{leaf}" for part in parts]
            if (old := found.pop(f"blk.{i}.{whole}.{leaf}", None)) is not None:
                found |= zip(names, old.unbind(0) if old.dim() == 3 else old.chunk(len(parts)), strict=True)
            elif names[0] in found:
                found[f"blk.{i}.{whole}.{leaf}"] = torch.cat([found.pop(name) for name in names])
    return found


def stored(path: Path, metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    write_gguf(path, metadata, [GGUFTensor(key, "F32", tuple(x.shape), lambda x=x: x) for key, x in tensors.items()])
    return path


@pytest.mark.parametrize("name", PARTS)
def test_files_of_other_writers_are_the_same_models(name: str, tmp_path: Path) -> None:
    metadata, tensors = open_source(written(name)).metadata, otherwise(name)
    assert tensors.keys() != set(open_source(written(name)).names)
    path = stored(tmp_path / "x.gguf", metadata, tensors)
    assert torch.allclose(outputs(load(path)), outputs(load(references.saved(name)[1])), rtol=0, atol=2e-5)
    key = next(
        key for key in tensors if key.startswith("blk.1.") and (".4." in key or "attn_k." in key or "qkv" in key)
    )
    rows = tensors[key].roll(1, 0)
    changed = load(stored(tmp_path / "y.gguf", metadata, tensors | {key: rows}))  # negative control
    assert not torch.allclose(outputs(changed), outputs(load(path)), atol=1e-3)
    with pytest.raises(CheckpointError, match=r"missing [13] tensors: 'blk\.1"):
        load(stored(tmp_path / "z.gguf", metadata, {k: x for k, x in tensors.items() if k != key}))


def test_a_tensor_in_whole_and_in_part_is_refused(tmp_path: Path) -> None:
    source = open_source(written("phi"))
    tensors = {key: source.read(key) for key in source.names} | otherwise("phi")
    assert torch.equal(  # both whole, and equal
        outputs(load(stored(tmp_path / "x.gguf", source.metadata, tensors))), outputs(load(written("phi")))
    )
    del tensors["blk.1.attn_k.weight"]
    with pytest.raises(CheckpointError, match=r"missing 1 tensors: 'blk.1.attn_k.weight'.*'blk.1.attn_qkv.weight'"):
        load(stored(tmp_path / "y.gguf", source.metadata, tensors))


@pytest.mark.parametrize("name", UNTOLD)
def test_a_model_gguf_cannot_tell_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=UNTOLD[name]) as caught:
        convert(references.saved(name)[1], tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama-llama3", "gemma", "bert-no-pooler", "mixtral"])
def test_a_model_comes_back_to_hf(name: str, tmp_path: Path) -> None:
    convert(written(name), tmp_path / "hf")
    assert torch.allclose(outputs(load(tmp_path / "hf")), outputs(load(written(name))), rtol=0, atol=1e-6)


def test_the_reference_opens_what_came_out_of_gguf(tmp_path: Path) -> None:
    model, _ = references.saved("llama-tied")
    convert(written("llama-tied"), tmp_path / "hf")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids).logits)


def wide(dtype: str | None = None, **more: Any) -> Model:
    """A Llama whose rows are whole blocks, but for those of width 40."""
    model = create(
        {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 52, "initializer_range": 0.1}
        | more
    )  # fmt: skip
    return model if dtype is None else Model(model.module.to(getattr(torch, dtype)), None, model.hf)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1"])
def test_packed_models_hold_what_ggml_would_make_of_them(dtype: str, tmp_path: Path) -> None:
    model, kind = wide(), QUANTIZED[dtype]
    model.save(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "x.gguf", dtype=dtype)
    # down's rows of 40 and the norms stay f32
    assert done.tensors == {kind: 2 + 2 * 6, "F32": 1 + 2 * 3}
    assert done.nbytes == (tmp_path / "x.gguf").stat().st_size
    source, after = open_source(tmp_path / "x.gguf"), load(tmp_path / "x.gguf")
    assert source.infos["blk.0.ffn_down.weight"].dtype == source.infos["blk.0.attn_norm.weight"].dtype == "F32"
    for key, parameter in model.module.named_parameters():
        got = after.module.get_parameter(key)
        if parameter.dim() == 1 or key.endswith("down.weight"):
            assert torch.equal(got, parameter)
        elif ".attn.q." not in key and ".attn.k." not in key:  # whole rows of these moved
            packed = gguf.quants.quantize(parameter.detach().numpy(), gguf.GGMLQuantizationType[kind])
            assert torch.equal(got, block_format(kind).unpack(torch.from_numpy(packed)))
    near = {"q8_0": 0.1, "q4_0": 2.0, "q4_1": 2.0}[dtype]
    gap = (outputs(after) - outputs(model)).abs().max()
    assert near / 20 < gap < near


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_goes_there_and_back_exactly(dtype: str, tmp_path: Path) -> None:
    model = wide(dtype)
    model.save(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "x.gguf")
    assert done.tensors == {{"float16": "F16", "bfloat16": "BF16"}[dtype]: 2 + 2 * 7, "F32": 1 + 2 * 2}
    convert(tmp_path / "x.gguf", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == dtype
    before, after = open_source(tmp_path / "hf"), open_source(tmp_path / "again")
    assert set(before.names) == set(after.names)
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)
    assert convert(tmp_path / "hf", tmp_path / "f32", dtype="f32").tensors == {"float32": len(before.names)}


def test_a_norm_of_one_plus_weight_keeps_bits_that_bf16_would_lose(tmp_path: Path) -> None:
    """GGUF stores Gemma's 1 + weight, which in bf16 would round every small weight away."""
    path = references.saved("gemma")[1]
    convert(path, tmp_path / "half", dtype="bf16")
    convert(tmp_path / "half", tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path / "again")
    before, after = open_source(tmp_path / "half"), open_source(tmp_path / "again")
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)


def test_an_unread_pooler_is_left_out_and_said(tmp_path: Path) -> None:
    path = references.saved("bert-pooler")[1]
    done = convert(path, tmp_path / "x.gguf")
    assert done.notes == ("left out head.dense, which its pooling does not read",)
    assert torch.allclose(outputs(load(tmp_path / "x.gguf")), outputs(load(path)), atol=1e-6)
    dense = shutil.copytree(path, tmp_path / "dense")
    config = json.loads((dense / "config.json").read_text()) | {"triptych_pooling": {"mode": "dense"}}
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gguf has no name for 'head.dense.weight'.*; convert it to hf$"):
        convert(dense, tmp_path / "y.gguf")


def test_how_an_encoder_pools_travels(tmp_path: Path) -> None:
    path = shutil.copytree(references.saved("bert-no-pooler")[1], tmp_path / "hf")
    config = json.loads((path / "config.json").read_text())
    config["triptych_pooling"] = {"mode": "first", "normalize": True}
    (path / "config.json").write_text(json.dumps(config))
    convert(path, tmp_path / "x.gguf")
    assert read_header(tmp_path / "x.gguf").spec.head == read_header(path).spec.head
    assert torch.allclose(outputs(load(tmp_path / "x.gguf")), outputs(load(path)), atol=1e-6)


def test_an_unequal_tie_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(references.saved("llama-tied")[1], tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")
    for out in ("x.gguf", "out"):
        with pytest.raises(CheckpointError, match=r"lm_head.weight differs from"):
            convert(path, tmp_path / out)
        assert not (tmp_path / out).exists()


def test_real_weights_come_back(smollm2_gguf: Path, tmp_path: Path, unchecked: None) -> None:
    """A Q4_1 file to f32 and to q4_1 again: the blocks are ggml's, so nearly all codes are the same."""
    convert(smollm2_gguf, tmp_path / "f32.gguf", dtype="f32")
    convert(tmp_path / "f32.gguf", tmp_path / "x.gguf", dtype="q4_1")
    before, after = open_source(smollm2_gguf), open_source(tmp_path / "x.gguf")
    assert set(before.names) == set(after.names)
    ours = {key: value for key, value in after.metadata.items() if key.startswith(("llama.", "tokenizer."))}
    assert all(before.metadata.get(key, value) == value for key, value in ours.items())
    name = "blk.7.ffn_up.weight"
    assert (after.read(name) - before.read(name)).abs().max() <= 2e-3 * before.read(name).abs().max()
    ours, again = (read_header(path).tokenizer() for path in (smollm2_gguf, tmp_path / "x.gguf"))
    assert all(ours.encode(text) == again.encode(text) for text in NASTY)


def test_a_sentence_encoder_as_gguf(minilm_dir: Path, tmp_path: Path) -> None:
    done = convert(minilm_dir, tmp_path / "x.gguf", dtype="f16")
    assert done.notes
    ours, packed = load(minilm_dir), load(tmp_path / "x.gguf")
    texts = ["She sat by the river bank.", "Ein Satz, mit Umlauten: äöü. 42", "日本語 🙂"]
    assert packed.ids(texts) == ours.ids(texts)
    assert torch.allclose(packed.encode(texts), ours.encode(texts), atol=2e-3)


# ---------------------------------------------------------------- where it is written


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    source = references.saved("llama")[1]
    convert(source, tmp_path / "x.gguf")
    convert(source, tmp_path / "hf")
    for out in ("x.gguf", "hf"):
        with pytest.raises(InputError, match=r"exists; choose another name, or replace it with --force"):
            convert(source, tmp_path / out)
        convert(source, tmp_path / out, dtype="f16", force=True)
        assert {info.dtype for info in open_source(tmp_path / out).infos.values()} >= {"F16"}
    with pytest.raises(InputError, match="is a directory, and gguf is not"):
        convert(source, tmp_path / "hf", to="gguf", force=True)
    with pytest.raises(InputError, match=r"is a directory, not a \.gguf file"):
        convert(source, tmp_path / "x.gguf", to="hf", force=True)
    with pytest.raises(InputError, match="an HF directory cannot store 'q8_0'; use one of f32, f16, bf16"):
        convert(source, tmp_path / "new", dtype="q8_0")


def test_a_file_may_replace_itself(tmp_path: Path) -> None:
    path = Path(shutil.copy(written("llama"), tmp_path / "x.gguf"))
    convert(path, path, dtype="f16", force=True)
    assert torch.allclose(outputs(load(path)), outputs(load(written("llama"))), atol=0.05)


# ---------------------------------------------------------------- tokenizers

NASTY = ["It's 12345 o'clock; THEY'LL pay.\n\n  Naïve x²", "日本語 🙂", "  lead", "<|endoftext|>a<|endoftext|>", "½ Ⅳ"]


def trained(size: int = 300, **more: Any) -> Tokenizer:
    return bpe_tokenizer(["the sun and the moon 12345 it's o'clock " * 9], size, **more)


def test_a_byte_level_tokenizer_comes_back() -> None:
    ours = trained()
    metadata = to_gguf(ours, ours.vocab_size + 3)
    again = from_gguf(metadata)
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{ours.vocab_size + 2}]"
    assert metadata["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert all(again.encode(text) == ours.encode(text) for text in NASTY)
    assert (again.eos_id, again.bos_id, again.stop_ids) == (ours.eos_id, ours.bos_id, ours.stop_ids)


def test_the_split_is_tested_not_guessed() -> None:
    for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"):
        fields = to_gguf(trained(), 300) | {"tokenizer.ggml.pre": name}
        assert to_gguf(from_gguf(fields), 300)["tokenizer.ggml.pre"] == name
    from tokenizers import pre_tokenizers

    odd = trained()
    odd.backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("o", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(TextError, match=r"GGUF cannot describe this tokenizer \(BPE, split by Sequence\)"):
        to_gguf(odd, 300)


def test_tokenizers_that_gguf_cannot_describe_are_refused() -> None:
    header = read_header(checkpoint("encoder"))
    with pytest.raises(TextError, match="cannot describe a tokenizer of type WordLevel"):
        to_gguf(header.tokenizer(), 500)
    characters = r"a token for each character and none for other bytes.*HF directory.*train one with tokenizer = \"bpe"
    with pytest.raises(TextError, match=characters):  # the tokenizer of quickstart's decoder
        to_gguf(character_tokenizer("the old mill"), 500)
    with pytest.raises(TextError, match="has 283 tokens, the model has rows for 282"):
        to_gguf(trained(), 282)
    ends = Tokenizer(trained().backend, DECODER.specials, stop_ids=[7, 8, 9])
    with pytest.raises(TextError, match="two stop tokens beside EOS"):
        to_gguf(ends, 300)


def test_no_tokenizer_stays_none() -> None:
    assert read_header(written("llama")).tokenizer() is None
    assert load(written("llama")).tokenizer is None


def sentencepiece() -> dict[str, Any]:
    """A SentencePiece BPE as a GGUF has it, bytes and all."""
    words = ["▁", "t", "h", "e", "a", "n", "d", "▁t", "he", "▁the", "an", "▁an", "▁and", "s", "u", "un", "▁s", "▁sun"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_comes_back(prefix: bool) -> None:
    ours = from_gguf(sentencepiece() | {"tokenizer.ggml.add_space_prefix": prefix})
    metadata = to_gguf(ours, ours.vocab_size)
    again = from_gguf(metadata)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.token_type"] == sentencepiece()["tokenizer.ggml.token_type"]
    assert metadata["tokenizer.ggml.add_bos_token"]
    for text in [*NASTY, "the sun and the sand", "<s>the</s> sun"]:
        assert again.encode(text) == ours.encode(text)
    assert len(ours.encode("the sun")) < 6


def test_a_chat_model_keeps_its_template_and_its_ends(tmp_path: Path) -> None:
    path = checkpoint("decoder")
    convert(path, tmp_path / "x.gguf")
    ours, again = read_header(path).tokenizer(), read_header(tmp_path / "x.gguf").tokenizer()
    assert again.chat.source == ours.chat.source
    more = Tokenizer(ours.backend, ours.specials, stop_ids=[65], chat=ours.chat)
    model = load(path)
    Model(model.module, more, model.hf).save(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [256, 65]}')
    convert(tmp_path / "hf", tmp_path / "y.gguf")
    assert load(tmp_path / "y.gguf").end_ids == (256, 65)
    convert(tmp_path / "y.gguf", tmp_path / "back")
    assert set(load(tmp_path / "back").end_ids) == {256, 65}
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert all(theirs(text).input_ids == ours.encode(text) for text in NASTY)


def test_what_a_checkpoint_says_of_generating_holds_against_its_config(tmp_path: Path) -> None:
    path = shutil.copytree(references.saved("llama")[1], tmp_path / "hf")
    (path / "generation_config.json").unlink(missing_ok=True)
    assert load(path).end_ids == (2,)
    told = {"eos_token_id": [7, 9], "pad_token_id": 5, "bos_token_id": None, "temperature": 0.5}
    (path / "generation_config.json").write_text(json.dumps(told))
    ids = read_header(path).spec.ids
    assert (ids.eos, ids.pad, ids.bos) == ((7, 9), 5, 1)
    theirs = AutoModelForCausalLM.from_pretrained(path).generation_config
    assert (theirs.eos_token_id, theirs.pad_token_id) == ([7, 9], 5)
    convert(path, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == told
    assert load(tmp_path / "again").end_ids == (7, 9)
    config = json.loads((path / "config.json").read_text())
    del config["eos_token_id"], told["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(told))
    assert load(path).end_ids == (2,)  # of the configuration class


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "x.gguf"
    told = json.loads(said(["convert", str(checkpoint("decoder")), str(out), "--dtype", "f16", "--json"], capsys)[0])
    assert told["format"] == "gguf"
    assert told["nbytes"] == out.stat().st_size
    assert set(told["tensors"]) == {"F16", "F32"}
    assert "llama" in said(["convert", str(out), str(tmp_path / "hf"), "--to", "hf"], capsys)[0]
    assert said(["convert", str(out), str(tmp_path / "hf")], capsys, 1)[1].startswith("error: ")
    assert main(["convert", str(references.saved("bart")[1]), str(tmp_path / "bart.gguf")]) == 1
    assert "GGUF has no names for models of family 'bart'" in capsys.readouterr().err


def test_spec_equality_is_not_vacuous() -> None:
    """`difference` reports a number changed anywhere but in the fields that only training reads."""
    spec = read_header(references.saved("llama")[1]).spec
    from triptych.mapping.gguf_metadata import difference

    assert difference(spec, spec) is None
    assert difference(spec, replace(spec, init_std=0.5)) is None
    assert difference(spec, replace(spec, context=51)) == "context is 52, and would be read back as 51"


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin", "out.PT"])
def test_a_directory_is_not_named_like_a_weights_file(name: str, tmp_path: Path) -> None:
    create(SMALL).save(tmp_path / "m")
    with pytest.raises(InputError, match=r"an HF checkpoint is a directory, not a \.\w+ file; name a directory, for"):
        convert(tmp_path / "m", tmp_path / name)
    assert not (tmp_path / name).exists()
    assert convert(tmp_path / "m", tmp_path / "out").format == "hf"


def test_weights_that_were_unpacked_are_said_to_have_grown(tmp_path: Path, capsys: Captured) -> None:
    create(SMALL).save(tmp_path / "m")
    assert convert(tmp_path / "m", tmp_path / "packed.gguf", dtype="q8_0").notes == ()
    grown = r"0 MiB of packed weights became 0 MiB of float32; --dtype bf16 .* writes half of it"
    (note,) = convert(tmp_path / "packed.gguf", tmp_path / "plain").notes
    assert re.fullmatch(grown, note)
    assert convert(tmp_path / "packed.gguf", tmp_path / "again.gguf").notes == ()  # it stays packed
    assert convert(tmp_path / "packed.gguf", tmp_path / "named", dtype="f32").notes == ()  # it was asked for
    assert convert(tmp_path / "packed.gguf", tmp_path / "half", dtype="bf16").notes == ()
    assert "--dtype bf16" in said(["convert", str(tmp_path / "packed.gguf"), str(tmp_path / "shown")], capsys)[1]


@pytest.mark.parametrize("name", ["q.xyz", "model.onnx", "q.gguf.tmp", "out.json"])
def test_an_ending_of_no_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=rf"{name}: \.\w+ is the ending of no format; write .*\.gguf for a GGUF file, or"
    ):
        convert(checkpoint("decoder"), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.onnx", "a.pt", "a.bin", "a.safetensors", "a.json", "", "plain/config.json"])
def test_save_refuses_the_names_that_convert_refuses(name: str, tmp_path: Path) -> None:
    model = load(checkpoint("decoder"))
    model.save(tmp_path / "plain")
    for write in (model.save, partial(convert, checkpoint("decoder"))):
        with pytest.raises(
            InputError,
            match=r"ending of no format|is a directory, not a \.|a model becomes a directory|the name to write to is",
        ):
            write(f"{tmp_path}/{name}" if name else "")
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("name", ["plain", "Llama-3.2-1B", "v1.5", "model.d/", ".hidden"])
def test_a_name_without_an_ending_or_with_a_slash_is_a_directory(name: str, tmp_path: Path) -> None:
    assert convert(checkpoint("decoder"), f"{tmp_path}/{name}").format == "hf"
    assert (tmp_path / name / "config.json").is_file()


#: What llama.cpp refuses, in a Phi, a StarCoder2 and so on that are otherwise as it knows them, and a control.
LIMITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "phi": ("phi", {"tie_word_embeddings": True}, "phi2 model has tied embeddings"),
    "starcoder2": ("starcoder2", {"use_bias": False, "sliding_window": None}, "starcoder2 model has no biases"),
    "gpt-neox": ("gpt-neox", {"tie_word_embeddings": True}, "gptneox model has tied embeddings"),
    "gpt-neox, no biases": ("gpt-neox", {"attention_bias": False}, "gptneox model has no biases"),
    "qwen2": ("qwen2", {"rope_parameters": LLAMA3}, "qwen2 model has frequencies of rotation of its own"),
    "gemma": ("gemma", {"attention_bias": True}, "gemma model has biases in its attention"),
    "qwen3-moe": ("qwen3-moe-normed", {"attention_bias": True}, "a bias in the output projection of its attention"),
    "gptj": ("gptj", {}, "is of an architecture that it does not have"),
    "llama": ("llama", {"rope_parameters": LLAMA3}, ""),
    "granite": ("granite", {}, ""),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_file_that_llama_cpp_refuses_has_a_note(name: str, tmp_path: Path) -> None:
    variant, change, problem = LIMITS[name]
    config = json.loads((references.saved(variant)[1] / "config.json").read_text()) | change
    create(config).save(tmp_path / "model")
    done = convert(tmp_path / "model", tmp_path / "x.gguf")
    notes = [note for note in done.notes if note.startswith("llama.cpp does not open this file: ")]
    assert [problem in note for note in notes] == [True] * bool(problem)


def test_a_window_that_gguf_does_not_have_is_refused_without_a_guess(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window' \(= 4\) is not understood; convert it to hf"):
        convert(references.saved("starcoder2-untied")[1], tmp_path / "x.gguf")
