"""Activation patching (Vig et al. 2020; Meng et al. 2022, "causal tracing"; Heimersheim & Nanda 2024): a corrupt prompt
is run with values of a clean prompt in their place, one site, position and head at a time.

`gradient=True` estimates all of these from one backward pass (Nanda 2023, "attribution patching"): to first order,
putting `clean` in place of `corrupt` changes the metric by `sum((clean - corrupt) * d metric / d corrupt)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.errors import InputError, ProbeError
from triptych.probe.display import Displayed
from triptych.probe.metric import Answer, Metric, MetricFunction, MetricName, measured, metric_of
from triptych.probe.patch_places import Alignment, Cells, Pairs, cells_of, patched_sites
from triptych.probe.prompts import (
    BATCH_TOKENS,
    EditedRun,
    ProbedModel,
    Prompt,
    PromptInput,
    forward,
    measured_at,
    prompt_of,
    same_prompts,
)
from triptych.probe.reads_and_edits import Plan, Read
from triptych.probe.size import check_reads

SHOWN_WIDTH = 9  # letters of a column's name in a printed grid
ROUNDING = 64  # units in the last place by which two equal metrics may differ; KL sums terms of the order of 1 nat


@dataclass(frozen=True, eq=False)
class PatchGrid(Displayed):
    """The metric of the corrupt prompt with the clean prompt's values at one place, for each place.

    values      [R, C], row by row the sites (or heads), column by column the positions (or heads); NaN where a site
                does not have the position or the head.
    fired       [R, C], whether the clean value differs from the corrupt one there, be it by rounding: products of dense
                weights may round differently in batches of other sizes.
    clean, corrupt   the metric of the prompts as they are.
    estimated   whether the values come from one backward pass and not from runs.
    """

    metric: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Tensor
    fired: Tensor
    clean: float
    corrupt: float
    estimated: bool = False

    @property
    def tells_apart(self) -> bool:
        """Whether the metrics of the two prompts differ by more than fp32 rounds."""
        size = max(abs(self.clean), abs(self.corrupt), 1.0 if self.metric == "kl" else 0.0)
        return abs(self.clean - self.corrupt) > ROUNDING * torch.finfo(torch.float32).eps * size

    @property
    def restored(self) -> Tensor:
        """[R, C]: 0 where the corrupt prompt's metric stays, 1 where the clean prompt's comes back; NaN everywhere if
        the metric does not tell these two apart."""
        return (self.values - self.corrupt) / (self.clean - self.corrupt if self.tells_apart else math.nan)

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """(row, column, value) of the `count` cells whose metric differs most from the corrupt prompt's."""
        moved = (self.values - self.corrupt).abs().nan_to_num(-1.0).flatten()
        chosen = moved.topk(min(count, moved.numel())).indices.tolist()
        cells = [divmod(i, len(self.columns)) for i in chosen]
        return [(self.rows[r], self.columns[c], float(self.values[r, c])) for r, c in cells]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; None where there is no value."""
        return {
            "metric": self.metric, "clean": self.clean, "corrupt": self.corrupt, "estimated": self.estimated,
            "rows": list(self.rows), "columns": list(self.columns),
            "values": _listed(self.values), "restored": _listed(self.restored), "fired": self.fired.tolist(),
        }  # fmt: skip

    def __str__(self) -> str:
        width = max(map(len, self.rows), default=0)
        title = f"{self.metric}: clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; share restored"
        lines = [title + (", estimated by one backward pass" if self.estimated else "")]
        lines.append(" " * width + "".join(f" {_short(name):>{SHOWN_WIDTH}}" for name in self.columns))
        for name, row in zip(self.rows, self.restored.tolist(), strict=True):
            cells = "".join(f" {'' if math.isnan(x) else format(x, '.3f'):>{SHOWN_WIDTH}}" for x in row)
            lines.append(f"{name:<{width}}{cells}")
        return "\n".join(lines)

    __repr__ = __str__


def _listed(values: Tensor) -> list[list[float | None]]:
    return [[None if not math.isfinite(x) else x for x in row] for row in values.tolist()]


def _short(name: str) -> str:
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    return plain if len(plain) <= SHOWN_WIDTH else plain[: SHOWN_WIDTH - 1] + "…"


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

    The runs are rows of flat batches of up to `batch_tokens` tokens.  To see what a corrupt value breaks in the clean
    prompt ("noising"), exchange the two prompts.

    Raises InputError for answers of several tokens, equal prompts, prompts of unequal length without `align`, and
    positions out of range; ProbeError for sites and heads that are not there, values of more than `max_bytes`, and
    where no clean value differs from the corrupt one.
    """
    measure = metric_of(model, answer, metric)
    wanted = patched_sites(model, site, heads=heads is not False)
    intact = prompt_of(model, clean, target)
    broken = prompt_of(model, corrupt, target if corrupt_target is None else corrupt_target)
    if same_prompts(intact, broken):
        raise InputError("the clean and the corrupt prompt are the same; there is nothing to patch")
    pairs = Alignment.of(model, intact, broken, wanted, align, target_align)
    cells = cells_of(model, wanted, heads, positions, broken, pairs)
    broken_at = measured_at(model, broken, at)
    intact_at = measured_at(model, intact, None if at is None else pairs.clean(at, source=not broken.lengths[1]))
    sources = [intact.lengths[0]] if intact.lengths[1] else []
    check_reads(Plan.of(model.spec, [one.name for one in wanted]), [intact.decoded], sources, max_bytes)
    whole = forward(model, [EditedRun(intact, intact_at)], [one.name for one in wanted])
    measure = measure.beside(whole.logits)
    new = {one.name: pairs.moved(whole.trace[one.name][0], one) for one in wanted}
    how = _estimated if gradient else _patched
    corrupt_value, values, fired = how(model, broken, broken_at, measure, cells, new, batch_tokens)
    if math.isnan(corrupt_value) or math.isnan(float(measure(whole.logits))):
        raise InputError(f"the metric {measure} is NaN for the prompts as they are; it must be a number")
    if not bool(fired.any()):
        raise ProbeError("nothing was changed: the clean prompt has the same values as the corrupt one at these places")
    return PatchGrid(
        str(measure), cells.rows, cells.columns, values, fired, float(measure(whole.logits)), corrupt_value, gradient
    )


