"""`triptych encode`: embeddings of texts, to a file or as a table of their similarities."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_texts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


FORMATS = (".npy", ".safetensors")
FEW = 12  # texts whose similarity matrix fits a terminal


@options.opens
def encode(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling", metavar="HOW", help="mean, first (the [CLS] token) or dense; by default the checkpoint's."
        ),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1.")
    ] = None,
    matmul: options.Matmul = options.Products.AUTO,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the vectors to a .npy or .safetensors file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compute one embedding per text, and their similarities."""
    if out is not None:
        screen.check_suffix(out, FORMATS, "--out")
    from triptych.tasks import note_on_products

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    with screen.waiting(f"encoding {len(inputs):,} texts"):
        vectors = model.encode(inputs, pooling=pooling, normalize=normalize, matmul=matmul.value).float().cpu().numpy()
    if note := note_on_products(model.module, matmul.value):
        screen.note(note)
    if out is not None:
        _save(vectors, out)
        screen.note(f"{out}: {screen.shape(vectors.shape)} vectors")
    if as_json:
        rows = [] if out else [{"text": t, "vector": v.tolist()} for t, v in zip(inputs, vectors, strict=True)]
        screen.result({"shape": list(vectors.shape), "out": None if out is None else str(out), "results": rows})
    elif out is None:
        _show(inputs, vectors)


def _save(vectors: NDArray[np.float32], out: Path) -> None:
    """Replace `out` by the vectors [B, D].  Raises CheckpointError, with the old file kept, when that fails."""
    import numpy as np

    from triptych.checkpoints import atomic_write

    if out.suffix == ".safetensors":
        from safetensors.numpy import save as to_bytes

        atomic_write(out, to_bytes({"embeddings": np.ascontiguousarray(vectors)}))
    else:
        buffer = io.BytesIO()
        np.save(buffer, vectors)
        atomic_write(out, buffer.getvalue())


def _show(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
    """The cosine similarity of every two texts; of one text, or of many, the first components of each."""
    if not 1 < len(texts) <= FEW:
        title = f"{screen.shape(vectors.shape)} vectors"
        table = screen.table("text", "first components")
        for text, vector in zip(texts, vectors, strict=True):
            table.add_row(screen.plain(text), "  ".join(f"{x:+.4f}" for x in vector[:6]) + "  ...")
    else:
        unit = vectors / (vectors**2).sum(axis=1, keepdims=True).clip(1e-24) ** 0.5
        title = f"cosine similarity of {screen.shape(vectors.shape)} vectors"
        names = [str(i + 1) for i in range(len(texts))]
        table = screen.table("", "text", *names, right=names)
        for name, text, row in zip(names, texts, unit @ unit.T, strict=True):
            table.add_row(name, screen.plain(text), *(f"{x:.3f}" for x in row))
    screen.show(table, title)
