"""Tiny models of every kind that the server serves, and servers of some of them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from cli_models import BERT, WORDS, checkpoint
from test_hearing import LETTERS, MELS, V, tokenizer
from triptych.model import Model, create, load
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker
from triptych.text import word_tokenizer

WHISPER = {
    "model_type": "whisper", "vocab_size": V, "num_mel_bins": MELS, "d_model": 24, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 3, "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 39, "max_source_positions": 50, "max_target_positions": 52, "init_std": 0.4,
    "pad_token_id": LETTERS, "bos_token_id": LETTERS, "eos_token_id": LETTERS, "decoder_start_token_id": LETTERS + 1,
}  # fmt: skip


@cache
def model(kind: str) -> Model:
    """A `decoder` (that chats), an `encoder` (that fills masks), an `encoder-decoder`, a model that `labels` texts with
    one of three classes, one that `ranks` pairs, one for `sentences`, or one that `hears`."""
    if kind in ("decoder", "encoder", "encoder-decoder"):
        return load(checkpoint(kind))
    if kind == "hears":
        return create(WHISPER, tokenizer(), seed=3)
    words = word_tokenizer(WORDS, 90)
    more: dict[str, Any] = {
        "labels": {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, "ranks": {"id2label": {"0": "fits"}},
        "sentences": {"architectures": ["BertModel"], "triptych_sentences": {"max_seq_length": 16}},
    }[kind]  # fmt: skip
    how = {"architectures": ["BertForSequenceClassification"], "vocab_size": words.vocab_size, "pad_token_id": 0}
    return create(BERT | how | more, words, seed=3)


def server_of(kinds: Sequence[str], **how: Any) -> Server:
    return Server({kind: ModelWorker(model(kind), kind, max_rows=8) for kind in kinds}, **how)
