"""What was loaded from where, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LoadedTensor:
    """One of our parameters and the stored tensors it came from."""

    ours: str
    sources: tuple[str, ...]
    file: str
    dtype: str  # as stored, in the format's spelling
    shape: tuple[int, ...]  # ours, after `op`
    op: str = "copy"


@dataclass(frozen=True)
class LoadReport:
    """How a checkpoint was loaded; `print(report)` shows it.

    tensors   for each parameter the tensor of the file that it comes from, and how that was stored.
    ties      parameter -> the parameter whose tensor it shares.
    ignored   tensor that was not read -> the reason.
    notes     lines on what differs from the file or from the arguments of `load`, such as another dtype.
    packed    how many matrices are packed, with their bytes; empty where none is.
    """

    tensors: tuple[LoadedTensor, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    packed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, ready for JSON."""
        tensors = [{**asdict(t), "sources": list(t.sources), "shape": list(t.shape)} for t in self.tensors]
        more = {"ignored": dict(self.ignored), "notes": [*self._on_packed, *self.notes]}
        return {"tensors": tensors, "ties": dict(self.ties), **more}

    def __str__(self) -> str:
        rows = [("parameter", "shape", "from", "stored as", "op", "file")]
        for t in self.tensors:
            rows.append((t.ours, "×".join(map(str, t.shape)), " + ".join(t.sources), t.dtype, t.op, t.file))
        rows += [(alias, "", target, "", "tie", "") for alias, target in self.ties.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(f"{len(self.tensors)} loaded, {len(self.ties)} tied, {len(self.ignored)} ignored")
        return "\n".join(
            [*lines, *(f"ignored  {line}" for line in by_reason(self.ignored)), *self._on_packed, *self.notes]
        )

    @property
    def _on_packed(self) -> list[str]:
        return [self.packed] if self.packed else []


def by_reason(ignored: Mapping[str, str]) -> Iterator[str]:
    """One line a reason, with the first tensor it holds for and how many more there are."""
    for why in dict.fromkeys(ignored.values()):
        first, *others = [name for name, reason in ignored.items() if reason == why]
        yield f"{first}{f' and {len(others)} more' if others else ''}: {why}"
