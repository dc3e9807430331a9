"""Activation patching, its estimate by gradients (attribution patching), and steering.

In activation patching (Vig et al. 2020; Meng et al. 2022, "causal tracing"; Heimersheim & Nanda 2024) a corrupt prompt
is run with values of a clean prompt in their place, one site, position and head at a time.

`gradient=True` estimates all of these from one backward pass (Nanda 2023, "attribution patching"): to first order,
putting `clean` in place of `corrupt` changes the metric by `sum((clean - corrupt) * d metric / d corrupt)`.

Steering (Turner et al. 2023) adds the difference of two prompts to the residual stream at every position that is
computed.  The result is an edit: `model.generate(prompts, edit=model.steer(...))` adds it in the prompt and in every
token that is generated, cached or not.  Blocks that are edited run as modules, not in the native step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from triptych.arguments import checked, integer, number, readable
from triptych.checkpoints.safetensors import open_file
from triptych.errors import InputError, ProbeError, shown
from .display import Displayed, JsonResult
from .metric import Answer, Metric, MetricFunction, MetricName, metric_of
from .patch_places import Alignment, Cells, Pairs, cells_of, patched_sites
from .prompts import (
    BATCH_TOKENS,
    EditedRun,
    ProbedModel,
    PromptInput,
    check_values,
    differ,
    forward,
    measured_at,
    prompt_of,
    resized,
    same_prompts,
    two_prompts,
    values_at,
)
from .reads_and_edits import Edit, Plan, Read, add
from .sites import Selection, match, matrix, sites
from .twin_runs import TwinRuns, margin_of, margin_text

SHOWN_WIDTH = 9  # letters of a column's name in a printed grid
ROUNDING = 64  # units in the last place: of smaller differences of two metrics a good part is rounding
ROUGH = "the two metrics differ by little more than rounding, and so do the shares"


@dataclass(frozen=True, eq=False)
class PatchGrid(JsonResult, Displayed):
    """The metric of the corrupt prompt with the clean prompt's values at one place, for each place.

    values      [R, C], row by row the sites (or heads), column by column the positions (or heads); NaN where a site
                does not have the position or the head.
    fired       [R, C], whether the clean value differs from the corrupt one there.  In an encoder, prompts of unequal
                length are of unequal shape, and a difference may be one of rounding.
    clean, corrupt   the metric of the prompts as they are.
    estimated   whether the values come from one backward pass and not from runs.
    margin      0 but in a mixture of experts, where a difference of up to so much of the largest value or logit is
                none.
    """

    in_json = ("metric", "clean", "corrupt", "estimated", "margin", "rows", "columns", "values", "restored", "fired")
    metric: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Tensor
    fired: Tensor
    clean: float
    corrupt: float
    estimated: bool = False
    margin: float = 0.0

    @property
    def tells_apart(self) -> bool:
        """Whether the metrics of the two prompts differ: by any bit, as both were run in batches of one shape."""
        return self.clean != self.corrupt and abs(self.clean - self.corrupt) > self.margin * self._size

    @property
    def rough(self) -> bool:
        """Whether they differ by so little that the shares are little more than rounding."""
        return (
            self.tells_apart
            and abs(self.clean - self.corrupt) <= ROUNDING * torch.finfo(torch.float32).eps * self._size
        )

    @property
    def _size(self) -> float:
        """What the metrics are of the order of: of a divergence, the terms of its sum."""
        return max(abs(self.clean), abs(self.corrupt), 1.0 if self.metric == "kl" else 0.0)

    @property
    def restored(self) -> Tensor:
        """[R, C]: 0 where the corrupt prompt's metric stays, 1 where the clean prompt's comes back; NaN everywhere if
        the metric does not tell these two apart."""
        return (self.values - self.corrupt) / (self.clean - self.corrupt if self.tells_apart else math.nan)

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """(row, column, value) of the `count` cells whose metric differs most from the corrupt prompt's."""
        count = integer("count", count, 0)
        moved = (self.values - self.corrupt).abs().nan_to_num(-1.0).flatten()
        chosen = moved.topk(min(count, moved.numel())).indices.tolist()
        cells = [divmod(i, len(self.columns)) for i in chosen]
        return [(self.rows[r], self.columns[c], float(self.values[r, c])) for r, c in cells]

    def __repr__(self) -> str:
        width = max(map(len, self.rows), default=0)
        title = f"{self.metric}: clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; share restored"
        title += ", estimated by one backward pass" if self.estimated else ""
        lines = [f"{title}{f' ({ROUGH})' if self.rough else ''}{margin_text(self.margin)}"]
        lines.append(" " * width + "".join(f" {_short(name):>{SHOWN_WIDTH}}" for name in self.columns))
        for name, row in zip(self.rows, self.restored.tolist(), strict=True):
            cells = "".join(f" {'' if math.isnan(x) else format(x, '.3f'):>{SHOWN_WIDTH}}" for x in row)
            lines.append(f"{name:<{width}}{cells}")
        return "\n".join(lines)


