"""Memory in huge pages, which a processor reads faster: it looks up fewer addresses.

Linux gives huge pages to the aligned parts of a mapping that asks for them, where /sys/kernel/mm/transparent_hugepage
says `madvise` or `always`.  The matrices of a model, and the keys and values of a layer, are often smaller than a page
of 2 MiB, so several share a mapping.  Where the system gives none, the memory is ordinary.

A mapping that was used for a while and is not any more can be kept for the next user (`HugePages(reused=True)`): new
pages are cleared by the system when they are first written to, which costs more than the writing.  The system may take
its pages back at any time (MADV_FREE), so that the process does not hold memory that others need.
"""

import mmap
from contextlib import suppress
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triptych.errors import TriptychError

PAGE = 1 << 21  # bytes of a huge page; of another size, less of the memory is in huge pages
MAPPING = 1 << 27  # bytes mapped at a time, unless a piece is larger; at first a page, then twice as many as before
LINE = 64
UNUSED_MAPPINGS: list[mmap.mmap] = []  # at most one, of a HugePages that was `reused`, for the next such one


class HugePages:
    """Gives out memory, piece after piece; a mapping is freed when nothing uses its pieces any more.

    reused   pieces hold any numbers, not zeros, and their mapping is kept for the next HugePages that is made so.
    """

    def __init__(self, *, reused: bool = False) -> None:
        self.reused = reused
        self._mapping: npt.NDArray[np.uint8] | None = None
        self._at = 0

    def take(self, nbytes: int) -> Tensor:
        """`[nbytes]` uint8 at a multiple of 64 bytes, zeros unless they are `reused`; plain memory where the system has
        no huge pages, or maps no more.

        Raises TriptychError where there is no memory of this size.
        """
        if not hasattr(mmap, "MADV_HUGEPAGE") or not nbytes:
            return _plain(nbytes)
        if self._mapping is None or self._at + nbytes > len(self._mapping):
            grown = PAGE if self._mapping is None else 2 * len(self._mapping)
            grown = MAPPING if self.reused else min(grown, MAPPING)
            try:
                self._mapping, self._at = self._mapped(max(nbytes, grown)), 0
            except OSError:
                return _plain(nbytes)
        piece = torch.frombuffer(self._mapping[self._at : self._at + nbytes], dtype=torch.uint8)
        self._at += -(-nbytes // LINE) * LINE
        return piece

    def _mapped(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes or more from a multiple of PAGE on."""
        again = self.reused and nbytes == MAPPING and hasattr(mmap, "MADV_FREE")
        mapping = None
        if again:
            with suppress(IndexError):  # of a thread that was quicker
                mapping = UNUSED_MAPPINGS.pop()
        mapping = mapping or _new_mapping(nbytes)
        whole = np.frombuffer(mapping, np.uint8)
        if again:
            finalize(whole, _keep, mapping).atexit = False
        start = -whole.ctypes.data % PAGE
        return whole[start : start + nbytes]


def _plain(nbytes: int) -> Tensor:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8)
    except RuntimeError:  # of torch's allocator; its message has several lines
        size = f"{nbytes / 2**20:,.1f} MiB"
        raise TriptychError(
            f"the system has no {size} of memory left; end other programs, or use a smaller or packed model"
        ) from None


def _new_mapping(nbytes: int) -> mmap.mmap:
    """A mapping that holds so many bytes from a multiple of PAGE on, in huge pages where the system has them."""
    mapping = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without them: the memory then has pages of the usual size
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _keep(mapping: mmap.mmap) -> None:
    """Keep a mapping that nothing uses any more, unless one is kept; until it is used again, the system may take its
    pages."""
    if not UNUSED_MAPPINGS:
        with suppress(OSError):  # of a kernel that does not do so: the mapping is freed
            mapping.madvise(mmap.MADV_FREE)
            UNUSED_MAPPINGS.append(mapping)
