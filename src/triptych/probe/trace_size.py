"""Checks before a run: the bytes that its trace will hold, and that each read and edit matches a row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from triptych import machine
from triptych.arguments import integer
from triptych.errors import ConfigError, ProbeError, shown
from triptych.nn import Transformer
from triptych.program import lower
from .reads_and_edits import Edit, Plan, Read, select
from .sites import CONTEXT_SITES, Site
from .trace_values import Statistics

WITHOUT_MEMORY = 1 << 30  # bytes a trace may take where the system does not say what is free
TRACE_MEMORY_FRACTION = 0.5  # of the free memory otherwise
LARGEST = 3  # sites that a refusal names


@dataclass(frozen=True)
class TraceSize:
    """The bytes that a trace will keep: `sites` by the name of the site, `total` of all together.

    The total may be smaller than the sum, since a tensor that several sites share is kept once.
    """

    sites: dict[str, int]
    total: int

    def __str__(self) -> str:
        lines = [f"{nbytes:>15,}  {site}" for site, nbytes in self.sites.items()]
        once = ", values that sites share once" if self.total < sum(self.sites.values()) else ""
        return "\n".join([*lines, f"{self.total:>15,}  bytes in all{once}"])


def trace_size(
    plan: Plan, lengths: Sequence[int], sources: Sequence[int] = (), itemsize: int = 4, *, new: int | None = None,
    beams: int = 1, shared: Mapping[str, str] | None = None,
) -> TraceSize:  # fmt: skip
    """The bytes that the reads keep of decoder (or only) rows of these final lengths and source rows of those.

    `itemsize` is that of the model's numbers.  In a generation of `new` tokens a row, logits exist for that many
    positions only, and a search keeps what each of its `beams` reads there until it ends.  `shared` maps sites to one
    that passes the same tensor (`shared_sites`).
    """
    sites: dict[str, int] = {}
    once: dict[Hashable, int] = {}
    for name, reads in plan.reads.items():
        site = plan.sites[name]
        rows = sources if name.startswith("encoder.") or site.of_source else lengths
        keys = sources if ".cross." in name else rows
        for number, read in enumerate(reads):
            nbytes = 0
            for item in select(read.items, range(len(rows))):
                whole = _row_bytes(site, read, rows[item], keys[item], itemsize, new)
                nbytes += whole
                if beams > 1 and new and rows is lengths:
                    most = keys[item] - new if keys is rows else keys[item]
                    nbytes += (beams - 1) * (whole - _row_bytes(site, read, rows[item] - new, most, itemsize, 0))
            sites[name] = sites.get(name, 0) + nbytes
            key: Hashable = name, number
            if shared is not None and not (read.grad or site.per_key or read.reduce == "mean"):
                key = shared.get(name, name), repr((read.items, read.at, read.heads, read.dtype, read.reduce))
            once[key] = nbytes
    return TraceSize(sites, sum(once.values()))


def limit_of(max_bytes: int | None) -> int:
    """`max_bytes`, or half of the free memory.  Raises InputError for what is no number of bytes."""
    if max_bytes is None:
        free = machine.free_memory()
        return WITHOUT_MEMORY if free is None else int(free * TRACE_MEMORY_FRACTION)
    return integer("max_bytes", max_bytes, 0)


def check_size(size: TraceSize, limit: int, max_bytes: int | None) -> None:
    """Raise ProbeError for more than `limit`, which is `limit_of(max_bytes)`, saying how to read less."""
    if size.total <= limit:
        return
    largest = sorted(size.sites, key=lambda name: -size.sites[name])[:LARGEST]
    named = ", ".join(f"{name} {size.sites[name]:,}" for name in largest) + ", ..." * (len(size.sites) > LARGEST)
    what = f"max_bytes={limit:,}" if max_bytes is not None else f"half of the free memory, {limit:,}"
    raise ProbeError(
        f"the reads would keep {size.total:,} bytes, over {what} ({named}); choose layers=, heads=, at= or items=, "
        "dtype='bf16', reduce= (Statistics() of a pattern), fewer or shorter texts, or raise max_bytes"
    )


def check_fires(plan: Plan, lengths: Sequence[int], sources: Sequence[int], *, allow_null: bool) -> None:
    """Raise ProbeError for a read, or an edit unless `allow_null`, of rows or positions that none of the rows has.

    `lengths` are those of the decoder's (or only) rows, `sources` those of the rows that an encoder beside it reads.
    """
    every: list[tuple[str, Read | Edit]] = [(name, read) for name, reads in plan.reads.items() for read in reads]
    every += [] if allow_null else [(name, edit) for name, edits in plan.edits.items() for edit in edits]
    for name, chosen in every:
        if chosen.items is None and chosen.at is None:
            continue
        site = plan.sites[name]
        rows = sources if sources and (name.startswith("encoder.") or site.of_source) else lengths
        if not any(select(chosen.at, range(rows[item])) for item in select(chosen.items, range(len(rows)))):
            what = f"never fired: {name}" if isinstance(chosen, Read) else f"the edit at {name} would change nothing"
            longest = max(rows, default=0) - 1
            raise ProbeError(
                f"{what}; it selects items={shown(chosen.items)}, at={shown(chosen.at)} of rows 0 to {len(rows) - 1} "
                f"with positions up to {longest}"
            )


def shared_sites(module: Transformer) -> dict[str, str]:
    """For each site the first that passes the same tensor in an uncached forward; {} where nothing can be lowered."""
    try:
        program = lower(module)
    except ConfigError:
        return {}
    same: dict[tuple[str, str], Hashable] = {}  # entry and value -> what stands for it and all that are the same
    of_site: dict[str, Hashable] = {}
    owner: dict[Hashable, str] = {}  # what stands for some values -> the first site that passes them

    def passes(site: str, value: Hashable) -> None:
        of_site[site] = value
        owner.setdefault(value, site)

    for entry, body in program.entries.items():
        for step in body.instructions:
            inputs = {
                argument: of_site.get(name, same.get((entry, name), (entry, name)))
                for argument, name in step.inputs.items()
            }
            if step.op == "extend":
                same[entry, step.out[0]] = inputs[step.attributes["leaf"]]
            elif step.op == "site":
                passes(step.out[0], *inputs.values())
            elif step.op == "attend":
                for port in step.attributes["ports"]:
                    if port.endswith(CONTEXT_SITES):
                        passes(port, inputs["k" if port.endswith(CONTEXT_SITES[0]) else "v"])
    return {site: owner[value] for site, value in of_site.items()}


def _row_bytes(site: Site, read: Read, length: int, keys: int, itemsize: int, new: int | None) -> int:
    """The bytes that a read keeps of one row of so many positions and keys."""
    positions = length if read.at is None else len(select(read.at, range(length)))
    heads = len(select(read.heads, range(site.heads or 1)))
    if site.name == "logits" and new is not None:
        positions = min(positions, new)
    if isinstance(read.reduce, Statistics):
        return read.reduce.nbytes(heads, positions, keys) if positions else 0
    width = keys if site.per_key else site.width // (site.heads or 1)
    if site.per_key or read.reduce is not None:
        itemsize = max(itemsize, 4)  # computed in fp32 or better
    if read.reduce == "mean":
        positions = min(positions, 1)
    elif isinstance(read.dtype, torch.dtype):
        itemsize = read.dtype.itemsize
    heads = min(heads, 1) if read.reduce == "mean_heads" else heads
    return positions * heads * (1 if read.reduce == "norm" else width) * itemsize
