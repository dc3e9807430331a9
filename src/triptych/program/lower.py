"""Lowers a module to its program: runs the parts' own forwards once on symbolic values, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from triptych.attention import AdditiveOver, AttendPlan, ContentBias, Heads, Mechanism, Rows, ScoreBias
from triptych.attention.cross_cache import Project
from triptych.attention.mask_lowering import window_of
from triptych.attention.mechanisms import DOT_PRODUCT, LINEAR
from triptych.attention.rows import KeysAndValues
from triptych.errors import ConfigError
from triptych.nn import Stack, Taps, Transformer
from triptych.ops import NotLowerable
from triptych.spec import EmbedSpec, FramesSpec, PatchesSpec
from triptych.spec.masks import Mask
from .program import Program
from .symbols import LENGTHS, Recorder, SymbolicRows, Value


def lower(module: Transformer) -> Program:
    """The program of a model, in evaluation mode.  A block that does something outside the table of operations stands
    in it as one `module` instruction, with the reason in `Program.unlowered`.

    Raises ConfigError, naming what was met, where an input slot or a head cannot be lowered.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in parameters.items() if name not in module.spec.ties}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    recorder, unlowered = Recorder(names, shapes), dict[str, str]()
    training = [part.training for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            _lower_stacks(module, recorder, unlowered)
    except NotLowerable as reason:
        raise ConfigError(f"this {module.spec.family} model cannot be lowered: {reason}") from None
    finally:
        for part, flag in zip(module.modules(), training, strict=True):
            part.training = flag
    return Program(recorder.entries, recorder.used, unlowered)


def _lower_stacks(module: Transformer, recorder: Recorder, unlowered: dict[str, str]) -> None:
    memory: Value | None = None
    if module.encoder is not None:
        tokens = "N" if module.decoder is None else "M"
        with recorder.entry("encode") as outputs:
            outputs.append(_stack(module, "encoder", recorder, tokens, unlowered))
        memory = outputs[0]
    if module.decoder is not None:
        with recorder.entry("decode") as outputs:
            outputs.append(_stack(module, "decoder", recorder, "N", unlowered, memory))
    if module.head is not None:
        with recorder.entry("unembed") as outputs:
            last = "encoder" if module.decoder is None else "decoder"
            hidden = recorder.input("hidden", ("N", module.spec.stacks[last].width), module.dtype)
            taps = RecordingTaps(recorder, "", unlowered)
            outputs.append(recorder.checked(module.unembed(hidden, SymbolicRows(recorder, "N"), taps)))


def _stack(
    module: Transformer, name: str, recorder: Recorder, tokens: str, unlowered: dict[str, str],
    memory: Value | None = None,
) -> Value:  # fmt: skip
    stack = module.encoder if name == "encoder" else module.decoder
    assert isinstance(stack, Stack)
    prefix = f"{name}." if module.spec.layout == "encoder-decoder" else ""
    rows = SymbolicRows(recorder, tokens)
    cross = None if memory is None else SymbolicCross(recorder, memory)
    types = None
    if isinstance(stack.spec.embed, EmbedSpec) and stack.spec.embed.token_types:
        types = recorder.input("token_types", (tokens,), torch.long)
    out = stack(
        _input(stack, recorder, tokens), rows, token_types=types, cache=SymbolicCache(recorder), cross=cross,
        taps=RecordingTaps(recorder, prefix, unlowered, f"{name}."),
    )  # fmt: skip
    return recorder.checked(out)


def _input(stack: Stack, recorder: Recorder, tokens: str) -> Value:
    part, dtype = stack.spec.embed, stack.dtype
    if isinstance(part, FramesSpec):
        recorder.sizes["P"] = part.stride * sum(LENGTHS)
        return recorder.input("frames", ("P", part.conv1.inputs), dtype)
    if isinstance(part, PatchesSpec):
        recorder.sizes["P"] = sum(LENGTHS) - len(LENGTHS)
        return recorder.input("patches", ("P", part.channels * part.patch**2), dtype)
    return recorder.input("ids", (tokens,), torch.long)


@dataclass(eq=False)
class RecordingTaps(Taps):
    """Names what passes: a site operation each.  A block that cannot be lowered becomes one `module` instruction."""

    recorder: Recorder
    prefix: str
    unlowered: dict[str, str]
    module: str = ""

    def at(self, name: str) -> RecordingTaps:
        module = self.module if name == "" else f"{self.module}{name}."
        return RecordingTaps(self.recorder, f"{self.prefix}{name}." if name else self.prefix, self.unlowered, module)

    def run(self, block: Callable[..., Tensor], x: Tensor, ctx: object, layer: int) -> Tensor:
        recorder, x = self.recorder, self.recorder.checked(x)
        state = (list(recorder.instructions), dict(recorder.values), dict(recorder.inputs), recorder.count)
        try:
            return block(x, ctx, layer, self)
        except NotLowerable as reason:
            recorder.instructions, recorder.values, recorder.inputs, recorder.count = state
            name = self.module.removesuffix(".")
            self.unlowered[name] = str(reason)
            return recorder.emit("module", {"x": x}, attributes={"module": name}, dims=x.dims, dtype=x.dtype)

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        return self.recorder.site(self.prefix + site, value)

    def attend(
        self, plan: AttendPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None
    ) -> Tensor:
        """Record `attend`, with the sites it serves itself as ports."""
        assert isinstance(plan, SymbolicPlan)
        ports = [f"{self.prefix}{leaf}" for leaf in ("k_ctx", "v_ctx")]
        if plan.mechanism is not LINEAR:
            ports += [f"{self.prefix}{leaf}" for leaf in ("scores", "pattern")]
        return plan.run(q, k, v, sinks, content, ports)


@dataclass(frozen=True, eq=False)
class SymbolicPlan:
    """Stands for a `RowPlan`: what attention does, whatever the rows."""

    recorder: Recorder
    keys: str
    mask: Mask
    heads: Heads
    bias: ScoreBias | None
    mechanism: Mechanism

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None,
        ports: Sequence[str] = (),
    ) -> Tensor:  # fmt: skip
        recorder, heads = self.recorder, self.heads
        inputs = {"q": recorder.checked(q), "k": recorder.checked(k), "v": recorder.checked(v)}
        if self.bias is not None:
            q_pos = recorder.input("q_pos", ("N",), torch.long)
            placed = recorder.checked(self.bias(q_pos, recorder.input("k_pos", ("S",), torch.long)))
            if content is not None:
                placed = recorder.checked(content(_by_head(inputs["q"]), _by_head(inputs["k"]), placed))
            inputs["bias"] = placed
        scores = self.mechanism.weight if isinstance(self.mechanism, AdditiveOver) else None
        learned = {"sinks": sinks, "weight": scores}
        weights = {key: recorder.names[id(value)] for key, value in learned.items() if value is not None}
        band = window_of(self.mask)
        attributes = {
            "mask": self.mask, "scale": 1.0 / math.sqrt(heads.width) if heads.scale is None else heads.scale,
            "softcap": heads.softcap, "keys": self.keys, "mechanism": self.mechanism.name,
            "span": None if band is None else sum(band), "ports": tuple(ports),
        }  # fmt: skip
        dims = (inputs["q"].dims[0], heads.heads, heads.value_width)
        return recorder.emit(
            "attend", inputs, weights=weights, attributes=attributes, dims=dims, dtype=inputs["q"].dtype
        )


