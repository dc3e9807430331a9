"""A family's table of names applied to one spec: which stored tensor becomes which parameters, by which operations,
and the inverse.  The operations work on torch's tensors and NumPy's arrays alike, and as views where they can."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from triptych.errors import CheckpointError, nearest, shown
from triptych.spec import AttentionSpec, ModelSpec, MoESpec, PoolingSpec
from triptych.spec.part import part_name
from .weight_table import FileFormat, WeightTable

_LEAVES = ("weight", "bias")
Shape = tuple[int, ...]


class TensorOp:
    """The stored tensor has the shape of the parameter, unless an operation says otherwise."""

    rows: ClassVar = False  # whether it only moves whole rows, so that it also works on packed rows

    def to_ours(self, x: Any) -> Any:
        """The parameter, of the stored tensor."""
        raise NotImplementedError

    def to_source(self, x: Any) -> Any:
        """The inverse."""
        raise NotImplementedError

    def source_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, of that of the parameter."""
        return shape


@dataclass(frozen=True)
class Transpose(TensorOp):
    """The stored matrix is `[inputs, outputs]` (GPT-2's Conv1D)."""

    def to_ours(self, x: Any) -> Any:
        return x.swapaxes(0, 1) if x.ndim == 2 else x

    def to_source(self, x: Any) -> Any:
        return self.to_ours(x)

    def source_shape(self, shape: Shape) -> Shape:
        return shape[::-1]


def _exchanged(x: Any, sizes: Shape, axis: int) -> Any:
    """The rows of `x`, as many as `sizes` multiply to, with the dimensions `axis` and `axis + 1` of these exchanged."""
    return x.reshape(*sizes, *x.shape[1:]).swapaxes(axis, axis + 1).reshape(x.shape)


@dataclass(frozen=True)
class RopePermute(TensorOp):
    """GGUF's llama stores the rows of q and k with the two halves of each head interleaved: (0, K/2, 1, K/2+1, ...)."""

    heads: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return _exchanged(x, (self.heads, -1, 2), 1)

    def to_source(self, x: Any) -> Any:
        return _exchanged(x, (self.heads, 2, -1), 1)


@dataclass(frozen=True)
class OneRow(TensorOp):
    """The stored vector is a matrix of one row (BART's bias of the logits)."""

    def to_ours(self, x: Any) -> Any:
        return x[0]

    def to_source(self, x: Any) -> Any:
        return x[None]

    def source_shape(self, shape: Shape) -> Shape:
        return (1, *shape)


@dataclass(frozen=True)
class ByHead(TensorOp):
    """GPT-NeoX stores q, k and v of the first head, then of the second: (H, 3, K) rows for our (3, H, K)."""

    heads: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return _exchanged(x, (self.heads, 3, -1), 0)

    def to_source(self, x: Any) -> Any:
        return _exchanged(x, (3, self.heads, -1), 0)


@dataclass(frozen=True)
class Stacked(TensorOp):
    """GGUF stores the matrices of all experts as one, `[experts, outputs, inputs]`."""

    experts: int
    rows = True

    def to_ours(self, x: Any) -> Any:
        return x.reshape(-1, *x.shape[2:])

    def to_source(self, x: Any) -> Any:
        return x.reshape(self.experts, -1, *x.shape[1:])

    def source_shape(self, shape: Shape) -> Shape:
        return (self.experts, shape[0] // self.experts, *shape[1:])


@dataclass(frozen=True)
class PlusOne(TensorOp):
    """GGUF stores the whole factor of Gemma's norms, of which the model stores the difference from 1."""

    def to_ours(self, x: Any) -> Any:
        return x - 1

    def to_source(self, x: Any) -> Any:
        return x + 1


@dataclass(frozen=True)
class TensorLoad:
    """One stored tensor and the parameters it becomes.

    `shapes` are those of `ours`; `duplicate` marks a tensor whose parameters come from another one and which is
    only compared with them, `spare` one that need not even be equal.
    """

    ours: tuple[str, ...]
    source: str
    ops: tuple[TensorOp, ...]
    shapes: tuple[Shape, ...]
    duplicate: bool = False
    spare: bool = False

    @property
    def rows_only(self) -> bool:
        """Whether it only moves whole rows, so that it can be applied to packed rows."""
        return all(op.rows for op in self.ops)

    @property
    def source_shape(self) -> Shape:
        """The shape the stored tensor must have."""
        shape = (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])
        for op in reversed(self.ops):
            shape = op.source_shape(shape)
        return shape

    def to_ours(self, x: Any) -> dict[str, Any]:
        """Parameters from the stored tensor, as views where the ops allow it."""
        for op in self.ops:
            x = op.to_ours(x)
        parameters, start = {}, 0
        for name, shape in zip(self.ours, self.shapes, strict=True):
            parameters[name] = x[start : start + shape[0]]
            start += shape[0]
        return parameters

    def to_source(self, parameters: Mapping[str, Any]) -> Any:
        """The stored tensor from parameters: the inverse of `to_ours`."""
        x = parameters[self.ours[0]]
        if len(self.ours) > 1:
            library = sys.modules[type(x).__module__.partition(".")[0]]  # torch's or NumPy's, neither imported here
            x = library.concatenate([parameters[name] for name in self.ours])
        for op in reversed(self.ops):
            x = op.to_source(x)
        return x


