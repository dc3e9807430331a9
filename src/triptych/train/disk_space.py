"""How large the checkpoints of a run become, beside what its disk has free."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import CheckpointError
from triptych.train.loop import Trainer


@dataclass(frozen=True)
class DiskSpace:
    """Of the run in `directory`: bytes of one checkpoint, how many of them are on the disk at most at one time, their
    bytes together, and the bytes that are free for them."""

    directory: Path
    one: int
    count: int
    most: int
    free: int

    @staticmethod
    def of(trainer: Trainer, directory: Path, keep: int, old: int) -> DiskSpace:
        """Before `trainer` runs: each checkpoint is written while the newest `keep` are still there.

        `old` bytes in the directory are of checkpoints that are deleted for new ones.
        """
        run, optimizer = trainer.settings, trainer.optimizer
        one = optimizer.weight_bytes + optimizer.state_bytes
        written = math.ceil(1.0 / run.save_every) if run.save_every else 0
        if run.steps is not None:
            written = min(written, run.steps)
        first = trainer.at.step == 0 and written <= keep  # the checkpoint before the first step has no optimizer state
        full = min(written, keep + 1)
        most = full * one + first * optimizer.weight_bytes
        existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
        return DiskSpace(directory, one, full + first, most, shutil.disk_usage(existing).free + old)

    def check(self) -> None:
        """Raises CheckpointError where the disk cannot hold the checkpoints."""
        if self.most > self.free:
            raise CheckpointError(
                f"{self}: too little; free some, give --out on another disk, or write fewer with run.save_every = 1"
            )

    def __str__(self) -> str:
        return (
            f"checkpoints in {self.directory}: {self.count} of {size(self.one)} at most at one time, "
            f"{size(self.most)} in all; {size(self.free)} free"
        )


def size(nbytes: int) -> str:
    """Bytes in megabytes (10^6), from 10,000 of them on in gigabytes."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f} GB"
