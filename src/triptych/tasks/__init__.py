"""What people do with models: classify, tag, find entities and answers, fill in words, encode, transcribe."""

from triptych.tasks.answer import Answer, answer
from triptych.tasks.classify import classify
from triptych.tasks.encode import encode, pooling
from triptych.tasks.fill import fill
from triptych.tasks.tag import Entity, Tag, entities, tag
from triptych.tasks.transcribe import TEMPERATURES, Segment, Transcript, WhisperDecoder, transcribe
from triptych.tasks.whisper_tokens import WhisperTokens

__all__ = [
    "TEMPERATURES", "Answer", "Entity", "Segment", "Tag", "Transcript", "WhisperDecoder", "WhisperTokens", "answer",
    "classify", "encode", "entities", "fill", "pooling", "tag", "transcribe",
]  # fmt: skip
