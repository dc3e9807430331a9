"""The native plan of a module and the weights it is bound to, kept with the module and made again where one changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar, cast

import torch

from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from triptych.nn.weights import PackedWeight
from triptych.program.changes import ModuleFingerprint, refusal, unseen_changes
from triptych.program.lower import lower
from triptych.program.native_binding import Binder, Binding, MatrixOf
from triptych.program.native_plan import NativePlan
from triptych.program.native_values import NotNative
from triptych.program.program import Program

MOST_PLANS = 16  # of one kind that a module keeps: one for each choice of sites that are read
P = TypeVar("P", bound="Prepared")


class Prepared(ABC):
    """A module as it was when it was lowered, and its plan or why there is none; executors of one module share it.

    how    what the plan depends on beside the module.
    """

    def __init__(self, module: Transformer, how: tuple[Any, ...]) -> None:
        self.how = how
        self.fingerprint = ModuleFingerprint(module)
        self.plan: NativePlan | None = None
        self.binding: Binding | None = None
        self.reason = refusal(module) or unseen_changes(module)
        if module.device.type != "cpu":
            self.reason = f"the model is on {module.device.type}"
        if self.reason is None:
            named = module.named_parameters(remove_duplicate=False)
            packed = frozenset(name for name, weight in named if isinstance(weight, PackedWeight))
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self.plan = self.plan_of(lower(module), packed, *how)
            except ConfigError as reason:
                self.reason = str(reason)

    def serves(self, module: Transformer) -> bool:
        """Whether it was made of this module, not of one that it is a shallow copy of, as the module is now."""
        return self.fingerprint.module() is module and self.fingerprint.same()

    @staticmethod
    @abstractmethod
    def plan_of(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        """The plan of one entry of the program.  Raises NotNative for what the executor lacks."""

    @classmethod
    def bound(
        cls: type[P], module: Transformer, how: tuple[Any, ...], matrix_of: MatrixOf | None, positions: int
    ) -> Binding:
        """The plan of the module as it is now, with its weights as they are now and tables for so many positions.
        Raises NotNative where there is none."""
        with module.plans.lock:
            every = cast(dict[tuple[Any, ...], P], module.plans.setdefault(cls, {}))
            prepared = every.get(how)
            if prepared is None or not prepared.serves(module):
                prepared = cls(module, how)
                serving = [(key, one) for key, one in every.items() if one.serves(module)]
                module.plans[cls] = dict(serving[-MOST_PLANS:]) | {how: prepared}
            if prepared.plan is None:
                raise NotNative(prepared.reason or "the model has no native plan")
            binding = prepared.binding
            if binding is None or not binding.versions.same() or binding.positions < positions:
                try:
                    binding = Binder(module, prepared.plan, matrix_of).bind(positions)
                except InputError as error:
                    raise NotNative(str(error)) from None
                prepared.binding = binding
            return binding
