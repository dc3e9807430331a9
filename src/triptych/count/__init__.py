"""What a model costs, from its spec alone: parameters, bytes, FLOPs, memory and the speed a machine allows."""

from triptych.count.activations import activation_numbers
from triptych.count.counts import DTYPES, PARTS, Count, count, read_in_a_step
from triptych.count.flops import visible
from triptych.count.speed import Prediction, predict

__all__ = [
    "DTYPES",
    "PARTS",
    "Count",
    "Prediction",
    "activation_numbers",
    "count",
    "predict",
    "read_in_a_step",
    "visible",
]
