"""What loading costs: the final weights, and little more."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import malformed
from triptych.native import library, why_not

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")

# In a process of its own, since the allocator of this one keeps what other tests gave back.
# `cost` is the most anonymous memory (what no file backs) while `work` runs, over what there was before.
MEASURE = """
import sys, threading
from pathlib import Path
import triptych, triptych.model
from triptych.checkpoints import open_source

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def cost(work):
    seen, done = [anonymous()], threading.Event()
    def watch():
        while not done.wait(0.0005):
            seen.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()  # on the main thread: another has an allocator arena of its own, and its slack
    seen.append(anonymous())
    done.set()
    watcher.join()
    return max(seen) - seen[0], sum(t.nbytes for t in kept), sum(float(t.double().sum()) for t in kept)  # touched
"""
READ = "source = open_source(Path(sys.argv[1]))\nprint(*cost(lambda: [source.read(name) for name in source.names]))"
LOAD = "print(*cost(lambda: list(triptych.load(sys.argv[1], dequantize=True).module.parameters())))"
LOAD_PACKED = """
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights
from triptych.quantize import packing_for

header = read_header(sys.argv[1])
tokenizer, how = header.tokenizer(), packing_for(header.source)

def load():
    module, _ = read_weights(header.spec, header.source, dequantize=how.dequantize, packer=how.packer)
    return [getattr(one, "blocks", one) for one in module.parameters()]

print(*cost(load))
"""
# What stays, the tokenizer included; a small model before has what is imported and made once.
LOADED_PACKED = """
import gc
from tempfile import TemporaryDirectory
from triptych import machine

with TemporaryDirectory() as small:
    tiny = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16}
    triptych.create(tiny).save(Path(small) / "m")
    triptych.load(Path(small) / "m", quantize="int8")
gc.collect()
machine.give_back_memory()
before = anonymous()
model = triptych.load(sys.argv[1])
gc.collect()
print(anonymous() - before, sum(getattr(one, "blocks", one).nbytes for one in model.module.parameters()), 0)
"""


def measure(program: str, path: Path) -> tuple[int, int]:
    """(anonymous bytes it took at most, bytes of the weights it ended with)"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + program, str(path)],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    cost, weights, _ = done.stdout.split()
    return int(cost), int(weights)


def test_packed_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    """Twenty-four tensors, 192 MiB as float32: a reader that kept two copies, or read all at once, would show."""
    blocks = np.zeros((1024, 64 * 34), dtype=np.uint8)
    path = tmp_path / "w.gguf"
    entries = tuple(malformed.entry(f"t{k}", (2048, 1024), 8, k * blocks.nbytes) for k in range(24))
    path.write_bytes(malformed.gguf(entries=entries, data=blocks.tobytes() * 24))
    cost, weights = measure(READ, path)
    assert weights == 24 * 1024 * 2048 * 4
    assert 0.9 * weights < cost <= 1.15 * weights


def test_stored_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({f"t{k}": torch.zeros(1024, 2048) for k in range(8)}, path)
    cost, weights = measure(READ, path)
    assert weights == 8 * 1024 * 2048 * 4
    assert cost <= 0.15 * weights


def test_loading_a_real_model_costs_its_weights_and_little_more(smollm2_gguf: Path) -> None:
    """The whole of `load`: header, tokenizer, mapping, and 97 MB of packed weights made float32."""
    cost, weights = measure(LOAD, smollm2_gguf)
    assert weights == 4 * 134_515_008
    assert 0.9 * weights < cost <= 1.15 * weights


def test_loading_a_packed_file_costs_its_layout_and_little_more(smollm2_gguf: Path) -> None:
    """The weights alone, while they are read and after: the tokenizer, whose size does not follow theirs, comes before.
    No package that torch imports for operations on a packed weight is among the cost."""
    if library() is None:
        pytest.skip(why_not() or "")
    cost, weights = measure(LOAD_PACKED, smollm2_gguf)
    assert 90e6 < weights < 100e6  # 4.5 to 5 bits for most of 135 million numbers, 8.5 for the table
    assert 0.9 * weights < cost <= 1.15 * weights


def test_what_a_load_freed_goes_back_to_the_system(smollm2_gguf: Path) -> None:
    """The tokenizer's tables, about 13 MB whatever the weights, are counted too: a seventh of the layout of this model.
    Without `give_back_memory` it is 32% more than the layout."""
    if library() is None:
        pytest.skip(why_not() or "")
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library keeps what is freed")
    cost, weights = measure(LOADED_PACKED, smollm2_gguf)
    assert 0.95 * weights < cost <= 1.25 * weights, f"{cost / weights - 1:+.1%}"
