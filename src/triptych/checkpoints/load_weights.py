"""Loads a checkpoint's tensors into a module, packed where wanted, and gives its parameters back as tensors.

Which stored tensor fills which parameter, also of a tied head that has no tensor of its own, and which is missing or
left over, is decided by `plan` in mapping/tensor_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych import families
from triptych.errors import CheckpointError, InputError, first_line, nearest, shown
from triptych.mapping import names_in
from triptych.mapping.tensor_plan import TensorLoad, TensorPlan
from triptych.nn import LoraFactors, Transformer, empty, fill
from triptych.nn.packed_weight import PackedWeight, dense
from triptych.nn.part import Module
from triptych.spec import ModelSpec
from . import LoadedTensor, LoadReport, Source
from .gguf_blocks import PackedBlocks
from .gguf_reader import GGUFSource
from .packed_groups import PackedGroups
from .packed_safetensors import PackedSource

#: What `dtype=` may be called.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "fp32": torch.float32, "f32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "f16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip
_STORED_FLOATS = ("F64", "F32", "F16", "BF16")
_NOT_FLOATS = names_in("I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64")


def compute_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype to load weights in, from torch's object or its name; None keeps the stored one.

    Raises InputError for anything that no model computes in.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.").lower()
    if isinstance(dtype, torch.dtype | str) and name in DTYPES:
        return DTYPES[name]
    meant = nearest(name, DTYPES, 0.7)
    raise InputError(f"dtype {shown(name)} is not one of float32, bfloat16, float16, float64{meant}")


def usable_device(device: str | torch.device) -> torch.device:
    """The device called `device`.  Raises InputError where torch knows no such device or cannot use it here."""
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device {shown(str(device))} is not known to torch; use 'cpu', or 'cuda' for a GPU") from None
    if torch_device.type == "cpu" and torch_device.index:
        raise InputError(f"device {shown(str(device))}: there is one CPU; use 'cpu'")
    if torch_device.type == "meta":
        raise InputError("device 'meta' holds no numbers; use 'cpu', or 'cuda' for a GPU")
    try:
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {shown(str(device))} cannot be used here ({first_line(error)}); use device='cpu'"
        ) from None
    return torch_device


@runtime_checkable
class WeightPacker(Protocol):
    """Packs matrices while a model is loaded (`quantize.Packer`); None leaves a matrix as plain numbers."""

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def packed(self) -> str: ...

    def stored(self, name: str, weight: PackedBlocks | PackedGroups, dtype: torch.dtype) -> PackedWeight | None: ...

    def numbers(self, name: str, weight: Tensor) -> PackedWeight | None: ...


def stores_packed(source: Source | None) -> bool:
    """Whether a tensor of `source` is stored in packed blocks or groups that a packer takes."""
    return source is not None and any(map(source.is_packed, source.names))


def read_weights(
    spec: ModelSpec,
    source: Source,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: Sequence[str] = (),
    *,
    dequantize: bool = True,
    packer: WeightPacker | None = None,
) -> tuple[Transformer, LoadReport]:
    """The module of `spec` filled with the `StoredWeights` of `source`, whose arguments these are, and the report."""
    module = empty(spec)
    weights = StoredWeights(module, source, dtype, device, ignore, dequantize=dequantize, packer=packer)
    return fill(module, weights), weights.report()


class StoredWeights(Iterable[tuple[str, Tensor]]):
    """The weights in `source` of a module on the meta device, read one after another by each iteration.  What the
    reference of its family never trains (`Family.fixed`) needs no gradient in the module from now on.

    Plain tensors in their stored dtype are private views of the mapped file: no copy until they are written to.  A
    family that overflows fp16 is loaded in bf16 or fp32 instead, and the report says so.  Without `dequantize` the
    packed matrices of a file stay packed where their slot can use them so: those of a GGUF file in its blocks, or with
    a `packer`, which AWQ and GPTQ need, in the layout that it gives them.  A `packer` packs matrices of plain numbers
    too.
    The constructor and the iteration raise CheckpointError for a tensor that is missing, left over, of the wrong shape
    or type, or unequal to its tie, and InputError for a dtype or a device that cannot be used.
    """

    def __init__(
        self,
        module: Transformer,
        source: Source,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        ignore: Sequence[str] = (),
        *,
        dequantize: bool = True,
        packer: WeightPacker | None = None,
    ) -> None:
        self.module, self.source, self.dequantize, self.packer = module, source, dequantize, packer
        self.dtype, self.device = compute_dtype(dtype), usable_device(device)
        self.plan = _checked_plan(module.spec, source, ignore)
        self._instead = _instead_of_fp16(module.spec, self.device)
        self._loaded: list[LoadedTensor] = []
        self._notes: list[str] = []
        for name in families.find(module.spec.family).fixed & module.spec.shapes().keys():
            module.get_parameter(name).requires_grad_(False)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._loaded, self._notes = [], []
        first: dict[str, TensorLoad] = {}  # that of each parameter which is no duplicate
        for step in self.plan.loads:
            info = self.source.infos[step.source]
            weights = None if self.dequantize or step.duplicate else self._packed(step)
            if weights is None:
                weights = self._plain(step)
                if self.packer is not None and not step.duplicate:
                    weights = {
                        name: _repacked(self.module, self.packer, name, weight) for name, weight in weights.items()
                    }
            op = "+".join(type(op).__name__.lower() for op in step.ops) or "copy"
            for name, weight in weights.items():
                if step.duplicate:
                    _check_equal(step.source, name, weight, self._plain(first[name])[name], self.source)
                else:
                    first[name] = step
                    packed = isinstance(weight, PackedWeight)
                    yield name, weight.to(self.device) if packed else weight.to(self.device).contiguous()
                self._loaded.append(
                    LoadedTensor(name, (step.source,), info.file.name, info.dtype, tuple(weight.shape), op)
                )

    def report(self) -> LoadReport:
        """What the last iteration read."""
        packer = self.packer
        notes = dict.fromkeys([*self._notes, *([] if packer is None else packer.notes)])
        summary = "" if packer is None else packer.packed
        return LoadReport(tuple(self._loaded), dict(self.module.spec.ties), self.plan.ignored, tuple(notes), summary)

    def _packed(self, step: TensorLoad) -> dict[str, Tensor] | None:
        return _packed(self.module, step, self.source, self.dtype, self.packer)

    def _plain(self, step: TensorLoad) -> dict[str, Tensor]:
        """The weights of one stored tensor as plain numbers."""
        dtype, instead = self.dtype, self._instead
        stored = self.source.read(step.source, None if instead is not None and dtype == torch.float16 else dtype)
        if dtype is None and self.device.type == "cpu" and stored.dtype == torch.float16:
            stored = stored.float()  # fp16 arithmetic on a CPU is several times slower than fp32
        elif instead is not None and torch.float16 in (dtype, stored.dtype):
            stored = stored.to(instead)
            name = str(instead).removeprefix("torch.")
            self._notes.append(f"{self.module.spec.family} overflows fp16, so its weights are loaded in {name}")
        if stored.dtype not in DTYPES.values():
            info = self.source.infos[step.source]
            problem = f"{step.source} is stored as {info.dtype}, in which nothing is computed"
            raise CheckpointError(f"{info.file}: {problem}; load with dtype='bfloat16'")
        weights: dict[str, Tensor] = step.to_ours(stored)
        return weights


def _packed(
    module: Transformer, step: TensorLoad, source: Source, dtype: torch.dtype | None, packer: WeightPacker | None
) -> dict[str, Tensor] | None:
    """The weights of one stored tensor as the file has it packed; None where the type, an operation or a slot does not
    allow it."""
    takes_packed = step.rows_only and all(_takes_packed(module, name) for name in step.ours)
    if not takes_packed or not source.is_packed(step.source):
        return None
    parts: Mapping[str, PackedBlocks | PackedGroups]
    if isinstance(source, GGUFSource):
        dtype = dtype or torch.float32
        blocks = source.blocks(step.source)  # operations that move whole rows act on rows of blocks just as well
        raw = step.to_ours(blocks.raw)
        if packer is None:
            return {name: PackedWeight(part, blocks.format, dtype) for name, part in raw.items()}
        parts = {name: PackedBlocks(blocks.format, part) for name, part in raw.items()}
    elif packer is None:
        return None
    else:
        assert isinstance(source, PackedSource)
        dtype = dtype or (torch.bfloat16 if source.plain_dtype == torch.bfloat16 else torch.float32)
        parts = source.groups(step.source).moved(step.to_ours)
    return {
        name: part.dense(dtype) if (weight := packer.stored(name, part, dtype)) is None else weight
        for name, part in parts.items()
    }


def _repacked(module: Transformer, packer: WeightPacker, name: str, weight: Tensor) -> Tensor:
    """The weight in the form of the packer, where its slot takes one."""
    packed = packer.numbers(name, weight) if _takes_packed(module, name) else None
    return weight if packed is None else packed


def _takes_packed(module: Transformer, name: str) -> bool:
    """Whether a parameter is a matrix whose part says that it may be packed."""
    path, _, leaf = name.rpartition(".")
    part = module.get_submodule(path)
    return leaf == "weight" and isinstance(part, Module) and part.takes_packed


def _checked_plan(spec: ModelSpec, source: Source, ignore: Sequence[str]) -> TensorPlan:
    """How `source` fills `spec`, with every shape as the spec has it and every tensor of floating-point numbers."""
    plan = families.plan(spec, source.kind, source.names, ignore=ignore, where=str(source.path))
    for step in plan.loads:
        info = source.infos[step.source]
        if info.shape != step.source_shape:
            raise CheckpointError(
                f"{info.file}: {step.source} is {list(info.shape)}, the config asks for {list(step.source_shape)}"
            )
        if info.dtype in _NOT_FLOATS:
            raise CheckpointError(
                f"{info.file}: {step.source} is stored as {info.dtype}, and weights are floating-point numbers "
                f"({', '.join(_STORED_FLOATS)} or a packed type)"
            )
    return plan


def _instead_of_fp16(spec: ModelSpec, device: torch.device) -> torch.dtype | None:
    """The dtype for the weights of a family that overflows fp16; None for the others."""
    if not families.find(spec.family).overflows_fp16:
        return None
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def _check_equal(stored: str, name: str, value: Tensor, parameter: Tensor, source: Source) -> None:
    if not torch.equal(parameter, value):
        file = source.infos[stored].file
        raise CheckpointError(f"{file}: {stored} differs from {name}, to which it is tied")


def to_checkpoint(
    module: Transformer, hf: Mapping[str, Any] | None
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
    """Tensors under their HF names, one at a time, and the `config.json` to write beside them."""
    makers = stored_tensors(module.spec, hf, DetachedWeights(module))
    return ((name, make()) for name, make in makers.items()), stored_config(module, hf)


def stored_tensors(
    spec: ModelSpec, hf: Mapping[str, Any] | None, parameters: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """What makes each stored tensor of `parameters`, by its name in a file: that of the HF config `hf` which the model
    came with, or without one, of a model made from parts, the parameter's own."""
    if hf is None:
        return {name: partial(parameters.__getitem__, name) for name in spec.shapes()}
    return {step.source: partial(step.to_source, parameters) for step in families.save_plan(spec)}


