"""The linear maps of a model that an adapter changes, by the library's names or by those of the checkpoint.

PEFT names a map as transformers does (`q_proj`, `c_attn`), which is the name of its stored matrix.  Several of ours may
be one matrix there (GPT-2's `c_attn`): one adapter of such a matrix has one `down` and an `up` for each of ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from triptych import families
from triptych.errors import CheckpointError, ConfigError, InputError, nearest, shown
from triptych.mapping.tensor_plan import TensorLoad
from triptych.spec import LinearSpec, ModelSpec
from triptych.spec.part import part_name

ALL_LINEAR = "all-linear"
_WEIGHT = ".weight"


def stored_modules(spec: ModelSpec, *, mixtures: bool = False) -> dict[str, TensorLoad]:
    """The stored matrices of linear maps, by the name that the module has in transformers; with `mixtures` also those
    inside mixtures of experts, which take no adapter.

    A model of our own has our own names there too.
    """
    maps = (name for name, part in spec.walk() if isinstance(part, LinearSpec))
    linear = {f"{name}{_WEIGHT}" for name in maps if mixtures or not _of_mixture(name)}
    named = module_names(spec)
    return {
        named(load.source.removesuffix(_WEIGHT)): load
        for load in _loads(spec)
        if load.source.endswith(_WEIGHT) and linear.issuperset(load.ours)
    }


def module_names(spec: ModelSpec) -> Callable[[str], str]:
    """Gives the name of a module in transformers from the one that its tensors are stored under, or were once."""
    try:
        return families.find(spec.family).module_name
    except ConfigError:  # parts of no family
        return str


def is_never_read(spec: ModelSpec, module: str) -> bool:
    """Whether transformers has the module and no output depends on it: the pooler of a ViT that a decoder reads."""
    try:
        rows = families.find(spec.family).weights
    except ConfigError:  # parts of no family
        return False
    names = [row.hf.replace("{i}", "*") for row in rows if row.hf is not None and not row.ours]
    return any(fnmatchcase(f"{module}{_WEIGHT}", name) for name in names)


def slot_groups(spec: ModelSpec, targets: str | Sequence[str]) -> list[tuple[str, ...]]:
    """The slots that `targets` names, in the order of the model, as groups that share one `down`.

    A target is the end of a dotted name: `q`, `attn.q`, `decoder.blocks.3.attn.q`, or in transformers `q_proj`,
    `mlp.c_proj`; or `all-linear`, every linear map of the blocks.  Slots of one stored matrix share their `down` where
    they were named by it, or by `all-linear`.  Raises InputError, with the names that there are, for a target that
    names nothing, or something that would not be trained.
    """
    names = _checked_names(targets)
    modules = stored_modules(spec, mixtures=True)
    if ALL_LINEAR in names:
        if len(names) > 1:
            raise InputError(f"targets: {ALL_LINEAR!r} names every linear map; give it alone")
        inside = {slot for slot in _slots(spec) if ".blocks." in slot and not _of_mixture(slot)}
        chosen = [group for load in modules.values() if (group := tuple(s for s in slots_of(load) if s in inside))]
        return _ordered(spec, [*chosen, *([(slot,) for slot in inside])])
    return _ordered(spec, [group for name in names for group in _named(spec, modules, name)])


def check_whole_matrices(spec: ModelSpec, slots: Sequence[str]) -> None:
    """Raises InputError where some of the `slots` are one stored matrix with others that are not among them, whose rows
    would have no norms in the file of a DoRA."""
    for module, load in stored_modules(spec).items():
        missing = [slot for slot in slots_of(load) if slot not in slots]
        if 0 < len(missing) < len(slots_of(load)):
            raise InputError(
                f"DoRA needs all of {module}, of which {missing[0]} is not among the targets; name {module}"
            )


def _checked_names(targets: object) -> list[str]:
    names = [targets] if isinstance(targets, str) else targets
    if not isinstance(names, list | tuple) or not names or not all(isinstance(one, str) and one for one in names):
        problem = f"targets={shown(targets)} must be 'all-linear' or a list of names"
        raise InputError(f"{problem} of linear maps, for example ['q', 'v']")
    return list(names)


def _named(spec: ModelSpec, modules: dict[str, TensorLoad], name: str) -> list[tuple[str, ...]]:
    own = "out" if name == "o" else name
    groups: list[tuple[str, ...]] = [(slot,) for slot in _slots(spec) if _ends(slot, own)]
    groups = groups or [
        slots_of(load)
        for module, load in modules.items()
        if _ends(module, name) or _ends(load.source.removesuffix(_WEIGHT), name)
    ]
    if not groups:
        raise InputError(f"target {name!r} {_why_not(spec, modules, name)}")
    for slot in (slot for group in groups for slot in group):
        if _of_mixture(slot):
            problem = f"target {name!r}: {slot} is inside a mixture of experts, whose maps take no adapter"
            raise InputError(f"{problem}; name others, for example ['q', 'v']")
    return groups


def _why_not(spec: ModelSpec, modules: dict[str, TensorLoad], name: str) -> str:
    """The reason why a target cannot be trained, to be read after it."""
    for alias, source in spec.ties.items():
        theirs = [load.source for load in _loads(replace(spec, ties={})) if load.ours == (alias,)]
        if any(_ends(one.removesuffix(_WEIGHT), name) for one in (alias, *theirs)):
            slot, table = alias.removesuffix(_WEIGHT), source.removesuffix(_WEIGHT)
            return f"is {slot}, which shares its matrix with {table}; a shared matrix takes no adapter"
    stored = {load.source.rpartition(".")[0]: load.ours[0].rpartition(".")[0] for load in _loads(spec)}
    for slot, part in spec.walk():
        theirs = [module for module, ours in stored.items() if ours == slot and not isinstance(part, LinearSpec)]
        if slot and (_ends(slot, name) or any(_ends(module, name) for module in theirs)):
            return f"is {slot}, a {part_name(part)} and no linear map; an adapter changes linear maps"
    ours = list(dict.fromkeys(slot.rpartition(".")[2] for slot in _slots(spec) if not _of_mixture(slot)))
    theirs = [one for one in dict.fromkeys(module.rpartition(".")[2] for module in modules) if one not in ours]
    known = ", ".join(ours) + (f", or as transformers has them {', '.join(theirs)}" if theirs else "")
    return f"names no linear map of this {spec.family} model{nearest(name, [*ours, *theirs])}; there are {known}"


def _slots(spec: ModelSpec) -> Iterator[str]:
    """The linear maps that have a matrix of their own."""
    shared = {*spec.ties, *spec.ties.values()}
    return (name for name, part in spec.walk() if isinstance(part, LinearSpec) and f"{name}{_WEIGHT}" not in shared)


def slots_of(load: TensorLoad) -> tuple[str, ...]:
    """The slots of the matrices that are one stored tensor."""
    return tuple(name.removesuffix(_WEIGHT) for name in load.ours)


def _of_mixture(slot: str) -> bool:
    return ".experts." in slot or slot.endswith(".router")


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ordered(spec: ModelSpec, groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The groups in the order of the model, each slot in the first group that has it."""
    place = {slot: i for i, slot in enumerate(_slots(spec))}
    taken: set[str] = set()
    disjoint: list[tuple[str, ...]] = []
    for group in groups:
        left = tuple(slot for slot in group if slot not in taken)
        taken.update(left)
        disjoint += [left] if left else []
    return sorted(disjoint, key=lambda group: place[group[0]])


def _loads(spec: ModelSpec) -> Sequence[TensorLoad]:
    try:
        return families.save_plan(spec)
    except (ConfigError, CheckpointError):  # parts of no family, or a head that the table has no name for
        return [TensorLoad((name,), name, (), (shape,)) for name, shape in spec.shapes().items()]
