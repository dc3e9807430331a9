"""`triptych fill`, `encode`, `classify` and `tag`: predictions and vectors for texts, one result for each."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import options, screen
from .loading import load_model, read_texts
from .records import check_alone, check_without_records, cluster_of, work_on_records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from triptych.model import Model

FEW = 12  # texts whose similarity matrix fits a terminal
BAR = 24  # columns of a probability of 1


def fill(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    *,
    top: options.Positive = 5,
    as_json: options.Json = False,
) -> None:
    """Predict the words at the mask tokens of texts.

    --top N: Candidates shown for each mask.
    """
    inputs = read_texts(texts)
    filled = list(zip(inputs, load_model(checkpoint).fill(inputs, top=top), strict=True))
    if as_json:
        rows = [
            {"text": text, "masks": [[{"token": t, "probability": p} for t, p in mask] for mask in masks]}
            for text, masks in filled
        ]
        screen.result({"results": rows})
        return
    for text, masks in filled:
        for i, mask in enumerate(masks):
            number = f"  (mask {i + 1} of {len(masks)})" if len(masks) > 1 else ""
            lines = [(token, f"{p:.1%}", "━" * round(p * BAR)) for token, p in mask]
            screen.show_rows(("token", "probability", ""), lines, text + number, right=["probability"])


def classify(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    *,
    pair: str | None = None,
    top: options.Positive = 5,
    as_json: options.Json = False,
) -> None:
    """Classify each text or image file, or each token where the model labels tokens.

    --pair TEXT: Second text of each pair, for models of pairs.
    --top N: Labels shown for each text.
    """
    from triptych.spec import ReplacedHeadSpec, TokenHeadSpec

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    if isinstance(model.spec.head, TokenHeadSpec | ReplacedHeadSpec):
        _classify_tokens(model, inputs, as_json)
        return
    scores = model.classify(inputs, second=None if pair is None else [pair] * len(inputs))
    labelled = list(zip(inputs, scores, strict=True))
    if as_json:
        rows = [
            {"text": text, "labels": [{"label": label, "score": p} for label, p in labels]} for text, labels in labelled
        ]
        screen.result({"results": rows})
        return
    for text, labels in labelled:
        lines = [(label, f"{p:.4f}", "━" * round(min(1.0, max(0.0, p)) * BAR)) for label, p in labels[:top]]
        screen.show_rows(("label", "score", ""), lines, text, right=["score"])


def _classify_tokens(model: Model, texts: list[str], as_json: bool) -> None:
    from triptych.spec import TokenHeadSpec
    from triptych.tasks import joined

    named_labels = isinstance(
        model.spec.head, TokenHeadSpec
    )  # a discriminator tells replaced tokens from original ones
    tagged = zip(texts, model.tag(texts), strict=True)
    results = [(text, tags, joined(tags, text) if named_labels else []) for text, tags in tagged]
    if as_json:
        rows = [
            {"text": text, "tokens": [asdict(tag) for tag in tags], "entities": [asdict(one) for one in named]}
            for text, tags, named in results
        ]
        screen.result({"results": rows})
        return
    for text, tags, named in results:
        columns = ("label", "probability")
        tokens = [(tag.token, tag.label, f"{tag.probability:.1%}") for tag in tags]
        screen.show_rows(("token", *columns), tokens, text, right=["probability"])
        if any(tag.label.startswith(("B-", "I-")) for tag in tags):
            lines = [(one.text, one.label, f"{one.probability:.1%}") for one in named]
            screen.show_rows(("entity", *columns), lines, right=["probability"])


def tag(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    *,
    strategy: Literal["simple", "first", "average", "max"] = "simple",
    window: options.Positive | None = None,
    overlap: options.Natural | None = None,
    records: options.RecordFile = None,
    out: options.RecordFile = None,
    ray: options.Ray = None,
    actors: options.Actors = None,
    as_json: options.Json = False,
) -> None:
    """Find the entities in texts: names of people, places and whatever the checkpoint labels.

    --strategy: Group tokens (simple), or words by their first token, mean or surest token (max).
    --out FILE: With --records, the results: .jsonl or .parquet.
    """
    if records is not None:
        from triptych.batches.works import tagging

        check_alone(texts, "--records")
        settings = {"strategy": strategy, "window": window, "overlap": overlap}
        work_on_records(tagging, checkpoint, settings, records, out, cluster=cluster_of(ray, actors), as_json=as_json)
        return
    check_without_records(out=out, ray=ray, actors=actors)
    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    with screen.waiting(f"tagging {len(inputs):,} texts"):
        entities = model.entities(inputs, strategy=strategy, window=window, overlap=overlap)
    tagged = list(zip(inputs, entities, strict=True))
    if as_json:
        rows = [{"text": text, "entities": [asdict(one) for one in named]} for text, named in tagged]
        screen.result({"strategy": strategy, "results": rows})
        return
    numbers = ["probability", "characters"]
    for text, named in tagged:
        lines = [(one.text, one.label, f"{one.probability:.1%}", f"{one.begin:,}-{one.end:,}") for one in named]
        screen.show_rows(("entity", "label", *numbers), lines, text, right=numbers)


def encode(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    *,
    pooling: str | None = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1.")
    ] = None,
    matmul: options.Matmul = "auto",
    out: Path | None = None,
    records: options.RecordFile = None,
    ray: options.Ray = None,
    actors: options.Actors = None,
    as_json: options.Json = False,
) -> None:
    """Compute one embedding per text, and their similarities.

    --pooling HOW: mean, first (the [CLS] token) or dense; by default the checkpoint's.
    --out FILE: Write the vectors to a .npy or .safetensors file; with --records, a .jsonl or .parquet file.
    """
    if records is not None:
        from triptych.batches.works import encoding

        check_alone(texts, "--records")
        settings = {"pooling": pooling, "normalize": normalize, "matmul": matmul}
        work_on_records(encoding, checkpoint, settings, records, out, cluster=cluster_of(ray, actors), as_json=as_json)
        return
    check_without_records(ray=ray, actors=actors)
    screen.check_suffix(out, (".npy", ".safetensors"), "--out")
    from triptych.tasks import note_on_products

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    with screen.waiting(f"encoding {len(inputs):,} texts"):
        vectors = model.encode(inputs, pooling=pooling, normalize=normalize, matmul=matmul).float().cpu().numpy()
    if note := note_on_products(model.module, matmul):
        screen.note(note)
    if out is not None:
        _save(vectors, out)
        screen.note(f"{out}: {screen.shape(vectors.shape)} vectors")
    if as_json:
        rows = [] if out else [{"text": t, "vector": v.tolist()} for t, v in zip(inputs, vectors, strict=True)]
        screen.result({"shape": list(vectors.shape), "out": None if out is None else str(out), "results": rows})
    elif out is None:
        _show_vectors(inputs, vectors)


def _save(vectors: NDArray[np.float32], out: Path) -> None:
    """Replace `out` by the vectors [B, D].  Raises CheckpointError, with the old file kept, when that fails."""
    import numpy as np
    from safetensors.numpy import save as to_bytes

    from triptych.checkpoints import atomic_write

    buffer = io.BytesIO()
    if out.suffix == ".safetensors":
        buffer.write(to_bytes({"embeddings": np.ascontiguousarray(vectors)}))
    else:
        np.save(buffer, vectors)
    atomic_write(out, buffer.getvalue())


def _show_vectors(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
    """The cosine similarity of every two texts; of one text, or of many, the first components of each."""
    title = f"{screen.shape(vectors.shape)} vectors"
    if not 1 < len(texts) <= FEW:
        first = ["  ".join(f"{x:+.4f}" for x in vector[:6]) + "  ..." for vector in vectors]
        screen.show_rows(("text", "first components"), list(zip(texts, first, strict=True)), title)
        return
    unit = vectors / (vectors**2).sum(axis=1, keepdims=True).clip(1e-24) ** 0.5
    names = [str(i + 1) for i in range(len(texts))]
    cosines = [[f"{x:.3f}" for x in row] for row in unit @ unit.T]
    lines = [(name, text, *row) for name, text, row in zip(names, texts, cosines, strict=True)]
    screen.show_rows(("", "text", *names), lines, f"cosine similarity of {title}", right=names)
