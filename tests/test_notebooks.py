"""The notebooks run from top to bottom, hold what they claim (their own asserts), and store the outputs they give."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from programs import program

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LECTURES = [path for path in NOTEBOOKS if path.stem.startswith("lecture-")]
PANELS = [path for path in NOTEBOOKS if path not in LECTURES]

tool = program("tools/notebooks.py")


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")


def values(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of last lines, drawings among them."""
    return [one["data"] for one in outputs if one["output_type"] == "execute_result"]


def out_of_date(content: dict[str, Any]) -> list[int]:
    """The code cells whose outputs were stored by other code than that of the notebook."""
    cells = zip(tool.code_cells(content), tool.digests(content), strict=True)
    return [i for i, (cell, digest) in enumerate(cells) if cell["metadata"].get("outputs_of") != digest]


def test_there_is_one_for_each_panel_and_each_lecture() -> None:
    assert [notebook.stem for notebook in PANELS] == ["decoder", "encoder-decoder", "encoder"]
    assert [notebook.stem for notebook in LECTURES] == [f"lecture-{number}" for number in range(5)]


@pytest.mark.parametrize("notebook", LECTURES, ids=lambda path: path.stem)
def test_that_of_a_lecture_runs_and_holds_what_it_claims(notebook: Path, unchecked: None) -> None:
    """Every cell with a claim asserts it; only what training or rounding gives may differ from what is stored."""
    pytest.importorskip("matplotlib")
    content = tool.read(notebook)
    sources = ["".join(cell["source"]) for cell in tool.code_cells(content)]
    assert sum("assert " in source for source in sources) >= 4
    namespace, outputs = tool.execute(content, notebook.name)
    stored = [cell["outputs"] for cell in tool.code_cells(content)]
    assert [[one["output_type"] for one in own] for own in outputs] == [
        [one["output_type"] for one in own] for own in stored
    ]
    trained = "losses" in namespace
    assert any(one["output_type"] == "display_data" for own in outputs for one in own)
    for own, old in zip(outputs, stored, strict=True):
        assert len(printed(own).splitlines()) == len(printed(old).splitlines())
        if not trained:
            assert rounded(printed(own)) == pytest.approx(rounded(printed(old)), rel=0.02, abs=1e-6)
            assert NUMBERS.sub("", printed(own)) == NUMBERS.sub("", printed(old))


NUMBERS = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def rounded(text: str) -> list[float]:
    """The numbers of a text."""
    return [float(one.replace(",", "")) for one in NUMBERS.findall(text)]


@pytest.mark.parametrize("notebook", PANELS, ids=lambda path: path.stem)
def test_it_runs_and_holds_what_it_claims(notebook: Path, unchecked: None) -> None:
    pytest.importorskip("matplotlib")
    content = tool.read(notebook)
    namespace, outputs = tool.execute(content, notebook.name)
    assert namespace["losses"][-1] < namespace["losses"][0]
    assert any("nats" in printed(own) for own in outputs)
    pictures = [sum(one["output_type"] == "display_data" for one in own) for own in outputs]
    stored = [cell["outputs"] for cell in tool.code_cells(content)]
    assert sum(pictures) > 0
    assert pictures == [sum(one["output_type"] == "display_data" for one in own) for own in stored]
    # What training gives differs a little between processors; the untrained cells before it do not.
    trained = next(i for i, own in enumerate(outputs) if "nats" in printed(own))
    assert [printed(own) for own in outputs[:trained]] == [printed(own) for own in stored[:trained]]
    assert [values(own) for own in outputs] == [values(own) for own in stored]
    assert sum(map(len, map(values, outputs))) == 1  # the drawing of the model
    assert [len(printed(own).splitlines()) for own in outputs] == [len(printed(own).splitlines()) for own in stored]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_headings_are_headings_and_its_outputs_are_stored(notebook: Path) -> None:
    content = tool.read(notebook)
    texts = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "markdown"]
    assert texts[0].startswith("# ")
    assert [text.splitlines()[0][:5] for text in texts[1:-1]] == [f"## {i}." for i in range(1, len(texts) - 1)] or (
        all(text.startswith("## ") for text in texts[1:] if not text.startswith("Next: "))
    )
    cells = tool.code_cells(content)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(one["output_type"] == "display_data" for cell in cells for one in cell["outputs"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_stores_nothing_of_the_machine(notebook: Path) -> None:
    cells = tool.code_cells(tool.read(notebook))
    text = "".join(printed(cell["outputs"]) + json.dumps(values(cell["outputs"])) for cell in cells)
    assert not re.search(r"0x[0-9a-f]{6}", text)
    assert not re.search(r"/(home|root|tmp|usr|work|Users|private)\b|[A-Z]:\\", text)
    assert set(tool.read(notebook)["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_those_of_its_code(notebook: Path) -> None:
    content = tool.read(notebook)
    assert out_of_date(content) == [], "run tools/notebooks.py"
    cells = tool.code_cells(content)
    cells[2]["source"].append("\n")
    assert out_of_date(content) == list(range(2, len(cells)))  # and of all cells after a changed one


def test_a_wrong_cell_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wrong = tmp_path / "wrong.ipynb"
    cells = [{"cell_type": "code", "source": [line]} for line in ("x = 1", "assert x == 2")]
    wrong.write_text(json.dumps({"nbformat": 4, "cells": cells}))
    with pytest.raises(AssertionError):
        tool.execute(tool.read(wrong), wrong.name)
