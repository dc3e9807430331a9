"""docs/lectures.md: every concept, example, correction and exercise of the lectures, and what came of it.

    python tools/lectures.py            runs what was never recorded or has changed since, and writes the page
    python tools/lectures.py --again    runs everything
    python tools/lectures.py --page     runs nothing

`lectures.toml` says what belongs to each entry - commands, labs, tests, an answer of our own; `lectures.results.json`
what the labs and the worked examples gave when they last ran, with a digest of the files they consist of.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, LABS = ROOT / "docs", ROOT / "src" / "triptych" / "labs"
DATA, RESULTS, PAGE = DOCS / "lectures.toml", DOCS / "lectures.results.json", DOCS / "lectures.md"
FRAME = {"__init__.py", "lab.py", "report.py"}  # of labs/: what a lab is and how it is shown, not what it measures
KINDS = {"concept": "Concepts", "example": "Worked examples", "correction": "Corrections", "exercise": "Exercises"}
Plain = dict[str, Any]


def read_data() -> Plain:
    return tomllib.loads(DATA.read_text("utf-8"))


def read_results() -> Plain:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {"labs": {}, "examples": {}}


def entries(data: Plain) -> Iterator[tuple[str, str, Plain]]:
    """(kind, id, entry) in the order of the page."""
    for kind in KINDS:
        for name, entry in data[kind].items():
            yield kind, name, entry


# ---------------------------------------------------------------- what was run, and whether it still holds


def sources(module: str) -> set[Path]:
    """The files of labs/ that a module of labs/ consists of: its own, and those it imports from there."""
    found, waiting = set(), [module.split(".")]
    while waiting:
        path = LABS.joinpath(*waiting.pop())
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file() and path not in found:
            found.add(path)
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triptych.labs"):
                    # `from a import b`: b is a module or a name in a
                    waiting += [f"{node.module}.{name}".split(".")[2:] for name in ("", *(a.name for a in node.names))]
    return {path for path in found if path.parent != LABS or path.name not in FRAME}


def digest(kind: str, name: str) -> str:
    """Of all files of a lab, or of the worked examples."""
    files = sorted(sources(name.replace("-", "_"))) if kind == "labs" else [LABS / "walk" / "examples.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def wanted(data: Plain) -> dict[str, list[str]]:
    """The labs and the worked examples that the page tells of."""
    labs = {told.partition(":")[0] for _, _, entry in entries(data) for told in entry.get("labs", [])}
    examples = {name for _, _, entry in entries(data) for name in entry.get("examples", [])}
    return {"labs": sorted(labs), "examples": sorted(examples)}


def stale(data: Plain, results: Plain) -> dict[str, list[str]]:
    """What was never recorded, or has changed since."""
    return {
        kind: [name for name in names if results[kind].get(name, {}).get("sources") != digest(kind, name)]
        for kind, names in wanted(data).items()
    }


def record(names: dict[str, list[str]], results: Plain) -> None:
    """Run them, and write each result down as soon as there is one; draw the plots that the documentation shows."""
    import pictures

    from triptych import labs, machine
    from triptych.labs.walk import worked

    machine.use_threads()
    for name in names["labs"]:
        began = time.perf_counter()
        finding = labs.run(name)
        seconds = round(time.perf_counter() - began, 1)
        print(f"{name}: {finding.verdict}  {seconds} s", flush=True)
        checks = [{"claim": c.claim, "measured": c.shown, "criterion": c.criterion} for c in finding.checks]
        said = {"passed": finding.passed, "question": finding.question, "meaning": finding.meaning}
        keep(results, "labs", name, said | {"checks": checks, "seconds": seconds})
        pictures.of_lab(name, finding)
    for name in names["examples"]:
        walk = worked(name)
        keep(results, "examples", name, {"passed": walk.agrees, "outcome": walk.outcome})


def keep(results: Plain, kind: str, name: str, found: Plain) -> None:
    results[kind][name] = {"sources": digest(kind, name), **found}
    ordered = {kind: dict(sorted(told.items())) for kind, told in results.items()}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


# ---------------------------------------------------------------- the page


def page(data: Plain, results: Plain) -> str:
    """The whole of lectures.md."""
    counted = [f"{len(data[kind])} {title.lower()}" for kind, title in KINDS.items()]
    passed = sum(found["passed"] for found in results["labs"].values())
    summary = f"{', '.join(counted)}; {passed} of {len(wanted(data)['labs'])} labs pass."
    parts = ["<!-- Made by `make lectures` from lectures.toml and lectures.results.json. -->", data["opening"].strip()]
    parts.append(summary)
    for kind, title in KINDS.items():
        parts += [f"## {title}", data["about"][kind].strip()]
        parts += [told(kind, name, entry, results) for name, entry in data[kind].items()]
    parts += ["## What the labs measured", data["about"]["labs"].strip()]
    parts += [lab(name, found) for name, found in results["labs"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def told(kind: str, name: str, entry: Plain, results: Plain) -> str:
    """One entry: what it is about, an answer, and the commands, figures and tests that go with it."""
    label = {"exercise": f"{name}: ", "example": f"Example {name}: "}.get(kind, "")
    mark = f"{kind}-{name}".lower().replace(".", "-")
    rows = [f"- **Run:** {', '.join(f'`{command}`' for command in entry['run'])}"] if "run" in entry else []
    rows += [f"- **Measured:** {measured(one, results['labs'])}" for one in entry.get("labs", [])]
    for example in entry.get("examples", []):
        found = results["examples"].get(example, {"outcome": NOT})
        rows.append(f"- **Run:** `triptych explain --example {example}`. It ends in: {found['outcome']}")
    rows += [f"- **Figures:** {entry['figures']}"] if "figures" in entry else []
    rows += [f"- **Held by:** {grouped(entry['tests'])}"] if "tests" in entry else []
    rows += [f"- **Read:** {', '.join(entry['read'])}"] if "read" in entry else []
    rows += [f"- **Not yet:** {entry['later']}"] if "later" in entry else []
    heading = f"### {label}{entry['title']} {{ #{mark} }}"
    return "\n\n".join([heading, *(entry[key].strip() for key in ("asks", "answer") if key in entry), "\n".join(rows)])


NOT = "not recorded; run `make lectures`"


def grouped(tests: list[str]) -> str:
    """Tests of one file behind its name, said once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.removeprefix("tests/").partition("::")
        files.setdefault(file, []).extend([f"`{name}`"] if name else [])
    return "; ".join(f"`{file}`" + (": " if names else "") + ", ".join(names) for file, names in files.items())


