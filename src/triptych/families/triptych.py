"""Models that no other library has a class for: the spec itself, as JSON, and our own tensor names."""

from dataclasses import replace
from typing import Any

from triptych.mapping import ConfigKeys, WeightTable
from triptych.spec import ModelSpec, from_json, to_json
from triptych.spec.json import VERSION

hf_types = {"triptych"}
prefix = ""
weights: WeightTable = ()  # every parameter under its own name


def config(keys: ConfigKeys) -> ModelSpec:
    version = keys.int("triptych_version")
    if version != VERSION:
        raise keys.error(f"triptych_version {version} is not {VERSION}; update triptych to read it")
    spec = from_json(keys.get("spec"), f"{keys.where}: spec")
    if not isinstance(spec, ModelSpec):
        raise keys.error("spec is a part, not a model")
    return replace(spec, family="triptych")


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of `spec`, also of one that began as another family and was changed."""
    return {"model_type": "triptych", "triptych_version": VERSION, "spec": to_json(replace(spec, family="triptych"))}
