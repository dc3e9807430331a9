"""The base class of every section of a recipe: validated, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """The text under a key is its description in recipes that `triptych train --new` writes and in the documentation
    (`triptych.train.new_recipe`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