@dataclass(frozen=True)
class TensorPlan:
    """The plan of loading a checkpoint: what is loaded or compared, and what is ignored for which reason."""

    loads: tuple[TensorLoad, ...]
    ignored: dict[str, str]


def plan(
    spec: ModelSpec,
    rows: WeightTable,
    kind: FileFormat,
    stored: Collection[str],
    *,
    prefix: str = "",
    rename: Callable[[str], str] = str,
    ignored: Mapping[str, str] | None = None,
    where: str = "checkpoint",
) -> TensorPlan:
    """Each stored tensor used exactly once, each parameter of `spec` filled exactly once.

    `prefix` is the base model's, which a file may have or lack; `rename` turns another name of a tensor into that of
    the table; `ignored` are tensors the caller gives up, and why.  Raises CheckpointError naming what is missing and
    what is left over.
    """
    ignored = dict(ignored or {})
    original = {rename(name): name for name in stored}
    lacks = bool(prefix) and not any(name.startswith(prefix) for name in original)
    loads: list[TensorLoad] = []
    filled: set[str] = set()
    expected: dict[str, str] = {}
    notes = {}
    for load, note in _expand(spec, rows, kind):
        source = load.source.removeprefix(prefix) if lacks else load.source
        if not load.ours:
            notes[source] = note
            continue
        # A tied parameter has no tensor of its own: a tensor stored under its name is that of the parameter it shares.
        ours = tuple(spec.ties.get(name, name) for name in load.ours)
        for name in ours:
            expected.setdefault(name, source)
        duplicate = filled.issuperset(ours)
        partly_filled = not duplicate and not filled.isdisjoint(ours)  # some of a fused tensor were stored separately
        if source in original and original[source] not in ignored and not partly_filled:
            if duplicate and load.spare:
                ignored[original[source]] = note
                continue
            loads.append(TensorLoad(ours, original[source], load.ops, load.shapes, duplicate))
            filled.update(ours)
    used = {load.source for load in loads}
    ignored |= {original[name]: note for name, note in notes.items() if original.get(name, "") not in used | {""}}
    extra = sorted(set(stored) - used - ignored.keys())
    missing = list(dict.fromkeys(source for name, source in expected.items() if name not in filled))
    if missing or extra:
        raise _mismatch(where, missing, extra)
    _check_covered(spec, filled, kind, where)
    return TensorPlan(tuple(loads), ignored)


def save_plan(
    spec: ModelSpec, rows: WeightTable, kind: FileFormat, *, prefix: str = "", unprefixed: tuple[type, ...] = ()
) -> tuple[TensorLoad, ...]:
    """Under which names, and how, each parameter of `spec` is written: the inverse of `plan`.  A tied parameter is
    written once, under the name of its source.

    A model without a head of its own is written as the base model, without `prefix`; so is one whose head is
    `unprefixed`.
    """
    base = spec.head is None or isinstance(spec.head, (PoolingSpec, *unprefixed))
    loads: list[TensorLoad] = []
    filled: set[str] = set()
    for load, _ in _expand(spec, rows, kind):
        tied = not spec.ties.keys().isdisjoint(load.ours)
        if load.ours and not tied and (load.spare or filled.isdisjoint(load.ours)):
            loads.append(replace(load, source=load.source.removeprefix(prefix) if base else load.source))
            filled.update(load.ours)
    _check_covered(spec, filled, kind, f"a {spec.family} model")
    return tuple(loads)


