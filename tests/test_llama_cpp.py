"""GGUF files as llama.cpp itself reads them, where its bindings are installed (`pip install cyllama==0.2.18`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import references
import test_text_vocabulary as files
from triptych.checkpoints import open_source
from triptych.checkpoints.convert import convert
from triptych.model import Model, create, load
from triptych.spec import LMHeadSpec
from triptych.text import from_directory

llama: Any = pytest.importorskip("cyllama.llama.llama_cpp")

IDS = [3, 7, 1, 22, 9, 30, 5, 11, 17, 40, 2, 8, 4, 6, 13, 21, 35, 28, 19, 10]
TABLE = 5e-3  # ggml looks GELU up in a table of fp16
#: Variants llama.cpp runs, and how far its log-probabilities may be from ours.
RUN = {
    "llama": 2e-5, "llama-mqa": 2e-5, "llama-mha": 2e-5, "llama-biased": 2e-5, "llama-tied": 2e-5, "llama-linear": 2e-5,
    "llama-yarn": 2e-5, "llama-llama3": 2e-5, "llama-longrope": 2e-5, "mistral-full": 2e-5, "mixtral": 5e-5,
    "qwen2": 2e-5, "qwen3": 2e-5, "qwen3-tied": 2e-5, "phi3-long": 5e-5, "gpt2": TABLE, "gpt2-untied": TABLE,
    "gpt-neox": TABLE, "phi": TABLE, "gemma": TABLE, "bert-pooler": TABLE, "t5-published": 2e-5, "t5-v1.1": TABLE,
    "mt5-published": TABLE, "mt5-encoder": TABLE, "gemma2-plain": TABLE, "gemma3-linear": TABLE, "granite": 2e-5,
    "granite-tied": 2e-5, "qwen3-moe-normed": 2e-5, "gpt-neox-in-turn": TABLE,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    llama.disable_logging()
    llama.llama_backend_init()


class Theirs:
    """One file, opened."""

    def __init__(self, path: Path) -> None:
        class Opened(llama.LlamaModel):  # type: ignore[misc]
            @property
            def n_vocab(self) -> int:  # the bindings ask for it and do not have it
                return int(self.get_vocab().n_vocab)

        self.model = Opened(str(path), llama.LlamaModelParams(), False)

    def run(self, ids: list[int], encoder: bool = False, source: list[int] | None = None) -> torch.Tensor:
        """Logits `[T, V]`, after a `source` if there is one; of an encoder the first token's vector."""
        params = llama.LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.n_threads, params.flash_attn_type = 1, 0
        params.type_k = params.type_v = 0  # a cache of fp32
        if encoder:
            params.embeddings, params.pooling_type = True, 0
        context = llama.LlamaContext(self.model, params)
        if source:
            context.encode(_batch(source))
        (context.encode if encoder else context.decode)(_batch(ids))
        if encoder:
            return torch.tensor(context.get_embeddings())[: self.model.n_embd]
        return torch.from_numpy(np.stack([np.array(context.get_logits_ith(i), np.float32) for i in range(len(ids))]))


def _batch(ids: list[int]) -> Any:
    batch = llama.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for position, token in enumerate(ids):
        batch.add(token, position, [0], True)
    return batch


def apart(ours: Model, path: Path, ids: list[int]) -> float:
    if ours.spec.layout == "encoder":
        expected = ours.encode([ids], pooling="first", normalize=False)[0]
        return float((Theirs(path).run(ids, encoder=True) - expected).abs().max())
    source = ids[::-1] if ours.spec.layout == "encoder-decoder" else None
    logits = Theirs(path).run(ids, source=source)
    assert isinstance(ours.spec.head, LMHeadSpec)
    if source:
        logits *= ours.spec.head.scale or 1  # llama.cpp leaves T5's out: its tokens are in order, their odds are not
    expected = ours.logits(*([source],) * bool(source), [ids])[0]
    return float((logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max())


@pytest.mark.parametrize("name", RUN)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    source = references.saved(name)[1]
    convert(source, tmp_path / "x.gguf")
    assert apart(load(source), tmp_path / "x.gguf", IDS) < RUN[name]


@pytest.mark.parametrize("case", ["GPT2", "Qwen2", "Llama no prefix", "Gemma", "T5", "XLMRoberta", "Bert", "Llama"])
def test_llama_cpp_cuts_texts_the_same(case: str, tmp_path: Path) -> None:
    name, contents, config = files.CASES[case]
    made = files.written(tmp_path / "files", contents(), {"tokenizer_class": f"{name}Tokenizer", **config})
    ours = from_directory(made)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id, "max_position_embeddings": 52}
    model = create({"model_type": "llama", "vocab_size": ours.vocab_size + 3} | sizes | ids)
    Model(model.module, ours, model.hf).save(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "x.gguf")
    opened = Theirs(tmp_path / "x.gguf").model
    theirs = opened.get_vocab()
    tokens = files.SPECIAL.get(name, ["<mask>", "</s>"])
    texts = [*files.NASTY, *files.CORPUS[:4], *(f"the {token} sun{token}" for token in tokens), tokens[0] * 2]
    differ = [text for text in texts if list(theirs.tokenize(text, True, True)) != ours.encode(text)]
    # Where a text begins with a space, SentencePiece, and llama.cpp, put one more before it; transformers does not.
    assert differ == ([" ", " the sun", "   the   sun  ", "the </s> sun</s>"] if case == "Llama" else [])
    assert bool(done.notes) is bool(differ)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q8_0"])
def test_blocks_are_those_of_its_own_quantizer(dtype: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    plain, ours, theirs = (tmp_path / name for name in ("f32.gguf", "ours.gguf", "theirs.gguf"))
    convert(smollm2_gguf, plain, dtype="f32")
    convert(plain, ours, dtype=dtype)
    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.pure, params.nthread = {"q4_0": 2, "q4_1": 3, "q8_0": 7}[dtype], True, 1
    llama.model_quantize(str(plain), str(theirs), params)
    mine, its = open_source(ours), open_source(theirs)
    assert {name: info.dtype for name, info in mine.infos.items()} == {n: i.dtype for n, i in its.infos.items()}
    assert all(torch.equal(mine.read_raw(name), its.read_raw(name)) for name in mine.names)


@pytest.mark.heavy
def test_real_weights_and_tokenizers(smollm2_gguf: Path, minilm_dir: Path, tmp_path: Path) -> None:
    convert(smollm2_gguf, tmp_path / "x.gguf", dtype="f32")
    convert(minilm_dir, tmp_path / "bert.gguf", dtype="f32")
    model, encoder = load(smollm2_gguf, dequantize=True), load(minilm_dir)
    assert apart(model, tmp_path / "x.gguf", model.ids(["The capital of France is"])[0]) < 1e-3
    assert apart(encoder, tmp_path / "bert.gguf", encoder.ids(["She sat by the river bank."])[0]) < TABLE
    texts = ["It's 12345 o'clock; naïve café", "日本語 🙂\n\n  x²  ", "  lead  trail ", "def f(x):\n    return x[0]"]
    for file, ours in ((tmp_path / "x.gguf", model), (tmp_path / "bert.gguf", encoder)):
        opened = Theirs(file)
        vocabulary = opened.model.get_vocab()
        for text in texts:
            assert list(vocabulary.tokenize(text, True, False)) == ours.ids([text])[0]