def _patched(
    model: ProbedModel, broken: Prompt, at: int | None, measure: Metric, cells: Cells, new: dict[str, Tensor],
    batch_tokens: int,
) -> tuple[float, Tensor, Tensor]:  # fmt: skip
    """The corrupt prompt's metric, that of each cell [R, C], and where a value changed [R, C]."""
    runs = [
        EditedRun(broken, at, {one.name: place.put(one.name, new[one.name])}) for one, place in cells.places.values()
    ]
    values, fired = cells.empty()
    results, changed = measured(model, [EditedRun(broken, at), *runs], measure, batch_tokens)
    where = tuple(torch.tensor(list(cells.places)).T)
    values[where], fired[where] = results[1:], changed[1:]
    return float(results[0]), values, fired


def _estimated(
    model: ProbedModel, broken: Prompt, at: int | None, measure: Metric, cells: Cells, new: dict[str, Tensor],
    batch_tokens: int,
) -> tuple[float, Tensor, Tensor]:  # fmt: skip
    """As `_patched`, to first order: one forward and one backward pass of the corrupt prompt."""
    result = forward(model, [EditedRun(broken, at)], [Read(name, grad=True) for name in new])
    value = measure(result.logits)
    old = {name: result.trace[name][0] for name in new}
    if not value.requires_grad:
        raise ProbeError("the metric has no gradient; load the model with dequantize=True, or patch without gradient=")
    gradients = torch.autograd.grad(value.sum(), list(old.values()), allow_unused=True)
    change = {}
    for (name, before), gradient in zip(old.items(), gradients, strict=True):
        step = new[name] - before.detach()
        step = step.where(step.isfinite(), torch.zeros_like(step))  # -inf at keys that the mask hides in both prompts
        change[name] = step, step * (torch.zeros_like(step) if gradient is None else gradient)
    values, fired = cells.empty()
    corrupt = float(value.detach())
    for (r, c), (one, place) in cells.places.items():
        step, effect = change[one.name]
        there = place.mask(one.name, step)
        values[r, c] = corrupt + float((effect * there).sum())
        fired[r, c] = bool(((step != 0) & there).any())
    return corrupt, values, fired