def _expand(spec: ModelSpec, rows: WeightTable, kind: FileFormat) -> Iterator[tuple[TensorLoad, str]]:
    """Every load the table can mean for `spec`, with its note; `ours` is empty where the tensor is not needed."""
    shapes = spec.shapes()
    shapes |= {alias: shapes[source] for alias, source in spec.ties.items()}
    heads = _heads(spec)
    parts = {part_name(part) for _, part in spec.walk()}
    parts |= {f"tie:{name}" for name in spec.ties} | {f"own:{name}" for name in spec.shapes()} | {f"as:{spec.naming}"}
    experts = range(max((part.experts for _, part in spec.walk() if isinstance(part, MoESpec)), default=1))
    if not rows:  # a family of our own: every parameter under its own name
        yield from ((TensorLoad((name,), name, (), (shape,)), "") for name, shape in shapes.items())
    depths = {name: len(stack.blocks) for name, stack in spec.stacks.items()}
    for row in rows:
        name, ops = row.column(kind)
        if name is None or (row.part and row.part not in parts):
            continue
        stack = row.ours[0].partition(".")[0] if row.ours else ""
        blocks = range(depths.get(stack, max(depths.values()))) if "{i}" in name else range(1)
        leaves = _LEAVES if "*" in name else ("",)
        stacked = "{e}" not in name and any("{e}" in pattern for pattern in row.ours)
        for i, e, leaf in product(blocks, experts if "{e}" in name else range(1), leaves):
            every = experts if stacked else (e,)
            ours = tuple(_fill(pattern, i, leaf, x) for pattern in row.ours for x in every)
            if all(one in shapes for one in ours):
                own = heads.get(ours[0], 1) if ours else 1
                known: dict[str, TensorOp] = {
                    "transpose": Transpose(), "rope_permute": RopePermute(own), "one_row": OneRow(),
                    "by_head": ByHead(own), "stacked": Stacked(len(ours)), "plus_one": PlusOne(),
                }  # fmt: skip
                bound = tuple(known[op] for op in ops if op != "spare")
                stored_shapes = tuple(shapes[one] for one in ours)
                yield TensorLoad(ours, _fill(name, i, leaf, e), bound, stored_shapes, spare="spare" in ops), row.note


def _fill(pattern: str, i: int, leaf: str, e: int) -> str:
    return pattern.replace("{i}", str(i)).replace("{e}", str(e)).replace("*", leaf)


def _heads(spec: ModelSpec) -> dict[str, int]:
    """The number of heads in the rows of each q and k parameter."""
    heads = {}
    for name, part in spec.walk():
        if isinstance(part, AttentionSpec):
            for leaf in _LEAVES:
                heads[f"{name}.q.{leaf}"], heads[f"{name}.k.{leaf}"] = part.heads, part.kv_heads
    return heads


def _check_covered(spec: ModelSpec, covered: Collection[str], kind: FileFormat, where: str) -> None:
    left = [name for name in spec.shapes() if name not in covered]
    if left:
        advice = "; convert it to hf" if kind == "gguf" else ""
        raise CheckpointError(f"{where}: {kind} has no name for {_listed(left)} in family {spec.family!r}{advice}")


def _mismatch(where: str, missing: list[str], extra: list[str]) -> CheckpointError:
    parts = []
    if missing:
        close = nearest(missing[0], extra) if extra else ""
        parts.append(f"missing {len(missing)} tensors: {_listed(missing)}{close}")
    if extra:
        pattern = re.sub(r"\d+", "*", extra[0])
        advice = f"if they cannot matter, load with ignore=[{pattern!r}]"
        parts.append(f"unexpected tensors: {_listed(extra)}; {advice}")
    return CheckpointError(f"{where}: " + "; ".join(parts))


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(map(shown, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
