"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<module in transformers>.lora_A.weight   [rank, inputs], our `down`
    base_model.model.<module in transformers>.lora_B.weight   [outputs, rank], our `up`
    base_model.model.<module in transformers>.lora_magnitude_vector   [outputs], of DoRA

Source of the layout: the documentation of PEFT, developer_guides/checkpoint.  Slots of ours that are one matrix there
and share their `down` become one pair with their `up`s one above the other.  Where they do not share it, their `down`s
are stacked, `up` is block-diagonal and the rank is the sum: the same product.  The metadata of the safetensors file
(`triptych`) name these slots, and the base with a digest of its files.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.errors import CheckpointError, nearest, shown
from triptych.families.multimodal_text import text_name
from triptych.mapping import Values, names_in
from triptych.mapping.tensor_plan import TensorLoad
from triptych.nn.lora import LoraFactors, scale_divisor
from triptych.spec import EmbedSpec, LMHeadSpec, ModelSpec, PoolingSpec
from .adapter_targets import is_never_read, module_names, slots_of, stored_modules
from .locate import ADAPTER_CONFIG, PREFIX, base_of_adapter, open_source, parse_name
from .save import write_directory
from .source import Source, json_if_there, json_object

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB]|magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_MAGNITUDE = "magnitude_vector"
_NAME = re.compile(r"[\w.-]+")
_PREFIX = "base_model.model."
#: Keys of the config that say where a file came from, or how it was trained: the product does not depend on them.
_WITHOUT_EFFECT = names_in("""
    auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
    layers_pattern layers_to_transform megatron_core peft_type peft_version qalora_group_size revision runtime_config
    target_modules task_type
""")
_READ = names_in("r lora_alpha lora_dropout rank_pattern alpha_pattern use_rslora use_dora bias init_lora_weights")
_BEFORE_TRAINING = (True, False, None, "gaussian", "eva", "orthogonal")  # initializations that leave the base as it is


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """An adapter that was read: the factors by slot, what its input is dropped out with, and what it was made for."""

    path: Path
    factors: dict[str, LoraFactors]
    dropout: float
    base: str | None  # as the file names it
    digest: str | None  # of the files of the base; PEFT's own adapters have none


def adapter_base(path: Path) -> tuple[str | None, str | None]:
    """The name of the base that an adapter directory is for, and the digest of its files, where it has them."""
    own = _own_metadata(_open(path))
    base = own.get("base") or base_of_adapter(path)
    return base if isinstance(base, str) else None, own.get("digest")


def read_adapter(path: str | Path, spec: ModelSpec) -> StoredAdapter:
    """The adapter in the directory `path` for a model of `spec`.

    Factors of a map that no output depends on are left out.
    Raises CheckpointError for what is no LoRA of linear maps (trained biases, `modules_to_save`), and for a matrix that
    the model does not have or that has another shape there.
    """
    path = Path(path)
    config = json_if_there(path / ADAPTER_CONFIG)
    if not config:
        raise CheckpointError(f"{path}: holds no {ADAPTER_CONFIG}; an adapter is a directory with it and {WEIGHTS}")
    _check_config(config, path / ADAPTER_CONFIG)
    source = _open(path)
    separate = _separate(_own_metadata(source), path / WEIGHTS)
    pairs: dict[str, dict[str, str]] = {}
    for key in source.names:
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(f"{path / WEIGHTS}: {_why_not_read(key)}")
        pairs.setdefault(match["module"], {})[match["side"]] = key
    modules, today = stored_modules(spec), module_names(spec)
    factors: dict[str, LoraFactors] = {}
    for module, pair in pairs.items():
        load = modules.get(_known(today(module), modules))
        if load is None and is_never_read(spec, module):
            continue
        if load is None:
            close = nearest(module, modules)
            raise CheckpointError(
                f"{path / WEIGHTS}: {module} is no linear map of this {spec.family} model that takes an adapter{close}"
            )
        if not factors.keys().isdisjoint(slots_of(load)):
            raise CheckpointError(
                f"{path / WEIGHTS}: {module} is there twice, with and without the prefix of its model"
            )
        whole = _stored_factors(source, config, module, pair, path)
        _check_shapes(path / WEIGHTS, module, load, whole, spec)
        if whole.rank % max(1, len(set(separate).intersection(slots_of(load)))):
            raise CheckpointError(f"{path / WEIGHTS}: the rank {whole.rank} of {module} does not divide into its slots")
        factors |= _split(load, whole, separate)
    if not factors:
        raise CheckpointError(f"{path / WEIGHTS}: holds no matrices")
    base, digest = adapter_base(path)
    dropout = config.get("lora_dropout") or 0.0
    ordered = {slot: factors[slot] for slot, _ in spec.walk() if slot in factors}
    return StoredAdapter(path, ordered, float(dropout), base, digest)


