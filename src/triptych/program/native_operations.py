"""Translates each operation of the table to steps of the native executor, by the functions in `NATIVE`.

A step computes vectors from vectors.  What has no numbers of its own - positions, rotations, biases of positions -
becomes a table that the binding fills, and operations that change no number (sites, splitting heads, casts between
floating-point types, since the executor computes in fp32) become other names of their input.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from triptych.native.step import GROUP, PAIR, WIDEST_BF16, Function, Index, KeySource, Op, Over, Pairing, StoredType
from triptych.spec.masks import Full
from triptych.spec.positions import LongRope
from .native_values import (
    Angles,
    NativeValue,
    PlanInstruction,
    PlanInstructions,
    PlanTable,
    Positions,
    StoredKeys,
    Vector,
    uses_of,
    vector_of,
    window_in,
)
from .not_served import NotServed
from .program import Entry, Instruction, Program

# Operations that are a function of every number of a vector, and which attribute is its factor.
MAPS = {"silu": "", "relu": "", "tanh": "", "gelu": "", "scale": "factor", "shift": "offset", "softcap": "cap"}
ALIASES = ("site", "split_heads", "merge_heads", "cast")


NOT_NATIVE = {
    "conv1d": "torch computes the convolutions of frames before the step, and other models run as modules",
    "patches": "torch computes an image encoder",
    "pool": "torch computes the heads of encoders",
    "l2_normalize": "torch computes the heads of encoders",
    "disentangled_bias": "its scores depend on the content of keys; DeBERTa runs as modules",
    "reached_table": "its size depends on the rows; DeBERTa runs as modules",
    "reached_row": "its size depends on the rows; DeBERTa runs as modules",
}
"""Why the native step lacks an operation, by its name."""


@dataclass(eq=False)
class InstructionList:
    """The steps of a program so far, and what decides about the next ones.

    packed    weights that are stored packed: vectors are rounded before they are multiplied with them.
    stored    what the cache keeps of keys and values.
    windows   of each layer's store.
    bf16      vectors and weights are rounded to bf16 where they are multiplied: "all", whatever they are stored as,
              or "packed", with packed weights and in the attention of a row to itself.
    reads     sites whose vectors are kept.
    encoding  whether tokens see all of their row.
    rounded   each vector that is rounded for packed weights, or for products in bf16.
    attended  the layers whose keys were attended to.
    """

    program: Program
    packed: frozenset[str]
    stored: StoredType
    windows: Sequence[int | None]
    bf16: Literal["all", "packed"] | None
    reads: Collection[str] = ()
    encoding: bool = False
    out: PlanInstructions = field(default_factory=PlanInstructions)
    rounded: dict[tuple[Vector, bool], Vector] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)

    def add(
        self, op: Op, out: Vector | None, reads: dict[str, Vector], tables: dict[str, PlanTable] | None = None,
        **numbers: float,
    ) -> PlanInstruction:  # fmt: skip
        over = out.over if out is not None else Over.TOKENS
        writes = {} if out is None else {"output": out}
        step = PlanInstruction(op, over, reads, writes, tables or {}, numbers)
        if op in (Op.MAP, Op.MAP_MULTIPLY, Op.ADD, Op.ROTATE, Op.STORED):
            step.takes_over = "input"
        self.out.steps.append(step)
        return step

    def look_up(self, out: Vector, table: PlanTable, index: Index, shift: int = 0) -> Vector:
        """`out`, filled with the rows of a table at an index, which is first moved by `shift`."""
        self.add(Op.EMBED, out, {}, {"table": table}, row=index, shift=shift, width=out.width)
        return out

    def round_input(self, x: Vector, bf16: bool) -> Vector:
        """x rounded for packed weights, or for products in bf16; once for all of either."""
        if (x, bf16) not in self.rounded:
            codes = x.width // 4 + 3 * x.width // GROUP + 48  # and each of three parts begins at 64 bytes
            codes = -(-x.width // PAIR) * PAIR // 2 if bf16 else codes
            self.rounded[x, bf16] = Vector(codes, x.over)
            self.add(Op.ROUND_BF16 if bf16 else Op.ROUND, self.rounded[x, bf16], {"input": x}, width=x.width)
        return self.rounded[x, bf16]


StepsOf = Callable[["NativeWalk", Instruction], NativeValue]
NATIVE: dict[str, StepsOf] = {}


def native(*operations: str) -> Callable[[StepsOf], StepsOf]:
    """A decorator: the function makes the steps of these operations."""

    def register(function: StepsOf) -> StepsOf:
        NATIVE.update(dict.fromkeys(operations, function))
        return function

    return register


@dataclass(eq=False)
class NativeWalk:
    """One entry on its way to steps: `values` are what its operations gave so far."""

    maker: InstructionList
    entry: Entry
    values: dict[str, NativeValue]
    over: Over
    expert: int
    uses: Mapping[str, int]
    activations: dict[Vector, tuple[PlanInstruction, str]] = field(default_factory=dict)

    def result(self, step: Instruction) -> NativeValue:
        if step.op not in NATIVE:
            raise NotServed(f"the native step has no operation {step.op}")
        return NATIVE[step.op](self, step)

    @native(*ALIASES)
    def _alias(self, step: Instruction) -> NativeValue:
        return self.values[step.inputs["x"]]

    @native("alibi_bias", "t5_bias")
    def _bias(self, step: Instruction) -> PlanTable:
        kind, how = "bias both ways" if self.maker.encoding else "bias", tuple(sorted(step.attributes.items()))
        return PlanTable(kind, self._name(step.weights["weight"]) if step.weights else "", (step.op, how))

    def _name(self, weight: str) -> str:
        return weight.replace(".experts.0.", f".experts.{self.expert}.")

    def vector(self, step: Instruction, argument: str) -> Vector:
        return vector_of(self.values, step.inputs[argument])

    def _per_head(self, step: Instruction, argument: str) -> tuple[Vector, int]:
        """The vector of an argument, and how many of its numbers are those of one head."""
        return self.vector(step, argument), int(self.entry.values[step.inputs[argument]].shape[-1])

    @native("embedding")
    def _embedding(self, step: Instruction) -> Vector:
        weight, ids = self._name(step.weights["weight"]), self.values[step.inputs["ids"]]
        out = Vector(self.maker.program.weights[weight][1], self.over)
        if isinstance(ids, Positions):
            return self.maker.look_up(out, PlanTable("plain", weight), Index.POSITIONS, ids.shift)
        if ids == "types":  # no call has any, so all are type 0
            return self.maker.look_up(out, PlanTable("plain", weight), Index.NONE)
        if ids == "ids":
            return self.maker.look_up(out, PlanTable("matrix", weight), Index.IDS)
        raise NotServed(f"a lookup of {step.inputs['ids']} in {weight}")

    @native("sinusoids")
    def _sinusoids(self, step: Instruction) -> Vector:
        how = tuple(step.attributes[key] for key in ("width", "theta", "layout"))
        if self.values[step.inputs["positions"]] != Positions():
            raise NotServed(f"sinusoids of {step.inputs['positions']}")
        return self.maker.look_up(Vector(how[0], self.over), PlanTable("sinusoids", how=how), Index.POSITIONS)

    @native("linear")
    def _linear(self, step: Instruction) -> Vector:
        x, weight = self.vector(step, "x"), self._name(step.weights["weight"])
        rows, columns = self.maker.program.weights[step.weights["weight"]]  # one shape in all experts
        if columns != x.width:
            raise NotServed(f"{weight} acts on each head of {step.inputs['x']}")
        out, reads, packed = Vector(rows, self.over), {"input": x}, weight in self.maker.packed
        bf16 = self.maker.bf16 == "all" or (self.maker.bf16 == "packed" and packed)
        tables = {"weight": PlanTable("tiles" if self.maker.bf16 == "all" else "matrix", weight)}
        if "bias" in step.weights:
            tables["bias"] = PlanTable("vector", self._name(step.weights["bias"]))
        if bf16:
            reads = {"input": self.maker.round_input(x, True)}
        elif packed:
            reads["rounded"] = self.maker.round_input(x, False)
        self.maker.add(Op.LINEAR_BF16 if bf16 else Op.LINEAR, out, reads, tables, width=x.width)
        return out

    @native("layer_norm", "rms_norm")
    def _norm(self, step: Instruction) -> Vector:
        x, width = self._per_head(step, "x")
        out, eps = Vector(x.width, self.over), step.attributes.get("eps")
        tables = {key: PlanTable("vector", self._name(name)) for key, name in step.weights.items()}
        self.maker.add(
            Op[step.op.upper()], out, {"input": x}, tables, width=width,
            heads=x.width // width, eps=torch.finfo(torch.float32).eps if eps is None else eps,
            offset=step.attributes.get("offset", 0.0),
        )  # fmt: skip
        return out

    @native("rotation_cos", "rotation_sin")
    def _angles(self, step: Instruction) -> Angles:
        spec, dtype = step.attributes["spec"], step.attributes.get("dtype", "float32")
        if self.values[step.inputs["positions"]] != Positions() or dtype != "float32":
            raise NotServed(f"angles of {step.inputs['positions']} in {dtype}")
        return Angles(spec)

    @native("rotate")
    def _rotate(self, step: Instruction) -> Vector:
        x, width = self._per_head(step, "x")
        angles, sines = self.values[step.inputs["cos"]], self.values[step.inputs["sin"]]
        if not isinstance(angles, Angles) or angles != sines:
            raise NotServed("a rotation by other angles than those of the positions")
        spec, out = angles.spec, Vector(x.width, self.over)
        tables = {"table": PlanTable("rotation", how=spec)}
        pairing = Pairing.HALF if step.attributes["pairing"] == "half" else Pairing.INTERLEAVED
        numbers = {"width": width, "heads": x.width // width, "pairing": pairing}
        if isinstance(spec.scaling, LongRope):
            tables["far_table"] = PlanTable("far rotation", how=spec)
            numbers["near_length"] = spec.scaling.original_length
        self.maker.add(Op.ROTATE, out, {"input": x}, tables, **numbers)
        return out

    def apply(self, function: Function, x: Vector, factor: float = 0.0, name: str = "") -> Vector:
        """A function of every number of x; `name` is that of the value, where a product may compute it."""
        out = Vector(x.width, self.over)
        activation = self.maker.add(Op.MAP, out, {"input": x}, width=x.width, function=function, factor=factor)
        self.activations[out] = activation, name
        return out

    def product(self, x: Vector, y: Vector, function: float = Function.NONE, factor: float = 0.0) -> Vector:
        """A function of x times y, number by number."""
        out = Vector(x.width, self.over)
        self.maker.add(Op.MAP_MULTIPLY, out, {"input": x, "other": y}, width=x.width, function=function, factor=factor)
        return out

    def sum(self, x: Vector, y: Vector) -> Vector:
        """x plus y, number by number."""
        out = Vector(x.width, self.over)
        self.maker.add(Op.ADD, out, {"input": x, "other": y}, width=x.width)
        return out

    def both(self, step: Instruction) -> tuple[Vector, Vector]:
        """The inputs `x` and `y`.  Raises NotServed where their shapes differ."""
        x, y = (self.vector(step, key) for key in ("x", "y"))
        if self.entry.values[step.inputs["x"]].shape[1:] != self.entry.values[step.inputs["y"]].shape[1:]:
            raise NotServed(f"{step.op} of vectors of different shapes")
        return x, y

    @native(*MAPS)
    def _map(self, step: Instruction) -> Vector | Positions:
        """A function of every number of x."""
        function, x = Function[step.op.upper()], self.values[step.inputs["x"]]
        if step.attributes.get("approximate", "none") != "none":
            function = Function.GELU_TANH
        number = float(step.attributes.get(MAPS[step.op], 0.0))
        if isinstance(x, Positions) and function is Function.SHIFT:
            return Positions(x.shift + int(number))
        return self.apply(function, self.vector(step, "x"), number, step.result)

    @native("add")
    def _add(self, step: Instruction) -> Vector:
        return self.sum(*self.both(step))

    @native("multiply")
    def _multiply(self, step: Instruction) -> Vector:
        """An activation that only this product reads is computed in it."""
        x, y = self.both(step)
        activation, name = self.activations.get(x, (None, ""))
        if activation is None or self.uses[name] != 1 or x in self.maker.out.sites.values():
            return self.product(x, y)
        self.maker.out.steps.remove(activation)
        return self.product(activation.reads["input"], y, activation.numbers["function"], activation.numbers["factor"])

    @native("extend")
    def _extend(self, step: Instruction) -> StoredKeys:
        leaf = step.attributes["leaf"]
        new, width = self._per_head(step, leaf)
        stored = self.maker.stored
        if stored is not StoredType.F32:  # new keys are read as the cache gives them back later
            out = Vector(new.width, self.over)
            self.maker.add(Op.STORED, out, {"input": new}, width=width, heads=new.width // width, type=stored)
            new = out
        return StoredKeys(step.attributes["layer"], new, width)

    @native("attend")
    def _attend(self, step: Instruction) -> Vector:
        how, maker = step.attributes, self.maker
        if how["mechanism"] != "dot_product":
            raise NotServed(f"the native step attends by dot products, not by {how['mechanism']} scores")
        q, width = self._per_head(step, "q")
        k, v = (self.values[step.inputs[key]] for key in ("k", "v"))
        if not isinstance(k, StoredKeys) or not isinstance(v, StoredKeys) or k.store != v.store:
            raise NotServed("attention to other keys than a cache's")
        heads, cross = q.width // width, k.new is None
        out = Vector(heads * v.width, self.over)
        groups = int(self.entry.values[step.inputs["k"]].shape[1])
        if maker.encoding and how["mask"] != Full():
            raise NotServed(f"the native step has no mask {how['mask']} in an encoder")
        window = 0 if maker.encoding else window_in(how["mask"], cross)
        numbers = {
            "width": width, "heads": heads, "groups": groups, "value_width": v.width, "store": k.store,
            "kind": KeySource.CROSS if cross else KeySource.SELF, "scale": how["scale"],
            "softcap": how["softcap"] or 0.0,
        }  # fmt: skip
        tables, reads = dict[str, PlanTable](), {"input": q}
        if "bias" in step.inputs:
            bias = self.values[step.inputs["bias"]]
            if not isinstance(bias, PlanTable) or cross:
                raise NotServed("a bias of the scores that is more than a function of distance")
            tables["bias"] = bias
        if "sinks" in step.weights:
            tables["sinks"] = PlanTable("vector", self._name(step.weights["sinks"]))
        if cross or k.new is None or v.new is None:
            maker.add(Op.ATTEND, out, reads, tables, **numbers)
            return out
        new = {"keys": k.new, "values": v.new}
        numbers["bf16"] = maker.bf16 == "packed" and max(width, v.width) <= WIDEST_BF16
        if maker.encoding:
            numbers |= {"kind": KeySource.ROW, "store": 0}
        elif k.store in maker.attended:
            raise NotServed(f"two attentions to the keys of layer {k.store}")
        elif window != (maker.windows[k.store] or 0):
            raise NotServed(f"layer {k.store} looks back {window} positions, its cache {maker.windows[k.store]}")
        attend = maker.add(Op.ATTEND, out, reads | new, tables, **numbers, window=window)
        if not maker.encoding:
            maker.attended.add(k.store)
            extend = maker.add(Op.EXTEND, None, new, **numbers, window=window)
            if window:  # the new tokens take the places of some that the queries still see
                extend.after.append(attend)
        return out

    @native("experts")
    def _experts(self, step: Instruction) -> Vector:
        how, maker = step.attributes, self.maker
        x, scores = self.vector(step, "x"), self.vector(step, "scores")
        if self.over is not Over.TOKENS:
            raise NotServed("experts of chosen tokens")
        count, entry = how["count"], how["expert"]
        routes, total = Vector(scores.width, self.over), Vector(x.width, self.over)
        numbers = {"experts": count, "top": how["top_k"], "normalized": int(how["normalize"]), "width": x.width}
        last = maker.add(Op.ROUTE, routes, {"input": scores}, **numbers)
        last.writes["sum"] = total
        for number in range(count):
            taken, summed = Vector(x.width, Over.EXPERT), Vector(x.width, self.over)
            reads = {"input": x, "routes": routes}
            maker.add(Op.TAKE, taken, reads, experts=count, number=number, width=x.width).after.append(last)
            out = walk_entry(maker, entry, {entry.inputs[0]: taken}, Over.EXPERT, number)
            last = maker.add(Op.GIVE, summed, {"input": out, "routes": routes, "output": total}, experts=count,
                             number=number, width=x.width)  # fmt: skip
            last.over, last.takes_over, last.forced = Over.EXPERT, "output", True
            total = summed
        return total


def walk_entry(
    maker: InstructionList, entry: Entry, values: dict[str, NativeValue], over: Over = Over.TOKENS, expert: int = 0
) -> Vector:
    """Walk one entry, with the weights of this expert where it is an expert's."""
    walk = NativeWalk(maker, entry, values, over, expert, uses_of(entry, ALIASES))
    for step in entry.instructions:
        value = values[step.result] = walk.result(step)
        if step.op == "site" and step.result in maker.reads and isinstance(value, Vector):
            maker.out.sites[step.result] = value
    return vector_of(values, entry.outputs[0])
