"""Writes src/triptych/page/word_states.json: one word in many sentences, layer by layer, in SmolLM2.

    python tools/word_states.py             write the file
    python tools/word_states.py --check     compare it with the model, and fail where they differ

The file has the last word's vector in thirty sentences as points in a plane, for the chapter of the live page that
shows how a word gets its meaning from its neighbours.  "bank" has two meanings; "table", the control, has one, and
stands in sentences about the same two topics, with the deciding word mostly as far away.

A vector is taken after each block, divided by its root mean square (as the final norm does, because the residual stream
grows from layer to layer), and the mean of the layer's vectors of the same word is subtracted.  The plane is that of
the first two principal components of these vectors in all layers together.  No label is used, so a separation of the
two topics is not made by the choice of the plane.  Beside it stand two random directions, and the same sentences with
the attention from the last word to the deciding word cut in all layers and heads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triptych.model import Model

FILE = Path(__file__).resolve().parents[1] / "src" / "triptych" / "page" / "word_states.json"
STEPS = 1000  # of the scale of points: the furthest of a word
WITHIN = 5  # steps that another processor's arithmetic may differ by
SPLITS = 2000  # random divisions of the sentences into two groups
TOPICS = ("sentences about water", "sentences about money")
# For each word, sentences about water and about money that end in it, with the deciding word in brackets.
SENTENCES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "bank": (
        (
            "She sat by the [river] bank",
            "They fished from the [muddy] bank",
            "The boat drifted towards the [grassy] bank",
            "Reeds grew along the [stream] and its bank",
            "The canoe struck the [steep] bank",
            "Ducks slept on the [sandy] bank",
            "The [flood] washed over the bank",
            "He [swam] across to the other bank",
        ),
        (
            "The [thief] robbed the bank",
            "He borrowed [cash] from the bank",
            "Her [salary] goes straight to the bank",
            "She opened an [account] at the bank",
            "The [loan] came from the bank",
            "They paid the [mortgage] to the bank",
            "He is a clerk in the [central] bank",
            "The [interest] was set by the bank",
        ),
    ),
    "table": (
        (
            "She sat by the [river] table",
            "They ate from the [muddy] table",
            "The [stream] ran past the house and its table",
            "The canoe struck the [floating] table",
            "Ducks slept on the [sandy] table",
            "The [flood] washed over the table",
            "He [swam] across to the other table",
        ),
        (
            "The [thief] left the table",
            "He took [cash] from the table",
            "Her [salary] lies there on the table",
            "She opened an [account] at the table",
            "The [loan] lay upon the table",
            "They signed the [mortgage] at the table",
            "The [interest] was paid at the table",
        ),
    ),
}


class Sentence(NamedTuple):
    """A sentence, its deciding word, and the number of its topic."""

    text: str
    deciding: str
    topic: int


def sentences(word: str) -> list[Sentence]:
    found = []
    for topic, texts in enumerate(SENTENCES[word]):
        for text in texts:
            before, _, rest = text.partition("[")
            deciding, _, after = rest.partition("]")
            found.append(Sentence(before + deciding + after, deciding, topic))
    return found


def states(model: Model, given: Sequence[Sentence], *, cut: bool) -> Tensor:
    """`[L + 1, N, D]`: the last token's vector as it enters the first block and leaves each block."""
    from triptych.probe import Edit

    rows = model.ids([one.text for one in given])
    if len({row[-1] for row in rows}) != 1:
        raise SystemExit("the sentences do not end in one and the same token")
    edits = []
    for number, (one, row) in enumerate(zip(given, rows, strict=True)):
        before = one.text.partition(one.deciding)[0].rstrip()
        start, stop = (len(model.ids([part])[0]) for part in (before, f"{before} {one.deciding}"))
        hide = _hide(torch.arange(start, stop))
        blocks = range(len(model.spec.decoder.blocks) if cut else 0)
        edits += [Edit(f"blocks.{layer}.attn.scores", hide, number, len(row) - 1) for layer in blocks]
    trace = model.trace(rows, read=["blocks.0.resid_pre", "blocks.*.resid_post"], edit=edits)
    return torch.stack([torch.stack([row[-1] for row in trace[site]]) for site in trace]).double()


def _hide(keys: Tensor) -> Callable[[Tensor, Any], Tensor]:
    return lambda scores, where: scores.index_fill(-1, keys, -torch.inf)


def normalized(vectors: Tensor) -> Tensor:
    return vectors / vectors.square().mean(-1, keepdim=True).sqrt()


