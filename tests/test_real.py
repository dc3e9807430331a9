"""Real weights, each against the library its users would compare us with."""

from pathlib import Path
from typing import Any

import torch

import triptych
from triptych.model import Model

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "1, 2, 3, 4, 5,",
]
SENTENCES = [
    "She sat by the river bank.",
    "The bank raised its interest rates again.",
    "A dog barks.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "Attention is all you need, and a good deal of patience besides; this sentence is longer than the others by far.",
    "42",
]


def test_smollm2_writes_what_transformers_writes(smollm2: Model, smollm2_gguf: Path) -> None:
    """64 greedy tokens of five prompts, from the same GGUF dequantized by each library's own code."""
    import transformers

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    rows = [smollm2.ids([prompt])[0] for prompt in PROMPTS]
    found = smollm2.generate(rows, max_new_tokens=64)
    for row, ours in zip(rows, found, strict=True):
        ids = torch.tensor([row])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert ours.ids == out[0, len(row) :].tolist()


def test_smollm2_chats(smollm2: Model) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    first = "".join(smollm2.chat(messages, max_new_tokens=24))
    assert "Paris" in first
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert "Rome" in "".join(smollm2.chat(messages, max_new_tokens=24))


def test_smollm2_records_while_it_generates(smollm2: Model) -> None:
    """A pattern read while generating is the pattern of one whole pass, and reading leaves the tokens alone."""
    site = "blocks.7.attn.pattern"
    plain = smollm2.generate([PROMPTS[0]], max_new_tokens=6)[0]
    read = smollm2.generate([PROMPTS[0]], max_new_tokens=6, read=[site])[0]
    assert read.ids == plain.ids
    whole = smollm2.trace([[*smollm2.ids([PROMPTS[0]])[0], *plain.ids[:-1]]], read=[site])
    assert torch.allclose(read.trace[site][0], whole[site][0], atol=1e-4)


def test_minilm_embeds_what_sentence_transformers_embeds(minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer

    reference = torch.as_tensor(SentenceTransformer(str(minilm_dir), device="cpu").encode(SENTENCES))
    ours = triptych.load(minilm_dir).encode(SENTENCES)
    cosine = torch.nn.functional.cosine_similarity(ours, reference)
    assert cosine.min() >= 0.99999
    assert torch.allclose(ours.norm(dim=-1), torch.ones(len(SENTENCES)), atol=1e-5)
    others = torch.nn.functional.cosine_similarity(ours, reference.roll(1, 0))
    assert others.max() < 0.9  # the measure tells sentences apart


def test_minilm_keeps_its_pooling_when_saved(minilm_dir: Path, tmp_path: Path) -> None:
    model = triptych.load(minilm_dir)
    model.save(tmp_path / "out")
    back = triptych.load(tmp_path / "out")
    assert back.spec == model.spec
    assert torch.equal(back.encode(SENTENCES[:2]), model.encode(SENTENCES[:2]))
