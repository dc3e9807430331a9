"""What scoring the heads of a model gives: every head in every role, and the roles that are above their nulls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from triptych.errors import InputError, nearest
from triptych.probe.display import Displayed, plain
from triptych.probe.role_labels import FAR, FARTHEST, NEAR
from triptych.probe.role_scores import FAMILY, Stack

ROLES = {
    "induction": "the token after the first occurrence of the present one (A B ... A reads B)",
    "duplicate": "the first occurrence of the present token",
    "alignment": "the source from left to right, as the target is written",
    "subject-verb": "from a verb its subject, in ten sentences",
    "coreference": "from a pronoun the person it stands for, in ten sentences",
    "delimiter": "punctuation",
    "boundary": "the marks that end a sentence",
    "rare": "the rarest tokens of the text",
    "previous": "the token before",
    "next": "the token after",
    "offset": f"the token 2 to {FARTHEST} places away, always as many",
    "first": "the first token",
    "local": f"tokens at most {NEAR} places away",
    "long-range": f"tokens at least {FAR} places away, the first one excepted",
    "diffuse": "many keys alike",
}
GENERAL = ("local", "long-range", "diffuse")  # what a head does is named by these only where nothing else is above


@dataclass(frozen=True)
class HeadRole:
    """One head in one role.

    score      0 to 1: the mean weight of the role's queries on its keys; of `diffuse`, the effective number of keys as
               a share of those visible.
    even       what even weights score; `null` the mean of the null distribution; `threshold` what counts.
    z, p       the distance from `null` in its standard deviations, and the probability that any head in any role comes
               as far by chance; None where the null is not drawn.
    offset     places from the query to the key, for `offset`.
    effect     what is lost without the head (`HeadTable.unit`), and without random heads of its layer, the mean of
               several; None where it was not measured.
    """

    stack: Stack
    layer: int
    head: int
    role: str
    score: float
    even: float
    null: float
    threshold: float
    z: float | None
    p: float | None
    offset: int | None = None
    effect: float | None = None
    random_effect: float | None = None

    @property
    def above(self) -> bool:
        """Whether the score is above its threshold: the head has the role."""
        return self.score >= self.threshold

    @property
    def name(self) -> str:
        """`decoder 3.5`: stack, layer and head."""
        return f"{self.stack} {self.layer}.{self.head}"


@dataclass(frozen=True)
class RoleEffect:
    """What is lost without the best `heads` of a role together (`effect`), and without as many `random` heads, of the
    same layers where there are enough, one value for each of several different sets of them; in `HeadTable.unit`.  A
    small model may have one other set or none, with which nothing can be compared."""

    role: str
    heads: tuple[tuple[Stack, int, int], ...]
    effect: float
    random: tuple[float, ...]

    @property
    def random_mean(self) -> float:
        return sum(self.random) / len(self.random) if self.random else math.nan

    @property
    def beyond_random(self) -> bool:
        """Whether more is lost without these heads than without every set of random ones, of which there are two."""
        return len(self.random) > 1 and self.effect > max(self.random)


@dataclass(frozen=True, eq=False)
class HeadTable(Displayed):
    """Every head of a model in every role.

    rows           all heads in all roles that were measured, in the order of the model.
    together       for each role with heads above their threshold, what is lost without its best.
    not_measured   roles that the texts or the model cannot show, with the reason.
    unit           of the effects: nats, or cosine distance for a model that predicts no tokens.
    """

    rows: tuple[HeadRole, ...]
    together: tuple[RoleEffect, ...]
    not_measured: dict[str, str]
    unit: str
    seed: int
    links: dict[str, int] = field(default_factory=dict)  #: pairs of words a role of links was measured on

    @property
    def roles(self) -> dict[str, list[HeadRole]]:
        """The heads above their threshold, by role, the highest score first."""
        found = {role: self.find(role) for role in dict.fromkeys(row.role for row in self.rows)}
        return {role: heads for role, heads in found.items() if heads}

    def find(self, role: str) -> list[HeadRole]:
        """The heads that have a role, the highest score first.  Raises InputError for a role that was not measured."""
        measured = dict.fromkeys(row.role for row in self.rows)
        if role not in measured:
            reason = self.not_measured.get(role)
            if reason:
                raise InputError(f"the role {role!r} was not measured: {reason}")
            raise InputError(f"there is no role {role!r}{nearest(role, measured)}")
        return sorted((row for row in self.rows if row.role == role and row.above), key=lambda row: -row.score)

    def of(self, stack: Stack, layer: int, head: int) -> list[HeadRole]:
        """One head in all roles."""
        return [row for row in self.rows if (row.stack, row.layer, row.head) == (stack, layer, head)]

    def main(self) -> dict[tuple[Stack, int, int], HeadRole | None]:
        """For each head the role that names it: of those above their threshold the one with the highest score, local,
        long-range and diffuse only where there is no other; None where there is none."""
        mains: dict[tuple[Stack, int, int], HeadRole | None] = {}
        for row in self.rows:
            at = (row.stack, row.layer, row.head)
            best = mains.setdefault(at, None)
            if row.above and (best is None or _names(row) > _names(best)):
                mains[at] = row
        return mains

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [asdict(row) | {"above": row.above} for row in self.rows]
        together = [asdict(one) | {"beyond_random": one.beyond_random} for one in self.together]
        return {
            "seed": self.seed, "unit": self.unit, "family_wise": FAMILY, "not_measured": self.not_measured,
            "together": plain(together), "heads": rows,
        }  # fmt: skip

    def __iter__(self) -> Iterator[HeadRole]:
        return iter(self.rows)

    def __repr__(self) -> str:
        heads = {(row.stack, row.layer, row.head) for row in self.rows}
        lines = [f"HeadTable of {len(heads)} heads; effects in {self.unit}, of random heads in brackets"]
        for role, best in self.roles.items():
            lines.append(f"  {role}: {len(best)} head{'s' * (len(best) != 1)}")
            lines += [f"    {_line(row)}" for row in best[:5]]
        if len(lines) == 1:
            lines.append("  no head is above its threshold in any role")
        return "\n".join(lines)


def _names(row: HeadRole) -> tuple[bool, float, int]:
    """The larger, the better the role names the head: equal scores go to the role that says more."""
    known = list(ROLES).index(row.role) if row.role in ROLES else -1
    return row.role not in GENERAL, round(row.score, 2), -known


def _line(row: HeadRole) -> str:
    where = f" at {row.offset:+d}" if row.offset else ""
    text = f"{row.name}{where}: {row.score:.2f}, threshold {row.threshold:.2f}"
    if row.effect is None:
        return text
    beside = "" if row.random_effect is None else f" ({row.random_effect:.3g})"
    return f"{text}, without it {row.effect:.3g}{beside}"
