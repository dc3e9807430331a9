"""Runs the notebooks of docs/notebooks and stores their outputs in them, so that they show their pictures unopened.

    python tools/notebooks.py [NAME...]     all, or some: decoder encoder encoder-decoder

Cells run in order in one namespace, as in a kernel; none is needed.  An output is what a cell prints, its figures as
PNG, and the value of its last line where that is an expression, as SVG where it has one.  Nothing of the machine is
stored: no path, no time, no version.  Beside the outputs of a cell stands the digest of the code that gave them: its
own and that of the cells before it.
"""

import ast
import base64
import contextlib
import hashlib
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
            value = _run("".join(cell["source"]), f"{name}, code cell {number}", namespace)
        figures = [pyplot.figure(figure) for figure in pyplot.get_fignums()]
        outputs.append([*_text(printed.getvalue()), *map(_picture, figures), *_value(value, number + 1)])
        pyplot.close("all")
    return namespace, outputs


def digests(content: Plain) -> list[str]:
    """For each code cell a digest of its source and of the code cells before it."""
    so_far, found = hashlib.sha256(), []
    for cell in code_cells(content):
        so_far.update("".join(cell["source"]).encode("utf-8") + b"\0")
        found.append(so_far.hexdigest()[:16])
    return found


def _run(source: str, name: str, namespace: Plain) -> Any:
    """The value of the last line where that is an expression, else None."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def _value(value: Any, number: int) -> list[Plain]:
    if value is None:
        return []
    data: Plain = {"text/plain": [repr(value)]}
    if hasattr(value, "_repr_svg_"):
        data["image/svg+xml"] = value._repr_svg_().splitlines(keepends=True)
    return [{"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}}]


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
    cells = zip(code_cells(content), outputs, digests(content), strict=True)
    for number, (cell, own, digest) in enumerate(cells, 1):
        cell["outputs"], cell["execution_count"] = own, number
        cell["metadata"] = {"outputs_of": digest}
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{notebook.name}  {notebook.stat().st_size:,} bytes")


def main() -> None:
    chosen = sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for name in chosen:
        store(NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
