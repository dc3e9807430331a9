"""`load` a checkpoint, `create` a new model, and the `Model` that carries either."""

from __future__ import annotations

from triptych.model.model import Model, create, load

__all__ = ["Model", "create", "load"]
