"""What must not wait for torch does not import it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import references

SRC = Path(__file__).parents[1] / "src"
LIGHT = ("errors", "spec", "mapping", "families", "count", "cli")  # to the last line of `--help`
HEAVY = {"torch", "transformers", "matplotlib", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jaxtyping"}


def modules_under(names: Sequence[str]) -> list[str]:
    """Every module of these packages (or single files), by its dotted name."""
    root = SRC / "triptych"
    files = [path for name in names for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py")))]
    return [
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.exists()
    ]


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    program = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}), file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stderr.split())


def test_the_probe_sees_an_import() -> None:
    assert "tomllib" in loaded_after("import tomllib")
    assert "tomllib" not in loaded_after("import triptych")


def test_light_packages_import_nothing_heavy() -> None:
    light = modules_under(LIGHT)
    assert "triptych.spec.masks" in light
    loaded = loaded_after("import triptych, " + ", ".join(light))
    assert "triptych" in loaded
    assert not loaded & HEAVY


def test_public_masks_and_errors_need_no_torch() -> None:
    assert not loaded_after("import triptych; triptych.causal() & triptych.window(3); triptych.InputError") & HEAVY


@pytest.mark.skipif(not modules_under(["cli"]), reason="the command line is not there yet")
def test_help_imports_nothing_heavy() -> None:
    run = "from triptych.cli import main\nsys.argv = ['triptych', '--help']\ntry: main()\nexcept SystemExit: pass"
    assert not loaded_after(run) & HEAVY


def test_the_list_of_labs_imports_nothing_heavy() -> None:
    assert not loaded_after("from triptych.cli import main\nmain(['lab'])") & HEAVY


def test_a_header_is_shown_without_torch() -> None:
    path = references.saved("llama")[1]
    shown = loaded_after(f"from triptych.cli import main\nassert main(['inspect', {str(path)!r}]) == 0")
    assert "rich" in shown
    assert "torch" not in shown


def test_imports_by_name_stand_where_names_are_found_in_a_folder_or_a_table() -> None:
    """A late import is an import statement, which the contracts see; a string is for the families and the labs."""
    by_name = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if any(word in path.read_text() for word in ("import_module", "__import__("))
    }
    labs = "triptych_lectures/labs/__init__.py"
    assert "triptych/families/registry.py" in by_name <= {"triptych/families/registry.py", labs}


def test_what_stands_above_is_set_by_the_package() -> None:
    shown = "import triptych.probe.display as d\nassert '<pre>' in d.Displayed()._repr_html_()"
    assert "torch" in loaded_after(shown)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        loaded_after("import triptych.train\ntriptych.train('no-such-recipe')")
    assert "no-such-recipe" in (failed.value.stderr or "")


@pytest.mark.parametrize(
    ("set_before", "load", "expected"),
    [
        (None, "(0, 0, 0)", "10000"),
        (None, "(1e6, 0, 0)", "0"),
        (None, "(_ for _ in ()).throw(OSError())", "10000"),  # as where the system does not say
        ("7", "(0, 0, 0)", "7"),
        ("7", "(1e6, 0, 0)", "7"),
    ],
)
def test_waiting_threads_spin_shortly_and_not_at_all_on_a_busy_machine(
    set_before: str | None, load: str, expected: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {"PYTHONPATH": str(SRC)} | ({} if set_before is None else {"GOMP_SPINCOUNT": set_before})
    code = f"import os; os.getloadavg = lambda: {load}; import triptych; print(os.environ['GOMP_SPINCOUNT'])"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == expected


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count too, those for type checkers alone do not."""
    graph = grimp.build_graph("triptych", "triptych_lectures", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["triptych.nn.attention_states"] >= {"triptych.nn.attention"}
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
