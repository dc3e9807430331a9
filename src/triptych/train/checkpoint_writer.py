"""`CheckpointWriter`: writes the checkpoints of a run, at once or in a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from types import TracebackType
from typing import Any

from triptych.text import Tokenizer
from .checkpoint_content import CheckpointContent
from .checkpoints import Checkpoints
from .loop import Trainer


class CheckpointWriter:
    """Writes into `checkpoints`; a context whose end waits for the last one.

    in_background   a save copies weights and optimizer state, and a thread writes the copies; the next save waits for
                    it.  An error of the thread calls `stop`, and is raised by the next `wait`.
    """

    def __init__(self, checkpoints: Checkpoints, stop: Callable[[], None], *, in_background: bool) -> None:
        self.checkpoints, self.stop, self.in_background = checkpoints, stop, in_background
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, trainer: Trainer, hf: Mapping[str, Any] | None, tokenizer: Tokenizer | None, recipe: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:  # fmt: skip
        """Write the present state, or begin to, once the checkpoint before is there.

        Raises CheckpointError where one of the two cannot be written.
        """
        self.wait()
        content = CheckpointContent.of(trainer, hf, tokenizer, recipe, files, copied=self.in_background)
        if not self.in_background:
            self.checkpoints.write(content)
            return
        # A daemon, so that a second Ctrl-C ends the process at once; what it leaves half-written is no checkpoint.
        self._thread = Thread(target=self._write, args=(content,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.  Raises CheckpointError where it could not be."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, content: CheckpointContent) -> None:
        try:
            self.checkpoints.write(content, content.ranks.for_saving)
        except BaseException as error:
            self._error = error
            self.stop()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):  # and not after Ctrl-C
            self._join()
