"""Running a model: sampling, cached generation, beams, filling and encoding."""

from triptych.generate.beam import Beam, beam_search
from triptych.generate.encode import encode, fill, flat
from triptych.generate.engine import State, start, stream
from triptych.generate.sampling import Sampling, sample

__all__ = ["Beam", "Sampling", "State", "beam_search", "encode", "fill", "flat", "sample", "start", "stream"]
