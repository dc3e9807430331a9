"""A model as a picture, from the program of its spec: no weights and no network."""

from .models import Drawing, draw

__all__ = ["Drawing", "draw"]
