"""The lectures' experiments: each a table, a plot and a verdict, most of them within 20 seconds on two cores.

`LABS` lists them without importing one; `labs.toml` has the words of each that do not depend on what is measured, which
file it stands in where several labs share one, and what it may be given in place of its own model or text.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from triptych.arguments import checked
from triptych.errors import InputError, nearest, shown
from triptych.migration_hints import answer_for
from .texts import TEXTS

if TYPE_CHECKING:
    from .lab import Lab, LabResult, Setup

LABS: dict[str, str] = {lab: entry["about"] for lab, entry in TEXTS.items()}
INPUTS: dict[str, tuple[str, ...]] = {lab: tuple(entry.get("inputs", ())) for lab, entry in TEXTS.items()}


@checked
def checked_name(name: str) -> str:
    """`name`, where it is in `LABS`.  Raises InputError, with the nearest names, where it is not."""
    if name not in LABS:
        raise InputError(f"no lab {name!r}{nearest(name, LABS)}; `triptych lab` lists them")
    return name


def check_inputs(name: str, **inputs: str | None) -> None:
    """Raise InputError for a `model` or `data` that the lab would not read."""
    for kind, value in inputs.items():
        if value is not None and kind not in INPUTS.get(name, ()):
            users = ", ".join(lab for lab, kinds in INPUTS.items() if kind in kinds)
            raise InputError(f"the lab {name} does not use --{kind}; these do: {users}")


def module_of(name: str) -> str:
    """The module of a lab."""
    return f"{__name__}.{TEXTS.get(name, {}).get('file', name.replace('-', '_'))}"


def lab_class(name: str) -> type[Lab]:
    """The class of a lab.  Raises InputError, with the nearest names, for one that is not in `LABS`."""
    import_module(module_of(checked_name(name)))
    from .lab import LAB_CLASSES

    return LAB_CLASSES[name]


@checked
def run(name: str, setup: Setup | None = None) -> LabResult:
    """Run one lab.  Raises InputError, with the nearest names, for one that is not in `LABS`."""
    kind = lab_class(name)
    from .lab import Setup

    setup = Setup() if setup is None else setup
    if not isinstance(setup, Setup):
        raise InputError(f"setup={shown(setup)} must be a Setup, such as Setup(seed=1)")
    check_inputs(name, model=setup.model, data=setup.data)
    return kind.sized(setup).run(setup)


answer_for(__name__)
