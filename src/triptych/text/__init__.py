"""Tokenizers, chat templates and corpora.  Needs no torch."""

from triptych.migration_hints import answer_for
from .chat import ChatTemplate, RenderedPrompt
from .gguf_tokenizer import from_gguf
from .gguf_tokenizer_writer import to_gguf
from .new_tokenizers import Layout, bpe_tokenizer, byte_tokenizer, character_tokenizer, new_tokenizer, word_tokenizer
from .specials import DECODER, ENCODER, SEQ2SEQ, SPEECH, Specials, SpecialsLayout
from .tokenizer import Encoded, Tokenizer
from .tokenizer_directory import from_directory, has_tokenizer
from .whisper_vocabulary import WhisperTokens, with_whisper_tokens

__all__ = [
    "DECODER",
    "ENCODER",
    "SEQ2SEQ",
    "SPEECH",
    "ChatTemplate",
    "Encoded",
    "Layout",
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
    "new_tokenizer",
    "to_gguf",
    "with_whisper_tokens",
    "word_tokenizer",
]

answer_for(__name__)
