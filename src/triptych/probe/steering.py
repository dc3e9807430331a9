"""Steering: a vector added to the residual stream at every position that is computed (Turner et al. 2023).

The result is an edit: `model.generate(prompts, edit=model.steer(...))` adds it in the prompt and in every token that is
generated, cached or not.  Blocks that are edited run as modules, not in the native step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.arguments import readable
from triptych.checkpoints.safetensors import open_file
from triptych.errors import InputError, ProbeError, shown
from triptych.probe.prompts import ProbedModel, PromptInput, prompt_of, same_prompts, values_at
from triptych.probe.reads_and_edits import Edit, Plan, add
from triptych.probe.sites import Selection, match, sites

Over = Literal["last", "mean"]


def steer(
    model: ProbedModel,
    positive: PromptInput | None = None,
    negative: PromptInput | None = None,
    *,
    site: str,
    vector: Tensor | None = None,
    scale: float = 1.0,
    over: Over = "last",
    at: Selection = None,
    target: PromptInput = None,
) -> Edit:
    """Activation steering (Turner et al. 2023): the edit that adds `scale` times a vector at `site`, for example
    "blocks.10.resid_post".

    The vector is `vector` [D], or the difference of the values of two prompts there, `positive` minus `negative`: at
    their last token, or the mean over their tokens with `over="mean"`.  `at` are the absolute positions where it is
    added, by default all: those of the prompt and every one that is generated.

    Raises InputError for prompts that give no difference, or a vector beside prompts; ProbeError for a site that is not
    there, is several, or has heads or keys, and for a vector of another width.
    """
    if not isinstance(site, str) or not (vector is None or isinstance(vector, Tensor)):
        raise InputError("site is the name of one site, and vector a tensor [D]")
    known = match(site, model.spec, sites(model.spec))
    if len(known) > 1:
        raise ProbeError(f"{site} names {len(known)} sites; a steering vector is added at one")
    (place,) = known
    if place.heads is not None or place.name == "logits":
        raise ProbeError(f"{place.name} does not hold one vector of the residual stream a token; choose resid_post")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale) or scale == 0:
        raise InputError(f"scale={shown(scale)} must be a finite number other than 0")
    if over not in get_args(Over):
        raise InputError(f"over={shown(over)} must be 'last' or 'mean'")
    if vector is not None:
        readable(vector, "vector")
    prompts = [text for text in (positive, negative) if text is not None]
    if (vector is None) != (len(prompts) == 2) or (vector is not None and prompts):
        raise InputError("give two prompts, positive and negative, or a vector")
    if vector is None:
        pair = [prompt_of(model, text, target) for text in prompts]
        if same_prompts(*pair):
            raise InputError("the two prompts are the same; there is no direction to steer in")
        rows = values_at(model, pair, [place.name], 1 << 30)[place.name]
        first, second = (row[-1] if over == "last" else row.float().mean(0) for row in rows)
        vector = first - second
    usable = vector.shape == (place.width,) and vector.is_floating_point() and bool(torch.isfinite(vector).all())
    if not usable:
        raise ProbeError(f"the vector is {list(vector.shape)}; at {place.name} it must be {place.width} finite numbers")
    edit = add(place.name, scale * vector, at=at)
    Plan.of(model.spec, edit=edit)  # refuses positions that are none
    return edit


def read_vector(path: str | Path) -> Tensor:
    """The vector of a safetensors file that holds one tensor [D].

    Raises CheckpointError for a file that cannot be read, InputError for one that holds anything else.
    """
    source = open_file(Path(path))
    if len(source.names) != 1:
        raise InputError(f"{path} holds {len(source.names)} tensors; a steering vector is the only one of its file")
    vector = source.read(source.names[0])
    if vector.dim() != 1:
        raise InputError(f"{path} holds a tensor {list(vector.shape)}; a steering vector has one dimension")
    return vector
