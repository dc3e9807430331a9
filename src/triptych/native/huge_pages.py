"""Memory in huge pages, which a processor reads faster: it looks up fewer addresses.

Linux gives huge pages to the aligned parts of a mapping that asks for them, where /sys/kernel/mm/transparent_hugepage
says `madvise` or `always`.  The matrices of a model, and the keys and values of a layer, are often smaller than a page
of 2 MiB, so several share a mapping.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 1 << 21  # bytes of a huge page; of another size, less of the memory is in huge pages
MAPPING = 1 << 27  # bytes mapped at a time; of each mapping up to one page more than is used is touched
LINE = 64


class HugePages:
    """Gives out memory, piece after piece; a mapping is freed when nothing uses its pieces any more."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._at = self._end = 0

    def take(self, nbytes: int) -> Tensor:
        """`[nbytes]` zeros, uint8, at a multiple of 64 bytes; plain memory where the system has no huge pages."""
        if not hasattr(mmap, "MADV_HUGEPAGE") or not nbytes:
            return torch.zeros(nbytes, dtype=torch.uint8)
        if self._mapping is None or self._at + nbytes > self._end:
            self._map(max(nbytes, MAPPING))
        assert self._mapping is not None
        piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=self._at)
        self._at += -(-nbytes // LINE) * LINE
        return piece

    def _map(self, nbytes: int) -> None:
        """A new mapping with so many bytes from a multiple of PAGE on."""
        mapping = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them: the memory then has pages of the usual size
            mapping.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        self._mapping, self._at = mapping, -address % PAGE
        self._end = self._at + nbytes
