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
    found: set[Path] = set()
    waiting = [module.split(".")]
    while waiting:
        path = LABS.joinpath(*waiting.pop())
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file() and path not in found:
            found.add(path)
            tree = ast.parse(path.read_text("utf-8"))
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            waiting += [name.split(".")[2:] for node in imports for name in imported(node)]
    return {path for path in found if path.parent != LABS or path.name not in FRAME}


def imported(node: ast.ImportFrom) -> list[str]:
    """Names of modules under triptych.labs that an import may mean: `from a import b` is a.b or a name in a."""
    module = node.module or ""
    names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("triptych.labs.")]


def digest(module: str) -> str:
    files = sorted(sources(module))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def module_of(kind: str, name: str) -> str:
    """The module of labs/ in which a lab, or a worked example, is."""
    return name.replace("-", "_") if kind == "labs" else "walk.examples"


def wanted(data: Plain) -> dict[str, list[str]]:
    """The labs and the worked examples that the page tells of."""
    labs = {told.partition(":")[0] for _, _, entry in entries(data) for told in entry.get("labs", [])}
    examples = {name for _, _, entry in entries(data) for name in entry.get("examples", [])}
    return {"labs": sorted(labs), "examples": sorted(examples)}


def stale(data: Plain, results: Plain) -> dict[str, list[str]]:
    """What was never recorded, or has changed since."""
    return {
        kind: [name for name in names if results[kind].get(name, {}).get("sources") != digest(module_of(kind, name))]
        for kind, names in wanted(data).items()
    }


def record(names: dict[str, list[str]], results: Plain) -> None:
    """Run them, and write each result down as soon as there is one."""
    from triptych import labs, machine

    machine.use_threads()
    for name in names["labs"]:
        print(name, end=" ", flush=True)
        began = time.perf_counter()
        finding = labs.run(name)
        told = finding.to_dict()
        kept = {key: told[key] for key in ("question", "passed", "meaning", "checks")}
        seconds = time.perf_counter() - began
        print(f"{finding.verdict}  {seconds:.1f} s", flush=True)
        keep(results, "labs", name, kept | {"seconds": round(seconds, 1)})
    for name in names["examples"]:
        from triptych.labs.walk import worked

        walk = worked(name)
        print(name, walk.outcome, flush=True)
        keep(results, "examples", name, {"passed": walk.agrees, "outcome": walk.outcome, "verdict": walk.verdict})


def keep(results: Plain, kind: str, name: str, found: Plain) -> None:
    results[kind][name] = {"sources": digest(module_of(kind, name)), **found}
    ordered = {kind: dict(sorted(told.items())) for kind, told in results.items()}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


# ---------------------------------------------------------------- the page


def page(data: Plain, results: Plain) -> str:
    """The whole of lectures.md."""
    parts = ["<!-- Made by `make lectures` from lectures.toml and lectures.results.json. -->", data["opening"].strip()]
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
    lines = [f"`{command}`" for command in entry.get("run", [])]
    rows = [f"- Run: {', '.join(lines)}"] if lines else []
    rows += [f"- Measured: {measured(one, results['labs'])}" for one in entry.get("labs", [])]
    for example in entry.get("examples", []):
        found = results["examples"].get(example)
        rows.append(f"- Run: `triptych explain --example {example}`. It ends in: {found['outcome'] if found else NOT}")
    rows += [f"- Figures: {entry['figures']}"] if "figures" in entry else []
    tests = [test.removeprefix("tests/").replace("::", "`: `") for test in entry.get("tests", [])]
    rows += [f"- Held by: {', '.join(grouped(tests))}"] if tests else []
    rows += [f"- Read: {', '.join(entry['read'])}"] if "read" in entry else []
    rows += [f"- Not yet: {entry['later']}"] if "later" in entry else []
    heading = f"### {label}{entry['title']} {{ #{mark} }}"
    return "\n\n".join([heading, *(entry[key].strip() for key in ("asks", "answer") if key in entry), "\n".join(rows)])


NOT = "not recorded; run `make lectures`"


def grouped(tests: list[str]) -> Iterator[str]:
    """Tests of one file behind its name, said once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("`: `")
        files.setdefault(file, []).append(f"`{name}`")
    for file, names in files.items():
        yield f"`{file}`: {', '.join(names)}"


def measured(lab: str, found: Plain) -> str:
    """`name: claim; claim` -> its verdict, and the checks whose claims hold one of these phrases (all without any)."""
    name, _, phrases = lab.partition(": ")
    if name not in found:
        return f"lab `{name}` {NOT}"
    checks = found[name]["checks"]
    chosen = [check for check in checks if any(phrase in check["claim"] for phrase in phrases.split("; "))]
    if len(chosen) < len(phrases.split("; ")):
        raise SystemExit(f"lectures.toml: {lab!r} asks for a claim that the lab does not make")
    said = "; ".join(f"{check['claim']}: {number(check['measured'])}" for check in chosen)
    return f"[lab {name}](#lab-{name}), {'PASS' if found[name]['passed'] else 'FAIL'}. {said}"


def lab(name: str, found: Plain) -> str:
    """One lab: its question, its verdict with every criterion, and what it means."""
    rows = [
        f"| {check['claim'].replace('|', chr(92) + '|')} | {number(check['measured'])} | {bounds(check)} |"
        for check in found["checks"]
    ]
    head = f"### {name}: {'PASS' if found['passed'] else 'FAIL'} {{ #lab-{name} }}\n\n{found['question']}"
    table = "\n".join(["| criterion | measured | must be |", "| --- | ---: | --- |", *rows])
    return f"{head} `triptych lab {name}`\n\n{table}\n\n{found['meaning']}"


def number(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.4g}"


def bounds(check: Plain) -> str:
    least, most = check["least"], check["most"]
    if least is not None and most is not None:
        return number(least) if least == most else f"{number(least)} to {number(most)}"
    return f"at most {number(most)}" if most is not None else f"at least {number(least)}"


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
