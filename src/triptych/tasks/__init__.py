"""What people do with models: classify, tag, find entities and answers, fill in words, encode, transcribe,
generate."""

from triptych.program.native_encoder import Matmul
from triptych.tasks.answer import Answer, answer
from triptych.tasks.classify import classify, label_names
from triptych.tasks.drafting import speculation
from triptych.tasks.encode import encode, note_on_products, note_on_prompts, pooling
from triptych.tasks.fill import fill
from triptych.tasks.generation_requests import end_ids, generation_requests
from triptych.tasks.search import Embedder, Hit, OnEmbedded, SearchResult, identity_of, search
from triptych.tasks.statistics_reads import statistics_reads
from triptych.tasks.tag import Entity, Strategy, Tag, entities, entities_of, tag
from triptych.tasks.transcribe import TEMPERATURES, Segment, Transcript, WhisperDecoder, transcribe
from triptych.tasks.writing import WritingTask, summary, translation, written_answer
from triptych.text import WhisperTokens

__all__ = [
    "TEMPERATURES", "Answer", "Embedder", "Entity", "Hit", "Matmul", "OnEmbedded", "SearchResult", "Segment",
    "Strategy", "Tag", "Transcript", "WhisperDecoder", "WhisperTokens", "WritingTask", "answer", "classify", "encode",
    "end_ids", "entities", "entities_of", "fill", "generation_requests", "identity_of", "label_names",
    "note_on_products", "note_on_prompts", "pooling", "search", "speculation", "statistics_reads", "summary", "tag",
    "transcribe", "translation", "written_answer",
]  # fmt: skip
