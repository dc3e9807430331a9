"""safetensors whose matrices are packed: FP8 with scales (DeepSeek, Qwen), GPTQ and AWQ.  They are listed and
read as the plain matrices that they represent.

    fp8    weight [out, in] in float8-e4m3; weight_scale_inv [out / b, in / c] for blocks of b x c, or weight_scale for
           rows or the whole matrix.  value = weight * scale, despite the `_inv` in the name
    gptq   qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in].  Lowest
           bits first; zeros are stored minus one but in `gptq_v2`; g_idx is the group of each input (act-order)
    awq    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]: eight columns a word, in AWQ's order

The last two give value[in, out] = (code - zero) * scale.  Frantar et al. 2023, Lin et al. 2024; the layouts are those
of AutoGPTQ and AutoAWQ, and `packed_groups` takes them apart.  Everything is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from triptych.errors import ConfigError, nearest, shown
from triptych.mapping.config_keys import ConfigKeys
from .packed_groups import GroupReader, PackedGroups, stored_groups
from .source import Source, TensorInfo, fault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CHUNK = 1 << 20  # elements unpacked at a time
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class FilePacking:
    """The packing of a checkpoint's matrices, out of its `quantization_config`."""

    method: Literal["fp8", "gptq", "awq"]
    bits: int = 8
    group: int | None = None  # inputs that share a scale; all of them when None
    block: tuple[int, int] | None = None  # fp8: outputs and inputs that share one
    minus_one: bool = False  # gptq: zeros are stored so


# Keys about how the codes were computed or which kernel runs them; they do not change the values.  AWQ's and GPTQ's
# share a class in transformers, which writes all of them for either.
_COMMON_SILENT = (
    "sym true_sequential damp_percent damp_auto_increment static_groups dataset tokenizer backend meta quantizer "
    "model_name_or_path model_file_base_name block_name_to_quantize module_name_preceding_first_block "
    "modules_in_block_to_quantize batch_size pad_token_id model_seqlen max_input_length cache_block_outputs "
    "use_cuda_fp16 use_exllama disable_exllama exllama_config lm_head act_group_aware mse offload_to_disk"
)
_SILENT = {
    "fp8": "activation_scheme modules_to_not_convert ignored_layers modules_to_convert dequantize scale_fmt",
    "gptq": f"{_COMMON_SILENT} desc_act",
    "awq": f"{_COMMON_SILENT} modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse",
}
_ADVICE = "convert the model to plain safetensors with the tool that packed it"


def scheme(config: object, where: str = "config.json") -> FilePacking:
    """The packing that the `quantization_config` of an HF config names.

    Raises ConfigError for a method, a value or a key that is not understood.
    """
    where = f"{where}: quantization_config"
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must be a table, not {shown(config)}")
    reader = _QuantizationKeys(config, where)
    method = reader.one_of("quant_method", ("fp8", "gptq", "awq"))
    packing = {"fp8": _fp8, "gptq": _gptq, "awq": _awq}[method](reader)
    known = {*reader.read, *_SILENT[method].split()}
    for key in config.keys() - known:
        raise reader.error(f"{shown(key)} is not understood{nearest(key, known)}; {_ADVICE}")
    return packing


def _fp8(reader: _QuantizationKeys) -> FilePacking:
    reader.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    reader.one_of("expert_dtype", ("fp8",), "fp8")
    block = reader.get("weight_block_size", None)
    if block is None:
        return FilePacking("fp8")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise reader.error(f"weight_block_size {shown(block)} is not two sizes")
    return FilePacking("fp8", block=(block[0], block[1]))


def _gptq(reader: _QuantizationKeys) -> FilePacking:
    bits = reader.one_of("bits", (4, 8))
    first = reader.one_of("format", ("gptq", "gptq_v2"), "gptq")
    version = reader.one_of("checkpoint_format", ("gptq", "gptq_v2"), first)
    reader.one_of("pack_dtype", ("int32",), "int32")
    for off in ("is_marlin_format", "dynamic"):  # another layout, and other sizes for some modules
        if reader.get(off, None):
            raise reader.error(f"{off} is set, which is not read; {_ADVICE}")
    return FilePacking("gptq", bits, reader.group(), minus_one=version == "gptq")


