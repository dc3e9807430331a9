"""From a checkpoint's tensors to a module's parameters, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych import families
from triptych.checkpoints import Loaded, LoadReport, Source
from triptych.errors import CheckpointError
from triptych.nn import Transformer, assign, empty, finish
from triptych.spec import Model


def read_weights(
    spec: Model,
    source: Source,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ignore: Sequence[str] = (),
) -> tuple[Transformer, LoadReport]:
    """The module of `spec` with every parameter read from `source`, tensor by tensor.

    Plain tensors in their stored dtype are private views of the mapped file: no copy until somebody writes to them.  A
    family that overflows fp16 is kept in bf16 or fp32 instead, and the report says so.
    Raises CheckpointError for a tensor that is missing, left over, of the wrong shape, or unequal to its tie.
    """
    device = torch.device(device)
    plan = families.plan(
        spec, "gguf" if source.kind == "gguf" else "hf", source.names, ignore=ignore, where=str(source.path)
    )
    module, loaded, notes = empty(spec), [], set()
    wide = _instead_of_fp16(spec, device)
    for step in plan.loads:
        info = source.infos[step.source]
        if info.shape != step.source_shape:
            raise CheckpointError(
                f"{info.file}: {step.source} is {list(info.shape)}, the config asks for {list(step.source_shape)}"
            )
        kept = _dtype(info.dtype, dtype, device)
        if wide is not None and (kept == torch.float16 or (kept is None and info.dtype == "F16")):
            kept = wide
            notes.add(f"{spec.family} overflows fp16, so its weights are kept in {str(wide).removeprefix('torch.')}")
        stored = source.read(step.source, kept)
        for name, value in step.to_ours(stored).items():
            if not step.duplicate:
                assign(module, name, value.to(device).contiguous())
            elif not torch.equal(module.get_parameter(name), value.to(device)):
                raise CheckpointError(f"{info.file}: {step.source} differs from {name}, to which it is tied")
            done = "+".join(type(op).__name__.lower() for op in step.ops) or "copy"
            loaded.append(Loaded(name, (step.source,), info.file.name, info.dtype, tuple(value.shape), done))
    return finish(module), LoadReport(tuple(loaded), dict(spec.ties), tuple(plan.ignored), tuple(notes))


def _instead_of_fp16(spec: Model, device: torch.device) -> torch.dtype | None:
    """What to keep the weights of a family in that overflows fp16; None for the others."""
    if not getattr(families.find(spec.family), "overflows_fp16", False):
        return None
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def _dtype(stored: str, asked: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    if asked is None and stored == "F16" and device.type == "cpu":
        return torch.float32  # fp16 arithmetic on a CPU is several times slower than fp32
    return asked


def to_checkpoint(
    module: Transformer, hf: Mapping[str, Any] | None
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
    """Tensors under their HF names, made one at a time, and the `config.json` to write beside them.

    A model that came with an HF config is written back with it; one made from parts saves its spec.
    """
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    dtype = {"dtype": str(next(iter(parameters.values())).dtype).removeprefix("torch.")}
    if hf is None:
        return ((name, parameters[name]) for name in module.spec.shapes()), families.to_config(module.spec) | dtype
    return ((step.source, step.to_source(parameters)) for step in families.save_plan(module.spec)), {**hf, **dtype}
