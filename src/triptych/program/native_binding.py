"""The tables of a native plan: where the weights lie, and what is computed from positions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from triptych import ops
from triptych.attention.rope import rope_angles
from triptych.errors import InputError
from triptych.native.step import MATRIX, Index, Op
from triptych.nn.weights import PackedWeight
from triptych.program.changes import Numbers
from triptych.program.native_plan import NativePlan
from triptych.program.native_values import NotNative, Table

LAYOUT_F32, LAYOUT_BF16 = 0, 1  # of matmul.h
SHORTEST = 256  # positions that tables have at least
_DENSE = {torch.float32: LAYOUT_F32, torch.bfloat16: LAYOUT_BF16}
MatrixOf = Callable[[PackedWeight], tuple[int, Tensor] | None]
"""The run-time layout of a packed weight: its number in matmul.h and the bytes; None where there is none."""

_BY_POSITION = ("rotation", "far rotation", "sinusoids", "bias")


@dataclass(frozen=True, eq=False)
class Binding:
    """A plan with its weights.

    matrices    records of `MATRIX`, one per table.
    positions   positions that the tables by position have.
    limit       positions that tables of the model itself have.
    vocab       rows that ids may name.
    lookups     packed weights whose rows are looked up before each call, by their place in `matrices`: those in
                a form that the kernels do not read, or rounded to another type than fp32.
    packed      whether some matrix is packed.
    """

    plan: NativePlan
    matrices: npt.NDArray[Any]
    positions: int
    limit: int
    vocab: int
    lookups: dict[int, Tensor]
    numbers: Numbers
    kept: list[Tensor]
    packed: bool


class Binder:
    """Fills the tables of one plan."""

    def __init__(self, module: nn.Module, plan: NativePlan, matrix_of: MatrixOf | None = None) -> None:
        self.plan, self.matrix_of = plan, matrix_of
        self.parameters: Mapping[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.kept: list[Tensor] = []
        self.shared: list[Tensor] = []
        self.copied: list[Tensor] = []
        self.packed: list[PackedWeight] = []

    def bind(self, positions: int) -> Binding:
        """Tables for at least so many positions.  Raises NotNative for a weight in a form that the kernels do not read,
        InputError where a bias is not defined so far."""
        longest = 1 << max(positions - 1, SHORTEST - 1).bit_length()
        try:
            return self._bound(longest)
        except InputError:
            return self._bound(positions)

    def _bound(self, positions: int) -> Binding:
        matrices = np.zeros(len(self.plan.tables), MATRIX)
        lookups = {}
        for i, table in enumerate(self.plan.tables):
            if table.kind == "lookup" and not self._reads_rows(weight := self.parameters[table.name]):
                lookups[i] = weight
                matrices[i] = (LAYOUT_F32, weight.shape[0], weight.shape[1], 0, 0)
                continue
            layout, rows, columns, data = self._table(table, positions)
            self.kept.append(data)
            matrices[i] = (layout, rows, columns, 0, data.data_ptr())
        limit, vocab = self._limits(matrices)
        numbers = Numbers(self.shared, self.copied, self.packed)
        return Binding(self.plan, matrices, positions, limit, vocab, lookups, numbers, self.kept, bool(self.packed))

    def _reads_rows(self, weight: Tensor) -> bool:
        """Whether the kernels read the rows of a packed table themselves, exactly as they are defined."""
        if not isinstance(weight, PackedWeight) or weight.dtype != torch.float32:
            return False
        return self.matrix_of is not None and self.matrix_of(weight) is not None

    def _limits(self, matrices: npt.NDArray[Any]) -> tuple[int, int]:
        limit = vocab = np.iinfo(np.int32).max
        for step in self.plan.instructions[self.plan.instructions["op"] == Op.EMBED]:
            table, rows = self.plan.tables[step["weight"]], int(matrices[step["weight"]]["rows"])
            if step["kind"] in (Index.IDS, Index.LOOKUP):
                vocab = min(vocab, rows)
            elif step["kind"] == Index.POSITIONS and table.kind not in _BY_POSITION:
                limit = min(limit, rows - int(step["number"]))
        return int(limit), int(vocab)

    def _table(self, table: Table, positions: int) -> tuple[int, int, int, Tensor]:
        if table.kind in ("matrix", "lookup"):
            return self._matrix(table.name)
        if table.kind in ("vector", "plain"):
            data = self._plain(table.name)
        else:
            data = self._by_position(table, positions)
        rows = 1 if data.dim() == 1 else data.shape[0]
        return LAYOUT_F32, rows, data.shape[-1], data

    def _matrix(self, name: str) -> tuple[int, int, int, Tensor]:
        weight = self.parameters[name]
        if isinstance(weight, PackedWeight):
            packed = None if self.matrix_of is None else self.matrix_of(weight)
            if packed is None:
                raise NotNative(f"{name} is packed in a form that the native kernels do not read")
            self.packed.append(weight)
            return packed[0], weight.shape[0], weight.shape[1], packed[1]
        if weight.dtype not in _DENSE or not weight.is_contiguous():
            raise NotNative(f"{name} is {weight.dtype}; the native kernels read fp32 and bf16 rows")
        self.shared.append(weight)
        return _DENSE[weight.dtype], weight.shape[0], weight.shape[1], weight.detach()

    def _plain(self, name: str) -> Tensor:
        """Numbers in fp32: the parameter itself where it is that."""
        weight = self.parameters[name]
        if isinstance(weight, PackedWeight):
            self.packed.append(weight)
            return weight.dense().float()
        if weight.dtype == torch.float32 and weight.is_contiguous():
            self.shared.append(weight)
            return weight.detach()
        return self._copied(weight).float().contiguous()

    def _copied(self, weight: Tensor) -> Tensor:
        if weight.is_inference():
            raise NotNative("a weight was made in inference mode, where changes are not counted")
        self.copied.append(weight)
        return weight.detach()

    @torch.no_grad()
    def _by_position(self, table: Table, positions: int) -> Tensor:
        places = torch.arange(positions)
        if table.kind in ("rotation", "far rotation"):
            length = 1 if table.kind == "rotation" else 1 << 30
            return torch.cat(rope_angles(table.how, places, length), -1).contiguous()
        if table.kind == "sinusoids":
            return ops.sinusoids(places, *table.how).contiguous()
        name, attributes = table.how
        arguments = dict(attributes)
        if table.name:
            arguments["weight"] = self._copied(self.parameters[table.name])
        bias: Tensor = ops.OPERATIONS[name].run(q_pos=places, k_pos=torch.zeros(1, dtype=torch.long), **arguments)
        return bias[..., 0].float().contiguous()  # [H, distance]
