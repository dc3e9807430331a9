"""A model as a page runs it: its program with the tables that depend on positions, and its weights in int8.

The page's interpreter (`live_interpreter.js`, with `live_weights.js`) reads exactly what `export` gives.
`LiveExport.weights` are the same int8 matrices as fp32 tensors: run by the torch interpreter of programs, they are the
oracle of the page.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.arguments import checked
from triptych.attention.mask_lowering import implies_causal
from triptych.attention.position_biases import alibi_slopes, distance_row, t5_bucket
from triptych.attention.rope import attention_factor, inverse_frequencies
from triptych.errors import InputError
from triptych.model import Model
from triptych.nn.packed_weight import dense
from triptych.program import Entry, Instruction, Program, lower
from triptych.program.module_changes import refusal
from triptych.quantize import quantize
from triptych.quantize.kernel_layouts import GROUP
from triptych.spec import ModelSpec, to_json
from triptych.spec.masks import Mask
from triptych.spec.positions import LongRope, RopeSpec
from .inspect import layer_of
from .sections import defined

MAX_PARAMETERS = 15_000_000
MAX_TOKENS = 512  # of a text in the page
BYTES_PER_PARAMETER = (1 + 2 / GROUP) * 4 / 3  # a code and its share of a scale, in base64

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class LiveExport:
    """A program and its weights as the page reads them.

    program   the `Program.to_json` of the model in fp32, with numbers in the place of rotations and distances.
    tables    integers by distance, from -reach to reach, which operations name by their place in this list.
    tensors   weight -> kind (`int8`, `fp32`), shape, and where its bytes begin.
    data      the bytes: codes `[rows, padded columns]`, then fp16 scales `[rows, padded columns / 32]`; or fp32.
    weights   the same weights as fp32 tensors.
    lowered   the program that `weights` belong to.
    limit     the most tokens of a text.
    """

    program: Json
    tables: list[list[int]]
    tensors: dict[str, Json]
    data: bytes
    weights: dict[str, Tensor]
    lowered: Program
    limit: int

    def base64(self) -> str:
        return base64.b64encode(self.data).decode("ascii")

    def parts(self) -> list[Json]:
        """Every attention and every MLP, in the order of the program: what a reader may cut out.

        `part` is "blocks.2.attn", "decoder.blocks.0.cross" or "blocks.2.mlp", `stack` "encoder", "decoder" or "cross",
        and `tower` the entry that runs it.
        """
        parts, entries = [], self.lowered.entries
        for tower, stack in (("encode", "encoder"), ("decode", "decoder")):
            for step in entries[tower].instructions if tower in entries else ():
                mlp = step.op == "site" and step.out[0].endswith(".mlp.out")
                if mlp or step.op == "attend":
                    part = (step.out[0] if mlp else step.attributes["ports"][0]).rpartition(".")[0]
                    own = {"part": part, "stack": "cross" if part.endswith(".cross") else stack}
                    heads = 1 if mlp else entries[tower].values[step.out[0]].shape[1]
                    parts.append(own | {"layer": layer_of(part), "mlp": mlp, "heads": heads, "tower": tower})
        return parts


def check_size(spec: ModelSpec) -> None:
    """Raise InputError for a model with more parameters than a page carries, from its spec alone."""
    parameters = sum(map(prod, spec.shapes().values()))
    if parameters > MAX_PARAMETERS:
        raise InputError(
            f"a page that runs the model would carry {parameters:,} parameters, about "
            f"{parameters * BYTES_PER_PARAMETER / 2**20:,.0f} MiB, and the most is {MAX_PARAMETERS:,} parameters; use "
            "triptych inspect MODEL TEXT --save page.html, which keeps the attention on one text"
        )


@checked
def export(model: Model) -> LiveExport:
    """The program and the int8 weights of a model.

    Raises InputError for more than `MAX_PARAMETERS`, for hooks and replaced forwards, which a page cannot hold, and for
    an operation, a mask or a part that its interpreter does not have, by name.
    """
    check_size(model.spec)
    module = copy.deepcopy(model.module).eval().to(device="cpu", dtype=torch.float32)
    if edited := refusal(module):
        raise InputError(f"a page runs the model as it was trained, and {edited}; remove it first")
    program = lower(module)
    for name, reason in program.unlowered.items():
        raise InputError(f"{name} cannot run in a page: {reason}")
    limit = min(model.spec.context or MAX_TOKENS, MAX_TOKENS)
    exporter = _Exporter(limit, program.weights, [])
    entries = {name: exporter.entry(entry, name) for name, entry in program.entries.items()}
    parameters = {name: dense(value.detach()) for name, value in module.named_parameters(remove_duplicate=False)}
    tensors, data, weights = _packed(program, parameters)
    return LiveExport({"entries": entries}, exporter.tables, tensors, data, weights, program, limit)


@dataclass(frozen=True, eq=False)
class _Exporter:
    """Entries as JSON whose attributes need no arithmetic of Python's; `tables` are those they name."""

    limit: int
    shapes: Mapping[str, Sequence[int]]
    tables: list[list[int]]

    def entry(self, entry: Entry, where: str) -> Json:
        steps = [self.step(step, where) for step in entry.instructions]
        shapes = {name: list(info.shape) for name, info in entry.values.items()}
        return {
            "inputs": list(entry.inputs), "instructions": steps, "outputs": list(entry.outputs), "shapes": shapes,
            "continues": _continues(entry),
        }  # fmt: skip

    def step(self, step: Instruction, where: str) -> Json:
        if step.op not in defined("operation"):
            raise InputError(f"{where}: a page has no operation {step.op!r}")
        attributes: Json = {}
        for key, value in step.attributes.items():
            if isinstance(value, Mask):
                _check_mask(value, where)
            if isinstance(value, RopeSpec):
                attributes[key] = _rotation(value)
            elif isinstance(value, Entry):
                attributes[key] = {"entry": self.entry(value, where)}
            else:
                attributes[key] = to_json(value)
        if attributes.get("dtype", "float32") != "float32":
            raise InputError(f"{where}: a page computes in fp32, and {step.op} asks for {attributes['dtype']}")
        attributes |= self.positions(step)
        return {
            "op": step.op, "out": list(step.out), "inputs": step.inputs, "weights": step.weights,
            "attributes": attributes,
        }  # fmt: skip

    def positions(self, step: Instruction) -> Json:
        """What an operation reads of distances, computed here once: the interpreter has no logarithms of its own whose
        last bit could choose another bucket."""
        how, distance = step.attributes, torch.arange(-self.limit, self.limit + 1)
        if step.op == "alibi_bias":
            return {"slopes": alibi_slopes(how["heads"]).tolist()}
        if step.op == "t5_bias":
            buckets, *_ = self.shapes[step.weights["weight"]]
            both_ways = {"max_distance": how["max_distance"], "bidirectional": how["bidirectional"]}
            return {"buckets": self.table(t5_bucket(distance, buckets=buckets, **both_ways))}
        if step.op in ("reached_table", "reached_row"):
            rows = distance_row(distance, span=how["span"], max_distance=how.get("max_distance"))
            return {"rows": self.table(rows)}
        return {}

    def table(self, numbers: Tensor) -> int:
        """The place of these numbers among the tables; equal ones are kept once."""
        table = numbers.tolist()
        if table not in self.tables:
            self.tables.append(table)
        return self.tables.index(table)


