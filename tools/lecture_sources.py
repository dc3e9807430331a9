"""The source files that a module imports, directly or not, within this repository's two packages, which of them a run
enters, and the digest of what runs of them.

Imports are read from the syntax, not run: those inside functions count, those under `if TYPE_CHECKING` do not.  Where a
package's `__init__` imports a name only when it is used, the module that has this name counts, once something uses it.
"""

import ast
import hashlib
import inspect
import io
import sys
import threading
import tokenize
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Self

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGES = ("triptych", "triptych_lectures")
FAMILIES = "triptych.families.registry"  # it imports the files beside it by their names
NATIVE = "triptych.native.loader"  # it loads what the C files beside it are compiled to
Names = dict[str, str]  # a name in a file -> the module that it stands for, or that has it


class EnteredModules:
    """Within a `with` block, notes the modules of this repository whose functions are called, from any thread that
    begins in it.  What runs while a module is imported does not count: it runs whether the module is used or not."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._importing: dict[int, int] = {}  # thread -> modules that it is importing, one inside another

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # documented, and missing in the types

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code, thread = frame.f_code, threading.get_ident()
        if code.co_name == "<module>":
            self._importing[thread] = self._importing.get(thread, 0) + (1 if event == "call" else -1)
        elif event == "call" and not self._importing.get(thread) and code.co_flags & inspect.CO_OPTIMIZED:
            name = str(frame.f_globals.get("__name__"))  # a dataclass's methods have it too, whose code has no file
            if name.split(".")[0] in PACKAGES:
                self.names.add(name)


def digest(*modules: str, src: Path = SRC, entered: Collection[str] | None = None) -> str:
    """SHA-256 of the paths of the modules' source files and of what runs of them (`what_runs`).  With `entered`, a file
    counts only where a function of its module is called, and where it has none."""
    files = sources(*modules, src=src)
    if entered is not None:
        files = {path for path in files if _counts(path, src, entered)}
        files |= {path for name in entered if (path := file_of(name, src)) is not None}
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(src).as_posix()}\0".encode() + hashlib.sha256(what_runs(path)).digest())
    return total.hexdigest()


def _counts(path: Path, src: Path, entered: Collection[str]) -> bool:
    if path.suffix in (".c", ".h"):
        return NATIVE in entered
    module = ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")
    return module in entered or (path.suffix == ".py" and not _has_functions(path.read_text("utf-8")))


@cache
def _has_functions(text: str) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(text)))


def what_runs(path: Path) -> bytes:
    """The text of a Python file without comments, docstrings and blank lines, which change no result; another file
    whole."""
    return _code(path.read_text("utf-8")) if path.suffix == ".py" else path.read_bytes()


@cache
def _code(text: str) -> bytes:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            alone = isinstance(first, ast.Expr) and not text.splitlines()[first.lineno - 1][: first.col_offset].strip()
            if alone and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def sources(*modules: str, src: Path = SRC) -> set[Path]:
    """The files of `modules` and of all that they import, and the tables that stand beside these in TOML.  Raises
    FileNotFoundError for a module without a file."""
    files: set[Path] = set()
    waiting = [*modules]
    while waiting:
        module = waiting.pop()
        path = file_of(module, src)
        if path is None:
            raise FileNotFoundError(f"no file under {src} holds the module {module}")
        if path in files:
            continue
        files |= {file for file in (path, path.with_suffix(".toml")) if file.is_file()}
        waiting += imported(module, src)
        if module == FAMILIES:
            waiting += [f"triptych.families.{file.stem}" for file in path.parent.glob("[!_]*.py")]
        if module == NATIVE:
            files |= {*path.parent.glob("*.c"), *path.parent.glob("*.h")}
    return files


@cache
def file_of(module: str, src: Path) -> Path | None:
    """The file of a module of this repository; None for any other name."""
    path = src.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None) if module.split(".")[0] in PACKAGES else None


@cache
def imported(module: str, src: Path) -> tuple[str, ...]:
    """The modules of this repository that the file of `module` imports, and the packages around it."""
    path = file_of(module, src)
    assert path is not None
    nodes = list(run_nodes(ast.parse(path.read_text("utf-8"))))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = {package}
    names: Names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            origin = from_where(node, package)
            found.add(origin)
            for alias in node.names:
                member = member_of(origin, alias.name, src)
                found.add(member)
                names[alias.asname or alias.name] = member
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "import_module":
            found |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    found |= {attribute(node, names, src) for node in nodes if isinstance(node, ast.Attribute)}
    parents = {name.rsplit(".", i)[0] for name in found for i in range(name.count(".") + 1)}
    return tuple(sorted(name for name in parents - {module} if file_of(name, src) is not None))


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from run_nodes(other)
        else:
            yield from run_nodes(child)


def from_where(node: ast.ImportFrom, package: str) -> str:
    """The module after `from`, in full."""
    if not node.level:
        return node.module or ""
    base = package.rsplit(".", node.level - 1)[0]
    return f"{base}.{node.module}" if node.module else base


def member_of(module: str, name: str, src: Path) -> str:
    """The module that `name` is, or that has it, as far as it is known without running `module`: else `module`."""
    if file_of(f"{module}.{name}", src) is not None:
        return f"{module}.{name}"
    return deferred(module, src).get(name, module)


@cache
def deferred(module: str, src: Path) -> Names:
    """The names that a package's `__init__` imports when they are used; it imports them under `TYPE_CHECKING` too."""
    path = file_of(module, src)
    if path is None or path.name != "__init__.py":
        return {}
    tree = ast.parse(path.read_text("utf-8"))
    run = set(run_nodes(tree))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in run]
    return {alias.asname or alias.name: from_where(node, module) for node in statements for alias in node.names}


def attribute(node: ast.Attribute, names: Names, src: Path) -> str:
    """The module that `a.b.c` is, or that has it, where `a` is an imported module; else an empty name."""
    base = node.value
    owner = names.get(base.id, "") if isinstance(base, ast.Name) else ""
    if isinstance(base, ast.Attribute):
        owner = attribute(base, names, src)
    return member_of(owner, node.attr, src) if file_of(owner, src) is not None else ""