def between(vectors: Tensor, topic: Tensor) -> Tensor:
    """For each layer of `[L, N, D]`, the part of the variance that lies between the means of the two groups; 0 where
    all vectors are equal."""
    centered = vectors - vectors.mean(1, keepdim=True)
    total = centered.square().sum((1, 2))
    share = sum(
        (own := centered[:, topic == group]).mean(1).square().sum(-1) * own.shape[1] for group in topic.unique()
    )
    return torch.where(total > 1e-9, share / total.clamp(min=1e-9), torch.zeros_like(total))


def of_word(model: Model, word: str) -> list[dict[str, object]]:
    """The page's planes of one word: its components, the same with the deciding word cut, and random directions."""
    given = sentences(word)
    topic = torch.tensor([one.topic for one in given])
    whole, without = (normalized(states(model, given, cut=cut)) for cut in (False, True))
    mean = whole.mean(1, keepdim=True)
    centered, moved = whole - mean, without - mean  # the same origin, so that what the cut changes is seen
    width = whole.shape[-1]
    _, _, directions = torch.linalg.svd(centered.flatten(0, 1), full_matrices=False)
    components = directions[:2].T * (centered[:, 0] @ directions[:2].T).mean(0).sign()  # [D, 2], of no own direction
    draw = torch.Generator().manual_seed(0)
    random, _ = torch.linalg.qr(torch.randn(width, 2, generator=draw, dtype=torch.double))
    splits = [topic[torch.randperm(len(topic), generator=draw)] for _ in range(SPLITS)]
    by_chance = torch.stack([between(whole, split) for split in splits])  # [splits, L]
    common = {
        "layers": ["embedding", *(f"block {i}" for i in range(len(whole) - 1))],
        "tokens": [one.deciding for one in given],
        "text": topic.tolist(),
        "place": list(range(0, 10 * len(given), 10)),  # the points are no neighbours
        "named": [],
        "sentences": [one.text for one in given],
        "chance": _rounded(by_chance.mean(0)),
        "beyond": _rounded(by_chance.quantile(0.99, dim=0)),
    }
    parts = {
        word: (centered, components, whole),
        f"{word}, deciding word cut": (moved, components, without),
        f"{word}, random directions": (centered, random, whole),
    }
    furthest = float(torch.stack([(one @ components).abs().max() for one in (centered, moved)]).max())
    planes: list[dict[str, object]] = []
    for name, (vectors, axes, full) in parts.items():
        at = vectors @ axes
        scale = float(at.abs().max()) if axes is random else furthest
        total = (vectors - vectors.mean(1, keepdim=True)).square().sum((1, 2))
        seen = (at - at.mean(1, keepdim=True)).square().sum((1, 2))
        share = torch.where(total > 1e-9, seen / total.clamp(min=1e-9), torch.zeros_like(total))
        planes.append(common | {
            "stack": name,
            "at": (at / scale * STEPS).round().int().flatten(1).tolist(),
            "share": _rounded(share),
            "between": _rounded(between(full, topic)),
        })  # fmt: skip
    return planes


def _rounded(numbers: Tensor) -> list[float]:
    return [round(float(x), 3) for x in numbers]


def made(model: Model) -> dict[str, object]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "texts": list(TOPICS),
        "stacks": [plane for word in SENTENCES for plane in of_word(model, word)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the file with the model")
    from triptych_lectures.labs.lab import Setup
    from triptych_lectures.labs.pretrained import decoder

    arguments = parser.parse_args()
    content = made(decoder(Setup()))
    if not arguments.check:
        FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"wrote {FILE}, {FILE.stat().st_size:,} bytes")
        return 0
    apart = difference(json.loads(FILE.read_text(encoding="utf-8")), content)
    print(f"largest difference of a point: {apart} of {STEPS} steps")
    return int(apart > WITHIN)


def difference(stored: Any, content: Any) -> float:
    """How far apart two files of this kind are at most, in steps of a point; infinite where a text differs."""
    if isinstance(stored, dict) and isinstance(content, dict) and stored.keys() == content.keys():
        return max(difference(stored[key], content[key]) for key in stored)
    if isinstance(stored, list) and isinstance(content, list) and len(stored) == len(content):
        return max((difference(*pair) for pair in zip(stored, content, strict=True)), default=0.0)
    if isinstance(stored, float) and isinstance(content, float):
        return abs(stored - content) * STEPS  # shares, in [0, 1]
    if isinstance(stored, int) and isinstance(content, int):
        return abs(stored - content)
    return 0.0 if stored == content else float("inf")


if __name__ == "__main__":
    sys.exit(main())
