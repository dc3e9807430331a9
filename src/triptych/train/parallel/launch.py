"""The processes of a run on one machine, started and watched by torch's elastic agent as torchrun does."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

from triptych import machine
from ..ranks import LostProcessError

SHUTDOWN_SECONDS = 50  # for the other processes to end by themselves once one is lost, or after Ctrl-C


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `triptych` with these arguments in so many processes, to the end; the exit code of those that report their
    own errors.

    Raises LostProcessError, naming the rank, where a process was killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its reports are made here in a line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.threads() // processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0, shutdown_timeout=SHUTDOWN_SECONDS,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "triptych", *arguments)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        return _outcome({rank: (failure.pid, failure.exitcode) for rank, failure in error.failures.items()})
    return 0


def _outcome(ended: Mapping[int, tuple[int, int]]) -> int:
    """The exit code of processes that ended, by rank: their ids and exit codes, negative for a signal.

    Raises LostProcessError for one that another program killed.
    """
    killed = {rank: one for rank, one in ended.items() if one[1] < 0 and -one[1] != signal.SIGTERM}
    for rank, (process, code) in killed.items():
        name = signal.Signals(-code).name
        raise LostProcessError(
            f"rank {rank} (process {process}) was ended by {name}, and the run with it; the checkpoints before are "
            "whole: continue with --resume"
        )
    return max((code for _, code in ended.values() if code > 0), default=1)
