"""What one of several processes that train a model keeps in memory, and the bytes that it sends in a step.

`spec.division` says what a process has of each tensor; `train.parallel` divides modules by it.  Bytes sent are those of
ring algorithms (Thakur et al. 2005): of `n` processes each sends `n - 1` parts of `1 / n` to gather a tensor, or to sum
it where each keeps its part, and twice as many to have the sum in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from triptych.spec import LayerNormSpec, LinearSpec, LMHeadSpec, MaskedLMHeadSpec, ModelSpec, MoESpec, RMSNormSpec
from triptych.spec.division import gathered_parts, own_part, shard_rows
from triptych.spec.parts import BlockSpec, EmbedSpec, ParallelBlockSpec
from .training import TrainingMemory, TrainingRow, activation_bytes

FP32, BF16 = 4, 2  # bytes of a number; weights, gradients and the optimizer's state are fp32
AT_ONCE = 2  # blocks that are whole at a time: the one that computes, and the next one, which is on its way
OF_A_LOSS = 4  # numbers a token that are summed where each process has the logits of a part of the vocabulary


@dataclass(frozen=True)
class Mesh:
    """Processes that train one model: in each of `replicate` groups, `shard` times `tensor` processes divide it."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def processes(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def readers(self) -> int:
        """The number of processes that read different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tensor {self.tensor}"


@dataclass(frozen=True)
class TrainingStep:
    """How each process that reads rows of its own computes a step: in `accumulate` micro-batches of `rows` rows of
    `length` tokens, all trained on, each with `source` tokens for the encoder of an encoder-decoder."""

    length: int
    source: int = 0
    rows: int = 1
    accumulate: int = 1
    recompute: bool = False
    bf16: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class RankMemory(TrainingMemory):
    """`TrainingMemory` of the process that has most of a divided model, and beside it

    gathered    weights that are whole while they are used, and gradients that are whole before they are divided: those
                outside blocks and of `AT_ONCE` blocks; with several micro-batches all gradients, until the last one.
    """

    gathered: int = 0

    @property
    def peak(self) -> int:
        """The most that is in memory at one time."""
        return super().peak + self.gathered


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a process sends in a step, the mean of all; flags, counts and norms are left out.

    gather_forward, gather_backward   weights among the processes of `shard`, in forward and in backward passes.
    scatter      gradients among the processes of `shard`, summed.
    replicate    gradients among the replicas, summed.
    tensor       vectors of tokens among the processes of `tensor`, summed in every layer.
    muon         matrices that one process makes whole for Muon, and their updates.
    """

    gather_forward: float = 0.0
    gather_backward: float = 0.0
    scatter: float = 0.0
    replicate: float = 0.0
    tensor: float = 0.0
    muon: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """The bytes by kind."""
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.to_dict().values())


