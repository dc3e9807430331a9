"""The native products beside float64, between kernels, batches, cuts and threads, and in buffers of exact size."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from ctypes import byref, string_at
from pathlib import Path

import pytest
import torch
from torch import Tensor

import triptych.native
from triptych.errors import InputError
from triptych.native import Input, Library, library, loader, why_not
from triptych.quantize import LAYOUTS, PackedMatrix, multiply, quantize
from triptych.quantize.kernel_layouts import GROUP, Codes, floats_of, matrix_struct

NATIVE = Path(triptych.native.__file__).parent
PACKED = ("U4", "U5", "S8", "S8X16")
LOWEST = {"U4": 0, "U5": 0, "S8": -128, "S8X16": -128}
HIGHEST = {"U4": 15, "U5": 31, "S8": 127, "S8X16": 127}
# Packed ones of nine bands or more: one vector is multiplied with four bands at once, two apart, and with the rest.
SHAPES = {"U4": (149, 96), "U5": (129, 32), "S8": (162, 160), "S8X16": (131, 512), "F32": (37, 83), "BF16": (33, 45)}


@pytest.fixture
def native() -> Iterator[Library]:
    loaded = library()
    if loaded is None:
        pytest.skip(why_not() or "")
    yield loaded
    loaded.use(loader.LEVELS[-1])


@pytest.fixture(params=loader.LEVELS)
def isa(request: pytest.FixtureRequest, native: Library) -> str:
    if native.use(request.param) != request.param:
        pytest.skip(f"this processor lacks {request.param}")
    return str(request.param)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(name: str, rows: int, columns: int, code: int | None = None) -> PackedMatrix:
    """Random codes and scales; all codes are `code` where it is given."""
    if name in ("F32", "BF16"):
        return PackedMatrix.of(randn(rows, columns, seed=1).to(torch.float32 if name == "F32" else torch.bfloat16))
    dice, layout, whole = torch.Generator().manual_seed(1), LAYOUTS[name], -(-rows // 16) * 16
    low, high = LOWEST[name], HIGHEST[name]
    dtype = torch.uint8 if low == 0 else torch.int8
    codes = torch.randint(low, high + 1, (whole, columns), generator=dice).to(dtype)
    if code is not None:
        codes.fill_(code)
    groups = (whole, columns // layout.block)
    numbers = Codes(
        codes,
        randn(*groups, seed=2).half(),
        randn(*groups, seed=3).half() * 8 if low == 0 else None,
        torch.randint(-128, 128, (whole, columns // 16), generator=dice).to(torch.int8) if name == "S8X16" else None,
    )
    return PackedMatrix(layout, rows, columns, layout.pack(numbers))


def rounded(x: Tensor) -> Tensor:
    """What round_groups makes of vectors `[count, columns]`, in float64, by the description in matmul.h."""
    groups = x.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2, keepdim=True) / 127
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1 / scale, 0)
    return ((groups * inverse).round().double() * scale.double()).flatten(1)


def agrees(y: Tensor, weight: PackedMatrix, x: Tensor) -> bool:
    """y is the product to the last bits of fp32, with vectors rounded where the layout is packed, and near the product
    of the vectors as they are."""
    dense = weight.dense().double()
    seen = x.double() if weight.layout.dense else rounded(x)
    far = (y - x.double() @ dense.T).norm() / (x.double() @ dense.T).norm()
    # fp32 adds columns / 32 groups or 16 partial sums one after another: a few units in the last place of the sum
    # without signs.
    room = 2e-6 * (seen.abs() @ dense.abs().T) + 1e-30
    return bool(((y - seen @ dense.T).abs() <= room).all()) and float(far) <= (1e-5 if weight.layout.dense else 2e-2)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("name", SHAPES)
def test_products_agree_with_float64(name: str, count: int, isa: str) -> None:
    weight = matrix(name, *SHAPES[name])
    x, bias = randn(count, weight.columns), randn(weight.rows, seed=4)
    y = multiply(weight, x, threads=1)
    assert agrees(y, weight, x)
    assert torch.equal(multiply(weight, x, bias, threads=1), y + bias)


@pytest.mark.parametrize("name", PACKED)
def test_control_swapped_halves_of_a_byte_do_not_agree(name: str, native: Library) -> None:
    weight, x = matrix(name, *SHAPES[name]), randn(3, SHAPES[name][1])
    y = multiply(weight, x)
    assert agrees(y, weight, x)
    data = weight.data.clone()
    data[:64] = (data[:64] >> 4) | (data[:64] << 4)  # the first line of the first group
    swapped = PackedMatrix(weight.layout, weight.rows, weight.columns, data)
    assert not agrees(multiply(swapped, x), weight, x)


@pytest.mark.parametrize("name", PACKED)
def test_the_largest_codes_do_not_saturate(name: str, isa: str) -> None:
    """Of few vectors and of many, whose kernels begin their sums of integers at another number."""
    x = torch.stack([torch.ones(256), -torch.ones(256)]) * 3
    for code in (LOWEST[name] or HIGHEST[name], HIGHEST[name]):
        weight = matrix(name, 32, 256, code)
        y = multiply(weight, x)
        assert agrees(y, weight, x)
        assert torch.equal(multiply(weight, x.repeat(8, 1)), y.repeat(8, 1))


@pytest.mark.parametrize("name", SHAPES)
def test_all_kernels_give_the_same_bits(name: str, native: Library) -> None:
    weight, x = matrix(name, *SHAPES[name]), randn(7, SHAPES[name][1])
    native.use("portable")
    expected = multiply(weight, x)
    for kernels in loader.LEVELS:
        native.use(kernels)
        assert torch.equal(multiply(weight, x), expected)


@pytest.mark.parametrize("name", ["U4", "U5", "S8", "S8X16"])
def test_rows_are_unpacked_as_torch_unpacks_them(name: str, native: Library) -> None:
    weight = matrix(name, *SHAPES[name])
    rows = torch.full((weight.rows, weight.columns), torch.nan)
    for i, row in enumerate(rows):
        native.functions.unpack_row(matrix_struct(weight), i, row.data_ptr())
    assert torch.equal(rows, weight.dense())


@pytest.mark.parametrize("name", SHAPES)
def test_batch_threads_and_cut_do_not_change_a_bit(name: str, isa: str, native: Library) -> None:
    weight, x = matrix(name, *SHAPES[name]), randn(17, SHAPES[name][1])
    expected = multiply(weight, x, threads=1)
    for threads in (2, 3, 7):
        assert torch.equal(multiply(weight, x, threads=threads), expected)
    for i in range(17):
        assert torch.equal(multiply(weight, x[i : i + 1]), expected[i : i + 1])
    for first, last in ((0, 2), (3, 17), (1, 9)):
        assert torch.equal(multiply(weight, x[first:last]), expected[first:last])
    cut = torch.cat([multiply(weight.slice(a, b), x) for a, b in ((0, 16), (16, weight.rows))], dim=1)
    assert torch.equal(cut, expected)


@pytest.mark.parametrize("name", SHAPES)
def test_many_vectors_get_the_bits_of_one(name: str, isa: str) -> None:
    """Numbers of vectors on both sides of where kernels for many begin, columns of several ranges (of no whole register
    in dense matrices), and bands that have no second one beside them."""
    columns = 768 if name in PACKED else 205
    weight = matrix(name, 69, columns)
    x, bias = randn(31, columns, seed=5), randn(69, seed=4)
    x[3, 40] = torch.inf
    expected = torch.cat([multiply(weight, x[i : i + 1], bias) for i in range(31)])
    assert not expected[3].isfinite().any()
    assert expected[4:].isfinite().all()
    for count in (*range(9, 26), 31):
        y = multiply(weight, x[:count], bias, threads=count % 3 + 1)
        assert torch.equal(y.nan_to_num(7.0), expected[:count].nan_to_num(7.0))
    one = multiply(weight.slice(16, 69), x[:18], bias[16:], threads=1)
    assert torch.equal(one.nan_to_num(7.0), expected[:18, 16:].nan_to_num(7.0))


def test_multiply_writes_the_rows_of_its_bands_and_no_others(native: Library, isa: str) -> None:
    weight, x = matrix("U4", 37, 64), randn(2, 64)
    expected, out = multiply(weight, x), torch.full((2, 40), 7.0)
    vectors, memory = Input(2, 64, floats_of(x), 64), torch.empty(4096, dtype=torch.uint8)
    native.functions.place_input(byref(vectors), memory.data_ptr())
    for m in range(2):
        native.functions.round_groups(byref(vectors), m, 0, 2)
    native.functions.multiply(matrix_struct(weight), byref(vectors), out.data_ptr(), 40, None, 1, 2)
    assert torch.equal(out[:, 16:32], expected[:, 16:32])
    native.functions.multiply(matrix_struct(weight), byref(vectors), out.data_ptr(), 40, None, 2, 3)
    assert torch.equal(out[:, 32:37], expected[:, 32:])
    assert bool((out[:, :16] == 7).all() and (out[:, 37:] == 7).all())


def test_strided_vectors_and_results(native: Library) -> None:
    weight, wide, out = matrix("S8", 20, 64), randn(3, 100), torch.full((3, 30), 7.0)
    multiply(weight, wide[:, 20:84], out=out[:, 4:24])
    assert torch.equal(out[:, 4:24], multiply(weight, wide[:, 20:84].contiguous()))
    assert bool((out[:, :4] == 7).all() and (out[:, 24:] == 7).all())


# ---------------------------------------------------------------- rounding of vectors


def round_all(native: Library, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded numbers, scales and sums of vectors `[count, columns]`."""
    (count, columns), groups = x.shape, x.shape[1] // GROUP
    vectors = Input(count, columns, floats_of(x), columns)
    memory = torch.zeros(native.functions.place_input(byref(vectors), None), dtype=torch.uint8)
    native.functions.place_input(byref(vectors), memory.data_ptr())
    for m in range(count):
        native.functions.round_groups(byref(vectors), m, 0, groups)

    def read(pointer: object, nbytes: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(string_at(pointer, nbytes)), dtype=dtype)  # type: ignore[arg-type]

    codes = read(vectors.rounded, count * columns, torch.int8).view(count, columns)
    scales = read(vectors.scales, 4 * count * groups, torch.float32).view(count, groups)
    return codes, scales, read(vectors.sums, 8 * count * groups, torch.float32).view(count, groups, 2)


