"""`triptych heads`: what each attention head does, and which heads link two words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from triptych.errors import counted
from . import options, screen
from .screen import plain

if TYPE_CHECKING:
    from triptych.probe import HeadRole, HeadTable, LinkScore, LinkTable

SHOWN = 5  # heads listed of each role
RANKED = 12  # heads listed of a link


def heads(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    *,
    link: str | None = None,
    text: str | None = None,
    target: str | None = None,
    seed: options.Seed = 0,
    save: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Find the role of each attention head, compared with chance and with its ablation; or rank heads for two words.

    --link WORD:WORD: Rank every head by its weight from one word of --text to the other; bank@2 is the second.
    --text TEXT: The text of --link.
    --target TEXT: With --link: the first word stands here, in an encoder-decoder's target.
    --seed N: Seed of all random draws.
    --save FILE: Write all heads to an offline .html page.
    """
    screen.check_suffix(save)
    words = _words(link, text, target, texts, save)
    from .loading import load_measured, read_texts

    rows = read_texts(texts) if texts else None
    model = load_measured(checkpoint)
    if words is not None:
        assert text is not None
        with screen.stages() as stage:
            ranked = model.link(text, *words, target, seed=seed, on_progress=stage)
        screen.result(ranked.to_dict()) if as_json else _show_link(ranked)
        return
    with screen.stages() as stage:
        table = model.heads(rows, seed=seed, on_progress=stage)
    if save is not None:
        from triptych.page.attention_page import inside_page, sample_text
        from triptych.page.inspect import inspect_text

        inspection = inspect_text(model, rows[0] if rows else sample_text(model))
        page = inside_page(model, [inspection], checkpoint.model, table=table, title="Attention heads")
        screen.write_page(save, page)
    if as_json:
        screen.result(table.to_dict())
    else:
        _show(table, checkpoint.model)


def _words(
    link: str | None, text: str | None, target: str | None, texts: list[str] | None, save: Path | None
) -> tuple[str, str] | None:
    """The two words of --link.  Raises BadParameter for options that do not go together."""
    if link is None:
        if text is not None or target is not None:
            raise typer.BadParameter("--text and --target are for --link; write other texts after MODEL")
        return None
    query, colon, key = link.partition(":")
    if not (colon and query.strip() and key.strip()) or ":" in key:
        raise typer.BadParameter(
            f"--link {link} must be two words, as bank:river: the one that reads, and the one read"
        )
    if text is None:
        raise typer.BadParameter('--link needs the text with the words: --text "She sat by the river bank"')
    if texts or save is not None:
        raise typer.BadParameter("--link takes its text from --text, and prints a table; leave out TEXT and --save")
    return query.strip(), key.strip()


def _name(row: HeadRole | LinkScore, rows: Sequence[HeadRole | LinkScore]) -> str:
    """`3.5`, layer and head, as `ablate --heads` takes it; before it the stack, where the model is not a decoder."""
    return row.name.removeprefix("decoder ") if all(one.stack == "decoder" for one in rows) else row.name


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _show(table: HeadTable, name: str) -> None:
    from triptych.probe import ROLES

    together = {one.role: one for one in table.together}
    numbers = ["score", "even", "threshold", "z", "without it", "without a random head"]
    for role, best in table.roles.items():
        lines = []
        for row in best[:SHOWN]:
            where = _name(row, table.rows) + (f" at {row.offset:+d}" if row.offset else "")
            scores = map(_number, (row.score, row.even, row.threshold))
            effects = (_number(row.effect, 3), _number(row.random_effect, 3))
            lines.append((where, *scores, _number(row.z, 1), *effects))
        more = f", {SHOWN} shown" if len(best) > SHOWN else ""
        title = f"{role}: {ROLES.get(role, 'pairs of words')} ({counted(len(best), 'head')}{more})"
        screen.show_rows(("head", *numbers), lines, title, right=numbers)
        if (one := together.get(role)) is not None:
            screen.console().print(
                f"without the best {len(one.heads)}: {one.effect:.3f} {table.unit}; {_beside(one.random)}\n"
            )
    if not table.roles:
        screen.console().print(f"no head of {plain(name)} is above its threshold in any role")
    if table.roles:
        screen.note(
            "score, even, threshold: the share of a query's weight on what the title names, in this head, with even "
            "weights, and the least that counts; z: standard deviations of the score above chance; without it: "
            f"{table.unit} lost without the head; head 3.5: layer 3, head 5"
        )
    for role, reason in table.not_measured.items():
        screen.note(f"{role} was not measured: {reason}")


def _beside(random: Sequence[float]) -> str:
    """What was lost without other sets of as many heads, or why that says nothing."""
    if not random:
        return "the model has no other set of as many heads to compare with"
    if len(random) == 1:
        return f"of as many other heads there is one set alone ({random[0]:.3f}), which says nothing about chance"
    return f"without as many random heads: {', '.join(f'{lost:.3f}' for lost in random)}"


def _show_link(table: LinkTable) -> None:
    numbers = ["weight", "other words", "threshold", "z", "p", "without it", "in a random head"]
    lines = []
    for row in table.rows[:RANKED]:
        scores = (_number(row.weight), _number(row.null), _number(row.threshold), _number(row.z, 1), _number(row.p, 3))
        effects = (_number(row.effect, 3), _number(row.random_effect, 3))
        lines.append((_name(row, table.rows), *scores, *effects, "linked" if row.above else ""))
    title = f"from {table.query} to {table.key}: {len(table.above)} of {len(table.rows)} heads"
    screen.show_rows(("head", *numbers, ""), lines, title, right=numbers)
    if unreachable := sum(row.threshold > 1 for row in table.rows[:RANKED]):
        screen.console().print(
            f"{counted(unreachable, 'threshold')} above 1, which no weight can reach: other words in these places vary "
            "too much there for one pair to stand out among all heads"
        )
    best = "in the best of them" if table.above else "in the first four"
    screen.console().print(f"without the link {best}: {table.effect:.3f} {table.unit}; {_beside(table.random)}")