def _continues(entry: Entry) -> bool:
    """Whether a longer text leaves all that was computed for its first tokens as it was."""
    if "ids" not in entry.inputs or "row_ends" in entry.inputs:
        return False
    attends = [step.attributes for step in entry.instructions if step.op == "attend"]
    back = all(how["keys"] == "cross" or implies_causal(how["mask"]) for how in attends)
    return back and all(step.op == "site" or ops.OPERATIONS[step.op].tokenwise for step in entry.instructions)


def _check_mask(mask: Mask, where: str) -> None:
    name = type(mask).__name__
    if name not in defined("mask"):
        raise InputError(f"{where}: a page has no mask {name}")
    for part in getattr(mask, "parts", ()):
        _check_mask(part, where)


def _rotation(spec: RopeSpec) -> Json:
    """A rotation in numbers: radians per position of each pair, and what cosines and sines are multiplied by; for
    LongRoPE also the frequencies of rows longer than `original`."""
    rotation: Json = {"pairing": spec.pairing, "factor": attention_factor(spec)}
    rotation["frequencies"] = inverse_frequencies(spec, 1).float().tolist()
    if isinstance(spec.scaling, LongRope):
        rotation["original"] = spec.scaling.original_length
        rotation["long"] = inverse_frequencies(spec, spec.scaling.original_length + 1).float().tolist()
    return rotation


def _packed(program: Program, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Json], bytes, dict[str, Tensor]]:
    """The places of all tensors that are read, their bytes, and the numbers that these stand for."""
    matrices = dict[str, bool]()
    for entry in program.entries.values():
        for name, matrix in _uses(entry):
            if matrices.setdefault(name, matrix) != matrix:
                raise InputError(f"{name} is read as a matrix and otherwise, which a page cannot do")
    tensors, pieces, weights, offset = dict[str, Json](), list[bytes](), dict[str, Tensor](), 0
    for name, matrix in matrices.items():
        if not bool(parameters[name].isfinite().all()):
            raise InputError(f"{name}: it has numbers that are not finite, and a page does not carry those")
        piece, weights[name] = _int8(parameters[name]) if matrix else _fp32(parameters[name])
        kind, shape = "int8" if matrix else "fp32", list(parameters[name].shape)
        tensors[name] = {"kind": kind, "shape": shape, "offset": offset}
        pieces.append(piece)
        offset += len(piece)
    return tensors, b"".join(pieces), weights


def _uses(entry: Entry) -> Iterator[tuple[str, bool]]:
    """Every weight that an entry reads, experts' own included, and whether as the matrix of a product or a lookup."""
    for step in entry.instructions:
        for key, name in step.weights.items():
            yield name, key == "weight" and step.op in ("linear", "embedding")
        if step.op == "experts":
            own = list(_uses(step.attributes["expert"]))
            for number in range(step.attributes["count"]):
                yield from ((name.replace(".experts.0.", f".experts.{number}."), matrix) for name, matrix in own)


def _int8(weight: Tensor) -> tuple[bytes, Tensor]:
    """The bytes of a matrix in our `int8`, and the numbers they stand for.  Columns beyond the last whole group of 32
    share a scale among themselves."""
    rows, columns = weight.shape
    matrix = quantize(torch.nn.functional.pad(weight, (0, -columns % GROUP)), "int8")
    packed = matrix.layout.unpack(matrix.data, matrix.columns)
    codes, scales = packed.codes[:rows].to(torch.int8), packed.scales[:rows].half()
    return codes.numpy().tobytes() + scales.numpy().tobytes(), packed.values()[:rows, :columns].contiguous()


def _fp32(weight: Tensor) -> tuple[bytes, Tensor]:
    return weight.contiguous().numpy().astype("<f4").tobytes(), weight
