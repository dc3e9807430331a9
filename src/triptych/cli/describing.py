"""Showing what `inspect`, `check`, `count` and `doctor` found: tables for people, JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.cli import screen
from triptych.cli.screen import mib, plain, shape

if TYPE_CHECKING:
    from rich.tree import Tree

    from triptych.check import Report
    from triptych.checkpoints.describe import Description, PartLine
    from triptych.page import AttentionMap
    from triptych.page.inspect import Inspection
    from triptych.spec import Model

POSITIONS = 4096  # where neither the model nor the user has a limit
TOP_KEYS = 4  # of each query, where attention is told in words


def header(model: str, *, ignore: Sequence[str], offline: bool, as_json: bool) -> None:
    """What a checkpoint holds."""
    from triptych.checkpoints.describe import describe
    from triptych.checkpoints.load_report import by_reason

    found = describe(model, ignore=ignore, offline=offline)
    if as_json:
        screen.result(found.to_dict() | {"sites": _sites(found.spec)})
        return
    out = screen.console()
    screen.show(screen.facts(_summary(found)), plain(found.path))
    out.print()
    out.print(_tree(found.tree))
    out.print()
    out.print(_tensors(found))
    notes = [f"{alias} is {source}" for alias, source in found.ties.items()]
    notes += [f"not read: {line}" for line in by_reason(found.ignored)]
    for line in notes:
        out.print(line)
    out.print("\nsites for --site, {i} a block:", style="dim")
    out.print("  ".join(_sites(found.spec)))


def _sites(spec: Model) -> list[str]:
    """The probe sites of a model, with `{i}` for the number of a block."""
    from triptych.probe.sites import sites

    return list(dict.fromkeys(re.sub(r"blocks\.\d+", "blocks.{i}", name) for name in sites(spec)))


def _summary(found: Description) -> list[tuple[str, str]]:
    rows = [
        ("family", f"{found.family}, {found.layout}"),
        ("parameters", f"{found.parameters:,}"),
        ("stored", f"{mib(found.stored_bytes)} in {len(found.tensors):,} tensors"),
        ("vocabulary", f"{found.vocab:,}" if found.vocab else "none"),
        ("context", "no limit" if found.context is None else f"{found.context:,} positions"),
    ]
    if found.tokenizer is None:
        return [*rows, ("tokenizer", "none")]
    named = ", ".join(f"{name} {plain(one['text'])} = {one['id']}" for name, one in found.tokenizer["specials"].items())
    chat = "has a chat template" if found.tokenizer["chat_template"] else "no chat template"
    stops = " ".join(map(str, found.tokenizer["stop_ids"])) or "none"
    rows += [("tokenizer", f"{found.tokenizer['tokens']:,} tokens; {chat}; ends generation: {stops}")]
    return [*rows, ("special tokens", named)] if named else rows


def _tree(line: PartLine) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    def label(one: PartLine) -> Text:
        return Text.assemble((one.name, "bold"), "  ", (one.text, "dim"))

    def grow(node: Tree, one: PartLine) -> Tree:
        for below in one.below:
            grow(node.add(label(below)), below)
        return node

    return grow(Tree(label(line), guide_style="dim"), line)


def _tensors(found: Description) -> Any:
    """A line for tensors that differ only by the number of their block, or of their expert."""
    groups: dict[tuple[Any, ...], list[tuple[tuple[str, ...], int]]] = {}
    for one in found.tensors:
        names, numbers = numberless((one.name, *experts_in_one(one.becomes)))
        groups.setdefault((names, one.shape, one.dtype, one.op, one.file), []).append((numbers, one.nbytes))
    shown = screen.table("stored tensor", "becomes", "shape", "dtype", "size", "done", "file", right=["shape", "size"])
    for (names, sizes, dtype, op, file), members in groups.items():
        every = zip(*(numbers for numbers, _ in members), strict=True)
        for letter, numbers in zip("ie", every, strict=False):
            names = tuple(name.replace(f"{{{letter}}}", ranges({int(x) for x in numbers})) for name in names)
        stored, *becomes = map(plain, names)
        size = mib(sum(nbytes for _, nbytes in members))
        shown.add_row(stored, "\n".join(becomes), shape(sizes), dtype, size, op, plain(file))
    return shown


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def numberless(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names with `{i}` for the first number they all share and `{e}` for the second, and those numbers."""
    shared: list[str] = []
    for letter, numbers in zip("ie", zip(*map(_NUMBER.findall, names), strict=False), strict=False):
        if len(set(numbers)) > 1:
            break
        shared.append(numbers[0])
        names = tuple(_NUMBER.sub(f"{{{letter}}}", name, count=1) for name in names)
    return names, tuple(shared)


