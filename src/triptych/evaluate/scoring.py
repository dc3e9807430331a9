"""The engine in which texts are scored."""

import torch

from triptych.generate import BUDGET, Engine, Scheduler
from triptych.model import Model
from triptych.program.native_executor import MOST_DENSE_FP32


def scheduler_of(model: Model, max_rows: int) -> Scheduler:
    """A scheduler for `generate.score`, with what rows have alike computed once.  A step runs as many tokens as the
    native executor takes of dense fp32 weights, where it is faster than the modules (bench/eval_tasks.py)."""
    module = model.module
    native = module.device.type == "cpu" and module.dtype == torch.float32 and not module.has_packed_weights
    budget = MOST_DENSE_FP32 if native else BUDGET
    return Scheduler(Engine(module, executor=model.executor, reuse=True, budget=budget), max_rows=max_rows)
