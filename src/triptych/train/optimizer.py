"""Optimizers by the role of each parameter, read from the spec tree; gradient clipping and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.optim import AdamW

from triptych.arguments import checked
from triptych.errors import CheckpointError, InputError
from triptych.nn import Transformer
from triptych.spec import model as spec
from triptych.spec.parts import LinearSpec
from .data import groups
from .ranks import Ranks
from .settings import BelowOne, Fraction, NonNegative, Rate, RecipeSection, Share

MOMENTUM = 0.95
TOGETHER = 1 << 22  # numbers orthogonalized at a time, so that large matrices need no more memory than in torch


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`: the same numbers and the same state; in fp32 where
    several processes train, for in bf16 a gradient that was summed in another order gives other updates.

    torch iterates over one matrix at a time.  A small model has many of the same shape, and a product of matrices of
    width 128 takes less time than the call.
    """

    def __init__(self, *arguments: Any, ranks: Ranks | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ranks = ranks or Ranks()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch has overloads
        """One update of every matrix that has a gradient; there is no `closure`."""
        for group in self.param_groups:
            alike: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[self.ranks.sharing_key(parameter)].append(parameter)
            for parameters in alike.values():
                size = self.ranks.shape(parameters[0]).numel()
                for some in groups(parameters, max(1, TOGETHER // size)):
                    self._update(group, some)

    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update matrices of one shape [rows, columns]."""
        mixed = []  # gradients with their running means, which take them in first (Nesterov)
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            mean: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            mixed.append(gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean)
        numbers = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        iterate = partial(orthogonal, exact=True) if self.ranks.exact_muon else orthogonal
        directions = self.ranks.map_matrices(parameters, mixed, lambda whole: iterate(whole, *numbers))
        factor = 0.2 * max(self.ranks.shape(parameters[0])) ** 0.5  # as large as an update of AdamW: Liu et al. 2025
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction, alpha=-group["lr"] * factor)


def orthogonal(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, *, exact: bool = False
) -> Tensor:
    """[n, rows, columns] in bf16, or where `exact` in fp32 or better: each matrix with singular values moved near 1.

    `steps` times `a x + b (x xᵀ) x + c (x xᵀ)² x`, from a matrix of norm 1: the quintic Newton-Schulz iteration of
    Jordan et al. 2024.
    """
    a, b, c = coefficients
    upright = x.shape[1] > x.shape[2]
    x = x.to(torch.promote_types(x.dtype, torch.float32)) if exact else x.bfloat16()
    x = x.mT if upright else x  # the smaller of the two products of x and xᵀ
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if upright else x


Role = Literal["matrix", "head", "other"]


def roles(model: spec.ModelSpec) -> dict[str, Role]:
    """`matrix`: weights of linear maps inside blocks.  `head`: those after the stack.  `other`: embeddings, position
    tables, norms, biases and sinks, which are never decayed.  A tied head counts as the embedding that it shares."""
    by_name: dict[str, Role] = dict.fromkeys(model.shapes(), "other")
    for name, part in model.walk():
        weight = f"{name}.weight"
        if isinstance(part, LinearSpec) and weight in by_name:
            by_name[weight] = "matrix" if ".blocks." in name else "head"
    return by_name


def check_trainable(module: Transformer) -> None:
    """Raises InputError for packed weights, unless what is trained beside them is an adapter and nothing else."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    if module.has_packed_weights and roles(module.spec).keys() & trained:
        problem = f"this {module.spec.family} model has packed matrices, which are not trained"
        raise InputError(f"{problem}; load it with dequantize=True, or train an adapter (add_adapter) and nothing else")


class OptimizerSettings(RecipeSection):
    """How gradients change the weights."""

    name: Literal["muon", "adamw"] = "muon"
    """`muon` trains matrices by orthogonalized momentum (Jordan et al. 2024) and the rest by AdamW; its state takes 4
    bytes for a number of a matrix.  `adamw` trains everything by AdamW (Loshchilov & Hutter 2019); its state takes 8
    bytes for a number."""
    lr: Rate = 3e-3
    """Highest learning rate of AdamW."""
    muon_lr: Rate = 1e-2
    """Highest learning rate of Muon, times 0.2 sqrt(max(rows, columns)), so that its updates are as large as AdamW's
    (Liu et al. 2025)."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Of AdamW: the decay rates of the running means of gradients and of their squares."""
    eps: Rate = 1e-8
    """Of AdamW: added to the root mean square by which it divides."""
    momentum: Share = MOMENTUM
    """Of Muon: the decay rate of the running mean of gradients."""
    weight_decay: NonNegative = 0.1
    """Times the learning rate, the share of a matrix that each step takes away; embeddings, norms and biases keep
    theirs."""
    clip: NonNegative = 1.0
    """Gradients are scaled down to at most this global norm; 0 turns it off."""

    @model_validator(mode="after")
    def _is_read(self) -> OptimizerSettings:
        if self.name == "adamw" and self.momentum != MOMENTUM:
            raise ValueError("has momentum, which is Muon's; AdamW has betas")
        return self


class Optimizer:
    """The optimizers of a module behind one interface: step, clip, and state as named tensors."""

    @checked
    def __init__(self, module: Transformer, settings: OptimizerSettings, ranks: Ranks | None = None) -> None:
        self.settings, self.ranks = settings, ranks or Ranks()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        stored = module.parameters() if module.lora_adapter is None else self.parameters.values()
        self.weight_bytes = sum(p.nbytes for p in stored)  # of a checkpoint
        by_role = roles(module.spec)
        check_trainable(module)
        adam: dict[float, list[Tensor]] = {settings.weight_decay: [], 0.0: []}
        matrices = []
        for name, parameter in self.parameters.items():
            role = by_role.get(name, "other")  # parameters of an adapter are not in the spec
            if settings.name == "muon" and role == "matrix":
                matrices.append(self.ranks.local(parameter))
            else:
                adam[0.0 if role == "other" else settings.weight_decay].append(self.ranks.local(parameter))
        self.parts: list[torch.optim.Optimizer] = []
        if groups := [{"params": ps, "weight_decay": decay} for decay, ps in adam.items() if ps]:
            self.parts.append(AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True))
        if matrices:
            own = (settings.muon_lr, settings.weight_decay, settings.momentum)
            self.parts.append(Muon(matrices, *own, adjust_lr_fn="match_rms_adamw", ranks=self.ranks))
        self._divided = [p for p in self.parameters.values() if self.ranks.local(p) is not p]
        self._groups = [group for part in self.parts for group in part.param_groups]
        for group in self._groups:
            group["peak"] = group["lr"]

    def step(self, factor: float) -> None:
        """One update at `factor` times the peak learning rates; then the gradients are set to None."""
        for group in self._groups:
            group["lr"] = group["peak"] * factor
        self.ranks.localize_gradients(self.parameters.values())
        for part in self.parts:
            part.step()
        self.zero()

    def clip(self) -> float:
        """Scale the gradients to a global norm of at most `clip`; returns the norm before."""
        limit = self.settings.clip or math.inf
        self.ranks.localize_gradients(self.parameters.values())
        norm = self.ranks.gradient_norm(self.parameters.values())
        torch.nn.utils.clip_grads_with_norm_([self.ranks.local(p) for p in self.parameters.values()], limit, norm)
        return float(norm)

    def zero(self) -> None:
        for part in self.parts:
            part.zero_grad()
        for parameter in self._divided:
            parameter.grad = None

    @property
    def state_bytes(self) -> int:
        """The bytes of the state once a step was made: two numbers for each that AdamW trains, one for Muon's."""
        numbers = ((part, p, self.ranks.shape(p).numel()) for part in self.parts for p in _parameters(part))
        return sum((1 if isinstance(part, Muon) else 2) * p.element_size() * n for part, p, n in numbers)

    def state(self) -> dict[str, Tensor]:
        """All optimizer state by `PARAMETER/KEY`, for example `decoder.blocks.0.attn.q.weight/momentum_buffer`."""
        names = {self.ranks.local(parameter): name for name, parameter in self.parameters.items()}
        states = [(names[parameter], state) for part in self.parts for parameter, state in part.state.items()]
        return {f"{name}/{key}": value for name, state in states for key, value in state.items()}

    def restore(self, state: Mapping[str, Tensor], *, copied: bool = True) -> None:
        """Set the state to the tensors `state` returned, or to copies of them.  Raises CheckpointError if they belong
        to other parameters or to another optimizer."""
        states = {p: part.state[p] for part in self.parts for p in _parameters(part)}
        for name, value in state.items():
            of, _, key = name.rpartition("/")
            parameter = self.ranks.local(self.parameters[of]) if of in self.parameters else None
            if parameter is None or (value.dim() and value.shape != parameter.shape):
                raise CheckpointError(f"optimizer state {name} {list(value.shape)} fits no parameter of this model")
            states[parameter][key] = value.to(parameter.device, copy=copied)
        missing = [name for name, p in self.parameters.items() if state and not states[self.ranks.local(p)]]
        if missing:
            raise CheckpointError(f"the checkpoint has no optimizer state for {missing[0]}; was the recipe changed?")


def _parameters(part: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in part.param_groups for p in group["params"])


class Schedule(RecipeSection):
    """The learning rate as a share of its peak, from the progress of the run in [0, 1]."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up it falls to `floor` along half a cosine (Loshchilov & Hutter 2017) or a line, or stays; with
    `wsd` it stays and falls at the end alone, along a line (warm-up, stable, decay: Hu et al. 2024)."""
    warmup: BelowOne = 0.02
    """Share of the run over which it rises linearly from 0 to the peak."""
    floor: Share = 0.0
    """The learning rate at the end, as a share of the peak."""
    decay: Fraction = 0.1
    """For wsd: the share of the run over which it falls."""

    @model_validator(mode="after")
    def _fits_together(self) -> Schedule:
        if self.shape != "wsd" and self.decay != type(self).model_fields["decay"].default:
            raise ValueError("has decay, which is for wsd; remove it, or set shape")
        if self.shape == "wsd" and self.warmup + self.decay > 1.0:
            raise ValueError("has warmup and decay of more than the whole run together; lower one")
        return self

    def factor(self, progress: float) -> float:
        """The learning rate as a share of its peak."""
        progress = min(max(progress, 0.0), 1.0)
        if progress < self.warmup:
            return progress / self.warmup
        done = (progress - self.warmup) / (1.0 - self.warmup)
        if self.shape == "constant":
            return 1.0
        if self.shape == "wsd":
            fall = min(1.0, (1.0 - progress) / self.decay)
        else:
            fall = 0.5 * (1.0 + math.cos(math.pi * done)) if self.shape == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * fall