def _awq(reader: _QuantizationKeys) -> FilePacking:
    bits = reader.one_of("bits", (4,), reader.get("w_bit", 4))
    first = reader.one_of("format", ("gemm",), "gemm")
    reader.one_of("version", ("gemm",), first)
    reader.one_of("zero_point", (True,), True)
    reader.one_of("desc_act", (False,), False)
    return FilePacking("awq", bits, reader.group())


class _QuantizationKeys(ConfigKeys):
    """The keys of a `quantization_config`; each must be read or be known not to matter."""

    def one_of(self, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(name, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(value == one and type(value) is type(one) for one in known):
            listed = ", ".join(map(repr, known))
            raise self.error(f"{name} {shown(value)} is not one of {listed}; {_ADVICE}")
        return value

    def group(self) -> int | None:
        size = self.get("group_size", self.get("q_group_size", 128))
        if type(size) is not int or (size < 1 and size != -1):
            raise self.error(f"group_size {shown(size)} is neither a size nor -1")
        return None if size == -1 else size


@dataclass(frozen=True)
class _StoredPackedMatrix:
    """One packed matrix: its stored tensors, the matrix it represents, and a function that computes rows of that."""

    parts: tuple[str, ...]
    info: TensorInfo
    rows: Callable[[Source], Callable[[int, int], Tensor]]  # -> values of outputs [a, b), float32
    unused: tuple[str, ...] = ()  # stored beside it and not needed: scales of activations
    groups: GroupReader | None = None  # of codes that can stay packed


class PackedSource(Source):
    """A source whose packed matrices look like plain ones.

    They are read in `dtype`, or in the dtype of most of the plain tensors beside them.
    """

    def __init__(self, source: Source, packing: FilePacking) -> None:
        self._source, self.path, self.metadata = source, source.path, source.metadata
        matrices = _matrices(source, packing)
        self._matrices = {matrix.info.name: matrix for matrix in matrices}
        hidden = {name for matrix in matrices for name in (*matrix.parts, *matrix.unused)}
        self.infos = {name: info for name, info in source.infos.items() if name not in hidden}
        self._plain = plain_dtype(self.infos)
        for name, matrix in self._matrices.items():
            if name in self.infos:
                raise fault(matrix.info.file, f"holds the matrix {shown(name)} plain and packed")
            self.infos[name] = matrix.info

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        import torch

        if name not in self._matrices:
            return self._source.read(name, dtype)
        matrix = self._matrices[name]
        outputs, inputs = matrix.info.shape
        out = torch.empty((outputs, inputs), dtype=dtype or self.plain_dtype)
        values, step = matrix.rows(self._source), max(1, _CHUNK // inputs)
        for start in range(0, outputs, step):
            out[start : start + step] = values(start, min(start + step, outputs))
        return out

    def is_packed(self, name: str) -> bool:
        return name in self._matrices and self._matrices[name].groups is not None

    def groups(self, name: str) -> PackedGroups:
        """The codes of a matrix with their scales and zero points.  Raises CheckpointError for any other tensor."""
        matrix = self._matrices.get(name)
        if matrix is None or matrix.groups is None:
            raise fault(self.path, f"the tensor {shown(name)} is not stored as codes in groups")
        return matrix.groups(self._source)(0, matrix.info.shape[0])

    @property
    def plain_dtype(self) -> torch.dtype:
        """The dtype of most of the plain tensors, in which matrices are read."""
        import torch

        dtype: torch.dtype = getattr(torch, self._plain)
        return dtype

    def read_raw(self, name: str) -> Tensor:
        """See `Source.read_raw`; of a packed matrix the bytes of its codes."""
        return self._source.read_raw(self._matrices[name].parts[0] if name in self._matrices else name)


def plain_dtype(infos: Mapping[str, TensorInfo]) -> str:
    """torch's name of the dtype most numbers of the plain floating tensors are stored in; float32 without any."""
    sizes = dict.fromkeys(_FLOATS, 0)
    for info in infos.values():
        if info.dtype in sizes:
            sizes[info.dtype] += info.nbytes // (4 if info.dtype == "F32" else 2)
    return _FLOATS[max(sizes, key=lambda name: sizes[name])]


def unpacked(source: Source, packing: FilePacking | None) -> Source:
    """`source` with its packed matrices as plain ones; itself where there are none.

    FP8 without any `quantization_config` is plain numbers that no arithmetic here computes with: widened too.
    Raises CheckpointError for parts of a matrix that are missing or do not fit each other.
    """
    if packing is None and not any(info.dtype == "F8_E4M3" for info in source.infos.values()):
        return source
    return PackedSource(source, packing or FilePacking("fp8"))


def _matrices(source: Source, packing: FilePacking) -> list[_StoredPackedMatrix]:
    if packing.method == "fp8":
        return [_fp8_matrix(source, name, packing) for name, info in source.infos.items() if info.dtype == "F8_E4M3"]
    stems = [name.removesuffix("qweight") for name in source.infos if name.endswith(".qweight")]
    return [_grouped_matrix(source, stem, packing) for stem in stems]


def _grouped_matrix(source: Source, stem: str, packing: FilePacking) -> _StoredPackedMatrix:
    """The matrix of one module of GPTQ or AWQ."""
    infos, shape, groups = stored_groups(
        source, stem, packing.bits, packing.group, awq=packing.method == "awq", minus_one=packing.minus_one
    )
    label = f"{packing.method.upper()} {packing.bits}-bit"
    size = sum(info.nbytes for info in infos)
    whole = TensorInfo(f"{stem}weight", label, shape, size, infos[0].file, infos[0].offset)

    def rows(source: Source) -> Callable[[int, int], Tensor]:
        read = groups(source)
        return lambda a, b: read(a, b).values()

    return _StoredPackedMatrix(tuple(info.name for info in infos), whole, rows, groups=groups)


# ---------------------------------------------------------------- fp8


def _fp8_matrix(source: Source, name: str, packing: FilePacking) -> _StoredPackedMatrix:
    info, stem = source.infos[name], name.removesuffix("weight")
    if len(info.shape) != 2 or 0 in info.shape:
        raise fault(info.file, f"tensor {shown(name)}: an fp8 tensor of shape {list(info.shape)} is no matrix")
    names = [f"{name}_scale_inv", f"{name}_scale"]
    scales = [scale for scale in names if scale in source.infos]
    if len(scales) > 1:
        raise fault(info.file, f"tensor {shown(name)} has two scales")
    if scales:
        _check_scale(source.infos[scales[0]], info, packing)
    unused = tuple(f"{stem}{kind}_scale" for kind in ("input", "activation"))
    logical = replace(info, dtype="F8_E4M3 scaled" if scales else "F8_E4M3")

    def rows(source: Source) -> Callable[[int, int], Tensor]:
        import torch

        codes = source.read(name)
        scale = source.read(scales[0], torch.float32) if scales else torch.ones(())
        by_row = _by_row(scale, info.shape, packing)
        return lambda a, b: codes[a:b].float() * by_row(a, b)

    return _StoredPackedMatrix((name, *scales), logical, rows, tuple(one for one in unused if one in source.infos))


def _check_scale(scale: TensorInfo, info: TensorInfo, packing: FilePacking) -> None:
    outputs, inputs = info.shape
    blocks = packing.block and tuple(-(-size // step) for size, step in zip(info.shape, packing.block, strict=True))
    fits = scale.shape == blocks if blocks else scale.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1))
    if not fits or scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        wanted = list(blocks) if blocks else f"one number or {outputs}"
        raise fault(
            scale.file,
            f"tensor {shown(scale.name)} is {list(scale.shape)} {scale.dtype}; "
            f"the scales of {[outputs, inputs]} must be {wanted}",
        )


def _by_row(scale: Tensor, shape: tuple[int, ...], packing: FilePacking) -> Callable[[int, int], Tensor]:
    """The scales of outputs [a, b) and all inputs, `[b - a, in]` or what broadcasts to it."""
    import torch

    if packing.block is None or scale.dim() == 0:
        return lambda a, b: scale.reshape(-1, 1)[a:b] if scale.numel() > 1 else scale.reshape(1, 1)
    tall, wide = packing.block
    return lambda a, b: scale[torch.arange(a, b) // tall].repeat_interleave(wide, dim=1)[:, : shape[1]]
