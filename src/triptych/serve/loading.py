"""Loads the models that a server is started with: each when it is wanted, and those with adapters over the tensors of
their base, which are in memory once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch

from triptych import machine
from triptych.checkpoints.adapter_files import read_adapter
from triptych.checkpoints.adapters import with_base
from triptych.checkpoints.header import read_header
from triptych.generate import CacheBudget
from triptych.generate.scheduling import CACHE_MEMORY_FRACTION
from triptych.model import Model, load
from triptych.nn import Transformer, attach
from .cards import ModelCard, card_of
from .worker import ModelWorker


class Loader:
    """Models by their paths, for any thread; one is loaded at a time, so that no two compete for memory.

    budget   the memory of the caches of all of them: three quarters of what is free, less what later models take.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows, free = max_rows, machine.free_memory()
        self.budget = CacheBudget(1 << 62 if free is None else max(1, int(CACHE_MEMORY_FRACTION * free)))
        self.bases: dict[str, Model] = {}
        self.lock = Lock()

    def worker(self, name: str, path: str) -> ModelWorker:
        """A model with its engine.  Raises as `load`."""
        return ModelWorker(self.model(path), name, max_rows=self.max_rows, budget=self.budget)

    def later(self, name: str, path: str) -> Callable[[], ModelWorker]:
        """What makes that worker when it is called."""
        return lambda: self.worker(name, path)

    def model(self, path: str) -> Model:
        """The model of a path, or of the adapter there over its base.  Raises as `load`."""
        base, adapter = with_base(path)
        with self.lock:
            if str(base) not in self.bases:
                before = machine.free_memory() or 0
                self.bases[str(base)] = model = load(base)
                model.module.requires_grad_(False)
                taken = max(0, before - (machine.free_memory() or 0))
                self.budget.nbytes = max(1, self.budget.nbytes - taken)
            model = self.bases[str(base)]
            return model if adapter is None else with_adapter(model, adapter)

    def card(self, name: str, path: str) -> ModelCard:
        """What a model is, by its header, without its weights.  Raises CheckpointError and ConfigError where it is
        none."""
        base, adapter = with_base(path)
        header = read_header(base)
        return card_of(name, header.spec, header.tokenizer(), header.path, adapter)


def with_adapter(model: Model, adapter: Path) -> Model:
    """Another model with an adapter, over the same tensors: its modules are its own, and only the adapter's matrices
    take memory.  Raises CheckpointError for an adapter of another model."""
    stored = read_adapter(adapter, model.spec)
    with torch.inference_mode(False):  # tensors made in inference mode count no changes, which executors look for
        module = sharing_tensors(model.module)
        attach(module, stored.factors, stored.dropout)
    return Model(module, model.tokenizer, model.hf, model.path, model.report)


def sharing_tensors(module: Transformer) -> Transformer:
    """The same parts once more, with the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    twin = copy.deepcopy(module, memo=dict(shared))
    assert {*map(id, twin.parameters())} == {*map(id, module.parameters())}
    return twin
