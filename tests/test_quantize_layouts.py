"""Run-time layouts: what goes in comes back, GGUF blocks keep their numbers, our own rounding is near."""

import copy
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from native_models import LLAMA
from test_gguf import SCALES, random_blocks
from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.errors import CheckpointError, InputError
from triptych.model import create
from triptych.native import huge_pages
from triptych.native.huge_pages import MAPPING, PAGE, HugePages
from triptych.quantize import LAYOUT_OF, LAYOUTS, PackedMatrix, kernel_layouts, quantize, repack
from triptych.quantize.kernel_layouts import Codes

GROWTH = {  # bytes of the layout over bytes of the file, for whole bands
    "Q4_0": 1.112, "Q4_1": 1.0, "Q4_K": 1.112, "Q5_0": 1.091, "Q5_1": 1.0, "Q5_K": 1.091, "Q8_0": 1.0, "Q6_K": 1.305,
}  # fmt: skip


def blocks(kind: str, rows: int = 37, count: int = 3) -> PackedBlocks:
    return PackedBlocks(block_format(kind), torch.from_numpy(random_blocks(kind, rows, count)))


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) * 0.02


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("name", ["U4", "U5", "S8", "S8X16"])
def test_codes_come_back(name: str) -> None:
    layout, dice = LAYOUTS[name], torch.Generator().manual_seed(0)
    signed, columns = name.startswith("S8"), 2 * layout.block
    top = {"U4": 16, "U5": 32}.get(name, 256)
    codes = torch.randint(0, top, (48, columns), generator=dice).to(torch.uint8)
    scales = torch.randn(48, 2, generator=dice).half()
    factors = torch.randint(-128, 128, (48, columns // 16), generator=dice).to(torch.int8)
    numbers = Codes(
        codes.view(torch.int8) if signed else codes,
        scales,
        None if signed else scales * 3,
        factors if name == "S8X16" else None,
    )
    data = layout.pack(numbers)
    assert data.nbytes == layout.nbytes(48, columns)
    back = layout.unpack(data, columns)
    for field in ("codes", "scales", "minimums", "factors"):
        wanted, got = getattr(numbers, field), getattr(back, field)
        assert (wanted is None and got is None) or torch.equal(wanted, got), field


def test_bytes_lie_where_the_header_says() -> None:
    """One code of a matrix at a time is one: which byte, and which bits of it."""
    for name, row, column, byte, bits in (
        ("U4", 0, 0, 0, 1),
        ("U4", 3, 1, 13, 1),
        ("U4", 3, 6, 14, 16),
        ("U4", 17, 35, 2 * 320 + 320 + 7, 1),
        ("U4", 2, 31, 3 * 64 + 11, 16),
        ("S8", 5, 9, 2 * 64 + 21, 1),
        ("S8X16", 5, 255, 63 * 64 + 23, 1),
    ):
        layout = LAYOUTS[name]
        codes = torch.zeros(32, 256 if name == "S8X16" else 64, dtype=torch.int8 if "S" in name else torch.uint8)
        codes[row, column] = 1
        scales = torch.zeros(32, codes.shape[1] // layout.block)
        factors = torch.zeros(32, 16, dtype=torch.int8)
        minimums = None if "S" in name else scales
        data = layout.pack(Codes(codes, scales, minimums, factors if name == "S8X16" else None))
        assert [(int(i), int(data[i])) for i in data.nonzero()[:, 0]] == [(byte, bits)], (name, row, column)


@pytest.mark.parametrize(("columns", "row", "byte", "bit"), [(9, 3, 256 + 13, 2), (31, 15, 256 + 63, 7)])
def test_fifth_bits_lie_in_the_fifth_line(columns: int, row: int, byte: int, bit: int) -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[row, columns] = 16
    data = LAYOUTS["U5"].pack(Codes(codes, torch.zeros(16, 1), torch.zeros(16, 1)))
    assert [(int(i), int(data[i])) for i in data.nonzero()[:, 0]] == [(byte, 1 << bit)]


def test_rows_share_memory_and_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = repack(blocks("Q4_K"))
    dense = packed.dense()
    assert torch.equal(packed.slice(16, 35).dense(), dense[16:35])
    assert packed.slice(16, 35).data.data_ptr() == packed.data.data_ptr() + LAYOUTS["U4"].nbytes(16, packed.columns)
    monkeypatch.setattr(kernel_layouts, "_CHUNK", 1)  # one band at a time
    assert torch.equal(packed.dense(), dense)
    assert torch.equal(repack(blocks("Q4_K")).data, packed.data)
    weight = normal(37, 64)
    assert torch.equal(quantize(weight, "int4").data, quantize(weight, "int4").data)


def test_dense_matrices_are_as_they_are() -> None:
    weight = normal(5, 7)
    packed = PackedMatrix.of(weight)
    assert packed.data.data_ptr() == weight.data_ptr()
    assert packed.shape == (5, 7)
    assert torch.equal(packed.slice(1, 3).dense(), weight[1:3])
    assert PackedMatrix.of(weight.bfloat16()).nbytes == 70
    with pytest.raises(InputError, match=r"float32 or bfloat16, not torch\.float64"):
        PackedMatrix.of(weight.double())
    with pytest.raises(InputError, match="contiguous bytes"):
        PackedMatrix.of(weight.T)


# ---------------------------------------------------------------- from GGUF


@pytest.mark.parametrize("kind", SCALES)
def test_repacked_blocks_keep_their_numbers(kind: str) -> None:
    source = blocks(kind)
    packed, expected = repack(source), source.dense()
    assert packed.layout == LAYOUT_OF[kind]
    if kind in ("Q4_K", "Q5_K"):  # scales and minimums are rounded to fp16, codes are not
        parts = source.format.parts(source.raw.reshape(-1, source.format.nbytes))
        reach = (31 if kind == "Q5_K" else 15) * parts.scales.abs() + parts.minimums.abs()
        room = (reach * 2.0**-11).repeat_interleave(32, dim=1).view(expected.shape)
        assert bool(((packed.dense() - expected).abs() <= room).all())
    else:
        assert torch.equal(packed.dense(), expected)
    damaged = packed.data.clone()
    damaged[70] ^= 1
    assert not torch.equal(PackedMatrix(packed.layout, *packed.shape, damaged).dense(), packed.dense())


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("scale", [None, 0.01, -3e-7, 6e-8, 0.0], ids=str)
def test_native_and_torch_repack_to_the_same_bytes(
    kind: str, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = blocks(kind) if scale is None else with_scale(kind, scale)
    packed = repack(source)
    monkeypatch.setattr(sys.modules["triptych.quantize.repack"], "library", lambda: None)
    assert torch.equal(repack(source).data, packed.data)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    source = blocks("Q8_0")
    with pytest.raises(CheckpointError, match="not whole blocks of Q8_0"):
        repack(PackedBlocks(source.format, source.raw[:, :-1]))


def test_memory_in_huge_pages_is_aligned_and_nothing_shares_a_byte() -> None:
    pages = HugePages()
    sizes = [1, 64, 65, 0, MAPPING - 200, 300, MAPPING + 5, 2]
    pieces = [pages.take(size) for size in sizes]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert [len(piece) for piece in pieces] == sizes
    assert all(bool((piece == i).all()) for i, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert pieces[0].data_ptr() % PAGE == 0
        assert copy.deepcopy(pieces[1]).untyped_storage().nbytes() == 64  # a copy does not copy the others


def test_without_huge_pages_memory_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert len(HugePages().take(70)) == 70


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="the system keeps no freed memory for later")
def test_memory_is_used_again_when_nothing_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[mmap.mmap] = []
    monkeypatch.setattr(huge_pages, "UNUSED_MAPPINGS", kept)
    pages = HugePages(reused=True)
    first, second = pages.take(100).fill_(7), pages.take(50)
    address, view = first.data_ptr(), second[10:20]
    del pages, first, second
    assert not kept  # a view of a piece lives
    other = HugePages(reused=True).take(100)
    assert other.data_ptr() != address
    del view
    assert len(kept) == 1
    zeros = HugePages().take(100)  # a user that expects zeros gets new memory
    assert not zeros.any()
    assert len(kept) == 1
    again = HugePages(reused=True).take(100)
    assert again.data_ptr() == address
    assert not kept
    del again, other
    assert len(kept) == 1  # and no more


@pytest.mark.parametrize("kind", SCALES)
def test_growth_over_the_file(kind: str) -> None:
    source = blocks(kind, rows=32)
    growth = repack(source).nbytes / source.raw.nbytes
    assert growth <= GROWTH[kind] <= growth + 0.001
    assert growth <= (1.35 if kind == "Q6_K" else 1.15)


def with_scale(kind: str, scale: float) -> PackedBlocks:
    """Blocks whose fp16 scales are all `scale`."""
    source = blocks(kind)
    raw = source.raw.clone().view(-1, source.format.nbytes)
    for at in SCALES[kind]:
        raw[:, at : at + 2] = torch.tensor([scale]).half().view(torch.uint8)
    return PackedBlocks(source.format, raw.view(source.raw.shape))


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("Q4_0", 9000.0), ("Q5_0", 5000.0), ("Q4_K", 2000.0), ("Q5_K", 2000.0), ("Q8_0", math.inf), ("Q6_K", math.nan)],
)
def test_scales_too_large_for_fp16_are_refused(kind: str, scale: float) -> None:
    with pytest.raises(CheckpointError, match=rf"the {kind} matrix can be used as dense numbers only: .* too large"):
        repack(with_scale(kind, scale))


@pytest.mark.parametrize("kind", list(SCALES))
def test_subnormal_scales_are_exact(kind: str) -> None:
    source = with_scale(kind, 3e-7)
    assert torch.equal(repack(source).dense(), source.dense())


def test_matrices_alone_are_repacked() -> None:
    source = blocks("Q8_0", rows=6)
    with pytest.raises(CheckpointError, match="two dimensions"):
        repack(PackedBlocks(source.format, source.raw.view(2, 3, -1)))


# ---------------------------------------------------------------- our own rounding


def test_int8_rounds_to_the_nearest() -> None:
    weight = normal(37, 96)
    weight[3, :32] = 0
    packed = quantize(weight, "int8")
    step = weight.view(37, 3, 32).abs().amax(dim=2, keepdim=True) / 127
    error = (packed.dense() - weight).view(37, 3, 32).abs()
    assert packed.layout.name == "S8"
    # Half a step, and at the largest number what fp16 takes from its scale.
    assert bool((error <= step * 0.5 + step * 127 * 2.0**-11).all())
    assert float(error.max() / step.max()) > 0.3
    assert torch.equal(packed.dense()[3, :32], torch.zeros(32))


def test_int4_beats_the_range_of_the_numbers() -> None:
    weight = normal(64, 320)
    weight[5] = 0.25
    weight[6] = 0
    packed = quantize(weight, "int4")
    groups = weight.view(64, 10, 32)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-9)
    plain = (((groups - low) / step).round() * step + low).view_as(weight)
    searched, naive = (packed.dense() - weight).norm(), (plain - weight).norm()
    assert packed.layout.name == "U4"
    assert float(searched / naive) < 0.92
    worse = (packed.dense() - weight).view(64, 10, 32).norm(dim=2) > (plain - weight).view(64, 10, 32).norm(
        dim=2
    ) * 1.01
    assert not bool(worse[:5].any() or worse[7:].any())
    assert torch.equal(packed.dense()[5:7], weight[5:7])


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(InputError, match=r"unknown packed form 'int3' .*did you mean"):
        quantize(normal(4, 32), "int3")
    with pytest.raises(InputError, match="groups of 32"):
        quantize(normal(4, 33), "int8")
    with pytest.raises(InputError, match="packs matrices of numbers"):
        quantize(normal(4, 32).to("meta"), "int8")
    for form in ("int4", "int8"):
        for bad in (math.nan, math.inf, 1e9):
            weight = normal(4, 32)
            weight[1, 1] = bad
            with pytest.raises(InputError, match="not finite or too large"):
                quantize(weight, form)


LITTLE_MEMORY = """
import resource, sys
import triptych
from triptych.native.huge_pages import HugePages
from triptych.errors import TriptychError

pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (100 << 20),) * 2)
model = triptych.load(sys.argv[1], quantize="int8")
print(len(model.generate([[1, 2, 3]], max_new_tokens=2)))
memory = HugePages()
print(memory.take(1 << 20).count_nonzero().item(), memory.take(1 << 20).numel())
try:
    memory.take(1 << 30)
except TriptychError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is mapped")
def test_a_small_model_is_loaded_where_little_memory_may_be_mapped(tmp_path: Path) -> None:
    create(LLAMA).save(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    written, taken, error = done.stdout.splitlines()
    assert (written, taken) == ("1", "0 1048576")
    assert error.startswith("the system has no 1,024.0 MiB of memory left")
