"""The settings of `make test-processors` are asked of the libraries themselves, and the tests they run are there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import processors


def proved(**variables: str) -> tuple[int, str]:
    """The status and the words of a process with these variables alone."""
    environment = {name: value for name, value in os.environ.items() if name not in processors.VARIABLES}
    command = [sys.executable, str(Path(processors.__file__)), "--prove"]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout or done.stderr


def test_a_setting_that_took_effect_is_named() -> None:
    code, text = proved(ATEN_CPU_CAPABILITY="default", TRIPTYCH_KERNELS="none")
    assert code == 0
    assert "torch: DEFAULT; in effect: ATEN_CPU_CAPABILITY=default, TRIPTYCH_KERNELS=none" in text


@pytest.mark.parametrize("name", ["MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_a_setting_without_effect_is_said_to_have_none(name: str) -> None:
    code, text = proved(**{name: "ABACUS"})
    assert code == 1
    assert text.startswith(f"{name}=ABACUS has no effect here: ")


def test_every_listed_file_has_the_tests_that_are_named() -> None:
    for file, words in processors.TESTS.items():
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        for word in words.split(" or "):
            assert word in text, (file, word)
