"""Translates the terms of files into those of a spec: config keys, GGUF metadata, reversible tables of tensor names.

`triptych.families` uses them, one file a family.  Nothing here imports torch.
"""

from .config_keys import ACTIVATIONS, COUNT, ConfigKeys, Values
from .weight_table import WeightTable, names_in, of_decoder, renamed, table, within

__all__ = [
    "ACTIVATIONS",
    "COUNT",
    "ConfigKeys",
    "Values",
    "WeightTable",
    "names_in",
    "of_decoder",
    "renamed",
    "table",
    "within",
]
