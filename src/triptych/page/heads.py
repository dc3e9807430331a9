"""The tested roles of a model's heads: their tables, and their page, which is that of a text with its roles."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.page import TableSection
from triptych.probe import ROLES, HeadTable
from triptych.probe.prompts import ProbedModel

TEXT = "The dog that the boys had seen, and that had run away, sat by the river bank. They called the dog."


def sample_text(model: ProbedModel) -> str:
    """As many words of TEXT, from the first, as the model reads."""
    spec, words = model.spec, TEXT.split()
    longest = spec.context if spec.encoder is None else spec.source_context
    beginnings = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    return next((text for text in beginnings if longest is None or len(model.ids([text])[0]) <= longest), TEXT)


def role_effects(table: HeadTable) -> TableSection:
    """Each role with its heads, and what is lost without the best of them."""
    together = {one.role: one for one in table.together}
    rows = []
    for role, best in table.roles.items():
        one = together.get(role)
        effect = "" if one is None else f"{one.effect:.3f}"
        # One other set of as many heads says nothing about chance.
        random = f"{one.random_mean:.3f}" if one is not None and len(one.random) > 1 else ""
        rows.append([role, ROLES.get(role, "pairs of words"), str(len(best)), effect, random])
    rows += [[role, f"not measured: {reason}", "", "", ""] for role, reason in table.not_measured.items()]
    header = ("role", "reads", "heads", f"without the best, {table.unit}", "without random heads")
    return TableSection("Roles", header, _filled(rows))


def best_heads(table: HeadTable) -> TableSection:
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