def stored_config(module: Transformer, hf: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `config.json` of a model: `hf`, or of one made from parts its spec."""
    dtype = {"dtype": str(module.dtype).removeprefix("torch.")}
    return (families.to_config(module.spec) if hf is None else dict(hf)) | dtype


class ModelParameters(Mapping[str, Tensor]):
    """Parameters by name.  `changed` are those that are not what their blocks hold."""

    changed: frozenset[str] = frozenset()
    _by_name: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def stored_as(self, name: str) -> str | None:
        """The type of GGUF whose blocks the parameter can be written in without rounding; None for plain numbers."""
        raise NotImplementedError

    def blocks(self, name: str) -> Tensor:
        """These blocks, `[rows, bytes of a row]`.

        Raises CheckpointError where they are needed from a file that has changed or is gone.
        """
        raise NotImplementedError


class DetachedWeights(ModelParameters):
    """The parameters of a module without gradients; a packed one is unpacked on access and not cached.

    `file` opens what the module was loaded from, for packed types whose blocks cannot be had from memory.
    """

    def __init__(self, module: Transformer, file: Callable[[], StoredParameters | None] = lambda: None) -> None:
        self._by_name = dict(module.named_parameters())
        self._file = cache(file)

    def stored_as(self, name: str) -> str | None:
        weight = self._by_name[name]
        return weight.format.stored_as if isinstance(weight, PackedWeight) else None

    def blocks(self, name: str) -> Tensor:
        weight = self._by_name[name]
        assert isinstance(weight, PackedWeight)
        blocks = weight.format.stored(weight.blocks, weight.shape[0], lambda: self._in_file(name, self.stored_as(name)))
        if blocks is None:
            problem = f"the blocks of {name} ({self.stored_as(name)}) have to be read from its file, which has changed"
            raise CheckpointError(f"{problem} or is gone; save into a directory, as plain numbers")
        return blocks

    def _in_file(self, name: str, kind: str | None) -> Tensor | None:
        file = self._file()
        return file.blocks(name) if file is not None and name in file and file.stored_as(name) == kind else None

    def __getitem__(self, name: str) -> Tensor:
        return dense(self._by_name[name].detach())


class StoredParameters(ModelParameters):
    """The parameters of `spec` in a checkpoint: each is read on access, in `dtype` or as stored, and not cached;
    with the `factors` of an adapter, which change slots, each with what they add to it.

    The constructor raises CheckpointError for tensors that are missing, left over or of the wrong shape.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        ignore: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        factors: Mapping[str, LoraFactors] | None = None,
    ) -> None:
        self._source, self._plan, self._dtype = source, _checked_plan(spec, source, ignore), dtype
        self._by_name = {name: step for step in self._plan.loads if not step.duplicate for name in step.ours}
        self._factors = {f"{slot}.weight": one for slot, one in (factors or {}).items()}
        self.changed = frozenset(self._factors)

    def __getitem__(self, name: str) -> Tensor:
        step = self._by_name[name]
        weights: dict[str, Tensor] = step.to_ours(self._source.read(step.source, self._dtype))
        return self._factors[name].merged(weights[name]) if name in self._factors else weights[name]

    def stored_as(self, name: str) -> str | None:
        step = self._by_name[name]
        packed = isinstance(self._source, GGUFSource) and step.rows_only and self._source.is_packed(step.source)
        return self._source.infos[step.source].dtype if packed else None

    def blocks(self, name: str) -> Tensor:
        step = self._by_name[name]
        blocks: Tensor = step.to_ours(self._source.read_raw(step.source))[name]
        return blocks

    def check_duplicates(self) -> None:
        """Raise CheckpointError for a tensor stored twice and unequally."""
        for step in self._plan.loads:
            if step.duplicate:
                for name, value in step.to_ours(self._source.read(step.source, self._dtype)).items():
                    _check_equal(step.source, name, value, self[name], self._source)
