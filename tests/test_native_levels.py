"""TRIPTYCH_KERNELS caps every C function: which level runs, and that its code has only the instructions of that level.
A library of another version is refused."""

import os
import re
import shutil
import subprocess
import sys
from ctypes import byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from native_models import llama, needs_native
from triptych import native
from triptych.attention import Rows
from triptych.errors import ConfigError
from triptych.native import Input, Library, Matrix, loader, step
from triptych.native.loader import LEVELS, VARIABLE
from triptych.program import native_calls
from triptych.program.native_executor import NativeStep
from triptych.program.not_served import NotServed
from triptych.quantize.kernel_layouts import floats_of

LIBRARY = native.library()
# Functions of the table that the loops of each level define, in its order (kernels.h).
TABLE = (
    "round", "f32", "bf16", "u4", "u5", "s8", "s8x16", "sum_of", "norm", "rotate", "map", "largest_of", "keep", "read",
    "scores", "softmax", "values", "merge", "finish", "statistics", "sample",
)  # fmt: skip
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run(code: str, level: str) -> str:
    command, environment = [sys.executable, "-c", code], ENVIRONMENT | {VARIABLE: level}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# -- the variable -----------------------------------------------------------------------------------------------------

STATE = """
from triptych import native
kernels = native.library()
print(native.describe())
print(None if kernels is None else (kernels.level, kernels.use("amx"), kernels.use("portable"), kernels.bf16))
"""


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_no_function_runs_above_the_cap(level: str) -> None:
    line, state = run(STATE, level).splitlines()
    ran = next(name for name in reversed(LEVELS[: LEVELS.index(level) + 1]) if f"('{name}', '{name}'," in state)
    assert state == f"('{ran}', '{ran}', 'portable', None)"
    beyond = LEVELS[LEVELS.index(level) + 1 :]
    shown = line.partition("(")[0]
    assert not any(f"{name}: " in shown for name in beyond)
    assert ("which this processor lacks" in line) == (ran != level)


def test_no_c_at_all() -> None:
    code = STATE + "print(native.why_not(), sorted(set(native.levels().values())))\n"
    code += "from native_models import *\nprint(len(create(LLAMA).generate([[1, 2]], max_new_tokens=3)))"
    line, state, why, written = run(code, "none").splitlines()
    assert line == f"none, torch computes: {VARIABLE}=none switches the native kernels off"
    assert (state, why, written) == ("None", f"{VARIABLE}=none switches the native kernels off ['none']", "1")


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx")
    with pytest.raises(ConfigError, match=r"TRIPTYCH_KERNELS='avx' is not one of none, portable, avx2, avx512, amx"):
        loader.highest_level()


