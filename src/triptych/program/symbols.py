"""Symbolic values: tensors without numbers that record every operation they are given to.

A `Value` is a tensor subclass: torch hands every function and method it meets to `__torch_function__`, where the table
of operations says what is recorded.  A function outside the table, and a branch on a value, raise `NotLowerable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import Rows
from triptych.ops import NotLowerable
from .program import Entry, Instruction, ValueInfo

LENGTHS = (5, 8)  # rows of the sample that shapes are checked with; sizes are symbols everywhere else


class Value(Tensor):
    """A tensor that is only a name, a symbolic shape and a dtype.  Its concrete shape is that of a sample."""

    label: str
    dims: ops.Shape
    recorder: Recorder

    @staticmethod
    def __new__(
        cls, label: str, dims: ops.Shape, dtype: torch.dtype, recorder: Recorder, sample: Sequence[int] | None = None
    ) -> Value:
        size = tuple(recorder.sizes[dim] if isinstance(dim, str) else dim for dim in dims)
        value: Value = torch.Tensor._make_wrapper_subclass(
            cls, sample or size, dtype=dtype, device=torch.device("meta")
        )
        value.label, value.dims, value.recorder = label, dims, recorder
        return value

    def __init__(self, *arguments: object, **options: object) -> None:
        """See `__new__`, which makes the tensor."""

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's stub and source differ
        return f"Value({self.label} {list(self.dims)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Value))
        if getattr(func, "__name__", "") in ("__get__", "dim", "size"):  # shape, dtype, device
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return value.recorder.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub of this hook lacks the operation
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise NotLowerable(f"{func} reads the numbers of a value that has none")


class SymbolicRows(Rows):
    """Sample rows whose positions are values."""

    symbolic = True
    recorder: Recorder
    tokens_dim: ops.Dim

    def __init__(self, recorder: Recorder, tokens: ops.Dim) -> None:
        super().__init__(LENGTHS)
        object.__setattr__(self, "recorder", recorder)
        object.__setattr__(self, "tokens_dim", tokens)
        recorder.tokens = tokens

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        return self.recorder.input("positions", (self.tokens_dim,), torch.long)

    def ends_of_tokens(self, device: torch.device | str = "cpu") -> Tensor:
        return self.recorder.input("row_ends", (self.tokens_dim,), torch.long)


class Recorder:
    """Records the entries of one program.  `names` are the parameters' names by identity."""

    def __init__(self, names: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.names, self.shapes = names, shapes
        self.sizes = {"N": sum(LENGTHS), "B": len(LENGTHS), "M": sum(LENGTHS), "T": 11, "S": 17, "R": 3, "P": 26}
        self.tokens: ops.Dim = "N"  # of the stack that is recorded
        self.entries: dict[str, Entry] = {}
        self.used: dict[str, tuple[int, ...]] = {}
        self._begin()

    def _begin(self) -> None:
        self.inputs: dict[str, Value] = {}
        self.instructions: list[Instruction] = []
        self.values: dict[str, ValueInfo] = {}
        self.count = 0

    @contextmanager
    def entry(self, name: str) -> Iterator[list[Value]]:
        """Record an entry; the body appends its outputs to the list it is given."""
        outer = (self.inputs, self.instructions, self.values, self.count)
        self._begin()
        outputs: list[Value] = []
        try:
            yield outputs
            if name in self.entries:  # cross-attention layers add to one entry, layer by layer
                self._join(self.entries[name])
            self.entries[name] = Entry(
                tuple(self.inputs), tuple(self.instructions),
                (*(self.entries[name].outputs if name in self.entries else ()), *(value.label for value in outputs)),
                dict(self.values),
            )  # fmt: skip
        finally:
            self.inputs, self.instructions, self.values, self.count = outer

    def _join(self, before: Entry) -> None:
        """Put an earlier part of the same entry before this one, with names of its own."""
        temporary = [name for name in self.values if name[0] == "t" and name[1:].isdigit()]
        renamed = {name: f"{name}'{len(before.instructions)}" for name in temporary}
        own = []
        for step in self.instructions:
            inputs = {key: renamed.get(value, value) for key, value in step.inputs.items()}
            own.append(replace(step, out=tuple(renamed.get(name, name) for name in step.out), inputs=inputs))
        self.instructions = [*before.instructions, *own]
        self.values = before.values | {renamed.get(name, name): info for name, info in self.values.items()}
        inputs_before = {name: info for name, info in before.values.items() if name in before.inputs}
        old = {name: self.value(name, info.shape, ops.dtype_of(info.dtype)) for name, info in inputs_before.items()}
        self.inputs = old | self.inputs

    def input(self, label: str, dims: ops.Shape, dtype: torch.dtype) -> Value:
        """A value that the entry starts from."""
        if label not in self.inputs:
            self.inputs[label] = self.value(label, dims, dtype)
        return self.inputs[label]

    def value(self, label: str, dims: ops.Shape, dtype: torch.dtype) -> Value:
        self.values[label] = ValueInfo(dims, str(dtype).removeprefix("torch."))
        return Value(label, dims, dtype, self)

    def site(self, name: str, value: Tensor) -> Value:
        """The identity with a result of its own: an edit here must not reach another site that passes this tensor."""
        value = self.checked(value)
        return self.emit("site", {"x": value}, name=name, dims=value.dims, dtype=value.dtype)

    def emit(
        self,
        op: str,
        inputs: Mapping[str, Value],
        *,
        dims: ops.Shape,
        dtype: torch.dtype,
        weights: Mapping[str, str] | None = None,
        attributes: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Value:
        if name is None:
            self.count += 1
            name = f"t{self.count}"
        out = self.value(name, dims, dtype)
        labels = {key: value.label for key, value in inputs.items()}
        for weight in (weights or {}).values():
            self.used[weight] = self.shapes[weight]
        self.instructions.append(Instruction(op, (name,), labels, dict(weights or {}), dict(attributes or {})))
        return out

    def checked(self, value: object) -> Value:
        if not isinstance(value, Value):
            raise NotLowerable(f"a {type(value).__name__} stands where a value of the forward belongs")
        return value

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        """Record a call of torch or of `ops` with a value among its arguments."""
        operation, bound = ops.recorded_call(func, args, kwargs)
        if operation.name == "experts":
            return self._experts(bound)
        if operation.name == "cast" and bound["dtype"] == bound["x"].dtype:
            return self.checked(bound["x"])
        inputs, weights, attributes = self._sorted(operation, bound)
        shapes: dict[str, Sequence[Any]] = {key: value.dims for key, value in inputs.items()}
        shapes |= {key: self.shapes[weight] for key, weight in weights.items()}
        dims = operation.shape(shapes, attributes)
        if not any("N" in shape for shape in shapes.values()):  # features become tokens
            dims = tuple(self.tokens if dim == "N" else dim for dim in dims)
        dtype = _dtype(operation, inputs, bound)
        return self.emit(operation.name, inputs, weights=weights, attributes=attributes, dims=dims, dtype=dtype)

    def _sorted(
        self, operation: ops.Operation, bound: Mapping[str, Any]
    ) -> tuple[dict[str, Value], dict[str, str], dict[str, Any]]:
        """Values, weights and plain arguments, each by the argument's name; rows are known when the program runs."""
        inputs, weights, attributes = dict[str, Value](), dict[str, str](), dict[str, Any]()
        for key, argument in bound.items():
            if isinstance(argument, Value):
                inputs[key] = argument
            elif isinstance(argument, Tensor):
                if id(argument) not in self.names:
                    raise NotLowerable(f"{operation.name}: {key} is a tensor that is no parameter of the model")
                weights[key] = self.names[id(argument)]
            elif isinstance(argument, torch.dtype):
                attributes[key] = str(argument).removeprefix("torch.")
            elif argument is not None and key not in ("rows", "lengths", "longest"):
                attributes[key] = argument
        return inputs, weights, attributes

    def _experts(self, bound: Mapping[str, Any]) -> Value:
        """One operation that holds the program of its first expert; the others have the same with their own weights.
        Raises NotLowerable for one that does something else."""
        x, parts = self.checked(bound["x"]), bound["parts"]
        expert = self._expert(parts[0], x)
        used = dict(self.used)
        for i, part in enumerate(parts):
            steps = []
            for step in self._expert(part, x).instructions:
                weights = {key: name.replace(f".experts.{i}.", ".experts.0.") for key, name in step.weights.items()}
                steps.append(replace(step, weights=weights))
            if tuple(steps) != expert.instructions:
                raise NotLowerable(f"expert {i} does something else than expert 0")
        self.used = used
        attributes = {
            "top_k": bound["top_k"], "normalize": bound["normalize"], "count": len(parts), "expert": expert,
        }  # fmt: skip
        inputs = {"x": x, "scores": self.checked(bound["scores"])}
        return self.emit("experts", inputs, attributes=attributes, dims=x.dims, dtype=x.dtype)

    def _expert(self, part: Callable[[Tensor], Tensor], x: Value) -> Entry:
        outer = dict(self.entries)
        with self.entry("expert") as outputs:
            outputs.append(self.checked(part(self.input("x", x.dims, x.dtype))))
        expert, self.entries = self.entries["expert"], outer
        return expert


def _dtype(operation: ops.Operation, inputs: Mapping[str, Value], arguments: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a result: the one that is asked for, or as the table says."""
    if isinstance(asked := arguments.get("dtype"), torch.dtype):
        return asked
    fixed = {"float32": torch.float32, "int64": torch.long}.get(operation.dtype)
    source = arguments["weight"] if operation.dtype == "weight" else next(iter(inputs.values()))
    dtype: torch.dtype = source.dtype
    return dtype if fixed is None else fixed
