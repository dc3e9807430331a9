"""The public names are a promise: they change on purpose, with a line in CHANGELOG.md."""

import ast
import importlib
from pathlib import Path

import pytest

import triptych

FROZEN = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()
SOURCE = Path(triptych.__file__).read_text(encoding="utf-8")


def test_public_names_are_those_on_the_list() -> None:
    removed, added = set(FROZEN) - set(triptych.__all__), set(triptych.__all__) - set(FROZEN)
    assert not removed, f"{sorted(removed)}: a removed name is a decision; record it in CHANGELOG.md, then here"
    assert not added, f"{sorted(added)}: new; add to tests/public_names.txt and to CHANGELOG.md"


def test_list_is_sorted_without_repeats() -> None:
    assert sorted(set(FROZEN)) == FROZEN


@pytest.mark.parametrize("name", FROZEN)
def test_public_name_resolves(name: str) -> None:
    assert getattr(triptych, name) is not None


def test_dir_is_the_public_names() -> None:
    assert dir(triptych) == sorted(FROZEN)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = triptych.nonsense


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, r"; write triptych\.load\(") for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer")),
        *((name, r"; write triptych\.load\(") for name in ("pipeline", "HookedTransformer", "Llama", "LLM")),
        *(
            (name, r"; write triptych\.load\(")
            for name in ("GPT2LMHeadModel", "SentenceTransformer", "from_pretrained")
        ),
        ("Trainer", r"; write triptych\.train\(recipe\), or triptych train RECIPE"),
        ("LlamaConfig", r"; write triptych\.create\("),
        ("casual", r"\(did you mean 'causal'\?\)"),
        ("pictures", "'pictures'$"),
    ],
)
def test_names_of_migration_hints_are_answered_with_ours(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint) as caught:
        getattr(triptych, name)
    assert "\n" not in str(caught.value)
    with pytest.raises(ImportError):
        exec(f"from triptych import {name}")


@pytest.mark.parametrize("name", ["AutoModel", "__wrapped__"])
def test_other_modules_may_ask_for_names_that_are_not_there(name: str) -> None:
    assert not hasattr(triptych, name)


def test_type_checkers_see_the_modules_that_are_imported() -> None:
    """A lazy name is what the `TYPE_CHECKING` imports say, every public name has one, and none hides a submodule."""
    [checked] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    static = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triptych.")
        for alias in node.names
    }
    for name, module in static.items():
        assert getattr(triptych, name) is getattr(importlib.import_module(str(module)), name)
    errors = {name for name in triptych.__all__ if name.endswith("Error")}
    assert static.keys() | errors | {"train", "__version__"} == set(triptych.__all__)
    submodules = {path.stem for path in Path(triptych.__file__).parent.iterdir()}
    assert not submodules & set(static)
