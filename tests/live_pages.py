"""Models that run in a page, beside the same int8 weights in the torch interpreter."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from browser import Tab
from triptych import nn
from triptych.model import Model
from triptych.nn import InputRow
from triptych.page.live_export import LiveExport
from triptych.page.render import INTERPRETER, OF_MODELS
from triptych.program import Entry, Program, interpret, interpret_logits
from triptych.program.interpreter import Edits
from triptych.spec import FramesSpec, full


@cache
def _scripts() -> str:
    folder = resources.files("triptych.page")
    names = [one for name in INTERPRETER for one in (name, *OF_MODELS.get(name, ()))]
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in ("base.js", *names))


def interpreter_page(path: Path) -> Path:
    """A page with the interpreter alone, whose functions a test can call by name."""
    data = '<script type="application/json" id="data">{"sections": []}</script>'
    path.write_text(f"<!doctype html><meta charset='utf-8'>{data}<script>{_scripts()}</script>", encoding="utf-8")
    return path


def section(model: Model, exported: LiveExport) -> dict[str, Any]:
    """What the interpreter reads of a live section; without a tokenizer."""
    embed = model.spec.reads.embed
    stride = embed.stride if isinstance(embed, FramesSpec) else 1
    return {
        "program": exported.program, "tables": exported.tables, "tensors": exported.tensors, "stride": stride,
        "weights": exported.base64(),
    }  # fmt: skip


def in_python(
    model: Model,
    exported: LiveExport,
    row: InputRow,
    target: list[int] | None = None,
    edits: Edits | None = None,
    program: Program | None = None,
) -> Tensor:
    """The logits (or the final vectors of a model without a head) of the torch interpreter, on the page's weights."""
    program, weights = program or exported.lowered, exported.weights
    with torch.no_grad():
        (inputs, rows), source = model.module.flat([row]), None
        if target is not None:
            source, (inputs, rows) = (inputs, rows), nn.flat([target], torch.device("cpu"))
        hidden = interpret(program, weights, inputs, rows, source=source, edits=edits)
        return interpret_logits(program, weights, hidden, rows) if "unembed" in program.entries else hidden


# `how` is the interpreter's; JSON has no sets.
RUN = """
((section, input, target, how, plain, cached) => {
  if (how.cuts) how.cuts = new Set(how.cuts);
  if (input.shape) input.data = Float32Array.from(input.data);
  const model = new LiveModel(section, plain);
  const expected = plain ? "JavaScript" : "WebAssembly SIMD";
  if (model.weights.kernel.name !== expected) throw new Error(model.weights.kernel.name);
  const decodes = "decode" in model.entries;
  const memory = target ? model.encode(input, how).memory : {};
  const ids = target ?? input;
  const whole = () => (decodes ? model.decode(ids, how, memory) : model.encode(ids, how)).hidden;
  if (!cached) return [...model.logits(whole()).data];
  const cache = new Cache(64);
  const pieces = [ids.slice(0, 3), ids.slice(3, 4), ids.slice(4)];
  return pieces.flatMap((piece) => [...model.logits(model.decode(piece, how, memory, cache).hidden).data]);
})"""


def in_browser(
    tab: Tab,
    model: Model,
    exported: LiveExport,
    row: InputRow,
    target: list[int] | None = None,
    *,
    how: dict[str, Any] | None = None,
    plain: bool = False,
    cached: bool = False,
) -> Tensor:
    """The same of the page's interpreter, flat."""
    inputs, _ = model.module.flat([row])
    given: Any = inputs.tolist()
    if inputs.is_floating_point():
        given = {"shape": list(inputs.shape), "data": inputs.flatten().tolist()}
    arguments = (section(model, exported), given, target, how or {}, plain, cached)
    answer = tab.evaluate(f"{RUN}({', '.join(map(json.dumps, arguments))})")
    return torch.tensor([float("nan") if x is None else x for x in answer])


def without(program: Program, *, mask: bool = False, scale: bool = False) -> Program:
    """The program whose attention has no mask, or does not scale its scores."""
    new = ({"mask": full()} if mask else {}) | ({"scale": 1.0} if scale else {})
    return with_attention(program, lambda stack: new)


def with_attention(program: Program, new: Callable[[str], dict[str, Any]]) -> Program:
    """The program whose attention has these attributes besides, by its stack: "encoder", "decoder" or "cross"."""

    def changed(name: str, entry: Entry) -> Entry:
        steps = []
        for step in entry.instructions:
            if step.op == "attend":
                stack = "cross" if step.attributes["keys"] == "cross" else f"{name}r"
                step = replace(step, attributes=step.attributes | new(stack))
            steps.append(step)
        return replace(entry, instructions=tuple(steps))

    return replace(program, entries={name: changed(name, entry) for name, entry in program.entries.items()})
