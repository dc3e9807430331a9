"""The labels of boxes in the drawing of a model and on the live page: titles, descriptions, equations and shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from triptych import ops
from triptych.files import tables_of
from triptych.program import Program
from triptych.spec.masks import mask_text
from triptych.spec.part import part_name
from .graph import EMBED, START, Box

Words = tuple[str, str]

MOST_HEADS = 128  # that are drawn as squares
_TEXTS: Mapping[str, Mapping[str, Any]] = tables_of(__file__)
_CLASSES: Mapping[str, str] = {kind: name for name, kinds in _TEXTS["classes"].items() for kind in kinds}
LINEAR: Mapping[str, Words] = {leaf: (title, does) for leaf, (title, does) in _TEXTS["linear"].items()}
PARTS: Mapping[str, Sequence[str]] = _TEXTS["parts"]
_STACKS = {"encode": "encoder.", "decode": "decoder.", "cross_kv": "decoder.", "unembed": "head."}


@dataclass(frozen=True)
class Details:
    """The texts of a box.

    lines   the first in bold.
    note    what is shown when the pointer rests on it: the part, and the shapes of its weights.
    name    of the part that it shows.
    kind    its class in the style.
    heads   query heads and the key/value heads that they read, to be drawn as squares.
    """

    lines: tuple[str, ...]
    note: str = ""
    name: str = ""
    kind: str = "position"
    heads: tuple[int, int] | None = None


def words_of(box: Box) -> Words:
    """The title of a box, and what it does."""
    site, weight = box.site or "", box.step.weights.get("weight", "")
    if box.part is not None:
        return PARTS[box.part][0], PARTS[box.part][1]
    if box.kind == "module":
        return "Module", f"{box.step.attributes['module']} runs as a module."
    operation = ops.OPERATIONS[box.kind]
    if box.kind == "embedding":
        if "position" in weight:
            return "Position embedding", "Looks up the row of each position."
        if "type" in weight:
            first = "Looks up the row of the token type, first or second sentence; here the first."
            return "Token type embedding", first
        return "Token embedding", "Looks up the row of each token: the same row at every position."
    if box.kind == "linear":
        other = f"Linear ({weight.split('.')[-2]})", operation.description
        return next((words for leaf, words in LINEAR.items() if f".{site}".endswith(f".{leaf}")), other)
    if box.kind == "rotate":
        return "Rotate queries" if site.endswith("q_rot") else "Rotate keys", operation.description
    if box.kind == "add" and box.layer == START and (not site or EMBED.search(site)):
        return operation.label, "Adds the embeddings."
    return operation.label, operation.description


def equation_of(box: Box) -> str:
    """The equation of a box."""
    return PARTS[box.part][2] if box.part is not None else ops.OPERATIONS[box.kind].equation


def factor_text(factor: float) -> str:
    """`× √768`, `/ √64` where the square of the factor or its inverse is a whole number, else `× 0.22`."""
    square = factor**2
    if square > 1 and not float(factor).is_integer() and isclose(square, round(square), rel_tol=1e-6):
        return f"× √{square:.0f}"
    if 0 < square < 1 and isclose(1 / square, round(1 / square), rel_tol=1e-6):
        return f"/ √{1 / square:.0f}"
    return f"× {factor:.4g}"


def heads_text(heads: int, groups: int, width: int, value_width: int) -> str:
    """`32 heads of width 128, 4 to each of 8 key/value heads`."""
    values = f" (values {value_width})" if value_width != width else ""
    own = f"{heads} head{'s' * (heads > 1)} of width {width}{values}"
    each = "one key/value head for all" if groups == 1 else f"{heads // groups} to each of {groups} key/value heads"
    return own if groups == heads else f"{own}, {each}"


@dataclass(frozen=True, eq=False)
class Describer:
    """Describes the boxes of a program, in which an alias in `ties` stands under the name of the weight it shares."""

    program: Program
    ties: Mapping[str, str]

    def details(self, box: Box) -> Details:
        name, note, tie = self._part(box)
        lines = [words_of(box)[0], *self._lines(box)]
        if box.entry == "cross_kv":
            lines.append("of the encoder's output")
        heads = None
        if box.part == "scores":
            queries, groups, *_ = self._heads(box)
            heads = (queries, groups) if queries <= MOST_HEADS else None
        kind = _CLASSES.get(box.kind, "position")
        return Details((*lines, *tie), note, name, kind, heads)

    def _part(self, box: Box) -> tuple[str, str, tuple[str, ...]]:
        """The part of a box, the shapes of its weights, and a line where its weight is another's."""
        weights, prefix = dict(box.step.weights), _STACKS[box.entry]
        if box.step.op == "experts":
            inner = box.step.attributes["expert"].instructions
            weights = {weight: weight for step in inner for weight in step.weights.values()}
        if not weights or box.part in ("softmax", "mix"):
            return "", f"{prefix}{box.site or box.name}: {words_of(box)[1]}", ()
        shapes = [f"{key.rpartition('.')[2]} {_shape(self.program.weights[name])}" for key, name in weights.items()]
        first, tie = next(iter(weights.values())), tuple[str, ...]()
        aliases = [alias for alias, source in self.ties.items() if source == first and alias.startswith(prefix)]
        if aliases and not first.startswith(prefix):
            first, tie = aliases[0], (f"weight tied to {first.removesuffix('.weight')}",)
        part = first.rpartition(".")[0]
        if box.step.op == "experts":
            part = part[: part.index(".experts") + len(".experts")]
        return part, f"{part}: {', '.join(shapes)}", tie

    def _heads(self, box: Box) -> tuple[int, int, int, int]:
        values, inputs = self.program.entries[box.entry].values, box.step.inputs
        (_, heads, width), (_, groups, _), (_, _, value_width) = (values[inputs[key]].shape for key in "qkv")
        return int(heads), int(groups), int(width), int(value_width)

    def _lines(self, box: Box) -> list[str]:
        how, weights = box.step.attributes, {k: self.program.weights[name] for k, name in box.step.weights.items()}
        shape = self.program.entries[box.entry].values[box.step.out[0]].shape
        bias = " + bias" if "bias" in weights else ""
        match box.kind:
            case "linear":
                rows, columns = weights["weight"]
                return [f"{columns:,} → {rows:,}{bias}"]
            case "embedding":
                rows, columns = weights["weight"]
                return [f"{rows:,} × {columns:,}"]
            case "conv1d":
                rows, columns, kernel = weights["weight"]
                stride = f", stride {how['stride']}" if how["stride"] > 1 else ""
                return [f"{columns:,} → {rows:,}, kernel {kernel}{stride}"]
            case "patches":
                rows, *numbers = weights["weight"]
                return [f"{numbers[0]} × {numbers[1]} × {numbers[2]} → {rows:,} + bias", "after one learned vector"]
            case "layer_norm":
                return [f"{weights['weight'][0]:,}{'' if bias else ', no bias'}"]
            case "rms_norm":
                return [f"{weights['weight'][0]:,}" + (f", weight + {how['offset']:g}" if how.get("offset") else "")]
            case "scores":
                return self._score_lines(box)
            case "softmax":
                return ["one learned sink a head"] if "sinks" in weights else []
            case "gelu":
                return ["tanh form"] if how.get("approximate") == "tanh" else []
            case "scale":
                return [factor_text(how["factor"])]
            case "softcap":
                return [f"capped at ± {how['cap']:g}"]
            case "multiply":
                return [f"[N, {', '.join(f'{n:,}' if isinstance(n, int) else n for n in shape[1:])}]"]
            case "experts":
                inner = how["expert"].instructions
                up = self.program.weights[next(step.weights["weight"] for step in inner if step.op == "linear")]
                kept = "weights divided by their sum" if how["normalize"] else "weights as the router gives them"
                return [f"{how['top_k']} of {how['count']}, each {up[1]:,} → {up[0]:,} → {up[1]:,}", kept]
            case "pool":
                return [_TEXTS["pools"][how["mode"]]]
            case "t5_bias":
                return [f"{weights['weight'][0]} buckets of distance up to {how['max_distance']}"]
            case "alibi_bias":
                return ["ALiBi, a slope a head"]
            case "disentangled_bias":
                terms = {"pos_k": "c2p", "pos_q": "p2c"}
                return [" and ".join(name for key, name in terms.items() if key in box.step.inputs)]
            case "rotate":
                return self._rotation_lines(box, int(shape[-1]))
        return []

    def _score_lines(self, box: Box) -> list[str]:
        how = box.step.attributes
        if how["mechanism"] == "linear":
            text = "weights in proportion to φ(q)·φ(k), φ = elu + 1"
        else:
            text = "w·tanh(q + k)" if how["mechanism"] == "additive" else "q·k"
            text += "" if how["scale"] == 1 else f" {factor_text(how['scale'])}"
            text += " + bias" if "bias" in box.step.inputs else ""
        cap = [] if how["softcap"] is None else [f"scores capped at ± {how['softcap']:g}"]
        return [text, heads_text(*self._heads(box)), f"mask: {mask_text(how['mask'])}", *cap]

    def _rotation_lines(self, box: Box, width: int) -> list[str]:
        steps = self.program.entries[box.entry].instructions
        rope = next(step.attributes["spec"] for step in steps if step.out[0] == box.step.inputs["cos"])
        lines = [f"base {rope.theta:,.0f}"] + ([] if rope.width == width else [f"{rope.width} of {width}"])
        if rope.scaling is not None:
            factor = getattr(rope.scaling, "factor", None)
            lines.append(part_name(rope.scaling) + ("" if factor is None else f" × {factor:g}"))
        return lines


def _shape(numbers: tuple[int, ...]) -> str:
    return f"({', '.join(f'{n:,}' for n in numbers)})"
