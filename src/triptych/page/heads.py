"""The roles of a model's heads as one page: all heads coloured by role, one of them large, and the tables beside."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionSection, Facts, Section, TableSection, render
from triptych.page.inspect import inspect_text
from triptych.probe import ROLES, HeadTable

TEXT = "The dog that the boys had seen, and that had run away, sat by the river bank. They called the dog."
NOTE = (
    "Each small square is a head; its frame has the colour of the role that names it. Rows are queries, columns are "
    "keys. A role says where a head looks; the tables say what is lost without it."
)


def heads_page(model: Model, table: HeadTable, name: str, text: str | None = None) -> str:
    """One offline page; the patterns are those of `text`, by default of a short one with a repeated word.

    Raises InputError for a model without a tokenizer, or a text whose patterns are too many for a page.
    """
    if model.tokenizer is None:
        raise InputError("a page of heads shows their patterns on a text, and this model has no tokenizer")
    inspection = inspect_text(model, TEXT if text is None else text)
    mains = table.main()
    maps = []
    for one in inspection.maps:
        rows = [mains.get((one.stack, one.layer, head)) for head in one.head_names]
        roles = ["" if row is None else row.role + (f" {row.offset:+d}" if row.offset else "") for row in rows]
        maps.append(type(one)(one.stack, one.layer, one.queries, one.keys, one.pattern, one.heads, roles))
    heads = {(row.stack, row.layer, row.head) for row in table}
    facts = [
        ("Model", name),
        ("Heads", str(len(heads))),
        ("Named", str(sum(row is not None for row in mains.values()))),
    ]
    facts += [("Seed", str(table.seed)), ("Text", inspection.text)]
    sections: list[Section] = [
        AttentionSection("Heads by role", NOTE, maps),
        _roles(table),
        _best(table),
        Facts("What was run", facts),
    ]
    return render("Attention heads", sections, subtitle="What each head does, beside chance and beside its removal")


def _roles(table: HeadTable) -> TableSection:
    """Each role with its heads, and what is lost without the best of them."""
    together = {one.role: one for one in table.together}
    rows = []
    for role, best in table.roles.items():
        one = together.get(role)
        effect, random = ("", "") if one is None else (f"{one.effect:.3f}", f"{one.random_mean:.3f}")
        rows.append([role, ROLES.get(role, "pairs of words"), str(len(best)), effect, random])
    rows += [[role, f"not measured: {reason}", "", "", ""] for role, reason in table.not_measured.items()]
    header = ("role", "reads", "heads", f"without the best, {table.unit}", "without random heads")
    return TableSection("Roles", header, _filled(rows))


def _best(table: HeadTable) -> TableSection:
    """The best heads of each role with their nulls and effects."""
    rows = []
    for role, best in table.roles.items():
        for row in best[:5]:
            name = role + (f" {row.offset:+d}" if row.offset else "")
            numbers = [f"{row.score:.2f}", f"{row.even:.2f}", f"{row.threshold:.2f}"]
            effects = ["" if x is None else f"{x:.3f}" for x in (row.effect, row.random_effect)]
            rows.append([row.name, name, *numbers, *effects])
    header = ("head", "role", "score", "even weights", "threshold", "without it", "without a random head")
    return TableSection("The best heads of each role", header, _filled(rows))


def _filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[cell or "–" for cell in row] for row in rows]