def _short(name: str) -> str:
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    return plain if len(plain) <= SHOWN_WIDTH else plain[: SHOWN_WIDTH - 1] + "…"


@checked
def patch(
    model: ProbedModel,
    clean: PromptInput,
    corrupt: PromptInput,
    *,
    answer: Answer | Sequence[Answer] | None = None,
    site: str | Sequence[str] | None = None,
    heads: bool | Sequence[int] = False,
    positions: Literal["all"] | Sequence[int] | None = "all",
    metric: MetricName | MetricFunction | None = None,
    at: int | None = None,
    target: PromptInput = None,
    corrupt_target: PromptInput = None,
    align: Pairs | None = None,
    target_align: Pairs | None = None,
    gradient: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    max_bytes: int = 1 << 30,
) -> PatchGrid:
    """Activation patching (Vig et al. 2020; Meng et al. 2022): run `corrupt` once for each site, position and head,
    with the value that `clean` has there, and measure each run.

    site        names or globs; by default `*resid_pre`, or with `heads` `*.z`, in both stacks where there are two.
    heads       one head at a time (True: all of them).  Sites k, v, k_rot, k_ctx and v_ctx have the key/value heads,
                each of which several query heads share under grouped heads.
    positions   one position of the corrupt prompt at a time: "all", or these; None patches all of them at once.
    answer, metric   what is measured (see `Metric`), at position `at` of the corrupt prompt: by default the last
                position of a decoder and the mask of an encoder.
    target      what the decoder beside an encoder reads (`corrupt_target` with the corrupt prompt, where it differs);
                its start token by default.
    align       pairs (clean position, corrupt position) that correspond, of the texts; `target_align`, of the targets.
                Needed where the two have different numbers of tokens; positions outside of it are not patched.
    gradient    estimate every cell from one backward pass instead of running each (attribution patching, Nanda 2023).

    The runs are rows of flat batches of up to `batch_tokens` tokens.  Each is compared in bits with a twin, the same
    row of the same batch without the change, and takes the clean values of a batch of that shape: two forwards more
    in all, whatever the number of runs, and in a mixture of experts a third.  To see what a corrupt value breaks in the
    clean prompt ("noising"), exchange the two prompts.

    Raises InputError for answers of several tokens, equal prompts, prompts of unequal length without `align`, and
    positions out of range; ProbeError for sites and heads that are not there, values of more than `max_bytes`, and
    where no clean value differs from the corrupt one.
    """
    measure = metric_of(model, answer, metric)
    wanted = patched_sites(model, site, heads=heads is not False)
    intact, broken = two_prompts(model, clean, corrupt, target, corrupt_target)
    pairs = Alignment.of(model, intact, broken, wanted, align, target_align)
    cells = cells_of(pairs, wanted, heads, positions)
    broken_at = measured_at(model, broken, at)
    intact_at = measured_at(model, intact, None if at is None else pairs.clean(at))
    check_values(model, [intact], [one.name for one in wanted], max_bytes)
    if broken_at is not None:  # of one length, forwards of both compute alike
        lengths = [max(both) for both in zip(intact.lengths, broken.lengths, strict=True)]
        intact, broken = resized(model, intact, lengths), resized(model, broken, lengths)
    both = EditedRun(intact, intact_at), EditedRun(broken, broken_at)
    if gradient:
        grid = _estimated(model, *both, measure, cells, pairs)
    else:
        grid = _patched(model, *both, measure, cells, pairs, batch_tokens)
    if not bool(grid.fired.any()):
        raise ProbeError("nothing was changed: the clean prompt has the same values as the corrupt one at these places")
    return grid


def check_metric(measure: Metric, clean: Tensor, corrupt: Tensor) -> tuple[Metric, float, float]:
    """The metric beside the clean prompt's logits [1, V], and its values.  Raises InputError for inf and NaN."""
    measure = measure.beside(clean)
    values = float(measure(clean)), float(measure(corrupt).detach())
    if not all(map(math.isfinite, values)):
        raise InputError(f"the metric {measure} is {values} for the prompts as they are; it must be finite")
    return measure, *values