def test_vectors_are_rounded_to_the_nearest(native: Library, isa: str) -> None:
    x = randn(5, 96) * torch.tensor([1e-40, 1e-20, 1.0, 1e20, 3e37])[:, None]
    x[2, :32] = 0
    x[3, 32:64] = torch.arange(32) / 2 * 1e20  # halves go to even
    x[3, 32] = 63.5e20 * 2
    codes, scales, sums = round_all(native, x)
    assert torch.equal((codes.double().unflatten(1, (-1, 32)) * scales.double()[:, :, None]).flatten(1), rounded(x))
    assert int(codes.abs().max()) == 127
    whole = codes.float().unflatten(1, (-1, 2, 16)).sum(dim=3)
    assert torch.equal(sums, torch.stack([whole.sum(dim=2), whole[:, :, 0]], dim=2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_vector_alone(bad: float, isa: str) -> None:
    weight, x = matrix("U4", 20, 96), randn(3, 96)
    sound = multiply(weight, x)
    x[1, 40] = bad
    y = multiply(weight, x)
    assert bool(y[1].isnan().all())
    assert torch.equal(y[[0, 2]], sound[[0, 2]])


# ---------------------------------------------------------------- sizes and refusals


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_those_of_the_header(name: str, native: Library) -> None:
    for rows, columns in ((1, 256), (16, 512), (37, 768)):
        layout = LAYOUTS[name]
        assert native.functions.matrix_bytes(layout.code, rows, columns) == layout.nbytes(rows, columns)


def test_what_does_not_fit_is_refused(native: Library) -> None:
    weight, x = matrix("U4", 20, 64), randn(3, 64)
    with pytest.raises(InputError, match=r"x is torch.float32 \[3, 63\].*needed is float32 \[3, 64\]"):
        multiply(weight, x[:, :63])
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        multiply(weight, x.double())
    with pytest.raises(InputError, match="rows must be contiguous"):
        multiply(weight, randn(64, 3).T)
    with pytest.raises(InputError, match="rows must be contiguous"):
        multiply(weight, x[:1].expand(3, 64))
    with pytest.raises(InputError, match=r"out is .*\[3, 19\]"):
        multiply(weight, x, out=torch.empty(3, 19))
    for threads in (0, -1, True, 10**9):  # OpenMP would end the process
        with pytest.raises(InputError, match="must be an integer from 1 to 1024"):
            multiply(weight, x, threads=threads)
    with pytest.raises(InputError, match="bias is"):
        multiply(weight, x, torch.zeros(21))
    with pytest.raises(InputError, match="rows 8 to 20"):
        weight.slice(8, 20)
    with pytest.raises(InputError, match="needs 1280 contiguous bytes"):
        PackedMatrix(LAYOUTS["U4"], 20, 64, torch.zeros(1279, dtype=torch.uint8))
    assert multiply(weight, x[:0]).shape == (0, 20)


def test_a_library_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    assert loader.load(tmp_path / "_kernels.so") == (
        None,
        "the native kernels were not built: _kernels.so is missing; installing with a compiler builds it",
    )
    (tmp_path / "_kernels.so").write_bytes(b"no library")
    loaded, reason = loader.load(tmp_path / "_kernels.so")
    assert loaded is None
    assert "cannot be loaded" in (reason or "")


# ---------------------------------------------------------------- in processes of their own


@pytest.mark.heavy
def test_one_openmp_runtime(native: Library) -> None:
    code = (
        "import torch; from triptych.quantize import *; w = quantize(torch.ones(64, 64), 'int8');"
        "multiply(w, torch.ones(1, 64)); torch.ones(500, 500) @ torch.ones(500, 500);"
        "print(open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "_kernels" in done.stdout
    assert len(set(re.findall(r"\S*lib(?:gomp|iomp|omp)\S*", done.stdout))) == 1


def environment() -> dict[str, str]:
    """The environment for another Python, with the package on its path."""
    return {**os.environ, "PYTHONPATH": str(NATIVE.parent.parent)}


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["sanitized", "guarded"])
def test_no_byte_beyond_the_buffers_is_touched(way: str, tmp_path: Path) -> None:
    """Every kernel in buffers of exact size; as a control, weights and caches that are too short are noticed."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    flags = ["-fopenmp", "-ffp-contract=off", f"-I{NATIVE}"]
    flags += ["-O3", "-DGUARDED=1"] if way == "guarded" else ["-O1", "-g", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all"] if way == "sanitized" else []

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        settings = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
        return subprocess.run(command, capture_output=True, text=True, timeout=600, env=settings, cwd=tmp_path)

    built = run(
        compiler,
        *flags,
        "-c",
        *map(str, NATIVE.glob("matmul*.c")),
        *map(str, NATIVE.glob("kernels*.c")),
        *map(str, NATIVE.glob("train*.c")),  # which the table of levels names
        *(str(NATIVE / f"{name}.c") for name in ("levels", "repack", "step_attend", "step_attend_bf16", "step_ops")),
    )
    assert built.returncode == 0, built.stderr
    driver = str(Path(__file__).with_name("native_sizes.c"))
    for shorter in (0, 1, 2):
        objects = [path.name for path in tmp_path.glob("*.o")]
        built = run(compiler, *flags, f"-DSHORTER={shorter}", driver, *objects, "-o", "sizes", "-lm")
        if "cannot find" in built.stderr:
            pytest.skip("gcc has no sanitizers here")
        assert built.returncode == 0, built.stderr
        done = run("./sizes")
        if shorter:
            assert done.returncode == -signal.SIGSEGV if way == "guarded" else "heap-buffer-overflow" in done.stderr
        else:
            assert done.returncode == 0, done.stderr[-3000:]
            assert int(done.stdout) >= 900


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_after_use_multiplies(native: Library) -> None:
    """OpenMP's threads are those of the parent: a child that used them would wait for ever."""
    weight, x = quantize(torch.randn(640, 256), "int8"), torch.randn(3, 256)
    expected = multiply(weight, x, threads=2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(multiply(weight, x, threads=2), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(multiply(weight, x, threads=2), expected)
