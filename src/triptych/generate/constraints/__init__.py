"""Constraints: what a row may write, kept token by token."""

from .constraint import Constraint, constraint_of
from .row_constraint import RowConstraint, masks_of

__all__ = ["Constraint", "RowConstraint", "constraint_of", "masks_of"]
