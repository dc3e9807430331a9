"""Edits of the model inside a request: values at the library's own sites, ablated heads and steering.

An edited row makes the steps that it runs in run as modules, which is slower for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.errors import TriptychError
from triptych.generate import Request
from triptych.model import Model
from triptych.probe import Edit, Plan, Session, add, put, zero
from .fields import ApiError, Fields
from .worker import ModelWorker

EDITS = ("edit", "ablate_heads", "steer")


async def edited(worker: ModelWorker, fields: Fields, requests: Sequence[Request]) -> Sequence[Request]:
    """The requests with the edits that the fields ask for.  Raises ApiError for what does not fit the model."""
    if not any(name in fields.values for name in EDITS):
        return requests

    def with_edits() -> list[Request]:
        try:
            plan = Plan.of(worker.model.spec, (), edits_of(worker.model, fields))
        except TriptychError as error:
            raise ApiError(400, str(error)) from None
        return [replace(request, probe=Session(plan, allow_null=True)) for request in requests]

    return await worker.call(with_edits)


def edits_of(model: Model, fields: Fields) -> list[Edit]:
    """The edits of `edit`, `ablate_heads` ("3.0" is head 0 of block 3) and `steer`.

    Raises ApiError for what is none, TriptychError for what does not fit the model.
    """
    edits = [edit_of(fields, one, f"edit[{i}]") for i, one in enumerate(fields.get("edit", []))]
    for i, name in enumerate(fields.get("ablate_heads", [])):
        block, _, head = name.partition(".") if isinstance(name, str) else ("", "", "")
        if not all(part.isdecimal() and len(part) < 10 for part in (block, head)):
            where = f"ablate_heads[{i}]"
            raise ApiError(400, f'{where} must be BLOCK.HEAD, such as "3.0"; edit reaches other sites', where)
        edits.append(zero(f"blocks.{int(block)}.attn.z", heads=int(head)))
    if "steer" in fields.values:
        steer = fields.inner(fields.values["steer"], "steer", at="steer")
        vector = None if (numbers := steer.get("vector")) is None else tensor_of(numbers, "steer.vector")
        how = {"site": steer.values["site"], "vector": vector, "scale": float(steer.get("scale", 1.0))}
        edits.append(model.steer(steer.get("toward"), steer.get("away"), **how))
    return edits


def edit_of(fields: Fields, value: object, at: str) -> Edit:
    """One edit: `zero`, or numbers to `add` or to `put`, at the chosen heads and positions of a site."""
    one = fields.inner(value, "edit", at=at)
    where = {"heads": one.get("heads"), "at": one.get("at")}
    kinds = [name for name in ("zero", "add", "put") if one.get(name)]
    if len(kinds) != 1:
        raise ApiError(400, f"{at} must have zero: true, or numbers in add or put, and one of the three", at)
    if kinds == ["zero"]:
        return zero(one.values["site"], **where)
    change = add if kinds == ["add"] else put
    return change(one.values["site"], tensor_of(one.values[kinds[0]], f"{at}.{kinds[0]}"), **where)


def tensor_of(value: object, at: str) -> Tensor:
    try:
        tensor = torch.tensor(value, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise ApiError(400, f"{at} must be numbers, or lists of as many numbers each", at) from None
    if not bool(torch.isfinite(tensor).all()):
        raise ApiError(400, f"{at} must be finite", at)
    return tensor