class DividedModel:
    """A model whose layers are divided among `tensor` processes.  Raises ConfigError where they cannot be."""

    def __init__(self, spec: ModelSpec, tensor: int) -> None:
        self.spec, self.tensor, self.own = spec, tensor, own_part(spec, tensor)
        self._activations: dict[TrainingStep, tuple[int, int]] = {}
        self._numbers: dict[tuple[int, int, bool], dict[str, int]] = {}

    @cached_property
    def shapes(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """The shapes of a process' tensors by the part with which they are gathered; "" is the model itself."""
        parts: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in (*gathered_parts(self.spec), "")}
        for name, shape in self.own.shapes().items():
            block = ".".join(name.split(".")[:3])
            parts[block if block in parts else ""][name] = shape
        return parts

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The tensors that Muon trains: the weights of linear maps in blocks."""
        maps = (name for name, part in self.own.walk() if isinstance(part, LinearSpec) and ".blocks." in name)
        return frozenset(f"{name}.weight" for name in maps if f"{name}.weight" not in self.spec.ties)

    def numbers(self, shard: int, index: int = 0, *, matrices: bool = False) -> Mapping[str, int]:
        """Numbers that process `index` of `shard` has, by part as in `shapes`, of all tensors or of `matrices` alone.
        The first process has the most."""
        key = shard, index, matrices
        if key not in self._numbers:
            self._numbers[key] = {
                part: sum(
                    len(shard_rows(shape[0], shard, index)) * prod(shape[1:])
                    for name, shape in tensors.items()
                    if not matrices or name in self.matrices
                )
                for part, tensors in self.shapes.items()
            }
        return self._numbers[key]

    def memory(self, mesh: Mesh, step: TrainingStep) -> RankMemory:
        """What a process of `mesh`, whose `tensor` is this model's, keeps in memory."""
        weights, whole = sum(self.numbers(mesh.shard).values()), self.numbers(1)
        momenta = sum(self.numbers(mesh.shard, matrices=True).values()) if step.optimizer == "muon" else 0
        activations, logits = self._activation_bytes(step)
        used = whole[""] + AT_ONCE * max(number for part, number in whole.items() if part)
        gathered, several = used + (sum(whole.values()) if step.accumulate > 1 else used), mesh.processes > 1
        return RankMemory(
            weights=FP32 * weights, gradients=FP32 * weights, optimizer_state=FP32 * (2 * weights - momenta),
            activations=activations, logits=logits, accumulated=step.accumulate > 1 and not several,
            gathered=FP32 * gathered if several else 0,
        )  # fmt: skip

    def sent(self, mesh: Mesh, step: TrainingStep) -> SentBytes:
        """What a process of `mesh`, whose `tensor` is this model's, sends in a step."""
        parts = {part: FP32 * number for part, number in self.numbers(mesh.shard).items()}
        every, others = sum(parts.values()), mesh.shard - 1
        return SentBytes(
            gather_forward=step.accumulate * others * every,
            gather_backward=step.accumulate * others * (every - parts[""]),
            scatter=others * every,
            replicate=_summed(every, mesh.replicate),
            tensor=step.accumulate * _summed(self._vector_bytes(step), mesh.tensor),
            muon=self._matrix_bytes(mesh) if step.optimizer == "muon" else 0.0,
        )

    def _activation_bytes(self, step: TrainingStep) -> tuple[int, int]:
        """Activations and logits of a micro-batch; the former with the copies of weights in bf16, which a backward pass
        needs: of all blocks, or of one where it computes them again."""
        step = replace(step, accumulate=1, optimizer="adamw")
        if step not in self._activations:
            rows = {TrainingRow(step.length, step.source): step.rows}
            activations, _ = activation_bytes(self.own, rows, recompute=step.recompute, bf16=step.bf16)
            _, logits = activation_bytes(self.spec, rows)
            copies = self.numbers(1, matrices=True).values()
            activations += BF16 * (max(copies) if step.recompute else sum(copies)) if step.bf16 else 0
            self._activations[step] = activations, logits // (self.tensor if self._divides_vocabulary else 1)
        return self._activations[step]

    @property
    def _divides_vocabulary(self) -> bool:
        predicts = isinstance(self.spec.head, LMHeadSpec | MaskedLMHeadSpec)
        return predicts and self.own.vocab != self.spec.vocab

    def _vector_bytes(self, step: TrainingStep) -> float:
        """Bytes of the vectors of one micro-batch that the processes of `tensor` sum.

        A map whose inputs are divided gives parts of a sum, in the dtype of its products.  The gradients of what enters
        a map whose outputs are divided are parts of a sum in fp32.
        """
        total, tokens = 0.0, step.rows * step.length
        for name, width, product in self._summed_widths:
            at_source = self.spec.layout == "encoder-decoder" and name.startswith("encoder.")
            at_source = at_source or name.endswith((".cross.k", ".cross.v"))
            vectors = step.rows * (step.source if at_source else step.length)
            times = 2 if product and step.recompute and name not in self._summed_once else 1
            total += (BF16 if product and step.bf16 else FP32) * times * vectors * width
        if self._divides_vocabulary:
            total += FP32 * OF_A_LOSS * tokens
        return total

    @cached_property
    def _summed_widths(self) -> list[tuple[str, float, bool]]:
        """The embeddings and maps that are divided: the name of each, the width of the vectors that are summed for a
        token (of experts the mean of all tokens), and whether these are products."""
        found, shares = list[tuple[str, float, bool]](), dict[str, float]()
        for (name, whole), (_, own) in zip(self.spec.walk(), self.own.walk(), strict=True):
            share = shares.get(name.rpartition(".experts.")[0], 1.0)
            if isinstance(whole, MoESpec):
                shares[name] = whole.top_k / whole.experts
            elif isinstance(whole, EmbedSpec) and whole != own:
                found.append((name, whole.width, False))
            elif isinstance(whole, LinearSpec) and isinstance(own, LinearSpec) and whole != own:
                product = whole.inputs != own.inputs
                found.append((name, share * (whole.outputs if product else whole.inputs), product))
        return found

    @cached_property
    def _summed_once(self) -> frozenset[str]:
        """The maps whose sum nothing in their block keeps, so that it is not computed again for the backward pass."""
        blocks = {f"{name}.blocks.{i}": b for name, s in self.spec.stacks.items() for i, b in enumerate(s.blocks)}
        return frozenset(f"{name}.{last}" for name, block in blocks.items() if (last := _last_sum(block)))

    def _matrix_bytes(self, mesh: Mesh) -> float:
        """Every process sends its part of a matrix to one, which sends back parts of the update; then replicas sum."""
        holders, whole = mesh.shard * mesh.tensor, self.spec.shapes()
        shapes = {name: shape for tensors in self.shapes.values() for name, shape in tensors.items()}
        parts = sum((mesh.tensor if shapes[n] == whole[n] else 1) * prod(whole[n]) for n in self.matrices)
        exchanged = 2.0 * FP32 * parts * (holders - 1) / holders / mesh.processes
        own = FP32 * sum(self.numbers(mesh.shard, matrices=True).values())
        return exchanged + _summed(own, mesh.replicate)


def _last_sum(block: BlockSpec | ParallelBlockSpec) -> str | None:
    """The map whose output is added to the residual stream last; None where something after it is kept."""
    last, norms = "attn.out", block.attn_norm
    if isinstance(block, BlockSpec) and block.cross_norm is not None:
        last, norms = "cross.out", block.cross_norm
    if block.mlp_norm is not None:
        last, norms = "mlp.down", block.mlp_norm
    kept = isinstance(norms.out, LayerNormSpec | RMSNormSpec) or norms.post is not None
    branch = isinstance(block, BlockSpec) and block.branch is not None
    return None if kept or branch or block.dropout or isinstance(block.mlp, MoESpec) else last


def _summed(nbytes: float, processes: int) -> float:
    """What each of `processes` sends so that all have the sum of tensors of so many bytes."""
    return 2.0 * nbytes * (processes - 1) / processes
