"""Vectors of texts: to a file, or as a table of how alike they are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.cli import screen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = (".npy", ".safetensors")
FEW = 12  # texts whose similarities fit a terminal


def save(vectors: NDArray[np.float32], out: Path) -> None:
    """[B, D] to a `.npy` or `.safetensors` file, whole or not at all.  Raises CheckpointError when it cannot be."""
    import numpy as np

    from triptych.checkpoints import atomic_write

    if out.suffix == ".safetensors":
        from safetensors.numpy import save as to_bytes

        atomic_write(out, to_bytes({"embeddings": np.ascontiguousarray(vectors)}))
    else:
        held = io.BytesIO()
        np.save(held, vectors)
        atomic_write(out, held.getvalue())


def show(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
    """The cosine of every two texts, or the first few numbers of each where there are many or one."""
    if not 1 < len(texts) <= FEW:
        shown = screen.table("text", "first numbers", title=f"{screen.shape(vectors.shape)} vectors")
        for text, vector in zip(texts, vectors, strict=True):
            shown.add_row(screen.plain(text), "  ".join(f"{x:+.4f}" for x in vector[:6]) + "  ...")
    else:
        unit = vectors / (vectors**2).sum(axis=1, keepdims=True).clip(1e-24) ** 0.5
        names = [str(i + 1) for i in range(len(texts))]
        shown = screen.table("", "text", *names, title=f"cosine of {screen.shape(vectors.shape)} vectors", right=names)
        for name, text, row in zip(names, texts, unit @ unit.T, strict=True):
            shown.add_row(name, screen.plain(text), *(f"{x:.3f}" for x in row))
    screen.console().print(shown)
