"""The probe's sites are alive in every family: what is cut out there is missed."""

import pytest
import torch

import references
import tiny
from parity import TARGETS, ours, rows_of
from triptych import nn
from triptych.nn import NO_TAPS, Taps
from triptych.probe import Edit, Plan, Read, Session, Statistics, sites, zero

EVERYTHING = ["*", Read("*.resid_post", reduce="norm"), Read("*.z", dtype="bf16", at=[0]), Read("*.q", reduce="mean")]
PATTERNS = [Read("*.pattern", reduce=Statistics()), Read("*.pattern", heads=[0], at=[1], reduce="mean_heads")]
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
def test_every_site_of_every_block_is_alive(name: str) -> None:
    spec = ours(name).spec
    with torch.inference_mode():
        plain = outputs(name)
        for site in sites(spec):
            change = Edit(site, lambda x, where: x * 0.5) if site.endswith("scores") else zero(site)
            session = Session(Plan.of(spec, [], [change]))
            edited = outputs(name, session.taps)
            session.close()
            assert not torch.equal(edited, plain), site


def reading(name: str) -> Session:
    """A session that reads every site in every way."""
    spec = ours(name).spec
    patterns = PATTERNS if any(site.endswith("pattern") for site in sites(spec)) else []
    return Session(Plan.of(spec, [*EVERYTHING, *patterns]))


@pytest.mark.parametrize("name", FAMILIES.values())
def test_reading_everything_changes_no_bit(name: str) -> None:
    with torch.inference_mode():
        session = reading(name)
        read = outputs(name, session.taps)
        session.trace.logits = [read]
        assert torch.equal(read, outputs(name))
    assert set(sites(ours(name).spec)) <= set(session.trace)


@pytest.mark.heavy
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", FAMILIES.values())
def test_reading_everything_changes_no_bit_of_a_cached_generation(name: str, chunk: int | None) -> None:
    """The same steps by the modules, whose caches are rings where the family has windows."""
    model = ours(name)
    if model.module.decoder is None:
        pytest.skip("an encoder alone has no cache")
    both = model.spec.layout == "encoder-decoder"
    prompts, sources = (TARGETS, rows_of(model)) if both else (rows_of(model), None)
    steps = []
    for session in (None, reading(name)):
        engine = tiny.engine(model.module, prompts, sources, chunk=chunk, probe=session, executor="modules")
        given = []
        for _ in range(4):
            given.append(engine.logits())
            for row, token in zip(engine.rows, given[-1].argmax(-1).tolist(), strict=True):
                row.ids.append(token)
        steps.append(torch.stack(given))
    assert torch.equal(*steps)
