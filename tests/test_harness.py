"""The test run: it cannot reach the network, it checks annotations, and its short run has cases of every family."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

import families_page
import short_run
import triptych


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_another_machine_is_out_of_reach(host: str) -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError, match="tests run offline"):
        client.connect((host, 9))


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        assert client.getpeername() == server.getsockname()


def test_signatures_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="back"):
        triptych.window(2.5)  # type: ignore[arg-type]


def test_signatures_are_not_checked_on_request(unchecked: None) -> None:
    assert triptych.window(np.int64(3)) == triptych.window(3)  # type: ignore[arg-type]


def parametrized(name: str) -> bool:
    """Whether the test `test_file::test_function` exists and is parametrized."""
    file, function = name.split("::")
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return any("parametrize" in ast.unparse(decorator) for decorator in found.decorator_list)


@pytest.mark.parametrize("name", short_run.TABLE)
def test_the_short_run_lists_tests_that_exist(name: str) -> None:
    assert parametrized(name) or short_run.TABLE[name] == 0


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
        "test_probe_families::test_every_site_of_a_middle_block_is_alive",
    }
    assert long < set(families_page.COLUMNS.values())
    for name in set(families_page.COLUMNS.values()) - long:
        assert short_run.TABLE.get(name, "family") == "family"
    assert len(classes) > 25