def _by_head(x: Value) -> Value:
    """`[N, H, K]` with the four dimensions that a content bias reads, under the same name."""
    tokens, heads, width = x.shape
    return Value(x.label, x.dims, x.dtype, x.recorder, (1, heads, tokens, width))


@dataclass(eq=False)
class SymbolicKeys:
    """The layout of keys: with the tokens themselves and a cache's (`self`), or with the source's (`cross`)."""

    where: ClassVar[str]
    recorder: Recorder

    def plan(
        self, rows: Rows, mask: Mask, heads: Heads, bias: ScoreBias | None = None, mechanism: Mechanism = DOT_PRODUCT
    ) -> SymbolicPlan:
        return SymbolicPlan(self.recorder, self.where, mask, heads, bias, mechanism)


class SymbolicCache(SymbolicKeys):
    """One `decode` serves with a cache and without: `extend` is the identity on the null cache."""

    where = "self"
    context: object | None = None

    def begin(self, rows: Rows, provenance: str) -> SymbolicCache:
        return self

    def of(self, layer: int) -> SymbolicCache:
        return self

    def finish(self) -> None:
        pass

    @property
    def layout(self) -> SymbolicKeys:
        return self

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        recorder, out = self.recorder, []
        for leaf, value in (("k", recorder.checked(k)), ("v", recorder.checked(v))):
            attributes = {"layer": layer, "leaf": leaf}
            dims = ("S", *value.dims[1:])
            out.append(recorder.emit("extend", {leaf: value}, attributes=attributes, dims=dims, dtype=value.dtype))
        return out[0], out[1]


@dataclass(eq=False)
class SymbolicCross(SymbolicKeys):
    """The encoder's output: each layer's projections are recorded in the entry `cross_kv`, and `decode` starts from
    their results."""

    where = "cross"
    memory: Value

    def layout(self, rows: Rows) -> SymbolicKeys:
        return self

    def keys(self, layer: int, project: Project) -> KeysAndValues:
        recorder = self.recorder
        with recorder.entry("cross_kv") as outputs:
            memory = recorder.input("memory", self.memory.dims, self.memory.dtype)
            k, v = (recorder.checked(x) for x in project(memory, SymbolicRows(recorder, "M")))
            outputs += [k, v]
        return recorder.input(k.label, k.dims, k.dtype), recorder.input(v.label, v.dims, v.dtype)
