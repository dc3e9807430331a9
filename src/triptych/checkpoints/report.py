"""What was loaded from where, for a person and for a program, and the error when it does not add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from triptych.checkpoints.source import shown
from triptych.errors import CheckpointError, nearest


@dataclass(frozen=True)
class Loaded:
    """One of our parameters and the stored tensors it came from."""

    ours: str
    sources: tuple[str, ...]
    file: str
    dtype: str  # as stored, in the format's spelling
    shape: tuple[int, ...]  # ours, after `op`
    op: str = "copy"


@dataclass(frozen=True)
class LoadReport:
    """Where every parameter came from.  `ties` maps an alias to the parameter it shares; `ignored` was not read."""

    tensors: tuple[Loaded, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, ready for JSON."""
        tensors = [{**asdict(t), "sources": list(t.sources), "shape": list(t.shape)} for t in self.tensors]
        return {"tensors": tensors, "ties": dict(self.ties), "ignored": list(self.ignored)}

    def __str__(self) -> str:
        rows = [("parameter", "shape", "from", "stored as", "op", "file")]
        for t in self.tensors:
            rows.append((t.ours, "×".join(map(str, t.shape)), " + ".join(t.sources), t.dtype, t.op, t.file))
        rows += [(alias, "", target, "", "tie", "") for alias, target in self.ties.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(f"{len(self.tensors)} loaded, {len(self.ties)} tied, {len(self.ignored)} ignored")
        return "\n".join(lines + [f"ignored  {name}" for name in self.ignored])


def missing_extra_error(path: Path | str, missing: Collection[str], extra: Collection[str]) -> CheckpointError:
    """The one-line error for tensors a model wants and `path` lacks, and for tensors it holds that nothing reads."""
    problems = []
    if missing:
        problems.append(f"{_few(missing, extra)} missing")
    if extra:
        problems.append(f"{_few(extra, missing)} in the file but not in the model")
    return CheckpointError(f"{path}: {'; '.join(problems)}")


def _few(names: Collection[str], others: Collection[str], limit: int = 3) -> str:
    """`"5 tensors ('a' (did you mean 'b'?), 'c', 'd', ...) are"`."""
    first = [shown(name) + nearest(name, others) for name in sorted(names)[:limit]]
    listed = ", ".join(first) + (", ..." if len(names) > limit else "")
    return f"{len(names)} tensors ({listed}) are" if len(names) > 1 else f"1 tensor ({listed}) is"
