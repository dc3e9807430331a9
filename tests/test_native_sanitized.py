"""The native step and the native encoder under the address and undefined-behaviour sanitizers: torch's and NumPy's own
buffers get guarded edges, so a read or write beyond a cache, a weight, the arena or a thread's scratch memory ends the
process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.native import loader

NATIVE = Path(loader.__file__).parent

STEPS = """
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triptych
from triptych.native import loader

found = loader.load(Path(sys.argv[1]))
assert found[0] is not None, found[1]
loader._load = lambda: found

import tiny
from native_models import LLAMA, Run, llama
from triptych.attention import Rows
from triptych.generate.sampling import draw
from triptych.model import create
from triptych.program import native_executor
from triptych.program.native_executor import NativeStep
from triptych.program.native_encoder import NativeEncoder
from triptych.quantize import kernel_matrix
from test_sampling import SAMPLINGS
from triptych import ops
from triptych.attention import attend
from triptych.ops import native_training
from triptych.spec.masks import causal, keys

torch.set_num_threads(2)
create(LLAMA).save(sys.argv[3])
if sys.argv[2] == "broken":  # the control: an arena and scratch memory that are too small
    plan_of = native_executor.plan_of
    def small(*arguments, **how):
        plan = plan_of(*arguments)
        return replace(plan, arena=plan.arena // 2, scratch=16)
    native_executor.plan_of = small

@torch.inference_mode()
def prompts(module, lengths, generated):
    step = NativeStep(module, module.decoder.cache(3), matrix_of=kernel_matrix, bf16=True)
    for past in ((0, 0, 0), lengths):
        rows = Rows(lengths, past)
        of_prompts = [max(length - generated, 0) for length in lengths]
        assert step.logits([5] * rows.total, rows, range(rows.total), of_prompts) is not None, step.why_modules


def training():
    # Attention and activations with their gradients, of sizes that fill no register.
    native_training.kernels_for = lambda dtype: found[0]
    native_training.FEWEST = 1
    for dtype in (torch.float32, torch.bfloat16):
        for queries, count, width, value_width in ((1, 1, 1, 1), (3, 3, 5, 7), (37, 70, 20, 33), (129, 200, 64, 65)):
            for mask in (causal(), keys([count, 1]), None):
                q = torch.randn(2, 4, queries, width, dtype=dtype, requires_grad=True)
                k = torch.randn(2, 2, count, width, dtype=dtype, requires_grad=True)
                v = torch.randn(2, 2, count, value_width, dtype=dtype, requires_grad=True)
                for bias in (None, torch.randn(1, 4, queries, count, requires_grad=True)):
                    out = attend(q, k, v, mask=mask, bias=bias, path="native")
                    ops.gated("silu", out.contiguous(), torch.randn(out.shape, dtype=dtype)).float().sum().backward()
                    ops.ACTIVATIONS["gelu"](q.contiguous()).float().sum().backward()
        for width, turned in ((64, 64), (7, 2), (50, 36)):
            x, turn = torch.randn(9, 3, width, dtype=dtype, requires_grad=True), torch.randn(9, 1, turned)
            ops.rotate(x, ops.Rotation(turn.cos(), turn.sin(), "half")).float().sum().backward()
    for tokens, width in ((1, 1), (300, 33)):
        weight = torch.ones(width, requires_grad=True)
        ops.rms_norm(torch.randn(tokens, width, requires_grad=True), weight, 0.0, 1e-5).sum().backward()


MODELS = {
    "window": lambda: tiny.decoder(mask="window"), "alibi": lambda: tiny.decoder("alibi", "window"),
    "t5": lambda: tiny.decoder("t5"), "mixture": tiny.mixture, "both": tiny.encoder_decoder,
    "llama": llama, "wide": lambda: llama(head_dim=20),
}
for isa in loader.LEVELS:
    if found[0].use(isa) != isa:
        continue
    training()
    for name, make in MODELS.items():
        long = 90 if name in ("llama", "wide") else 40  # into a second tile of keys where the context allows
        Run(make(), native_sources=True).both(((7, 1, 3), (1, 1, 1), (1, 5, 2), (1, 0, 1), (long, 1, 30), (1, 1, 1)))
    for cache_type in ("fp16", "bf16", "int8"):  # with a window the first step fills the ring
        for name in ("window", "wide", "both"):
            steps = ((7, 1, 3), (1, 1, 1), (1, 5, 2), (90 if name == "wide" else 40, 1, 30), (1, 1, 1))
            Run(MODELS[name](), native_sources=True, cache_type=cache_type).both(steps)
    for form in ("int8", "int4"):
        module = triptych.load(sys.argv[3], quantize=form).module
        Run(module).both()
        if isa == "amx":
            prompts(module, (300, 1, 33), 2)
            prompts(module, (2, 17, 1), 0)
    encoder = NativeEncoder(tiny.encoder(), matrix_of=kernel_matrix, dense=True)
    rows = Rows((7, 1, 40, 3))
    with torch.inference_mode():
        assert encoder.hidden([3] * rows.total, rows) is not None, encoder.why_modules
    for vocab in (1, 3, 16, 257, 5003):
        draw(torch.randn(len(SAMPLINGS), vocab), SAMPLINGS, [1] * len(SAMPLINGS), range(len(SAMPLINGS)))
    print(isa)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The native library with sanitizers, and their runtime."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("gcc has no sanitizers here")
    target = tmp_path_factory.mktemp("sanitized") / "kernels.so"
    flags = ["-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-Wno-psabi"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(path) for path in sorted(NATIVE.glob("*.c"))]
    built = subprocess.run([compiler, *flags, *sources, "-o", str(target), "-lm"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target, runtime


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["whole", "broken"])
def test_no_byte_beyond_the_buffers_of_a_step_is_touched(
    way: str, sanitized: tuple[Path, str], tmp_path: Path
) -> None:  # fmt: skip
    """Every kernel with windows, rings, biases, experts, cross-attention and packed weights."""
    library, runtime = sanitized
    environment = os.environ | {
        "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    command = [sys.executable, "-c", STEPS, str(library), way, str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if way == "whole":
        assert done.returncode == 0, done.stderr[-5000:]
        assert done.stdout.split()[0] == "portable"
    else:
        assert "heap-buffer-overflow" in done.stderr, done.stderr[-5000:]
