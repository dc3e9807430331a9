"""The probe's sites are alive in every family: what is cut out there is missed."""

from __future__ import annotations

import pytest
import torch

import references
from parity import TARGETS, ours, rows_of
from triptych import nn
from triptych.nn import NO_TAPS, Taps
from triptych.probe import Edit, Plan, Session, sites, zero

CPU = torch.device("cpu")
FAMILIES = {kind: name for name, (kind, *_) in reversed(references.VARIANTS.items())}  # the first variant of each


def outputs(name: str, taps: Taps = NO_TAPS) -> torch.Tensor:
    """Logits; what a base model gives without a head."""
    model = ours(name)
    module, both = model.module, model.spec.layout == "encoder-decoder"
    source = module.flat(rows_of(model)[1:2])
    inputs, rows = nn.flat(TARGETS[1:2], CPU) if both else source
    batch = nn.Batch(inputs=inputs, rows=rows, source=source if both else None, taps=taps)
    return module(batch) if module.head is None else module.logits(batch)


@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_site_of_a_middle_block_is_alive(name: str) -> None:
    spec = ours(name).spec
    with torch.inference_mode():
        plain = outputs(name)
        for site in sites(spec):
            if "blocks." in site and "blocks.1." not in site:
                continue
            change = Edit(site, lambda x, where: x * 0.5) if site.endswith("scores") else zero(site)
            session = Session(Plan.of(spec, [], [change]))
            edited = outputs(name, session.taps)
            session.close()
            assert not torch.equal(edited, plain), site
