"""The command line: argument parsing and display; every command is one call into the library.

Nothing here imports torch, rich or the library before a command runs, so that help is shown at once.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

from . import screen
from .failure import guarded

NARROW = 72  # columns; in a narrower terminal the boxes of the help cut off names of options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command -> its exit code: 0, 1 (failed), 2 (usage), or 128 + the number of the signal that ended it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters that the terminal cannot encode become ?
            stream.reconfigure(errors="replace")

    arguments = list(sys.argv[1:] if argv is None else argv)
    screen.COMMAND.set(shlex.join(["triptych", *arguments]))

    def run() -> object:
        from .app import app

        app.rich_markup_mode = None if shutil.get_terminal_size().columns < NARROW else "markdown"
        return app(arguments or ["--help"], prog_name="triptych", standalone_mode=False)

    return guarded(run, arguments)
