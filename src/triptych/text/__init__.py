"""Tokenizers, chat templates and corpora.  Needs no torch."""

from triptych.migration_hints import answer_for
from triptych.text.chat import ChatTemplate, RenderedPrompt
from triptych.text.gguf_tokenizer import from_gguf
from triptych.text.gguf_tokenizer_writer import to_gguf
from triptych.text.new_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer, word_tokenizer
from triptych.text.specials import DECODER, ENCODER, SEQ2SEQ, SPEECH, Specials, SpecialsLayout
from triptych.text.tokenizer import Encoded, Tokenizer
from triptych.text.tokenizer_directory import from_directory, has_tokenizer
from triptych.text.whisper_vocabulary import WhisperTokens, with_whisper_tokens

__all__ = [
    "DECODER",
    "ENCODER",
    "SEQ2SEQ",
    "SPEECH",
    "ChatTemplate",
    "Encoded",
    "RenderedPrompt",
    "Specials",
    "SpecialsLayout",
    "Tokenizer",
    "WhisperTokens",
    "bpe_tokenizer",
    "byte_tokenizer",
    "character_tokenizer",
    "from_directory",
    "from_gguf",
    "has_tokenizer",
    "to_gguf",
    "with_whisper_tokens",
    "word_tokenizer",
]

answer_for(__name__)
