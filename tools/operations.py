"""The table of operations and executors: `make docs` writes it into docs/concepts/programs.md (a hook of mkdocs), and
`python tools/operations.py` prints it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych import ops
from triptych.explain.reference_ops import NOT_REFERENCE, REFERENCE, parsed
from triptych.page.sections import defined
from triptych.program.interpreter import SPECIAL
from triptych.program.native_operations import NATIVE, NOT_NATIVE
from triptych.program.static_plan import NOT_STATIC

MARK = "<!-- operations -->"


@dataclass(frozen=True)
class Executor:
    """What runs operations: whether it has one, and why it lacks others."""

    name: str
    has: Callable[[str], bool]
    lacks: Mapping[str, str]


EXECUTORS = (
    Executor("torch", lambda name: name in ops.RUN or name in SPECIAL, {}),
    Executor("fixed shapes", lambda name: name not in NOT_STATIC, NOT_STATIC),
    Executor("native step", lambda name: name in NATIVE, NOT_NATIVE),
    Executor("page", lambda name: name in defined("operation"), {}),
    Executor(
        "explain", lambda name: name in REFERENCE or parsed(ops.OPERATIONS[name].equation) is not None, NOT_REFERENCE
    ),
)


def in_markdown() -> str:
    """The table, and under it the reason of every place without a ✓."""
    header = ["operation", "what it computes", *(executor.name for executor in EXECUTORS)]
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    reasons: dict[str, int] = {}
    for name, operation in ops.OPERATIONS.items():
        cells = []
        for executor in EXECUTORS:
            if not executor.has(name) and name not in executor.lacks:
                raise SystemExit(f"{executor.name} has no {name}: add an entry, or a reason why not")
            reason = None if executor.has(name) else f"{executor.name}: {executor.lacks[name]}."
            cells.append("✓" if reason is None else str(reasons.setdefault(reason, len(reasons) + 1)))
        equation = operation.equation.replace("|", "\\|")
        lines.append(f"| `{name}` | {equation} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a page, with the table and a line about it in the place of the mark and the line behind it."""
    before, mark, rest = markdown.partition(MARK)
    return markdown if not mark else before + in_markdown() + rest.partition(")\n")[2]


if __name__ == "__main__":
    print(in_markdown())
