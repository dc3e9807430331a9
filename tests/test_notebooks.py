"""The notebooks run from top to bottom, hold what they claim (their own asserts), and are kept without outputs.

Cells run in order in one namespace, as a kernel would run them; none is needed for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    told = json.loads(notebook.read_text(encoding="utf-8"))
    assert told["nbformat"] == 4
    return [cell for cell in told["cells"] if cell["cell_type"] == "code"]


def run(notebook: Path) -> dict[str, Any]:
    """What its names are in the end.  An error names the notebook and the cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(notebook)):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), namespace)
    return namespace


def test_there_is_one_for_each_panel() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["decoder", "encoder-decoder", "encoder"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_holds_what_it_claims(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unchecked: None
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    try:
        namespace = run(notebook)
        assert pyplot.get_fignums(), "no picture"
    finally:
        pyplot.close("all")
    assert namespace["losses"][-1] < namespace["losses"][0]
    assert "nats" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(notebook: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(notebook))


def test_a_wrong_cell_is_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.ipynb"
    told = [{"cell_type": "code", "source": [line]} for line in ("x = 1", "assert x == 2")]
    wrong.write_text(json.dumps({"nbformat": 4, "cells": told}))
    with pytest.raises(AssertionError):
        run(wrong)
