"""The names that a family file must and may define, and the family of a `model_type` or a GGUF architecture."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from triptych.errors import CheckpointError, ConfigError, nearest, shown
from triptych.mapping import ConfigKeys, Values, WeightTable
from triptych.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class Family:
    """The names that are read from a family file.  Those with a default may be left out."""

    #: The file's module name.
    name: str
    #: The `model_type`s of Hugging Face configs that it reads.
    hf_types: Collection[str]
    #: A config as a spec.  A key that neither this nor `ignore` reads is an error.
    config: Callable[[ConfigKeys], ModelSpec]
    #: The reversible table of tensor names (`triptych.mapping.weight_table`).
    weights: WeightTable
    #: What the names of the base model begin with in HF files, which a file may have or lack.
    prefix: str = ""
    #: Classes of heads beside which HF names have no prefix.
    unprefixed: tuple[type, ...] = ()
    #: HF keys that cannot change the forward, each with the reason beside it in the file.
    ignore: Set[str] = frozenset()
    #: Special tokens that the configuration class of transformers means by an absent key.
    ids: Mapping[str, int] = field(default_factory=dict)
    #: Old endings of tensor names -> today's.
    renames: Mapping[str, str] = field(default_factory=dict)
    #: Parameters that transformers keeps as a checkpoint has them: no optimizer changes them there, nor here.
    fixed: Set[str] = frozenset()
    #: The name of a module in transformers, of the name that its tensors are stored under, where the two differ.
    module_name: Callable[[str], str] = str
    #: Whether activations of real checkpoints leave the range of fp16.
    overflows_fp16: bool = False
    #: The GGUF architectures that it reads, with `from_gguf`.
    gguf_archs: Collection[str] = frozenset()
    #: GGUF metadata as an HF config.
    from_gguf: Callable[[ConfigKeys], Values] | None = None
    #: `model_type` -> GGUF architecture, where the two differ.
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    #: The GGUF architecture of a model, where its `model_type` does not decide it.
    gguf_arch: Callable[[ModelSpec], str] | None = None
    #: GGUF keys of a model beyond, or in place of, those of `triptych.mapping.gguf_metadata`.
    to_gguf: Callable[[ModelSpec], Values] | None = None

    @classmethod
    def of(cls, module: ModuleType) -> Family | None:
        """The family that a module of this package defines; None for a module that several families share.

        Raises TypeError, naming the file, for a family file that lacks a required name.
        """
        if "hf_types" not in vars(module):
            return None
        if missing := {"hf_types", "config", "weights"} - vars(module).keys():
            raise TypeError(f"{module.__name__} defines hf_types and lacks {', '.join(sorted(missing))}")
        names = {one.name for one in fields(cls)} - {"name"}
        defined = {name: value for name, value in vars(module).items() if name in names}
        return cls(name=module.__name__.rpartition(".")[2], **defined)


#: Types of models that need a part which is not here, with its name.  Of LLaVA the text model is read (`wrapped`).
MISSING = {
    "blip-2": "a Q-Former, whose learned queries read an image, and an input slot that puts their vectors between the "
    "tokens of a decoder",
}


@cache
def all_families() -> tuple[Family, ...]:
    """The family of every family file in this folder."""
    files = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = (import_module(f"triptych.families.{file}") for file in files)
    return tuple(family for family in map(Family.of, modules) if family is not None)


def find(model_type: str, where: str = "config.json") -> Family:
    """The family that reads HF configs of this `model_type`.  Raises ConfigError with the nearest name."""
    return _find(model_type, lambda family: family.hf_types, f"{where}: model_type")


def find_gguf(arch: str, where: str = "GGUF") -> Family:
    """The family that reads GGUF files of this architecture.  Raises ConfigError with the nearest name."""
    return _find(arch, lambda family: family.gguf_archs, f"{where}: architecture")


def gguf_name(model: ModelSpec) -> str:
    """GGUF's name of the architecture of `model`.  Raises CheckpointError where it has no name for it."""
    family = find(model.family)
    if family.gguf_arch is not None:
        return family.gguf_arch(model)
    if model.family not in family.gguf_names and model.family not in family.gguf_archs:
        raise CheckpointError(f"GGUF has no names for models of family {model.family!r}; convert it to hf")
    return family.gguf_names.get(model.family, model.family)


def _find(name: str, names: Callable[[Family], Collection[str]], what: str) -> Family:
    by_name = {other: family for family in all_families() for other in names(family)}
    if name in by_name:
        return by_name[name]
    if name in MISSING:
        raise ConfigError(f"{what} {shown(name)} needs a part that is missing here: {MISSING[name]}")
    raise ConfigError(f"{what} {shown(name)} is not one of {', '.join(sorted(by_name))}{nearest(name, by_name)}")
