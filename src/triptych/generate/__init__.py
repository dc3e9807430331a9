"""Generation: requests, sampling, cached decoding and beams."""

from triptych.generate.beam import Beam, beam_search
from triptych.generate.engine import State, start, stream
from triptych.generate.sampling import Sampling, sample
from triptych.generate.writing import Generation, Writing
from triptych.nn import flat

__all__ = ["Beam", "Generation", "Sampling", "State", "Writing", "beam_search", "flat", "sample", "start", "stream"]
