"""`triptych patch`: which sites, positions and heads carry what tells two prompts apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from . import options, screen

if TYPE_CHECKING:
    from triptych.probe import PatchGrid
    from triptych.probe.path_patching import Projection
    from triptych.probe.sites import HeadName
    from triptych.spec import ModelSpec

WIDEST = 16  # columns of a table; a wider grid is listed by its largest cells


MetricOption = Literal["logit-difference", "logit", "probability", "log-probability", "kl"]


def patch(
    checkpoint: options.Checkpoint,
    *,
    clean: str,
    corrupt: str,
    answer: str | None = None,
    other: str | None = None,
    metric: MetricOption | None = None,
    site: list[str] | None = None,
    heads: bool = False,
    position: list[int] | None = None,
    at: int | None = None,
    align: str | None = None,
    target: str | None = None,
    gradient: bool = False,
    path: str | None = None,
    freeze_mlps: bool = False,
    save: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Run a prompt with values of another prompt in place of its own: one site, position, head or path at a time.

    --clean TEXT: Prompt with the right answer.
    --corrupt TEXT: Prompt that is run with values of the clean one.
    --answer TOKEN: Answer of the clean prompt.
    --other TOKEN: Answer of the corrupt prompt.
    --metric: What is measured; by default the difference of the logits of two answers, the log-probability of one
        answer, and kl without an answer.
    --site GLOB: Sites to patch; by default the residual stream. Repeatable.
    --heads: Patch one head at a time, at all positions unless --position is given.
    --position P: Patch only this position. Repeatable.
    --align PAIRS: Positions that correspond, CLEAN:CORRUPT, as in 0:0,1:1,3:2.
    --gradient: Estimate all cells from one backward pass instead of running each.
    --path HEADS:HEADS: Path patching: only what these heads give to later heads, as in L0H1,L0H2:L1H4.k, or to the
        output, as in L0H1:logits.
    --freeze-mlps: With --path: MLPs between the heads keep their values.
    --save FILE: Write the grid to an offline .html page.
    """
    screen.check_suffix(save)
    answers = answers_of(answer, other)
    pairs = None if align is None else _pairs(align)
    of_grids = {
        "--site": site, "--heads": heads, "--position": position, "--align": align, "--gradient": gradient
    }  # fmt: skip
    if path is None and freeze_mlps:
        raise typer.BadParameter("--freeze-mlps is for --path")
    if path is not None and (unfit := [name for name, value in of_grids.items() if value]):
        raise typer.BadParameter(f"--path patches what heads tell other heads; leave out {unfit[0]}")
    if path is not None and (path.count(":") != 1 or not all(path.split(":"))):
        raise typer.BadParameter(f"--path {path} must be heads that give and heads that read, as in L0H1,L0H2:L1H4.k")
    from .loading import load_measured

    model = load_measured(checkpoint)
    model.check_words("patch")
    with screen.waiting("patching"):
        if path is not None:
            senders, receivers, into = _path(model.spec, path)
            grid = model.path_patch(
                clean, corrupt, senders, receivers, into=into, answer=answers, metric=metric, at=at,
                target=target, mlps="frozen" if freeze_mlps else "recomputed",
            )  # fmt: skip
        else:
            grid = model.patch(
                clean, corrupt, answer=answers, metric=metric, site=site or None, heads=heads,
                positions=position or (None if heads else "all"), at=at, align=pairs, target=target, gradient=gradient,
            )  # fmt: skip
    facts = [("Model", checkpoint.model), ("Clean", clean), ("Corrupt", corrupt)]
    if save is not None:
        from triptych.page.interventions import patch_page

        screen.write_page(save, patch_page(grid, facts))
    if as_json:
        screen.result({"model": checkpoint.model} | grid.to_dict())
    elif save is None:
        _show(grid)


def answers_of(answer: str | None, other: str | None) -> list[str] | None:
    """The tokens of --answer and --other; None without them.  Raises BadParameter for --other alone."""
    if other is not None and answer is None:
        raise typer.BadParameter("--other needs an --answer to compare with")
    return [one for one in (answer, other) if one is not None] or None


def _path(spec: ModelSpec, path: str) -> tuple[list[HeadName], list[HeadName] | Literal["logits"], Projection]:
    """Senders, receivers and the receivers' input of --path.  Raises BadParameter for receivers of several inputs."""
    from triptych.probe.sites import typed_head

    first, second = path.split(":")
    senders = [typed_head(spec, text) for text in first.split(",")]
    if second.strip() == "logits":
        return senders, "logits", "q"
    names, inputs = zip(*(text.strip().rpartition(".")[::2] for text in second.split(",")), strict=True)
    if set(inputs) - {"q", "k", "v"} or len(set(inputs)) > 1:
        raise typer.BadParameter(
            f"--path {path}: heads that read end in .q, .k or .v, all in the same, as in L1H4.k,L1H5.k; or write logits"
        )
    return senders, [typed_head(spec, name) for name in names], inputs[0]


def _pairs(text: str) -> list[tuple[int, int]]:
    """The pairs of --align.  Raises BadParameter for anything else."""
    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        pairs = [()]
    if any(len(pair) != 2 for pair in pairs):
        raise typer.BadParameter(f"--align {text} must be pairs CLEAN:CORRUPT, as in 0:0,1:1,3:2")
    return [(pair[0], pair[1]) for pair in pairs]


def _show(grid: PatchGrid) -> None:
    from triptych.probe.patching import ROUGH
    from triptych.probe.twin_runs import margin_text

    how = ", estimated by one backward pass" if grid.estimated else ""
    title = f"{grid.metric}: clean {grid.clean:.4g}, corrupt {grid.corrupt:.4g}; share restored{how}"
    title += margin_text(grid.margin)
    if not grid.tells_apart:
        screen.note("the metric is the same for both prompts, so no share can be given")
    if grid.rough:
        screen.note(ROUGH)
    if len(grid.columns) > WIDEST:
        span = grid.clean - grid.corrupt if grid.tells_apart else math.nan
        moved = [(row, column, (x - grid.corrupt) / span) for row, column, x in grid.best(24) if x != grid.corrupt]
        best = [(row, column, f"{share:.3f}") for row, column, share in sorted(moved, key=lambda cell: -cell[2])]
        screen.show_rows(("site", "at", "share"), best, title, right=["share"])
        screen.note(f"the grid has {len(grid.columns)} columns; --save FILE.html or --json shows all of it")
        return
    cells = [["" if math.isnan(x) else f"{x:.3f}" for x in values] for values in grid.restored.tolist()]
    lines = [(name, *row) for name, row in zip(grid.rows, cells, strict=True)]
    screen.show_rows(("site", *grid.columns), lines, title, right=grid.columns)
