"""A model as a picture, from the program of its spec: no weights and no network."""

from triptych.draw.models import Drawing, draw

__all__ = ["Drawing", "draw"]
