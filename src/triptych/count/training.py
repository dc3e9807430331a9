"""The memory that a step of training takes, from the spec alone: for `count`, and for the check before a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from triptych.spec import LinearSpec, ModelSpec
from .activations import activation_numbers

MAX_LOGITS = 1 << 26  # numbers of [M, V] in memory at a time in training: 256 MiB in fp32
OF_A_LOGIT = 3  # numbers when the backward begins: the log-probability, its gradient, and the logit's gradient


@dataclass(frozen=True)
class TrainingRow:
    """The tokens of a row, those that its encoder reads, and for how many a head gives logits (None: for all)."""

    tokens: int
    source: int = 0
    trained: int | None = None


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a step of training keeps, by what they are for.

    weights, gradients  of all parameters, or of those that are trained.
    optimizer_state     from the second step on.
    activations         what the backward of the largest micro-batch needs, without
    logits              the log-probabilities of its trained tokens and two gradients of their size, of the tokens that
                        go through the head at a time.
    accumulated         whether gradients of an earlier micro-batch are there while a later one is computed.
    """

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    accumulated: bool = False

    @property
    def peak(self) -> int:
        """The most that is in memory at one time.  The backward frees activations as it adds gradients, so that without
        accumulation either the ones or the others are whole.  What an operation needs while it runs is not counted."""
        forward = self.activations + self.logits + (self.gradients if self.accumulated else 0)
        return self.weights + self.optimizer_state + max(forward, self.gradients)

    def to_dict(self) -> dict[str, int]:
        """The bytes as plain data for JSON, with their peak."""
        parts = {name: number for name, number in asdict(self).items() if name != "accumulated"}
        return parts | {"peak": self.peak}


def activation_bytes(
    spec: ModelSpec, rows: Mapping[TrainingRow, int], *, recompute: bool = False, bf16: bool = False
) -> tuple[int, int]:
    """`activations` and `logits` of `TrainingMemory` for rows of these sizes, each so many times, in one batch.

    In bf16 (torch's autocast) what attention and MLPs keep has two bytes a number, and what norms, sums and losses keep
    has four.  Copies of weights in bf16 are not counted (`block_matrices`).
    """
    total: Counter[str] = Counter()
    for row, times in rows.items():
        kept = activation_numbers(spec, row.tokens, row.source, recompute=recompute, trained=row.trained)
        total.update({name: times * number for name, number in kept.items()})
    logits = min(total.pop("logits", 0), max(MAX_LOGITS, spec.vocab))
    narrow = total["attention"] + total["mlp"] if bf16 else 0
    return 4 * total.total() - 2 * narrow, 4 * OF_A_LOGIT * logits


def block_matrices(spec: ModelSpec) -> int:
    """Numbers in the matrices of all blocks."""
    maps = ((name, part) for name, part in spec.walk() if isinstance(part, LinearSpec) and ".blocks." in name)
    return sum(prod(part.tensors()["weight"]) for name, part in maps if f"{name}.weight" not in spec.ties)


def size(nbytes: int) -> str:
    """Bytes in megabytes (10^6), from 10,000 of them on in gigabytes."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f} GB"
