"""What a family file must and may define."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from types import ModuleType

from triptych.mapping.config_keys import ConfigKeys, Values
from triptych.mapping.weight_table import WeightTable
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
    #: GGUF keys of a model beyond, or in place of, those of `triptych.mapping.write_gguf_metadata`.
    to_gguf: Callable[[ModelSpec], Values] | None = None

    @classmethod
    def of(cls, module: ModuleType) -> Family | None:
        """The family that a module of this package defines; None for a module that several families share.

        Raises TypeError, naming the file, for a family file that lacks a required name.
        """
        if "hf_types" not in vars(module):
            return None
        required = {one.name for one in fields(cls) if one.default is one.default_factory is MISSING} - {"name"}
        if missing := required - vars(module).keys():
            raise TypeError(f"{module.__name__} defines hf_types and lacks {', '.join(sorted(missing))}")
        names = {one.name for one in fields(cls)} - {"name"}
        defined = {name: value for name, value in vars(module).items() if name in names}
        return cls(name=module.__name__.rpartition(".")[2], **defined)
