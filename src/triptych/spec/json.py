"""A spec as JSON and back, from a closed table of parts: no name in a file is ever looked up anywhere else."""

from dataclasses import MISSING, fields, is_dataclass
from numbers import Real
from typing import Any

from triptych.errors import ConfigError, nearest, shown
from . import inputs, masks, model, norms, parts, positions
from .part import part_name

VERSION = 1
_MODULES = (masks, norms, positions, inputs, parts, model)
PARTS: dict[str, type] = {
    name.removesuffix("Spec"): value
    for module in _MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
}
for _name in ("Mask", "Points", "Dense"):  # the base class, an argument, and a mask that holds a tensor
    del PARTS[_name]


def to_json(value: Any) -> Any:
    """A part as plain JSON data: `{"part": "RMSNorm", "width": 64, ...}`, fields at their default left out."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | Real):
        return value
    name = part_name(value)
    if PARTS.get(name) is not type(value):
        raise ConfigError(
            f"{name} has no JSON form; give a part or a symbolic mask of triptych.spec, such as model.spec"
        )
    items = {f.name: getattr(value, f.name) for f in fields(PARTS[name]) if not _is_default(f, getattr(value, f.name))}
    return {"part": name} | {key: to_json(item) for key, item in items.items()}


def from_json(data: Any, where: str = "spec") -> Any:
    """The part that `to_json` wrote.  Raises ConfigError naming the place for an unknown part, field or value."""
    if where == "spec" and (not isinstance(data, dict) or "part" not in data):
        raise ConfigError(f"spec: {shown(data)} is no part; give what to_json wrote, {{'part': 'Model', ...}}")
    if isinstance(data, list):
        return tuple(from_json(item, f"{where}.{i}") for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "part" not in data:
        return {key: from_json(item, f"{where}.{key}") for key, item in data.items()}
    name = data["part"]
    part = PARTS.get(name) if isinstance(name, str) else None
    if part is None:
        raise ConfigError(f"{where}: unknown part {name!r}{nearest(str(name), PARTS)}")
    known = {f.name for f in fields(part)}
    for key in data.keys() - known - {"part"}:
        raise ConfigError(f"{where}: {name} has no field {key!r}{nearest(key, known)}")
    try:
        return part(**{key: from_json(item, f"{where}.{key}") for key, item in data.items() if key != "part"})
    except TypeError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not MISSING:
        return bool(value == field.default)
    return field.default_factory is not MISSING and bool(value == field.default_factory())
