"""A program: entries, each a flat list of instructions whose values carry the names of the probe sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from triptych import ops
from triptych.errors import ConfigError
from triptych.spec import from_json, to_json
from triptych.spec.part import Part, part_name

VERSION = 1


@dataclass(frozen=True)
class ValueInfo:
    """One value: its symbolic shape (`ops.Dim`) and dtype."""

    shape: ops.Shape
    dtype: str


@dataclass(frozen=True)
class Instruction:
    """One operation of a forward.

    op           its name in `ops.OPERATIONS`; `site` is the identity, `module` a part that was not lowered.
    out          names of its results.
    inputs       argument -> name of a value.
    weights      argument -> name of a parameter.
    attributes   argument -> plain data, or a spec.
    """

    op: str
    out: tuple[str, ...]
    inputs: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> str:
        """The name of the first of its results; all operations of today have one."""
        return self.out[0]


@dataclass(frozen=True)
class Entry:
    """One way into the model: the values it starts from, what it does, and the values it gives."""

    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    values: dict[str, ValueInfo]


@dataclass(frozen=True)
class Program:
    """A model's forward.

    entries     `encode`, `cross_kv`, `decode` and `unembed`, those that the model has; an encoder alone has `encode`.
    weights     parameter -> its shape; aliases of tied parameters stand under the name of the one they share.
    unlowered   module -> why it runs as a module.
    """

    entries: dict[str, Entry]
    weights: dict[str, tuple[int, ...]]
    unlowered: dict[str, str] = field(default_factory=dict)

    def instructions(self) -> Iterator[Instruction]:
        for entry in self.entries.values():
            yield from entry.instructions

    @property
    def sites(self) -> list[str]:
        """Every place that taps see, in the order in which it is reached: site operations, and the ports of `extend`
        and `attend`."""
        names: dict[str, None] = {}
        for instruction in self.instructions():
            if instruction.op == "site":
                names[instruction.result] = None
            names |= dict.fromkeys(instruction.attributes.get("ports", ()))
        return list(names)

    def flops(self, entry: str, sizes: Mapping[str, int]) -> Counter[str]:
        """FLOPs of an entry by operation, for numbers in the place of `N`, `S`, `M`, `B`, `P`, `R`."""
        total: Counter[str] = Counter()
        for instruction in self.entries[entry].instructions:
            total[instruction.op] += self.flops_of(entry, instruction, sizes)
        return total

    def flops_of(self, entry: str, instruction: Instruction, sizes: Mapping[str, int]) -> int:
        """FLOPs of one instruction of an entry."""
        if instruction.op == "experts":
            return self._expert_flops(instruction, sizes)
        operation, values = ops.OPERATIONS.get(instruction.op), self.entries[entry].values
        if operation is None:
            return 0
        shapes = {name: _numbers(values[value].shape, sizes) for name, value in instruction.inputs.items()}
        shapes |= {name: self.weights[weight] for name, weight in instruction.weights.items()}
        return operation.flops(shapes, _numbers(values[instruction.result].shape, sizes), instruction.attributes)

    def _expert_flops(self, instruction: Instruction, sizes: Mapping[str, int]) -> int:
        """Each token goes through `top_k` experts, all of one shape."""
        expert = instruction.attributes["expert"]
        inner = Program({"expert": expert}, {name: self.weights[name] for name in weights_of(expert)})
        return int(instruction.attributes["top_k"]) * sum(inner.flops("expert", sizes).values())

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a version."""
        return {
            "version": VERSION,
            "entries": {name: _entry_json(entry) for name, entry in self.entries.items()},
            "weights": {name: list(shape) for name, shape in self.weights.items()},
            "unlowered": dict(self.unlowered),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Program:
        """What `to_json` wrote.  Raises ConfigError for another version, an unknown operation or a value that no
        instruction before gives."""
        if data.get("version") != VERSION:
            raise ConfigError(f"program: version {data.get('version')!r} is not {VERSION}; lower the model again")
        entries = {name: _entry(entry, f"program.{name}") for name, entry in data["entries"].items()}
        weights = {name: tuple(shape) for name, shape in data["weights"].items()}
        return Program(entries, weights, dict(data["unlowered"]))

    def lines(self, entry: str) -> Iterator[str]:
        """An entry as text, one instruction a line, values with their shapes."""
        values = self.entries[entry].values
        for name in self.entries[entry].inputs:
            yield f"{name} {_shape_text(values[name].shape)} = input"
        for step in self.entries[entry].instructions:
            out = ", ".join(f"{name} {_shape_text(values[name].shape)}" for name in step.out)
            settings = {key: value for key, value in step.attributes.items() if key not in ("ports", "expert")}
            arguments = [*step.inputs.values(), *step.weights.values()]
            arguments += [f"{key}={_setting_text(value)}" for key, value in settings.items() if value is not None]
            yield f"{out} = {step.op}({', '.join(arguments)})"
        yield f"-> {', '.join(self.entries[entry].outputs)}"


def _numbers(shape: ops.Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape)


def weights_of(entry: Entry) -> list[str]:
    """The names of the weights that an entry reads."""
    return [name for instruction in entry.instructions for name in instruction.weights.values()]


def _shape_text(shape: ops.Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _setting_text(value: Any) -> str:
    return part_name(value) if isinstance(value, Part) else str(value)


def _entry_json(entry: Entry) -> dict[str, Any]:
    instructions = []
    for step in entry.instructions:
        attributes = {
            key: {"entry": _entry_json(value)} if isinstance(value, Entry) else to_json(value)
            for key, value in step.attributes.items()
        }
        instructions.append(asdict(replace(step, attributes={})) | {"attributes": attributes})
    return asdict(replace(entry, instructions=())) | {"instructions": instructions}


def _entry(data: Mapping[str, Any], where: str) -> Entry:
    known, instructions = set(data["inputs"]), []
    for i, step in enumerate(data["instructions"]):
        if step["op"] not in ops.OPERATIONS and step["op"] not in ("site", "module"):
            raise ConfigError(f"{where}.{i}: unknown operation {step['op']!r}")
        missing = [name for name in step["inputs"].values() if name not in known]
        if missing:
            raise ConfigError(f"{where}.{i}: {missing[0]!r} is used before any instruction gives it")
        known |= set(step["out"])
        attributes = {key: _attribute(value, f"{where}.{i}.{key}") for key, value in step["attributes"].items()}
        instructions.append(
            Instruction(step["op"], tuple(step["out"]), dict(step["inputs"]), dict(step["weights"]), attributes)
        )
    missing = [name for name in data["outputs"] if name not in known]
    if missing:
        raise ConfigError(f"{where}: the output {missing[0]!r} is given by no instruction")
    values = {name: ValueInfo(tuple(info["shape"]), info["dtype"]) for name, info in data["values"].items()}
    return Entry(tuple(data["inputs"]), tuple(instructions), tuple(data["outputs"]), values)


def _attribute(value: Any, where: str) -> Any:
    if isinstance(value, dict) and set(value) == {"entry"}:
        return _entry(value["entry"], where)
    return from_json(value, where)
