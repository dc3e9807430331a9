"""Which cases of the tests are in the short run (`make test`) and which in the whole run only (`make test-all`).

A test that is long as a whole carries the marker `heavy`.  A parametrized test with many cases is listed in
`short_run.toml` with the cases that the short run keeps; the others get the marker when tests are collected:

- a number: that many cases, evenly spaced; 0 for none, and for a test without cases that is long;
- "family": the first variant of each model family, by the parameter `name`, a key of `references.VARIANTS`;
- "slot": the sabotages that reach a slot which none before them reached, whatever choice fills it.

The marker `long` takes a test out of `make test-rest` too.  It is on labs at full size, and on the heavy tests in which
a lab that was broken on purpose has to fail: what they guard is the lab's own criteria, and `make test-labs` runs them.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

Rule = int | str
TABLE: dict[str, Rule] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["cases"]


def name_of(item: pytest.Item) -> str:
    """`test_file::test_function`, without the case."""
    return f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"


def left_out(items: Sequence[pytest.Item], table: dict[str, Rule] = TABLE) -> list[pytest.Item]:
    """The collected cases that the short run leaves out.

    The rules act on the cases that were collected, so that a single case named on the command line runs.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if name_of(item) in table:
            groups.setdefault(name_of(item), []).append(item)
    found = []
    for name, group in groups.items():
        kept = places(group, table[name])
        found += [item for i, item in enumerate(group) if i not in kept]
    return found


def is_broken_lab(item: pytest.Item) -> bool:
    """Whether a test is a heavy one in which a lab has to fail."""
    in_labs = item.path.stem.startswith("test_lab_") or item.path.stem.startswith("test_labs_")
    return in_labs and "fail" in name_of(item).partition("::")[2] and item.get_closest_marker("heavy") is not None


def places(items: Sequence[pytest.Item], rule: Rule) -> set[int]:
    """The places of the cases that a rule keeps."""
    if isinstance(rule, int):
        return evenly(len(items), rule)
    return {"family": first_of_each_family, "slot": first_of_each_slot}[rule](items)


def evenly(size: int, count: int) -> set[int]:
    """`count` of `size` places, the first and the last among them where there are two."""
    count = min(size, count)
    return {round(i * (size - 1) / max(1, count - 1)) for i in range(count)}


def first_of_each_family(items: Sequence[pytest.Item]) -> set[int]:
    """The places of the first case of each configuration class."""
    import references

    first: dict[str, int] = {}
    for i, item in enumerate(items):
        variant = item.callspec.params["name"]  # type: ignore[attr-defined]
        base, _ = references.CHANGED.get(variant, (variant, None))
        first.setdefault(references.VARIANTS[base][0], i)
    return set(first.values())


def first_of_each_slot(items: Sequence[pytest.Item]) -> set[int]:
    """The places of the sabotages that reach a slot first; `MLP.act:relu` and `MLP.act:silu` are one slot."""
    reached: set[str] = set()
    first = set()
    for i, item in enumerate(items):
        slots = {slot.partition(":")[0] for slot in item.callspec.params["sabotage"].slots}  # type: ignore[attr-defined]
        if slots - reached:
            first.add(i)
        reached |= slots
    return first
