"""Adding a LoRA adapter to a model, saving it, and finding the base model that a saved one names.

`quantize/adapter_merging.py` merges one into the weights."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.arguments import integer, number
from triptych.errors import CheckpointError, FetchError, InputError, shown
from triptych.nn import Adapter, LoraFactors, Transformer, attach, factors_of, fresh_factors
from triptych.spec import LinearSpec
from .adapter_files import adapter_base, base_digest, write_adapter
from .adapter_targets import ALL_LINEAR, check_whole_matrices, slot_groups
from .hub import local_path
from .locate import PREFIX, HubName, is_adapter, model_in_run, open_source


@dataclass(frozen=True)
class AdapterSettings:
    """A new adapter: see `Model.add_adapter`."""

    rank: int = 8
    alpha: float = 16
    targets: str | Sequence[str] = ALL_LINEAR
    dropout: float = 0.0
    seed: int = 0
    dora: bool = False
    rank_stabilized: bool = False


def add_adapter(module: Transformer, settings: AdapterSettings) -> Adapter:
    """Add an adapter that changes nothing yet.  Raises InputError as `Model.add_adapter`."""
    factors = new_factors(module, settings)
    with torch.inference_mode(False):
        return attach(module, factors, float(settings.dropout))


def new_factors(module: Transformer, settings: AdapterSettings) -> dict[str, LoraFactors]:
    """The factors of an adapter that changes nothing yet, by slot.  Raises InputError as `Model.add_adapter`."""
    integer("rank", settings.rank, 1)
    tiny, huge, below_one = sys.float_info.min, sys.float_info.max, math.nextafter(1, 0)
    number("alpha", settings.alpha, tiny, huge, "finite and above 0: with 0 nothing would be trained")
    number("dropout", settings.dropout, 0, below_one, "at least 0 and less than 1")
    integer("seed", settings.seed, 0)
    if module.lora_adapter is not None:
        raise InputError("the model has an adapter already; merge_adapter() or remove_adapter() first")
    groups = slot_groups(module.spec, settings.targets)
    parts = dict(module.spec.walk())
    for slot in (slot for group in groups for slot in group):
        part = parts[slot]
        assert isinstance(part, LinearSpec)
        if settings.rank > max(part.inputs, part.outputs):
            size = f"[{part.outputs}, {part.inputs}]"
            raise InputError(f"rank={settings.rank} is more than {slot} {size} has rows or columns; give a smaller one")
    if settings.dora:
        check_whole_matrices(module.spec, [slot for group in groups for slot in group])
    with torch.inference_mode(False):
        return fresh_factors(
            module, groups, settings.rank, float(settings.alpha), settings.seed, dora=settings.dora,
            rank_stabilized=settings.rank_stabilized,
        )  # fmt: skip


def save_adapter(
    path: str | Path, module: Transformer, base: Path | None, files: Mapping[str, bytes | str] | None = None,
    factors: Mapping[str, LoraFactors] | None = None,
) -> None:  # fmt: skip
    """Write the adapter of a model that was loaded from `base`, with `files` beside it; `factors` in place of those of
    a module of which each process has a part.

    Raises InputError where the model has no adapter and for the directory of another model, CheckpointError for what
    cannot be written.
    """
    factors = factors or factors_of(module)
    assert module.lora_adapter is not None
    if os.path.exists(Path(path, "config.json")) and (base is None or not os.path.samefile(path, base)):
        raise InputError(f"{path} holds a model, beside which the adapter would not be found; name another directory")
    name, digest = (None, None) if base is None else (base_name(base), _digest(base))
    write_adapter(
        path, module.spec, factors, dropout=module.lora_adapter.dropout, base=name, digest=digest, files=files
    )  # fmt: skip


def with_base(model: str | Path, adapter: str | Path | None = None) -> tuple[str | Path, Path | None]:
    """The model to load and the adapter to put on it, of what a user names: a model and perhaps an adapter for it, or a
    directory with an adapter alone, whose file names the base.

    Raises CheckpointError where the base is not there or is no longer what the adapter was trained on.
    """
    model = os.fspath(model)
    run_model = model_in_run(Path(model))
    if model.startswith(PREFIX) or not is_adapter(run_model):
        return model, None if adapter is None else model_in_run(Path(adapter))
    if adapter is not None:
        raise InputError(f"{run_model} is an adapter itself; name its base, and one adapter for it")
    base, digest = adapter_base(run_model)
    if base is None:
        raise CheckpointError(f"{run_model}: names no base; give it, and the adapter with --adapter (adapter=)")
    return check_base(base, digest, run_model), run_model


def check_base(base: str, digest: str | None, adapter: Path) -> Path:
    """The path of the base of the adapter in `adapter`.  What a file calls `hub:...` is only looked for in the cache.

    Raises CheckpointError unless `base` is there, with the files whose digest the adapter has.
    """
    advice = "and the adapter with --adapter (adapter=)"
    try:
        path = local_path(base, offline=True)
    except FetchError:
        raise CheckpointError(f"{adapter}: its base {base} has not been downloaded; give it, {advice}") from None
    if not os.path.exists(path):
        on_hub = base.count("/") == 1 and base[0] not in "./"
        known = f"give it, for example as hub:{base}," if on_hub else "give it"
        raise CheckpointError(f"{adapter}: its base {shown(base)} is not there; {known} {advice}")
    if digest is not None and _digest(path) != digest:
        problem = f"its base {base} has changed since the adapter was trained"
        raise CheckpointError(f"{adapter}: {problem}; to use it nevertheless, give the base, {advice}")
    return path


def base_name(path: Path) -> str:
    """What a later run finds a base by: its path, or the name on the hub of what lies in huggingface-hub's cache."""
    path = path.absolute()
    for i, part in enumerate(path.parts):
        if part.startswith("models--") and path.parts[i + 1 : i + 2] == ("snapshots",) and len(path.parts) > i + 2:
            file = "/".join(path.parts[i + 3 :]) or None
            return str(HubName("/".join(part.split("--")[1:]), path.parts[i + 2], file))
    return str(path)


def _digest(base: Path) -> str:
    return base_digest(open_source(base))