def measured(lab: str, found: Plain) -> str:
    """`name: phrase; phrase` -> its verdict, and the criteria that hold one of these phrases (all, without any)."""
    name, _, phrases = lab.partition(": ")
    if name not in found:
        return f"lab `{name}` {NOT}"
    checks = {check["claim"]: check["measured"] for check in found[name]["checks"]}
    for phrase in phrases.split("; "):
        if not any(phrase in claim for claim in checks):
            raise SystemExit(f"lectures.toml: lab {name} claims nothing about {phrase!r}")
    chosen = [claim for claim in checks if any(phrase in claim for phrase in phrases.split("; "))]
    said = "; ".join(f"{claim}: {checks[claim]}" for claim in chosen)
    return f"[lab {name}](#lab-{name}), {'PASS' if found[name]['passed'] else 'FAIL'}. {said}"


def lab(name: str, found: Plain) -> str:
    """One lab: its question, its verdict with every criterion, and what it means."""
    head = f"### {name}: {'PASS' if found['passed'] else 'FAIL'} {{ #lab-{name} }}"
    rows = [" | ".join(cell.replace("|", "\\|") for cell in check.values()) for check in found["checks"]]
    table = "\n".join(f"| {row} |" for row in ["criterion | measured | must be", "--- | ---: | ---", *rows])
    asked = f"{found['question']} `triptych lab {name}`, {found['seconds']} s"
    return "\n\n".join([head, asked, table, found["meaning"]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/lectures.md.")
    parser.add_argument("--again", action="store_true", help="run every lab again")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    data, results = read_data(), read_results()
    if not given.page:
        record(wanted(data) if given.again else stale(data, results), results)
    PAGE.write_text(page(data, results), "utf-8")
    failed = [name for kind in results.values() for name, found in kind.items() if not found["passed"]]
    sys.exit(f"these failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