def _stored_factors(
    source: Source, config: Mapping[str, Any], module: str, keys: Mapping[str, str], path: Path
) -> LoraFactors:
    """The factors of a stored matrix, in the directory `path`, by their keys."""
    needed = ("A", "B", _MAGNITUDE) if config.get("use_dora") else ("A", "B")
    if keys.keys() != set(needed):
        odd = min(keys.keys() ^ set(needed))
        problem = "and use_dora is not set" if odd in keys else "is missing"
        raise CheckpointError(f"{path / WEIGHTS}: lora_{odd} of {module} {problem}; file and config do not fit")
    parts = {side: source.read(keys[side], torch.float32) for side in needed}
    alpha = _alpha(config, module, parts["A"].shape[0], path / ADAPTER_CONFIG)
    return LoraFactors(parts["A"], parts["B"], alpha, parts.get(_MAGNITUDE), bool(config.get("use_rslora")))


def write_adapter(
    path: str | Path,
    spec: ModelSpec,
    factors: Mapping[str, LoraFactors],
    *,
    dropout: float = 0.0,
    base: str | None = None,
    digest: str | None = None,
    files: Mapping[str, bytes | str] | None = None,
) -> None:
    """Write an adapter as a directory that PEFT opens, with `files` beside it, whole or not at all.

    `base` is the name of the model it changes, and `digest` that of its files.  Raises CheckpointError for what cannot
    be written.
    """
    tensors: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, float]] = {}
    separate: list[str] = []
    modules = stored_modules(spec)
    for module, load in modules.items():
        slots = slots_of(load)
        there = {slot: factors[slot] for slot in slots if slot in factors}
        if not there:
            continue
        joined, shared = _joined(load, slots, there)
        separate += [] if shared else list(there)
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = joined.down.detach()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = joined.up.detach()
        if joined.magnitude is not None:
            tensors[f"{_PREFIX}{module}.lora_{_MAGNITUDE}"] = joined.magnitude.detach()
        sizes[module] = (joined.rank, joined.alpha)
    own = {"base": base, "digest": digest, "separate": separate}
    metadata = {"triptych": json.dumps({key: value for key, value in own.items() if value})}
    config = _config(spec, modules, sizes, dropout, base) | {
        "use_rslora": any(one.rank_stabilized for one in factors.values()),
        "use_dora": any(one.magnitude is not None for one in factors.values()),
    }
    write_directory(path, tensors, config, files, metadata, names=(WEIGHTS, ADAPTER_CONFIG))


