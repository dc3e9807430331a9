"""Results of single seeds, kept as JSON files, so that an interrupted run over several seeds continues.

The name of a file contains a digest of what determines its result: the lab, its sizes and inputs, and the source files.
A damaged file is not used: its seed runs again and replaces it.  Only results are kept; a lab trains its models anew.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

import triptych
from triptych.checkpoints.save import atomic_write
from triptych.errors import CheckpointError, InputError
from triptych.files import read_regular
from triptych.page import AttentionMap, AttentionSection, Curve, Facts, Prose, Samples, Section, TableSection
from . import lab_class
from .lab import Conclusion, LabResult, Setup, shown_sizes

LIMIT = 256 << 20  # bytes of one file
_VALIDATED: dict[str, type[Any]] = {kind.kind: kind for kind in (TableSection, Facts, Curve, Prose, Samples)}


@dataclass(frozen=True, eq=False)
class SeedRun:
    """The result of one seed and the seconds that it took; `kept` where it was read from a file."""

    seed: int
    seconds: float
    result: LabResult
    kept: bool = False


@dataclass(frozen=True)
class KeptResults:
    """Results in `folder`.  `sources` is a digest of the source files that determine them; `note` is called with one
    line about a file that cannot be used."""

    folder: Path
    sources: str
    note: Callable[[str], None]

    def path(self, name: str, setup: Setup) -> Path:
        """Of the result of `setup.seed`."""
        identity = self._identity(name, setup) | {"seed": None}  # seeds of one run have one key
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name}-{key[:16]}-seed{setup.seed}.json"

    def read(self, name: str, setup: Setup) -> SeedRun | None:
        """The kept result of this run, or None where there is none or its file is damaged."""
        path = self.path(name, setup)
        if not path.exists():
            return None
        try:
            data = json.loads(read_regular(path, LIMIT, InputError))
            if data["identity"] != self._identity(name, setup):
                raise InputError("it is of another run")
            return SeedRun(setup.seed, float(data["seconds"]), _result(data["result"]), kept=True)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:  # InputError and bad JSON are ValueErrors
            reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            self.note(f"{path} is damaged ({reason}); seed {setup.seed} runs again")
            return None

    def write(self, name: str, setup: Setup, run: SeedRun) -> None:
        """Keep a result.  Raises InputError where the file cannot be written."""
        data = {"identity": self._identity(name, setup), "seconds": run.seconds, "result": _plain_result(run.result)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(data, ensure_ascii=False, default=methodcaller("tolist"))  # arrays
            atomic_write(self.path(name, setup), text.encode())
        except (OSError, CheckpointError) as problem:
            raise InputError(f"{self.folder}: the result of seed {run.seed} cannot be written ({problem})") from None

    def _identity(self, name: str, setup: Setup) -> dict[str, Any]:
        """Everything that determines a result, as plain values."""
        sizes = shown_sizes(lab_class(name), setup)
        inputs = {"model": _state(setup.model), "data": _state(setup.data)}
        return {
            "lab": name, "seed": setup.seed, "sizes": sizes, "full": setup.full, "inputs": inputs,
            "torch": torch.__version__, "sources": self.sources,
        }  # fmt: skip


@cache
def package_digest() -> str:
    """SHA-256 of all source files of both packages: a result that was kept must not outlive a change of any part."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in package_files())).hexdigest()


def package_files() -> list[Path]:
    """The Python and C files and the tables of the library and of the lectures, in one order on every machine."""
    folders = [Path(triptych.__file__).parent, Path(__file__).parents[1]]
    return [path for root in folders for path in sorted(root.rglob("*")) if path.suffix in (".py", ".c", ".h", ".toml")]


def _state(named: str | None) -> list[str]:
    """The name of a model or text and, where it is a path, sizes and times of change of its files."""
    if named is None:
        return []
    path = Path(named)
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    stats = [(file, file.stat()) for file in files if file.is_file()]
    return [named, *(f"{file.name} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)]


def _plain_result(result: LabResult) -> dict[str, Any]:
    return {
        "question": result.question,
        "conclusion": [asdict(clause) for clause in result.conclusion],
        "remarks": result.remarks,
        "sections": [_plain_section(section) for section in result.sections],
    }


def _plain_section(section: Section) -> dict[str, Any]:
    maps = isinstance(section, AttentionSection) and all(isinstance(one, AttentionMap) for one in section.maps)
    if not maps and section.kind not in _VALIDATED:
        text = "This part is not kept with the results of several seeds; run the lab with one seed to see it."
        section = Prose(section.title, text)
    return {"kind": section.kind, "values": asdict(section)}


def _result(data: dict[str, Any]) -> LabResult:
    conclusion = TypeAdapter(Conclusion).validate_python(data["conclusion"])
    sections = tuple(_section(section) for section in data["sections"])
    if not isinstance(data["question"], str) or not isinstance(data["remarks"], str) or not conclusion:
        raise InputError("it has no question, remarks or conclusion")
    return LabResult(data["question"], conclusion, sections, data["remarks"])


def _section(data: dict[str, Any]) -> Section:
    values = data["values"]
    if data["kind"] == AttentionSection.kind:
        return AttentionSection(**values | {"maps": [AttentionMap(**one) for one in values["maps"]]})
    section: Section = TypeAdapter(_VALIDATED[data["kind"]]).validate_python(values)
    return section
