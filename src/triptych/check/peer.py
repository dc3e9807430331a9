"""The same checkpoint in transformers: how far its outputs are from ours, site by site."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.nn import InputRow
from triptych.probe import Plan, Session
from .comparison import Case, SiteDifference, max_abs_diff


@runtime_checkable
class Reference(Protocol):
    """A checkpoint in another library, in fp32.  An entry point of the group `triptych.references` makes one of a
    `Model`; it raises InputError where that library cannot load the file."""

    @property
    def name(self) -> str:
        """What computes."""
        ...

    def run(self, row: InputRow, target: list[int] | None) -> tuple[Mapping[str, Tensor], Tensor]:
        """The states of one row by our names of their sites, `[T, D]`, in the order of the model, and its output in the
        form of ours, `[1, T, ...]`."""
        ...


def can_compare(case: Case, *, required: bool) -> bool:
    """Whether to compare with transformers.  Raises InputError where it is required and cannot be done."""
    path, hf = case.model.path, case.model.hf or {}
    needs = ["transformers"] + ["gguf"] * (path is not None and path.suffix == ".gguf")
    missing = [name for name in needs if find_spec(name) is None]
    if path is None or hf.get("model_type") in (None, "triptych"):
        why = "transformers has no such model"
    elif missing:
        why = f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})"
    else:
        return True
    if required:
        raise InputError(f"cannot check against transformers: {why}")
    case.skipped.append(f"against transformers: {why}")
    return False


def against_transformers(case: Case) -> None:
    """Log-probabilities, and how the two drift apart from site to site."""
    [entry] = entry_points(group="triptych.references", name="transformers")
    reference: Reference = entry.load()(case.model)
    spec = case.model.spec
    prefixes = [f"{name}." if spec.layout == "encoder-decoder" else "" for name in spec.stacks]
    read = [f"{p}{site}" for p in prefixes for site in ("embed", "blocks.*.resid_post", "final")]
    layers: dict[str, SiteDifference] = {}
    difference = 0.0
    for i, row in enumerate(case.rows):
        session = Session(Plan.of(spec, read))
        ours = case.run(slice(i, i + 1), session.taps)
        trace = session.close()
        states, out = reference.run(row, None if case.targets is None else case.targets[i])
        difference = max(difference, max_abs_diff(ours, list(out)))
        for site, state in states.items():
            layer = _layer(site, trace[site][0], state, case.threshold)
            layers[site] = _further(layers.get(site, layer), layer)
    case.layers += layers.values()
    case.record("transformers", difference, case.threshold, f"{reference.name}, fp32")


def _layer(site: str, ours: Tensor, theirs: Tensor, threshold: float) -> SiteDifference:
    """One row at one site, [T, D] each."""
    by_position = (ours.double() - theirs.double()).abs().amax(-1) / float(theirs.abs().max())
    apart = (~(by_position <= threshold)).nonzero().flatten().tolist()
    return SiteDifference(site, float(by_position.max()), apart[0] if apart else None)


def _further(a: SiteDifference, b: SiteDifference) -> SiteDifference:
    """Of two rows at one site the greater difference and the lower position."""
    begins = [layer.first_position for layer in (a, b) if layer.first_position is not None]
    greatest = float(torch.tensor([a.difference, b.difference], dtype=torch.float64).max())  # NaN where either is
    return SiteDifference(a.site, greatest, min(begins, default=None))
