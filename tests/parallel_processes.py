"""Processes that train together, kept over many cases: `with Processes(2) as pool: pool.run("case", mesh, ...)`.

Each process imports `parallel_cases` and calls the function of a case by name with the `Ranks` of its mesh; what rank 0
returns is the result.  An error in any process is raised with its rank, and ends the pool.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 300  # seconds after which a case is taken to hang

Mesh = tuple[int, int, int]  # replicate, shard, tensor


def _serve(index: int, count: int, store: str, pipe: Connection, paths: list[str]) -> None:
    sys.path[:] = paths
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=count)
    import parallel_cases

    while (job := pipe.recv()) is not None:
        name, mesh, arguments = job
        try:
            result = getattr(parallel_cases, name)(parallel_cases.ranks_of(mesh), **arguments)
            pipe.send((None, result if index == 0 else None))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


class Processes:
    """`count` processes that serve cases until the block ends."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> "Processes":
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(self.count)]
        self.pipes = [own for own, _ in ends]
        store = os.path.join(self.folder.name, "store")
        self.processes = [
            context.Process(target=_serve, args=(i, self.count, store, theirs, sys.path), daemon=True)
            for i, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        return self

    def run(self, case: str, mesh: Mesh, **arguments: Any) -> Any:
        """What rank 0 of `mesh` returns for a case."""
        for pipe in self.pipes:
            pipe.send((case, mesh, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                self._end()
                raise TimeoutError(f"rank {rank} gave no answer to {case} on {mesh}")
            error, answer = pipe.recv()
            if error is not None:
                self._end()
                raise AssertionError(f"rank {rank}, {case} on {mesh}:\n{error}")
            answers.append(answer)
        return answers[0]

    def _end(self) -> None:
        for process in self.processes:
            process.kill()

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()
        self.folder.cleanup()
