"""Constraints: what a row may write, kept token by token."""

from .constraint import Constraint, constraint_of
from .row_constraint import RowConstraint, constrained

__all__ = ["Constraint", "RowConstraint", "constrained", "constraint_of"]