def experts_in_one(names: tuple[str, ...]) -> tuple[str, ...]:
    """`a.0.b`, `a.1.b` -> `a.0-1.b`: what a tensor that holds all experts becomes."""
    found: dict[str, list[int]] = {}
    for name in names:
        numbers = list(_NUMBER.finditer(name))[-1:]
        start, end = numbers[0].span() if numbers else (len(name), len(name))
        found.setdefault(f"{name[:start]}{{}}{name[end:]}", []).extend(int(number[0]) for number in numbers)
    return tuple(pattern.format(ranges(numbers)) for pattern, numbers in found.items())


def ranges(numbers: Collection[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def inside(found: Inspection, name: str, *, save: Path | None, as_json: bool) -> None:
    """What a text did inside a model: a page where `save` says so, else tables."""
    if save is not None:
        from triptych.page import write

        write(save, found.page(name))
        screen.note(f"{save}: open it in a browser")
    if as_json:
        maps = [
            {"stack": m.stack, "layer": m.layer, "heads": m.head_names, "queries": list(m.queries),
             "keys": list(m.keys), "pattern": m.weights.tolist()}
            for m in found.maps
        ]  # fmt: skip
        values = [asdict(one) for one in found.values]
        screen.result({"text": found.text, "target": found.target, "maps": maps, "values": values})
    elif save is None:
        if found.target is not None:
            screen.note(f"target: {plain(found.target)}")
        for one in found.maps:
            _map(one)
        if found.values:
            _values(found)


def _map(one: AttentionMap) -> None:
    """For each query the keys it draws most from, the mean of the heads shown."""
    which = f"head {one.head_names[0]}" if len(one.head_names) == 1 else f"mean of {len(one.head_names)} heads"
    shown = screen.table("query", "draws from")
    for query, row in zip(one.queries, one.weights.mean(axis=0), strict=True):
        best = sorted(range(len(row)), key=lambda s: -row[s])[:TOP_KEYS]
        said = "   ".join(f"{plain(one.keys[s])} {row[s]:.0%}" for s in best if row[s] >= 0.005)
        shown.add_row(plain(query), said)
    screen.show(shown, f"{one.stack} layer {one.layer}, {which}")


def _values(found: Inspection) -> None:
    numbers = ["mean", "std", "least", "most", "norm"]
    shown = screen.table("site", "shape", *numbers, right=["shape", *numbers])
    for one in found.values:
        told = ("" if x != x else f"{x:,.3f}" for x in (one.mean, one.std, one.least, one.most, one.norm))
        shown.add_row(one.site, shape(one.shape), *told)
    screen.show(shown)


def report(found: Report, *, as_json: bool) -> None:
    """What `check` found."""
    if as_json:
        screen.result(found.to_dict())
        return
    out = screen.console()
    shown = screen.table("check", "difference", "limit", "", "", right=["difference", "limit"])
    for one in found.findings:
        verdict = {True: "ok", False: "FAILED", None: ""}[one.passed]
        limit = "" if one.limit is None else f"{one.limit:g}"
        shown.add_row(
            one.name, f"{one.difference:.2e}", limit, verdict, one.note, style="bold red" * (verdict == "FAILED")
        )
    screen.show(shown, found.model)
    for line in found.skipped:
        out.print(f"not done: {line}", style="dim")
    if found.first_difference is not None:
        out.print(f"first difference from transformers: {found.first_difference}", style="bold")
    out.print("passed" if found.passed else f"FAILED: over {found.threshold:g}", style="bold")


def costs(
    model: str, *, context: int | None, batch: int, dtype: str, offline: bool, ignore: Sequence[str], as_json: bool
) -> None:
    """Parameters, bytes and FLOPs of a config or header."""
    from triptych.checkpoints.header import read_header
    from triptych.count import count

    spec = read_header(model, ignore, offline=offline, weights=False).spec
    found, positions = count(spec), context or spec.context or POSITIONS
    source = positions if spec.layout == "encoder-decoder" else 0
    weights, cache = found.weight_bytes(dtype), found.cache_bytes(positions, batch=batch, dtype=dtype, source=source)
    if as_json:
        chosen = {"dtype": dtype, "weight_bytes": weights, "cache_bytes": cache}
        screen.result(found.to_dict(positions, batch=batch, source=source) | {"chosen": chosen})
        return
    numbers = ["parameters", "share"]
    shown = screen.table("part", *numbers, right=numbers)
    for name, number in found.parameters.items():
        if number:
            shown.add_row(name, f"{number:,}", f"{number / found.total:.1%}")
    shown.add_row("all", f"{found.total:,}", "", style="bold")
    if found.active != found.total:
        shown.add_row("of one token", f"{found.active:,}", f"{found.active / found.total:.1%}")
    place = f"{batch:,} × {positions:,} positions"
    rows = [(f"bytes of weights, {dtype}", f"{weights:,}", mib(weights))]
    if spec.decoder is not None:
        rows += [(f"bytes of cache, {dtype}, {place}", f"{cache:,}", mib(cache))]
    rows += [(f"FLOPs to read {place}", f"{batch * found.prefill_flops(positions, source=source):,}", "")]
    if spec.decoder is not None:
        rows += [("FLOPs of one more token each", f"{batch * found.decode_flops(positions, source=source):,}", "")]
    rows += [(f"FLOPs to train on {place}", f"{batch * found.training_flops(positions, source=source):,}", "")]
    costs = screen.table("cost", "number", "size", right=["number", "size"])
    for row in rows:
        costs.add_row(*row)
    screen.show(shown, f"{spec.family}, {spec.layout}")
    screen.show(costs)


def machine(*, as_json: bool) -> None:
    """This machine, torch, and what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    from triptych import __version__, fetch
    from triptych import machine as here

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    with screen.waiting("asking torch"):
        threads = here.use_threads()
        torch = here.torch_facts()
    found, cache = here.look(), fetch.cache_directory()
    packages = sorted(path.name for path in (cache / "packages").glob("*-*") if path.is_dir())
    extras = {name: installed(name) for name in EXTRAS}
    if as_json:
        more = {"cache": str(cache), "packages": packages, "extras": extras, "threads": threads}
        screen.result({"triptych": __version__} | asdict(found) | {"torch": torch} | more)
        return
    cores = found.cores
    quota = "no quota" if cores.quota is None else f"quota of {cores.quota:g}"
    limit = "" if found.memory_limit is None else f", limited to {mib(found.memory_limit)}"
    rows = [
        ("triptych", __version__),
        ("system", f"{found.system}, {found.processor}"),
        ("cores", f"{cores.usable} usable of {cores.online} (bound to {cores.affinity}, {quota})"),
        ("threads", f"{threads}"),
        ("instructions", " ".join(found.isa) or "unknown"),
        ("memory", f"{_size(found.memory)}, {_size(found.memory_free)} free{limit}"),
        ("torch", f"{torch['version']}, {torch['code']} code"),
        ("GPU", f"{', '.join(torch['gpus']) or 'none'}; {torch['gpu']}"),
        ("cache", f"{cache}: {', '.join(packages) or 'empty'}"),
    ]
    rows += [(name, f"{got or 'not installed'}  ({EXTRAS[name]})") for name, got in extras.items()]
    screen.show(screen.facts(rows))


# Optional packages and what they are for.
EXTRAS = {
    "matplotlib": "loss.png of quickstart and train",
    "transformers": "check --against transformers",
    "gguf": "check of a .gguf file against transformers",
}


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else mib(nbytes)