def _patched(
    model: ProbedModel, clean: EditedRun, corrupt: EditedRun, measure: Metric, cells: Cells, pairs: Alignment,
    batch_tokens: int,
) -> PatchGrid:  # fmt: skip
    """One run a cell, with what the clean prompt has at the same place of a batch of the same shape."""
    places = [(site.name, place, pairs.clean_place(site, place)) for site, place in cells.places.values()]
    runs = TwinRuns(model, corrupt, [[site] for site, _, _ in places], batch_tokens)
    new, logits = runs.observe(clean, [{site: partial(of_clean.part, site)} for site, _, of_clean in places])
    runs.twin()
    measure, before, after = check_metric(measure, logits[:1], runs.twin_logits[:1])
    values, fired = cells.empty()
    where = torch.tensor(list(cells.places)).T
    changes = [{site: place.put(site, of_run[site])} for (site, place, _), of_run in zip(places, new, strict=True)]
    for piece in runs.compare(changes, foreign=True):
        chosen = tuple(where[:, piece.numbers])
        values[chosen], fired[chosen] = after + piece.effect(measure), piece.fired
    return PatchGrid(str(measure), cells.rows, cells.columns, values, fired, before, after, margin=runs.margin)


def _estimated(
    model: ProbedModel, clean: EditedRun, corrupt: EditedRun, measure: Metric, cells: Cells, pairs: Alignment
) -> PatchGrid:
    """As `_patched`, to first order: one forward of each prompt, and one backward pass."""
    patched = {site.name: site for site, _ in cells.places.values()}
    reads = [Read(name, grad=True) for name in patched]  # of both, so that both compute alike
    intact, broken = (forward(model, [run], reads) for run in (clean, corrupt))
    measure, before, after = check_metric(measure, intact.logits.detach(), broken.logits)
    value = measure(broken.logits)
    old = {name: broken.trace[name][0] for name in patched}
    if not value.requires_grad:
        raise ProbeError("the metric has no gradient; load the model with dequantize=True, or patch without gradient=")
    gradients = torch.autograd.grad(value.sum(), list(old.values()), allow_unused=True)
    margin = margin_of(model, corrupt, broken.logits.detach(), ())
    change = {}
    for (name, was), gradient in zip(old.items(), gradients, strict=True):
        new = pairs.moved(intact.trace[name][0].detach(), patched[name])
        was = was.detach() if matrix(name) else was.detach()[: len(new)]
        step = (new - was).where(differ(new, was, margin), torch.zeros_like(new))
        step = step.where(step.isfinite(), torch.zeros_like(step))  # -inf at keys that the mask hides in both prompts
        change[name] = step, torch.zeros_like(step) if gradient is None else step * gradient[: len(step)]
    values, fired = cells.empty()
    for (r, c), (site, place) in cells.places.items():
        step, effect = (place.part(site.name, one) for one in change[site.name])
        values[r, c] = after + float(effect.sum())
        fired[r, c] = bool((step != 0).any())
    return PatchGrid(str(measure), cells.rows, cells.columns, values, fired, before, after, True, margin)


@checked
def steer(
    model: ProbedModel,
    positive: PromptInput | None = None,
    negative: PromptInput | None = None,
    *,
    site: str,
    vector: Tensor | None = None,
    scale: float = 1.0,
    over: Literal["last", "mean"] = "last",
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
    if not (vector is None or isinstance(vector, Tensor)):
        raise InputError("site is the name of one site, and vector a tensor [D]")
    known = match(site, model.spec, sites(model.spec))
    if len(known) > 1:
        raise ProbeError(f"{site} names {len(known)} sites; a steering vector is added at one")
    (place,) = known
    if place.heads is not None or place.name == "logits":
        raise ProbeError(f"{place.name} does not hold one vector of the residual stream a token; choose resid_post")
    if not number("scale", scale, -math.inf, math.inf, wanted := "a finite number other than 0"):
        raise InputError(f"scale={shown(scale)} must be {wanted}")
    if vector is not None:
        readable(vector, "vector")
    prompts = [text for text in (positive, negative) if text is not None]
    of_prompts = prompts or over != "last" or target is not None
    if (vector is None) != (len(prompts) == 2) or (vector is not None and of_prompts):
        raise InputError("give two prompts, positive and negative, or a vector without over= and target=")
    if vector is None:
        pair = [prompt_of(model, text, target) for text in prompts]
        if same_prompts(*pair):
            raise InputError("the two prompts are the same; there is no direction to steer in")
        rows = [values[place.name] for values in values_at(model, pair, [place.name], 1 << 30)]
        first, second = (row[-1] if over == "last" else row.float().mean(0) for row in rows)
        vector = first - second
    usable = vector.shape == (place.width,) and vector.is_floating_point() and bool(torch.isfinite(vector).all())
    if not usable:
        raise ProbeError(f"the vector is {list(vector.shape)}; at {place.name} it must be {place.width} finite numbers")
    if not bool(vector.any()):
        instead = "; write over='mean', since both prompts end alike" if prompts and over == "last" else ""
        raise InputError(f"the vector at {place.name} is 0, which steers nowhere{instead}")
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
