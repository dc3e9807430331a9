"""Running a model: sampling, cached generation, beams, filling, encoding and labels."""

from triptych.generate.beam import Beam, beam_search
from triptych.generate.encode import encode, fill, pooling
from triptych.generate.engine import State, start, stream
from triptych.generate.hearing import TEMPERATURES, Hearing, Segment, Transcript, transcribe
from triptych.generate.labels import Answer, Entity, Tag, answer, classify, entities, tag
from triptych.generate.sampling import Sampling, sample
from triptych.generate.speech import Words
from triptych.generate.writing import Generation, Writing
from triptych.nn import flat

__all__ = [
    "TEMPERATURES", "Answer", "Beam", "Entity", "Generation", "Hearing", "Sampling", "Segment", "State", "Tag",
    "Transcript", "Words", "Writing", "answer", "beam_search", "classify", "encode", "entities", "fill", "flat",
    "pooling", "sample", "start", "stream", "tag", "transcribe",
]  # fmt: skip
