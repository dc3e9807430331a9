"""Tied weights: a parameter that stands under two names, as an output head that is the embedding.

`ModelSpec.ties` names them: alias -> the parameter it shares.  A file has a tied parameter once
(`mapping/tensor_plan.py::save_plan`).
"""

from __future__ import annotations

from torch import nn


def tie(root: nn.Module, ties: dict[str, str]) -> None:
    """Let each alias share the weight of its source: one object in both slots."""
    for alias, source in ties.items():
        path, _, leaf = alias.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, root.get_parameter(source))