def base_digest(source: Source) -> str:
    """SHA-256 over the size of each file of a checkpoint, its beginning, and pieces spread over it: it changes with the
    header, and where nearly all weights do, without a gigabyte being read."""
    digest = hashlib.sha256()
    for file in sorted({info.file for info in source.infos.values()}):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as content:
            for i in range(65):
                content.seek(i * max(size - 4096, 0) // 64)
                digest.update(content.read(65536 if i == 0 else 4096))
    return digest.hexdigest()


def _split(load: TensorLoad, whole: LoraFactors, separate: Sequence[str]) -> dict[str, LoraFactors]:
    """The factors of each of our slots from those of their stored matrix; `separate` are slots with a `down` of their
    own, beside which the others have none."""
    stored = _rows_of(load)
    ups, norms = stored.to_ours(whole.up), dict[str, Tensor]()
    if whole.magnitude is not None:
        norms = {name: column[:, 0] for name, column in stored.to_ours(whole.magnitude[:, None]).items()}
    slots = slots_of(load)
    of_slot = {slot: replace(whole, up=ups[f"{slot}.weight"], magnitude=norms.get(f"{slot}.weight")) for slot in slots}
    own = [slot for slot in slots if slot in separate]
    if not own:
        return of_slot
    rank = whole.rank // len(own)
    parts = {}
    for i, slot in enumerate(own):
        ours = slice(i * rank, (i + 1) * rank)
        down, up = whole.down[ours].contiguous(), of_slot[slot].up[:, ours].contiguous()
        parts[slot] = replace(of_slot[slot], down=down, up=up, alpha=_with_scale(whole, rank))
    return parts


def _joined(load: TensorLoad, slots: Sequence[str], there: Mapping[str, LoraFactors]) -> tuple[LoraFactors, bool]:
    """The inverse of `_split`, and whether no slot needs to be named in `separate`."""
    parts, stored = list(there.values()), _rows_of(load)
    norms = {
        f"{slot}.weight": one.magnitude.detach()[:, None] for slot, one in there.items() if one.magnitude is not None
    }
    magnitude = stored.to_source(norms)[:, 0] if norms else None
    shared = len(there) == len(slots) and all(part.down is parts[0].down for part in parts)
    if shared:
        up = stored.to_source({f"{slot}.weight": part.up.detach() for slot, part in there.items()})
        return replace(parts[0], up=up, magnitude=magnitude), True
    rank, start = sum(part.rank for part in parts), 0
    ups: dict[str, Tensor] = {}
    for slot, shape in zip(slots, load.shapes, strict=True):
        ups[f"{slot}.weight"] = up = parts[0].up.new_zeros(shape[0], rank).detach()
        if slot in there:
            up[:, start : start + there[slot].rank] = there[slot].up.detach() * (there[slot].scale / parts[0].scale)
            start += there[slot].rank
    down, up = torch.cat([part.down.detach() for part in parts]), stored.to_source(ups)
    return replace(parts[0], down=down, up=up, alpha=_with_scale(parts[0], rank), magnitude=magnitude), False


def _with_scale(factors: LoraFactors, rank: int) -> float:
    """The alpha with which factors of `rank` have the scale of these."""
    alpha = factors.scale * scale_divisor(rank, factors.rank_stabilized)
    return (
        float(f"{alpha:.12g}") if factors.rank_stabilized else alpha
    )  # of 12 digits, so that it returns to what it was


def _rows_of(load: TensorLoad) -> TensorLoad:
    """The load of a matrix with as many rows and other columns: `lora_B` of Conv1D is not transposed."""
    return replace(load, ops=tuple(op for op in load.ops if op.rows))


def _config(
    spec: ModelSpec, modules: Mapping[str, TensorLoad], sizes: Mapping[str, tuple[int, float]], dropout: float,
    base: str | None,
) -> Values:  # fmt: skip
    """`adapter_config.json`, with the keys of PEFT's LoraConfig."""
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    task = "SEQ_2_SEQ_LM" if spec.encoder is not None else "CAUSAL_LM"
    reads_text = isinstance(spec.reads.embed, EmbedSpec)  # PEFT's class of either task passes on ids alone
    task_type = task if isinstance(spec.head, LMHeadSpec) and reads_text else None
    return {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if isinstance(spec.head, PoolingSpec) else task_type,
        "base_model_name_or_path": parse_name(base).repo if base and base.startswith(PREFIX) else base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": dropout,
        "target_modules": sorted(set(_shortest_ends(list(sizes), list(modules)))),
        "rank_pattern": _patterns({module: r for module, (r, _) in sizes.items()}, rank),
        "alpha_pattern": _patterns({module: _whole(a) for module, (_, a) in sizes.items()}, _whole(alpha)),
        "fan_in_fan_out": any(not op.rows for module in sizes for op in modules[module].ops),
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def _patterns(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """The values of modules that are not `usual`, by ends of names that no module with another value has."""
    by_end: dict[str, float] = {}
    for value in dict.fromkeys(value for value in values.values() if value != usual):
        chosen = [module for module, one in values.items() if one == value]
        by_end |= dict.fromkeys(_shortest_ends(chosen, list(values)), value)
    return by_end


def _shortest_ends(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """For each chosen module the shortest end of its name that only chosen ones have: PEFT matches ends."""
    ends = []
    for module in chosen:
        parts = module.split(".")
        tails = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        others = [one for one in every if one not in chosen]
        ends.append(next(tail for tail in tails if not any(f".{one}".endswith(f".{tail}") for one in others)))
    return ends


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raises CheckpointError for what is not LoRA as it is here, by the name of the key."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file}: peft_type {shown(config.get('peft_type'))} is not LORA; only LoRA adapters can be read"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias = {shown(config['bias'])} trained biases too; only bias = 'none' is read")
    if config.get("init_lora_weights", True) not in _BEFORE_TRAINING:
        how = shown(config["init_lora_weights"])
        raise CheckpointError(f"{file}: init_lora_weights = {how} changes the base; convert the adapter to plain LoRA")
    for key, value in config.items():
        if value and key not in _READ and key not in _WITHOUT_EFFECT:
            problem = f"{shown(key)} = {shown(value)} is not supported"
            raise CheckpointError(f"{file}: {problem}; merge the adapter with PEFT")
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{file}: lora_dropout {shown(dropout)} is not a number from 0 to 1")


def _alpha(config: Mapping[str, Any], module: str, rank: int, file: Path) -> float:
    """The numerator of the scale."""
    config_rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"), file)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"), file)
    if config_rank != rank:
        raise CheckpointError(
            f"{file}: {module} has rank {rank} in {WEIGHTS}, and the config says {shown(config_rank)}"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{file}: lora_alpha {shown(alpha)} is not a finite number")
    return float(alpha)


def _by_pattern(patterns: object, module: str, default: object, file: Path) -> object:
    """The value of the first pattern that is the end of a module's name, or after `^` all of it.

    PEFT takes regular expressions here.  One that comes out of a file could run for hours, so that only names are read.
    """
    for pattern, value in (patterns if isinstance(patterns, dict) else {}).items():
        name = pattern.removeprefix("^").removesuffix("$")
        if not _NAME.fullmatch(name):
            problem = f"the pattern {shown(pattern)} is a regular expression"
            raise CheckpointError(f"{file}: {problem}; write names of modules")
        if module == name or (module.endswith(f".{name}") and not pattern.startswith("^")):
            return value
    return default


def _check_shapes(file: Path, module: str, load: TensorLoad, whole: LoraFactors, spec: ModelSpec) -> None:
    inputs, outputs = load.shapes[0][1], sum(shape[0] for shape in load.shapes)
    rank = whole.rank if whole.down.dim() == 2 else 0
    sides: list[tuple[str, Tensor, tuple[int, ...], str]] = [
        ("A", whole.down, (rank, inputs), f"[rank, {inputs}]"),
        ("B", whole.up, (outputs, rank), f"[{outputs}, rank]"),
    ]
    if whole.magnitude is not None:
        sides.append((_MAGNITUDE, whole.magnitude, (outputs,), f"[{outputs}]"))
    for side, tensor, shape, wanted in sides:
        if tuple(tensor.shape) != shape or not rank:
            raise CheckpointError(
                f"{file}: {module}.lora_{side} is {list(tensor.shape)}, and this {spec.family} model takes {wanted}; "
                "the adapter is of another model"
            )


def _why_not_read(key: str) -> str:
    if "lora_embedding" in key:
        return f"{shown(key)} changes an embedding; only linear maps take an adapter"
    return f"{shown(key)} is no lora_A.weight and no lora_B.weight, which alone are read"


def _known(module: str, modules: Mapping[str, TensorLoad]) -> str:
    """The name that the model has for `module`, which may be of the model with or without its head, or inside one of
    images and text."""
    names = [module, text_name(module)]
    names += [known for known in modules if known.endswith(f".{module}") and known.count(".") == module.count(".") + 1]
    names.append(module.partition(".")[2])
    return next((name for name in names if name in modules), module)


def _open(path: Path) -> Source:
    if not (path / WEIGHTS).exists() and (path / "adapter_model.bin").exists():
        return open_source(path / "adapter_model.bin")  # its error says what to do with a pickle
    return open_source(path / WEIGHTS)


def _separate(own: Mapping[str, Any], file: Path) -> list[str]:
    """The slots that have a `down` of their own although they are one matrix with others."""
    separate = own.get("separate", [])
    if not isinstance(separate, list) or not all(isinstance(slot, str) for slot in separate):
        raise CheckpointError(f"{file}: its metadata name {shown(separate)} where a list of slots belongs")
    return separate


def _own_metadata(source: Source) -> Values:
    """The metadata that this library wrote beside PEFT's own; empty in the files of others."""
    text = source.metadata.get("triptych")
    return {} if not isinstance(text, str) else json_object(text.encode(), source.path)
