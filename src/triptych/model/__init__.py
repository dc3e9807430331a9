"""`load` opens a checkpoint and `create` makes a new model; both return a `Model`."""

from __future__ import annotations

from .model import Model, create, load

__all__ = ["Model", "create", "load"]
