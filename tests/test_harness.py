"""The test run: it cannot reach the network, it checks annotations, and its short run has cases of every family."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import beartype.roar
import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import checked
import families_page
import short_run
import triptych
from triptych.probe import Site


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_another_machine_is_out_of_reach(host: str) -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError, match="tests run offline"):
        client.connect((host, 9))


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        assert client.getpeername() == server.getsockname()


def test_signatures_are_checked() -> None:
    with pytest.raises(beartype.roar.BeartypeCallHintViolation, match="name"):
        triptych.errors.nearest(2.5, [])  # type: ignore[arg-type]


def test_shapes_are_checked_across_arguments_and_result() -> None:
    @checked.checked
    def joined(x: Float[Tensor, "N D"], y: Float[Tensor, "M D"], wrong: bool = False) -> Float[Tensor, "sum D"]:
        return torch.cat([x, y])[:, : 1 if wrong else None]

    assert joined(torch.ones(2, 3), torch.ones(4, 3)).shape == (6, 3)
    for arguments in [(torch.ones(2, 3), torch.ones(4, 5)), (torch.ones(2, 3), torch.ones(4, 3), True)]:
        with pytest.raises(beartype.roar.BeartypeCallHintViolation):
            joined(*arguments)


def test_results_and_dataclasses_are_checked() -> None:
    @checked.checked
    def size() -> int:
        return "three"  # type: ignore[return-value]

    with pytest.raises(beartype.roar.BeartypeCallHintViolation, match="int"):
        size()
    with pytest.raises(beartype.roar.BeartypeCallHintViolation, match="name"):
        Site(name=3, width=4)  # type: ignore[arg-type]


def test_signatures_are_not_checked_on_request(unchecked: None) -> None:
    assert triptych.window(np.int64(3)) == triptych.window(3)  # type: ignore[arg-type]


def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file of tests by name."""
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parametrized(function: ast.FunctionDef) -> bool:
    return any("parametrize" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("file", sorted({name.split("::")[0] for name in short_run.TABLE}))
def test_the_short_run_lists_tests_that_exist(file: str) -> None:
    there = functions(file)
    for name, rule in short_run.TABLE.items():
        if name.startswith(f"{file}::"):
            assert parametrized(there[name.split("::")[1]]) or rule == 0, name


def test_the_short_run_keeps_evenly_spaced_cases() -> None:
    assert short_run.evenly(10, 4) == {0, 3, 6, 9}
    assert short_run.evenly(10, 1) == {0}
    assert short_run.evenly(3, 7) == {0, 1, 2}
    assert short_run.evenly(5, 0) == set()


def test_the_short_run_has_every_family() -> None:
    import references

    classes = {config for config, *_ in references.VARIANTS.values()}
    long = {
        "test_convert::test_a_model_comes_back_from_gguf",
        "test_probe_families::test_every_site_of_every_block_is_alive",
    }
    assert long < set(families_page.COLUMNS.values())
    for name in set(families_page.COLUMNS.values()) - long:
        assert short_run.TABLE.get(name, "family") == "family"
    assert len(classes) > 25


def test_no_two_classes_of_the_package_have_one_name() -> None:
    """A reader who looks for a class finds one."""
    places: dict[str, list[str]] = {}
    for path in sorted(Path(triptych.__file__).parents[1].glob("triptych*/**/*.py")):
        if path.parent.name == "story":  # programs of their own, each the one before with a few lines changed
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.name)
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
