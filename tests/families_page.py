"""`docs/families.md`, written from the tests that ran: a plugin that keeps their outcomes, and fails a stale page.

A run of all of them compares the page with what it saw; `--write-families` (make families) writes it instead.
"""

import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import short_run

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

# What a family must do, and the test of it that is run with each variant.
COLUMNS = {
    "load": "test_parity::test_a_ragged_batch_is_the_reference",
    "save": "test_parity::test_saved_by_us_opens_there_and_here",
    "GGUF read": "test_families::test_a_gguf_header_gives_the_spec_of_the_hf_config",
    "GGUF write": "test_convert::test_a_model_comes_back_from_gguf",
    "cached decode": "test_parity::test_cached_generation_is_the_reference",
    "probe sites": "test_probe_families::test_every_site_of_every_block_is_alive",
    "train step": "test_families_train::test_a_step_of_training_lowers_the_loss",
}
SEEN = pytest.StashKey[dict[tuple[str, str], str]]()
STALE = pytest.StashKey[str]()
NODE = re.compile(r"(?:.*/)?(?P<file>\w+)\.py::(?P<test>\w+)\[(?P<variant>[^\]]+)\]")

HEAD = """\
# Families

Written by `make families` from the tests that ran; a run of all tests fails when the page differs from their results. A
family is the `model_type` in a checkpoint's `config.json`: SmolLM2, for example, is a `llama`. A number counts the
variants that passed: tied and untied heads, one to all key/value heads, biases, each scaling of RoPE, each head. A dash
means that the column does not apply: an encoder does not decode, and GGUF has no name for some families.

| column | what was tested, each on tiny random checkpoints that transformers made |
| --- | --- |
| load | the log-probabilities of rows of several lengths are within 1e-4 of those of transformers, in fp32 |
| save | transformers and Triptych open what Triptych writes, and compute the same |
| GGUF read | the header of a GGUF file gives the same spec as the HF config |
| GGUF write | a model written as GGUF and read back has the same logits |
| cached decode | a prompt in chunks, then token by token, is within 1e-4 of one whole pass of transformers |
| probe sites | setting the values at any site to 0 changes the output |
| train step | every parameter has a gradient, and a step lowers the loss |
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-families", action="store_true", help="write docs/families.md from the tests that ran")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEEN] = {}
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watch(config.stash[SEEN]), "families-watch")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if short_run.name_of(item) in COLUMNS.values():
            item.add_marker("families")


class _Watch:
    """Sees every report, also those of workers."""

    def __init__(self, seen: dict[tuple[str, str], str]) -> None:
        self.seen = seen
        self.columns = {test: column for column, test in COLUMNS.items()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = NODE.fullmatch(report.nodeid)
        column = self.columns.get(f"{found['file']}::{found['test']}") if found else None
        if found and column and (report.when == "call" or report.outcome != "passed"):
            self.seen[column, found["variant"]] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    columns = {column for column, _ in config.stash[SEEN]}  # none in a worker
    if columns != set(COLUMNS) or config.stash[SEEN].keys() != expected():
        return  # a run of some of them
    page = render(config.stash[SEEN])
    if config.option.write_families:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        config.stash[STALE] = f"FAILED: {PAGE.name} is not what these tests show; run make families"
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if STALE in config.stash:
        terminalreporter.write_line(config.stash[STALE], red=True)


def expected() -> set[tuple[str, str]]:
    """Every (column, variant) that a whole run goes through."""
    found = set()
    for column, test in COLUMNS.items():
        module, name = test.split("::")
        (mark,) = [m for m in getattr(import_module(module), name).pytestmark if m.name == "parametrize"]
        found |= {(column, variant) for variant in mark.args[1]}
    return found


def render(seen: dict[tuple[str, str], str]) -> str:
    """The page from the outcome ("passed", "skipped", "failed") of each (column, variant)."""
    passed: dict[tuple[str, str], int] = defaultdict(int)
    failed: dict[tuple[str, str], int] = defaultdict(int)
    variants: dict[str, list[str]] = defaultdict(list)
    for (column, variant), outcome in sorted(seen.items()):
        family = family_of(variant)
        passed[column, family] += outcome == "passed"
        failed[column, family] += outcome == "failed"
        if variant not in variants[family]:
            variants[family].append(variant)
    lines = [HEAD, f"| family | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for family in sorted(variants):
        cells = (_cell(passed[column, family], failed[column, family]) for column in COLUMNS)
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    lines += ["", "## Variants", "", "| family | variants that were tested |", "| --- | --- |"]
    lines += [f"| `{family}` | {', '.join(sorted(names))} |" for family, names in sorted(variants.items())]
    return "\n".join(lines) + "\n"


def _cell(passed: int, failed: int) -> str:
    if failed:
        return f"**{failed} fail**"
    return f"✓ {passed}" if passed else "–"


def family_of(variant: str) -> str:
    """The `model_type` of a variant's config."""
    import transformers

    import references

    base, _ = references.CHANGED.get(variant, (variant, None))
    return str(getattr(transformers, references.VARIANTS[base][0]).model_type)