# -- the code ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code() -> dict[int, tuple[str, str]]:
    """The name and the instructions of each function of the library, by its address there."""
    if LIBRARY is None or shutil.which("objdump") is None or os.uname().machine != "x86_64":
        pytest.skip("needs the library on an x86-64 processor, and objdump")
    command = ["objdump", "-d", "--no-show-raw-insn", str(LIBRARY.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^([0-9a-f]+) <([^>]+)>:\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    functions = {int(address, 16): (name, body) for address, name, body in found}
    if not any(name.startswith("portable_") for name, _ in functions.values()):
        pytest.skip("the library has no symbols")
    return functions


def level_of(body: str) -> str:
    """The lowest level whose instructions these are."""
    if re.search(r"\b(tdp|tile)\w+", body):
        return "amx"
    if re.search(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])", body):
        return "avx512"
    return "avx2" if re.search(r"%ymm|\tv[a-z]", body) else "portable"


@pytest.mark.parametrize("level", LEVELS[:3])
def test_the_functions_in_use_are_compiled_for_their_level(level: str, code: dict[int, tuple[str, str]]) -> None:
    """What the table points to, by its name and by its instructions."""
    before = LIBRARY.level
    try:
        if LIBRARY.use(level) != level:
            pytest.skip(f"this processor lacks {level}")
        table = c_void_p.in_dll(LIBRARY.functions, "kernels_in_use").value
        known = c_void_p.from_buffer(LIBRARY.functions.select_level).value
        (offset,) = [address for address, (name, _) in code.items() if name == "select_level"]
        pointers = [c_void_p.from_address(table + 8 + 8 * i).value for i in range(len(TABLE))]
    finally:
        LIBRARY.use(before)
    functions = [code[(pointer or 0) - known + offset] for pointer in pointers]
    assert [name.partition(".")[0] for name, _ in functions] == [f"{level}_{name}" for name in TABLE]
    found = {name: level_of(body) for name, (_, body) in zip(TABLE, functions, strict=True)}
    allowed = LEVELS[: LEVELS.index(level) + 1]
    assert set(found.values()) <= set(allowed)
    vectors = {name for name in TABLE if found[name] == level}
    assert vectors >= {
        "f32",
        "bf16",
        "u4",
        "s8",
        "sum_of",
        "norm",
        "map",
        "keep",
        "scores",
        "values",
        "statistics",
        "sample",
    }


def test_nothing_else_needs_more_than_any_processor_has(code: dict[int, tuple[str, str]]) -> None:
    """Functions of no level are portable, those of products in bf16 aside."""
    in_bf16 = re.compile(r"multiply_p|finish|unpack_|begin_parts|end_parts|round_bf16|attend_range_bf16|add_values|"
                         r"tiles_of|weights_of|transpose|without_infinities|multiply_range|multiply_bf16")  # fmt: skip
    for name, body in code.values():
        if not name.startswith(("avx2_", "avx512_")) and not in_bf16.match(name):
            assert level_of(body) == "portable", name
        if name.startswith("avx2_"):
            assert level_of(body) in ("portable", "avx2"), name


def named_tables(source: str) -> list[str]:
    """Where C names a table of loops above portable, its declaration and select_level aside."""
    code = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
    code = re.sub(r"^int select_level\(.*?^}|^extern [^;]*;", "", code, flags=re.M | re.S)
    return re.findall(r".*\bavx\w+_(?:kernels|train)\b.*", code)


def test_only_the_choice_of_a_level_names_the_tables_above_portable() -> None:
    """A function that called their loops by name would run them whatever the cap."""
    sources = {path.name: path.read_text() for path in Path(native.__file__).parent.glob("*.[ch]")}
    assert {name: found for name, text in sources.items() if (found := named_tables(text))} == {}
    control = sources["levels.c"].replace("kernels_in_use->largest_of", "avx512_kernels.largest_of")
    assert len(named_tables(control)) == 1
    assert len(named_tables("train_kernels_in_use = &avx512_pairs_train;")) == 1


# -- constants and indices --------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("change", ["RANGE", "OP_STORED", "sizeof batch", "a field"])
def test_a_library_of_other_constants_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    ours = step.constants()
    if change == "a field":
        (fields,) = [name for name in ours if name.startswith("embed: ")]
        ours[fields.replace("window", "ring")] = ours.pop(fields)
        change = "fields of an instruction"
    else:
        ours[change] += 1
    monkeypatch.setattr(loader, "constants", lambda: ours)
    loaded, reason = loader.load(LIBRARY.path)
    assert loaded is None
    assert "are of another version" in reason
    assert "build them again" in reason
    assert change in reason
    assert "\n" not in reason
    monkeypatch.undo()
    assert isinstance(loader.load(LIBRARY.path)[0], Library)
    LIBRARY.use(LEVELS[-1])


@needs_native
def test_every_constant_of_the_library_has_its_twin() -> None:
    """Beside those of the headers as they stand."""
    ours, value = step.constants(), c_int64()
    assert LIBRARY.functions.constant(len(ours), byref(value)) is None
    headers = "".join(path.read_text() for path in sorted(LIBRARY.path.parent.glob("*.h")))
    for name in (
        "RANGE",
        "TILE_KEYS",
        "QUERIES",
        "QUERIES_BF16",
        "FEW_TOKENS",
        "COUNTERS",
        "WIDEST_BF16",
        "PAIR",
        "BAND",
    ):
        (written,) = re.findall(rf"^#define {name} +(\d+)", headers, re.M)
        assert int(written) == ours[name]
    for enum, number in re.findall(r"\b((?:OP|FUNCTION|STORED|ROWS|INDEX)_\w+) = (-?\d+)", headers):
        assert ours[enum] == int(number)


@needs_native
@pytest.mark.parametrize("layout", [-1, 6, 1 << 30])
def test_an_unknown_layout_is_not_multiplied(layout: int) -> None:
    assert LIBRARY is not None
    x, y = torch.ones(1, 32), torch.full((1, 16), 7.0)
    vectors = Input(1, 32, floats_of(x), 32)
    matrix = Matrix(layout, 16, 32, 0, torch.zeros(16, 32).data_ptr())
    LIBRARY.functions.multiply(byref(matrix), byref(vectors), y.data_ptr(), 16, None, 0, 1)
    assert torch.equal(y, torch.full((1, 16), 7.0))


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("wrong", ["table", "store", "layout", "operation"])
def test_a_plan_that_names_what_there_is_not_never_runs(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = native_calls.check_plan

    def spoiled(plan: Any, matrices: Any, stores: int) -> None:
        records = plan.instructions
        if wrong == "table":
            records["linear"]["weight"][np.flatnonzero(records["op"] == step.Op.LINEAR)[0]] = len(matrices)
        elif wrong == "store":
            records["attend"]["store"][records["op"] == step.Op.ATTEND] = stores
        elif wrong == "layout":
            matrices["layout"][-1] = 6
        else:
            records["op"][0] = 18
        check(plan, matrices, stores)

    module = llama()
    native_step = NativeStep(module, module.decoder.cache(1))
    assert native_step.logits([1], Rows((1,)), [0]) is not None
    monkeypatch.setattr(native_calls, "check_plan", spoiled)
    native_step = NativeStep(module, module.decoder.cache(1))
    with pytest.raises(NotServed, match="of its plan"):
        native_step.logits([1], Rows((1,)), [0])
    module.plans.clear()
