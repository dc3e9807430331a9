"""The costs of a model, from its spec alone: parameters, bytes, FLOPs, memory and the speed a machine allows."""

from .activations import activation_numbers, visible
from .counts import DTYPES, PARTS, Count, Prediction, count, predict, read_in_a_step
from .divided import Mesh, RankMemory, SentBytes, TrainingStep
from .plan import ClusterRates, TrainingPlan, plan
from .training import (
    MAX_LOGITS,
    OF_A_LOGIT,
    TrainingMemory,
    TrainingRow,
    activation_bytes,
    block_matrices,
)

__all__ = [
    "DTYPES",
    "MAX_LOGITS",
    "OF_A_LOGIT",
    "PARTS",
    "ClusterRates",
    "Count",
    "Mesh",
    "Prediction",
    "RankMemory",
    "SentBytes",
    "TrainingMemory",
    "TrainingPlan",
    "TrainingRow",
    "TrainingStep",
    "activation_bytes",
    "activation_numbers",
    "block_matrices",
    "count",
    "plan",
    "predict",
    "read_in_a_step",
    "visible",
]
