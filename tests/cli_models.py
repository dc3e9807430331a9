"""Tiny checkpoints with tokenizers, one a layout, made once a run and left on the disk: what a command line opens.

`BLOCKS` is the config of a Llama whose rows are whole blocks, so that they can be packed.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from triptych.cli import main
from triptych.model import create
from triptych.text import DECODER, SEQ2SEQ, ChatTemplate, Tokenizer, byte_tokenizer, word_tokenizer

CONTEXT = 72
Captured = pytest.CaptureFixture[str]  # what the fixture `capsys` is
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["the old mill stands where the river bends", "the ship came in on the evening tide"]
LLAMA = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "max_position_embeddings": CONTEXT,
         "initializer_range": 0.3}  # fmt: skip
BLOCKS = {"model_type": "llama", "vocab_size": 43, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 24, "intermediate_size": 37,
        "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": CONTEXT,
        "type_vocab_size": 4, "initializer_range": 0.3}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 24, "d_kv": 10, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3,
      "num_heads": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11,
      "initializer_factor": 1.0}  # fmt: skip


@cache
def checkpoint(layout: str) -> Path:
    """The directory of a `decoder` (that chats), an `encoder` (that fills masks), or an `encoder-decoder`."""
    tokenizer, config = {"decoder": _decoder, "encoder": _encoder, "encoder-decoder": _both}[layout]()
    path = Path(tempfile.mkdtemp(prefix="triptych-")) / layout
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    known = {key: value for key, value in ids.items() if value is not None}
    create({"vocab_size": tokenizer.vocab_size} | known | config, tokenizer).save(path)
    return path


def _decoder() -> tuple[Tokenizer, dict[str, Any]]:
    plain = byte_tokenizer(DECODER)
    return Tokenizer(plain.backend, plain.specials, chat=ChatTemplate(CHAT)), LLAMA


def _encoder() -> tuple[Tokenizer, dict[str, Any]]:
    return word_tokenizer(WORDS, 90), BERT


def _both() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_tokenizer(SEQ2SEQ)
    return tokenizer, T5 | {"decoder_start_token_id": tokenizer.pad_id}


def said(argv: list[str], capsys: Captured, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that ends with this code."""
    status = main(argv)
    out, err = capsys.readouterr()
    assert status == code, err
    return out, err


def refused(argv: list[str], capsys: Captured, code: int = 1) -> str:
    """The one line of a command that fails."""
    out, err = said(argv, capsys, code)
    assert not out
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: "), err
    assert not lines[0].startswith("error: unexpected "), err  # how an exception that is not ours is reported
    return lines[0]


def answered(argv: list[str], capsys: Captured, code: int = 0) -> Any:
    """What a command says with --json."""
    return json.loads(said([*argv, "--json"], capsys, code)[0])
