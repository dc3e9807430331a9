"""Runs the notebooks of docs/notebooks and stores their outputs in them, so that they show their pictures unopened.

    python tools/notebooks.py [NAME...]     all, or some: decoder encoder encoder-decoder

Cells run in order in one namespace, as in a kernel; none is needed.  An output is what a cell prints and its figures
as PNG.  Nothing of the machine is stored: no path, no time, no version.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
DOTS = 60  # per inch of a stored figure

Plain = dict[str, Any]


def read(notebook: Path) -> Plain:
    content: Plain = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    return content


def code_cells(content: Plain) -> list[Plain]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def execute(content: Plain, name: str) -> tuple[Plain, list[list[Plain]]]:
    """(the namespace after the last cell, the outputs of each code cell).  An error names the notebook and the cell."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    namespace: Plain = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(content)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{name}, code cell {number}", "exec"), namespace)
        figures = [pyplot.figure(figure) for figure in pyplot.get_fignums()]
        outputs.append([*_text(printed.getvalue()), *map(_picture, figures)])
        pyplot.close("all")
    return namespace, outputs


def _text(printed: str) -> list[Plain]:
    lines = printed.splitlines(keepends=True)
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def _picture(figure: Any) -> Plain:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DOTS, bbox_inches="tight", metadata={"Software": None})
    data = {"image/png": base64.b64encode(png.getvalue()).decode("ascii"), "text/plain": ["a figure"]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def store(notebook: Path) -> None:
    """Run a notebook and write its outputs into it."""
    content = read(notebook)
    _, outputs = execute(content, notebook.name)
    for number, (cell, own) in enumerate(zip(code_cells(content), outputs, strict=True), 1):
        cell["outputs"], cell["execution_count"] = own, number
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{notebook.name}  {notebook.stat().st_size:,} bytes")


def main() -> None:
    chosen = sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for name in chosen:
        store(NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
