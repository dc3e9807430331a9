"""The memory of processes that train one model: what `triptych count --train` says, and the peak of each (VmHWM).

    python bench/parallel_memory.py [--size 20M|100M|1.1B] [--mesh 1,4,1] [--length 256] [--rows 1] [--recompute]

A step is taken twice on a mesh replicate,shard,tensor, in fp32 with AdamW.  Each process takes a step of a small model
first, so that code and work space of libraries are there before; what is in memory then is taken off.  The peak is of
the steps alone, without the making of the model.  Needs Linux.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triptych import machine, nn
from triptych.count import Mesh, TrainingStep
from triptych.count.divided import DividedModel
from triptych.families import read_config
from triptych.spec import ModelSpec
from triptych.train import Example, Optimizer, OptimizerSettings, RunSettings, Schedule, Trainer, causal
from triptych.train.parallel.mesh import MeshRanks
from triptych.train.parallel.settings import ParallelSettings

SIZES = {  # width, hidden width, blocks, heads, key/value heads, vocabulary
    "small": (64, 128, 2, 4, 4, 512),
    "20M": (384, 1024, 6, 6, 2, 8192),
    "100M": (768, 2048, 12, 12, 4, 16_384),
    "1.1B": (2048, 5632, 22, 32, 4, 32_000),
}


class FixedRows:
    """The same rows in every step."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        random = np.random.default_rng(1)
        self.rows = [causal(random.integers(0, vocab, length + 1, dtype=np.int32)) for _ in range(rows)]

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return self.rows

    def held_out_rows(self) -> Any:
        return iter(self.rows)

    def targets(self) -> Any:
        return self.rows[0].targets


def spec_of(size: str, length: int) -> ModelSpec:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size")  # fmt: skip
    sizes = dict(zip(names, SIZES[size], strict=True))
    return read_config(
        {"model_type": "llama", "max_position_embeddings": length, "tie_word_embeddings": False, **sizes}
    )


def in_memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most since `steps` began."""
    line = Path("/proc/self/status").read_text().split(f"{name}:")[1]
    return 1024 * int(line.split()[0])


def steps(size: str, options: argparse.Namespace, ranks: MeshRanks) -> tuple[int, int]:
    """What is in memory before two steps, and the most during them."""
    module = nn.new(spec_of(size, options.length), 0)
    ranks.distribute(module)
    rows = options.rows * ranks.settings.readers
    run = RunSettings(steps=2, rows=rows, length=options.length, precision="fp32", recompute=options.recompute)
    optimizer = Optimizer(module, OptimizerSettings(name="adamw"), ranks)
    trainer = Trainer(module, FixedRows(rows, options.length, SIZES[size][-1]), optimizer, Schedule(), run, ranks=ranks)
    machine.give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    made = in_memory("VmRSS")
    trainer.step()
    trainer.step()
    return made, in_memory("VmHWM")


def measured(index: int, options: argparse.Namespace, mesh: Mesh, store: str) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=mesh.processes)
    settings = ParallelSettings(replicate=mesh.replicate, shard=mesh.shard, tensor=mesh.tensor)
    ranks = MeshRanks(settings, torch.device("cpu"), clocked=False)
    steps("small", options, ranks)
    machine.give_back_memory()
    before = in_memory("VmRSS")
    made, peak = (nbytes - before for nbytes in steps(options.size, options, ranks))
    model = DividedModel(spec_of(options.size, options.length), mesh.tensor)
    memory = model.memory(mesh, TrainingStep(options.length, rows=options.rows, recompute=options.recompute))
    if index == 0:
        print(f"{options.size}, {mesh}, {options.rows} rows of {options.length} tokens a process, fp32, AdamW")
        print(", ".join(f"{name} {nbytes / 1e6:,.0f} MB" for name, nbytes in memory.to_dict().items()), flush=True)
    own = f"rank {index}: {made / 1e6:,.0f} MB before the steps, {peak / 1e6:,.0f} MB at the peak, "
    for line in ranks.texts(f"{own}{peak / memory.peak:.0%} of the predicted"):
        if index == 0:
            print(line)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="100M")
    parser.add_argument("--mesh", default="1,4,1")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    mesh = Mesh(*map(int, options.mesh.split(",")))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measured, (options, mesh, f"{folder}/store"), nprocs=mesh.processes)


if __name__ == "__main__":
    main()
