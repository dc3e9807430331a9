"""The lectures' experiments: each a table, a plot and a verdict, in under a minute on two cores.

`LABS` lists them without importing one; a lab's file has its name, with `_` for `-`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from triptych.errors import InputError, nearest

if TYPE_CHECKING:
    from triptych.labs.lab import LabResult, Setup

LABS = {
    "scaling": "why scores are divided by √d: variance, entropy and gradient over d",
    "permutation": "attention without positions does not know the order of its input",
    "mask-leak": "a decoder trained without its mask cheats, and cannot write",
    "kv-cache": "the cache changes no token and saves the work of the past",
    "quadratic": "what T tokens cost: full, fused, window, block-sparse, linear, grouped",
    "additive-vs-dot": "Bahdanau's score beside the dot product: speed, parameters, widths",
    "soft-vs-hard": "sharpened without end, attention is a dictionary lookup",
    "heads-vs-width": "H heads of width D/H cost what one head of width D costs",
    "bottleneck": "a recurrent state forgets the first token; attention looks it up",
    "depth": "gradients through 2 to 64 layers: pre-norm, post-norm, no residual",
    "induction": "two layers learn A B ... A -> B; the head that does it, found and removed",
    "alignment": "cross-attention of a spelling model beside the true alignment",
    "bank": "river bank and money bank: which heads read the context, and the vectors parting",
    "not-explanation": "patterns that look different and say the same; ablation beside them",
    "parameters": "a real config's shapes, predicted from the arithmetic and loaded",
    "gradients": "a backward written by hand beside autograd's",
}


def known(name: str) -> str:
    """`name`, where it is in `LABS`.  Raises InputError, with the nearest names, where it is not."""
    if name not in LABS:
        raise InputError(f"no lab {name!r}{nearest(name, LABS)}; `triptych lab` lists them")
    return name


def run(name: str, setup: Setup | None = None) -> LabResult:
    """Run one lab.  Raises InputError, with the nearest names, for one that is not in `LABS`."""
    module = f"triptych.labs.{known(name).replace('-', '_')}"
    from triptych.labs.lab import Setup

    found: LabResult = import_module(module).run(setup or Setup())
    return found


__all__ = ["LABS", "known", "run"]
