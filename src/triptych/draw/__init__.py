"""A model as a picture, from its spec alone: no weights, no torch, no network."""

from triptych.draw.models import Drawing, draw

__all__ = ["Drawing", "draw"]
