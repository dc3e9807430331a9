"""Records the labs, and writes the pages of the lectures: docs/lectures.md, docs/lectures/ and docs/learn/path.md.

    python tools/lectures.py                 runs what is not recorded or has changed since, and writes the pages
    python tools/lectures.py --labs NAME...  runs of that only these labs
    python tools/lectures.py --again         runs everything, or with --labs these labs
    python tools/lectures.py --labs NAME --full --seeds 1
                                             the same labs with their full sizes and one seed
    python tools/lectures.py --labs NAME --model DIR
                                             the same lab with a model that a recipe has trained
    python tools/lectures.py --processes 2   two labs at a time, with a share of the threads each
    python tools/lectures.py --confirm       runs the stale labs at their first seed alone, and keeps what is recorded
                                             of those that measure the same there, to four digits, as before
    python tools/lectures.py --page          runs nothing
    python tools/lectures.py --stale         lists the results that are stale, and writes nothing

`lectures.toml` has the entries: commands, labs, tests and our own answers.  `lectures.results.json` has the results of
the last run of each lab and worked example, with a digest of the code that it imports, directly or not, comments and
docstrings left out; of labs only the modules count whose functions a run calls, and those that have none.  A result is
stale when that has changed since, until it is recorded again or confirmed; it stays on the page, marked.  A lab runs
with the sizes that `triptych lab NAME` has, and with as many seeds as its `seeds` says, from `FIRST_SEED` on: none of
the seeds at which labs are developed.  The finished seeds of a run that was interrupted are in `runs/lectures`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych_lectures.labs.lab import Clause
    from triptych_lectures.labs.seeds import SeedsResult

from lecture_pages import LecturePages, entries
from lecture_sources import EnteredModules
from lecture_sources import digest as digest_of_sources

from triptych_lectures.labs import LABS, module_of
from triptych_lectures.labs.texts import TEXTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DATA, RESULTS = DOCS / "lectures.toml", DOCS / "lectures.results.json"
SEEDS = ROOT / "runs" / "lectures"  # results of single seeds
FIRST_SEED = 6000
ENOUGH = 0.9  # the share of seeds in which a recorded lab has to pass
Plain = dict[str, Any]


def read_data() -> Plain:
    return tomllib.loads(DATA.read_text("utf-8"))


def read_results() -> Plain:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {"labs": {}, "examples": {}}


# ---------------------------------------------------------------- recorded results


def digest(kind: str, name: str, entered: Sequence[str] | None = None) -> str:
    """SHA-256 of the source files of worked examples, or of a lab and of its words in labs.toml: of all files that the
    lab imports, or of those that count where its run calls functions of the modules `entered`."""
    if kind != "labs":
        return digest_of_sources("triptych.explain.examples")
    of_files = digest_of_sources(module_of(name), entered=entered)
    return hashlib.sha256(f"{of_files} {sorted(TEXTS[name].items())}".encode()).hexdigest()


def wanted(data: Plain) -> dict[str, list[str]]:
    """The labs and the worked examples that the page quotes."""
    labs = {lab.partition(":")[0] for _, _, entry in entries(data) for lab in entry.get("labs", [])}
    examples = {name for _, _, entry in entries(data) for name in entry.get("examples", [])}
    return {"labs": sorted(labs), "examples": sorted(examples)}


def stale(data: Plain, results: Plain) -> dict[str, list[str]]:
    """The labs and examples that are not recorded, or were recorded before a change of their sources."""
    return {
        kind: [name for name in names if (one := results[kind].get(name)) is None or is_stale(kind, name, one)]
        for kind, names in wanted(data).items()
    }


def is_stale(kind: str, name: str, result: Plain) -> bool:
    return bool(result["sources"] != digest(kind, name, result.get("entered")))


def marked(results: Plain, old: dict[str, list[str]]) -> Plain:
    """`results` with a mark on those that are stale, for the page."""
    return {
        kind: {name: result | {"stale": name in old[kind]} for name, result in of_kind.items()}
        for kind, of_kind in results.items()
    }


def chosen(data: Plain, results: Plain, labs: list[str] | None, *, again: bool) -> dict[str, list[str]]:
    """What to run: what is stale, or everything; of the labs only `labs`, where they are named."""
    every = wanted(data)
    if unknown := [name for name in labs or [] if name not in every["labs"]]:
        raise SystemExit(
            f"no entry of lectures.toml quotes a lab {unknown[0]!r}; they quote: {', '.join(every['labs'])}"
        )
    names = every if again else stale(data, results)
    return names if labs is None else {"labs": [name for name in labs if name in names["labs"]], "examples": []}


def record(
    names: dict[str, list[str]],
    results: Plain,
    *,
    full: bool = False,
    seeds: int | None = None,
    model: str | None = None,
    processes: int = 1,
) -> None:
    """Run them, `processes` labs at a time, save each result as soon as there is one, and draw the plots that the
    documentation shows."""
    from triptych import machine
    from triptych.explain import worked

    threads = max(1, machine.threads() // processes)
    task = partial(recorded_lab, threads=threads, full=full, seeds=seeds, model=model)
    with in_processes(processes, threads) as run:
        for name, recorded in run(task, longest_first(names["labs"], results)):
            save(results, "labs", name, recorded)
            for finished in SEEDS.glob(f"{name}-{'[0-9a-f]' * 16}-seed*.json"):
                finished.unlink()  # so that --again runs them again
    for name in names["examples"]:
        walk = worked(name)
        save(results, "examples", name, {"passed": walk.agrees, "outcome": walk.outcome})


@contextlib.contextmanager
def in_processes(count: int, threads: int) -> Iterator[Callable[..., Iterator[tuple[str, Any]]]]:
    """`map` over so many processes at once, whose results come in any order; in this process for one."""
    if count == 1:
        yield map
        return
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # of the processes to come
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield pool.imap_unordered


def longest_first(labs: list[str], results: Plain) -> list[str]:
    """The labs in the order of their last recorded seconds, so that several processes end at about the same time."""
    return sorted(labs, key=lambda name: -results["labs"].get(name, {}).get("seconds", 0.0))


def recorded_lab(
    name: str, *, threads: int, full: bool, seeds: int | None = None, model: str | None = None
) -> tuple[str, Plain]:
    """Run a lab, print its verdict and draw its plot; -> its name, and what is recorded."""
    import pictures
    import torch

    torch.set_num_threads(threads)
    result, recorded = run_lab(name, seeds, full=full, model=model)
    recorded["entered"] = entered_by(name, full=full, model=model)
    print(f"{name}: {result.verdict}  {recorded['seconds']} s", flush=True)
    pictures.of_lab(name, result, recorded["command"])
    return name, recorded


def run_lab(
    name: str, count: int | None = None, *, full: bool = False, model: str | None = None
) -> tuple[SeedsResult, Plain]:
    """The result of a lab, and what is recorded: over `count` seeds, by default its `seeds`, with its `full` sizes or
    the default ones.  With `model`, a directory, the lab judges this model and one seed."""
    from triptych_lectures import labs
    from triptych_lectures.labs.kept_results import KeptResults
    from triptych_lectures.labs.lab import Setup, shown_sizes
    from triptych_lectures.labs.seeds import SeedsResult, over_seeds

    lab = labs.lab_class(name)
    setup = Setup(full=full, model=model, seed=FIRST_SEED, progress=lambda text: print(f"{name}: {text}", flush=True))
    kept = KeptResults(SEEDS, digest("labs", name), print)
    seeds = 1 if model is not None else count or lab.seeds
    run = over_seeds(name, setup, count=seeds, kept=kept)
    result = run.result
    assert isinstance(result, SeedsResult)
    sizes = shown_sizes(lab, setup)
    options = ["--full"] if full else [] if model is None else [f"--model {model}"]
    options += [*([f"--seeds {seeds}"] if seeds > 1 else []), f"--seed {FIRST_SEED}"]
    words = {"command": " ".join(["triptych lab", name, *options])}
    remarks = result.runs[0].result.remarks  # without the sentence on seeds, which stands in the index of the pages
    passed = result.held >= ENOUGH * seeds
    words |= {"passed": passed, "question": result.question, "remarks": remarks, "sizes": sizes}
    words |= {"falsified_by": lab.falsified_by, "seeds": len(result.runs), "held": result.held}
    conclusion = [recorded_clause(clause) for clause in result.conclusion]
    return result, words | {"conclusion": conclusion, "seconds": round(run.seconds, 1)}


def entered_by(name: str, *, full: bool, model: str | None) -> list[str]:
    """The modules of this repository whose functions a run of the lab calls, at the first seed."""
    from triptych_lectures.labs.lab import Setup
    from triptych_lectures.labs.report import timed

    with EnteredModules() as entered:
        timed(name, Setup(full=full, model=model, seed=FIRST_SEED, progress=lambda text: None))
    return sorted(entered.names)


def confirm(names: Sequence[str], results: Plain, *, processes: int = 1) -> None:
    """Run labs at their first seed, and save those that measure what is recorded of it; print which do not."""
    from triptych import machine

    threads = max(1, machine.threads() // processes)
    task = partial(confirmed_lab, results=results["labs"], threads=threads)
    with in_processes(processes, threads) as run:
        for name, recorded in run(task, longest_first([*names], results)):
            print(
                f"{name}: {'measures something else; record it again' if recorded is None else 'confirmed'}", flush=True
            )
            if recorded is not None:
                save(results, "labs", name, recorded)


def confirmed_lab(name: str, *, results: Plain, threads: int) -> tuple[str, Plain | None]:
    """-> the lab's name and what is recorded of it, with the texts of today, or None where its first seed measures
    something else, or is judged by other criteria."""
    import torch

    from triptych_lectures import labs
    from triptych_lectures.labs.lab import Setup, number, shown_sizes
    from triptych_lectures.labs.report import timed

    torch.set_num_threads(threads)
    before, options = results[name], results[name]["command"].split()
    model = options[options.index("--model") + 1] if "--model" in options else None
    setup = Setup(full="--full" in options, model=model, seed=FIRST_SEED, progress=lambda text: None)
    with EnteredModules() as entered:
        result = timed(name, setup).result
    assert result is not None
    measured = [[(number(c.measured), c.criterion) for c in clause.checks] for clause in result.conclusion]
    first = [[(check.get("seeds", [check["measured"]])[0], check["criterion"]) for check in clause["checks"]]
             for clause in before["conclusion"]]  # fmt: skip
    if measured != first:
        return name, None
    lab = labs.lab_class(name)
    words = {"question": result.question, "remarks": result.remarks, "falsified_by": lab.falsified_by}
    conclusion = [
        old | ({"text": new.text} if old["held"] == before["seeds"] else {})
        for old, new in zip(before["conclusion"], result.conclusion, strict=True)
    ]
    sizes = {"sizes": shown_sizes(lab, setup)}
    return name, before | words | sizes | {"conclusion": conclusion, "entered": sorted(entered.names)}


def recorded_clause(clause: Clause) -> Plain:
    """A statement, in how many seeds it holds, and its criteria with what each seed measured."""
    from triptych_lectures.labs.lab import number
    from triptych_lectures.labs.seeds import SeedsClause

    assert isinstance(clause, SeedsClause)
    checks = []
    for c in clause.spread:
        spread = {"seeds": [number(x) for x in c.values]} if len(clause.seeds) > 1 else {}
        checks.append({"claim": c.claim, "measured": c.shown, "criterion": c.criterion, **spread})
    return {"text": clause.text, "held": clause.held_in, "checks": checks}


def save(results: Plain, kind: str, name: str, result: Plain) -> None:
    """Put one result into `results` and write the whole file."""
    results[kind][name] = {"sources": ""} | result | {"sources": digest(kind, name, result.get("entered"))}
    ordered = {kind: dict(sorted(of_kind.items())) for kind, of_kind in results.items()}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


# ---------------------------------------------------------------- the pages


def pages(data: Plain, results: Plain) -> dict[str, str]:
    """The text of each page by its path in docs/."""
    return LecturePages(data, results, lab_pictures()).texts


def lab_pictures() -> dict[str, str]:
    """The pictures of labs in docs/."""
    files = sorted((DOCS / "pictures").iterdir())
    return {file.stem: f"pictures/{file.name}" for file in files if file.stem in LABS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the labs, and write the pages of the lectures.")
    parser.add_argument("--again", action="store_true", help="run every lab again")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--stale", action="store_true", help="list the stale results, and run and write nothing")
    parser.add_argument("--confirm", action="store_true", help="run the stale labs at their first seed alone")
    parser.add_argument("--full", action="store_true", help="record the sizes of `triptych lab NAME --full`")
    parser.add_argument("--seeds", type=int, metavar="N", help="record so many seeds, not those of the lab")
    parser.add_argument("--labs", nargs="+", metavar="NAME", help="run only these labs")
    parser.add_argument("--model", metavar="DIR", help="judge this model; with --labs and one lab")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="run N labs at a time")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error("--processes must be at least 1")
    if options.model is not None and len(options.labs or []) != 1:
        parser.error("--model needs --labs with one lab, which judges this model")
    if options.model is not None and Path(options.model).is_absolute():
        parser.error("--model must be relative to the project, as the pages print the command")
    data, results = read_data(), read_results()
    if options.stale:
        old = stale(data, results)
        print("\n".join(f"{kind} {name}" for kind, names in old.items() for name in names) or "no result is stale")
        return
    if options.confirm:
        confirm(chosen(data, results, options.labs, again=options.again)["labs"], results, processes=options.processes)
    elif not options.page:
        names = chosen(data, results, options.labs, again=options.again)
        record(names, results, full=options.full, seeds=options.seeds, model=options.model, processes=options.processes)
    results = read_results()  # in the order of the file
    (DOCS / "lectures").mkdir(exist_ok=True)
    for page, text in pages(data, marked(results, stale(data, results))).items():
        (DOCS / page).write_text(text, "utf-8")
    failed = [name for kind in results.values() for name, result in kind.items() if not result["passed"]]
    sys.exit(f"these failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
