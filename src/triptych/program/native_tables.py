"""The tables of a native plan: where the weights lie, and what is computed from positions alone.

Both are kept with the module, and made again where it or a weight changed (`bound`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from triptych import ops
from triptych.attention.rope import rope_angles
from triptych.errors import ConfigError, InputError
from triptych.native.step import BAND, LAYOUT_TILES, MATRIX, PAIR, TILE_KEYS, Index, MatrixLayout, Op, Records
from triptych.nn import Transformer
from triptych.nn.packed_weight import PackedWeight
from .lower import lower
from .module_changes import ModuleFingerprint, WeightVersions, refusal, unseen_changes
from .native_plan import NativePlan
from .native_values import PlanTable
from .not_served import NotServed

LAYOUT_F32, LAYOUT_BF16 = MatrixLayout.F32, MatrixLayout.BF16
SHORTEST = 256  # positions that tables have at least
MOST_PLANS = 16  # of one kind that a module keeps: one for each choice of sites that are read
_DENSE = {torch.float32: LAYOUT_F32, torch.bfloat16: LAYOUT_BF16}
MatrixOf = Callable[[PackedWeight], tuple[int, Tensor] | None]
"""The run-time layout of a packed weight: its number in matmul.h and the bytes; None where there is none."""

_BY_POSITION = ("rotation", "far rotation", "sinusoids", "bias", "bias both ways")


@dataclass(frozen=True, eq=False)
class Binding:
    """A plan with its weights.

    matrices    records of `MATRIX`, one per table.
    positions   positions that the tables by position have.
    limit       positions that tables of the model itself have.
    vocab       rows that ids may name.
    of_call     the places in `matrices` of tables that each call brings along.
    packed      whether some matrix is packed.
    """

    plan: NativePlan
    matrices: Records
    positions: int
    limit: int
    vocab: int
    of_call: list[int]
    versions: WeightVersions
    tensors: list[Tensor]
    packed: bool


class Binder:
    """Fills the tables of one plan."""

    def __init__(self, module: nn.Module, plan: NativePlan, matrix_of: MatrixOf | None = None) -> None:
        self.plan, self.matrix_of = plan, matrix_of
        self.parameters: Mapping[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.tensors: list[Tensor] = []
        self.shared: list[Tensor] = []
        self.copied: list[Tensor] = []
        self.packed: list[PackedWeight] = []

    def bind(self, positions: int) -> Binding:
        """Tables for at least so many positions.  Raises NotServed for a weight in a form that the kernels do not read,
        InputError where a bias is not defined so far."""
        longest = 1 << max(positions - 1, SHORTEST - 1).bit_length()
        try:
            return self._bound(longest)
        except InputError:
            return self._bound(positions)

    def _bound(self, positions: int) -> Binding:
        matrices = np.zeros(len(self.plan.tables), MATRIX)
        of_call = [i for i, table in enumerate(self.plan.tables) if table.kind == "rows of the call"]
        for i, table in enumerate(self.plan.tables):
            if i in of_call:
                continue
            layout, rows, columns, data = self._table(table, positions)
            self.tensors.append(data)
            start = columns // 2 if table.kind == "bias both ways" else 0  # of distance 0
            matrices[i] = (layout, rows, columns, 0, data.data_ptr() + start * data.element_size())
        limit, vocab = self._limits(matrices)
        versions = WeightVersions(self.shared, self.copied, self.packed)
        return Binding(self.plan, matrices, positions, limit, vocab, of_call, versions, self.tensors, bool(self.packed))

    def _limits(self, matrices: Records) -> tuple[int, int]:
        limit = vocab = np.iinfo(np.int32).max
        for step in self.plan.instructions[self.plan.instructions["op"] == Op.EMBED]:
            place, row, shift = step["embed"].item()
            table, rows = self.plan.tables[place], int(matrices[place]["rows"])
            if row == Index.IDS:
                vocab = min(vocab, rows)
            elif row == Index.POSITIONS and table.kind not in _BY_POSITION:
                limit = min(limit, rows - shift)
        return int(limit), int(vocab)

    def _table(self, table: PlanTable, positions: int) -> tuple[int, int, int, Tensor]:
        if table.kind == "matrix":
            return self._matrix(table.name)
        if table.kind == "tiles":
            weight = self.parameters[table.name]
            return LAYOUT_TILES, *weight.shape, self._tiles(weight)
        if table.kind in ("vector", "plain"):
            data = self._plain(table.name)
        else:
            data = self._by_position(table, positions)
        rows = 1 if data.dim() == 1 else data.shape[0]
        return LAYOUT_F32, rows, data.shape[-1], data

    def _matrix(self, name: str) -> tuple[int, int, int, Tensor]:
        if name not in self.parameters:
            raise NotServed(f"{name} was removed while the model ran, in another thread")
        weight = self.parameters[name]
        if isinstance(weight, PackedWeight):
            packed = None if self.matrix_of is None else self.matrix_of(weight)
            if packed is None:
                raise NotServed(f"{name} is packed in a form that the native kernels do not read")
            self.packed.append(weight)
            return packed[0], *weight.shape, packed[1]
        if weight.dtype not in _DENSE or not weight.is_contiguous():
            raise NotServed(f"{name} is {weight.dtype}; the native kernels read fp32 and bf16 rows")
        self.shared.append(weight)
        return _DENSE[weight.dtype], *weight.shape, weight.detach()

    @torch.no_grad()
    def _tiles(self, weight: Tensor) -> Tensor:
        """`[rows, columns]` in bf16 in the order of matmul_bf16.h."""
        if isinstance(weight, PackedWeight):
            self.packed.append(weight)
            numbers = weight.dense()
        else:
            numbers = self._copied(weight)
        rows, columns = numbers.shape
        padded = nn.functional.pad(numbers.to(torch.bfloat16), (0, -columns % PAIR, 0, -rows % PAIR))
        bands = padded.view(-(-rows // PAIR), PAIR // BAND, BAND, -(-columns // PAIR), PAIR // 2, 2)
        return bands.permute(0, 3, 1, 4, 2, 5).contiguous()

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
            raise NotServed("a weight was made in inference mode, where changes are not counted")
        self.copied.append(weight)
        return weight.detach()

    @torch.no_grad()
    def _by_position(self, table: PlanTable, positions: int) -> Tensor:
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
        first = 0
        if table.kind == "bias both ways":  # with room for the places of a tile that no query sees
            first = positions + TILE_KEYS - 1
            places = torch.arange(2 * first + 1)
        bias: Tensor = ops.RUN[name](q_pos=places, k_pos=torch.tensor([first]), **arguments)
        return bias[..., 0].float().contiguous()  # [H, distance]


class Prepared:
    """A module as it was when it was lowered, and its plan or why there is none; executors of one module share it."""

    def __init__(self, module: Transformer, plan_of: Callable[..., NativePlan], arguments: tuple[Any, ...]) -> None:
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
                    self.plan = plan_of(lower(module), packed, *arguments)
            except ConfigError as reason:
                self.reason = str(reason)


def bound(
    module: Transformer, kind: str, plan_of: Callable[..., NativePlan], arguments: tuple[Any, ...],
    matrix_of: MatrixOf | None, positions: int,
) -> Binding:  # fmt: skip
    """The plan `plan_of(program, packed weights, *arguments)` of the module as it is now, with its weights as they are
    now and tables for so many positions.  The module keeps it under its `kind`, and `arguments`.  Raises NotServed
    where there is none."""
    with module.plans.lock:
        prepared_plans: dict[tuple[Any, ...], Prepared] = module.plans.setdefault(kind, {})
        prepared = prepared_plans.get(arguments)
        if prepared is None or not prepared.fingerprint.same(module):
            prepared = Prepared(module, plan_of, arguments)
            serving = [(key, plan) for key, plan in prepared_plans.items() if plan.fingerprint.same(module)]
            module.plans[kind] = dict(serving[-MOST_PLANS:]) | {arguments: prepared}
        if prepared.plan is None:
            raise NotServed(prepared.reason or "the model has no native plan")
        binding = prepared.binding
        if binding is None or not binding.versions.same() or binding.positions < positions:
            try:
                binding = Binder(module, prepared.plan, matrix_of).bind(positions)
            except InputError as error:
                raise NotServed(str(error)) from None
            prepared.binding = binding
        return binding
