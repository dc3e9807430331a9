"""The comparisons with the reference library, and of cached with uncached, see every sabotage of `sabotage.py`."""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest

import references
import sabotage_attention  # noqa: F401  each lists its own
import sabotage_cache  # noqa: F401
import sabotage_heads  # noqa: F401
import sabotage_inputs  # noqa: F401
import sabotage_parts  # noqa: F401
import sabotage_relative  # noqa: F401
from parity import WITHIN, cached_gap, largest, ours
from sabotage import CACHED, PARITY, Sabotage
from triptych.attention.mask_lowering import leaves
from triptych.spec.masks import Mask
from triptych.spec.part import Part, part_name

RED = 1e-3  # ten times what passes


@cache
def sound(name: str) -> float:
    return largest(name, ours(name))


@cache
def sound_cached(name: str) -> float:
    return cached_gap(ours(name))


@pytest.mark.parametrize("sabotage", PARITY, ids=lambda s: f"{s.name}-{s.variant}")
def test_parity_goes_red(sabotage: Sabotage) -> None:
    name, model = sabotage.variant, ours(sabotage.variant)
    assert sound(name) <= WITHIN
    with sabotage.applied(model):
        assert largest(name, model) > RED
    assert largest(name, model) == sound(name)  # nothing of it stays


@pytest.mark.parametrize("sabotage", CACHED, ids=lambda s: f"{s.name}-{s.variant}")
def test_cached_against_uncached_goes_red(sabotage: Sabotage) -> None:
    model = ours(sabotage.variant)
    assert sound_cached(sabotage.variant) <= WITHIN
    with sabotage.applied(model):
        assert cached_gap(model) > RED
    assert cached_gap(model) == sound_cached(sabotage.variant)


# ---------------------------------------------------------------- none is forgotten

# What no comparison of outputs can see, or another kind of test does.
ELSEWHERE = {
    **dict.fromkeys(("inputs", "outputs", "width", "rows", "vocab", "length", "heads", "buckets"), "must fit tensors"),
    **dict.fromkeys(("dropout", "init_std"), "training only"),
    **dict.fromkeys(("family", "ids", "context", "naming"), "names, stops and refusals"),
    **dict.fromkeys(("encoder", "decoder", "head"), "the layout: another shape of output"),
}


def slots(part: Part) -> Iterator[str]:
    """The choices a part of a spec makes: filled optional slots, numbers, flags, and the values of enumerations."""
    kind = part_name(part)
    yield kind
    for field in fields(part):
        value, declared = getattr(part, field.name), str(field.type)
        if field.name in ELSEWHERE or value in (None, False, 0, 0.0, {}):
            continue
        if isinstance(value, Part | dict | tuple):
            if "None" in declared or (isinstance(value, dict) and "Kind" not in declared):
                yield f"{kind}.{field.name}"
        elif isinstance(value, Mask):
            yield from (f"{kind}.{field.name}:{type(leaf).__name__}" for leaf in leaves(value))
        elif "Literal" in declared:
            yield f"{kind}.{field.name}:{value}"
        elif field.name == "scaling":
            yield f"{kind}.{field.name}:{part_name(value)}"
        else:
            yield f"{kind}.{field.name}"


def test_every_slot_of_every_family_has_a_sabotage() -> None:
    """A family that fills a slot no family filled before must bring a sabotage of it."""
    filled = {slot for name in references.NAMES for _, part in ours(name).spec.walk() for slot in slots(part)}
    broken = {slot for sabotage in PARITY for slot in sabotage.slots}
    assert broken - filled == {"Rope.width"}  # which is not the head's in models of other families
    assert filled - broken - {slot.partition(".")[0] for slot in broken} == set()


def test_sabotages_have_names_of_their_own() -> None:
    named = [(sabotage.name, sabotage.variant) for sabotage in (*PARITY, *CACHED)]
    assert len(named) == len(set(named))
