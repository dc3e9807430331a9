"""Tasks on a model: classify, tag, fill in masks, answer questions, encode, search, transcribe, summarize and
translate, and statistics of attention.  Those for users are methods of `Model`."""

from triptych.checkpoints.header import label_names
from triptych.program.native_encoder import Matmul
from triptych.text import WhisperTokens
from .answer import Answer, answer
from .encode import encode, note_on_products, note_on_prompts, note_on_vectors
from .generation_requests import end_ids, generation_requests, speculation
from .labels import classify, fill
from .model_inputs import ModelInputs, Texts
from .search import Embedder, Hit, SearchResult, identity_of, search, search_with
from .statistics import statistics
from .tag import Entity, Strategy, Tag, entities, joined, tag
from .transcribe import Segment, Transcript, WhisperDecoder, transcribe
from .writing import (
    answer_in_words,
    summarize,
    summary,
    translate,
    translation,
    written_answer,
)

__all__ = [
    "Answer", "Embedder", "Entity", "Hit", "Matmul", "ModelInputs", "SearchResult", "Segment", "Strategy",
    "Tag", "Texts", "Transcript", "WhisperDecoder", "WhisperTokens", "answer", "answer_in_words",
    "classify", "encode", "end_ids", "entities", "fill", "generation_requests", "identity_of", "joined", "label_names",
    "note_on_products", "note_on_prompts", "note_on_vectors", "search", "search_with", "speculation", "statistics",
    "summarize", "summary", "tag", "transcribe", "translate", "translation", "written_answer",
]  # fmt: skip
