"""Attention maps as SVG: one head with its tokens, or all heads of a model as small pictures.  No library is needed."""

import base64
import math
import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from triptych.media.image import png
from .attention_maps import AnyMap, AttentionMap

# As in attention_colours.js.
SHADES = ("#f7f5ef", "#d3e2e4", "#9fc6d3", "#64a2c0", "#3a77a8", "#28508c", "#1d2d66", "#140f3c")
CELL = 16  # units of a weight, where tokens are named
NAMED = 160  # tokens along a side that are named
FEW = 2  # heads that are drawn with their tokens
SMALL = 72  # units of a head among many
LETTERS = 24  # of a token
LETTER, TITLE = 7.3, 17  # units: the width of a letter of 12 units, the size of the title
FONT = 'font-family="ui-monospace, Menlo, Consolas, monospace"'


def svg(maps: Sequence[AnyMap], title: str, command: str = "") -> str:
    """One SVG document: a head or a few with their tokens, else all heads in root scale.  `command` is what made it,
    which the picture says."""
    heads = [(one, index) for one in maps for index in range(len(one.head_names))]
    tokens = max(max(len(one.queries), len(one.keys)) for one in maps)
    if len(heads) <= FEW and tokens <= NAMED / len(heads) ** 2:
        return _enlarged(heads, title, command)
    return _many(maps, title, command)


def _enlarged(heads: Sequence[tuple[AnyMap, int]], title: str, command: str) -> str:
    """Heads beside each other, with their tokens."""
    parts, right, bottom = [], 0, 0
    for layer_map, index in heads:
        weights = _weights(layer_map, index)
        queries, keys = ([shortened(token) for token in tokens] for tokens in (layer_map.queries, layer_map.keys))
        left, top = (8 * max(map(len, tokens)) + 40 for tokens in (queries, keys))
        left, top = right + left, top + 30
        across, down = CELL * len(keys), CELL * len(queries)
        parts.append(_image(weights, left, top, across, down))
        for t, token in enumerate(queries):
            y = top + (t + 0.72) * CELL
            parts.append(f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end">{escaped(token)}</text>')
        for s, token in enumerate(keys):
            at = f"translate({left + (s + 0.72) * CELL:.1f} {top - 6}) rotate(-90)"
            parts.append(f'<text transform="{at}">{escaped(token)}</text>')
        for line, text in enumerate((_where(layer_map, index), f"0 to {float(weights.max()):.3f}")):
            parts.append(f'<text x="{left}" y="{top + down + 24 + 18 * line}">{escaped(text)}</text>')
        named = _text_width(_where(layer_map, index), LETTER)
        right, bottom = left + max(across, named), max(bottom, top + down)
    return document(right + 24, bottom + 58, title, parts, command)


def _where(layer_map: AnyMap, index: int) -> str:
    role = layer_map.roles[index] if layer_map.roles else ""
    place = f"{layer_map.stack} layer {layer_map.layer}, head {layer_map.head_names[index]}"
    return f"{place}: {role}" if role else place


def _many(maps: Sequence[AnyMap], title: str, command: str) -> str:
    """A row of small heads for each layer; the numbers of its heads are written where the row above has others."""
    parts: list[str] = []
    y, above, right = 56, list[int](), 0
    for layer_map in maps:
        names = layer_map.head_names
        if names != above:
            y += 16
        parts.append(f'<text x="24" y="{y + SMALL / 2}">{layer_map.stack} {layer_map.layer}</text>')
        for column, name in enumerate(names):
            weights = np.sqrt(_pooled(_weights(layer_map, column), 2 * SMALL))
            x = 130 + column * (SMALL + 8)
            if names != above:
                parts.append(f'<text x="{x}" y="{y - 4}">head {name}</text>')
            parts.append(f"<g><title>{escaped(_where(layer_map, column))}</title>")
            parts.append(_image(weights, x, y, SMALL, SMALL * len(layer_map.queries) / len(layer_map.keys)) + "</g>")
        end = 130 + len(names) * (SMALL + 8)
        if layer_map.roles and len(names) == 1:
            parts.append(f'<text x="{end}" y="{y + SMALL / 2}">{escaped(layer_map.roles[0])}</text>')
            end += _text_width(layer_map.roles[0], LETTER)
        right = max(right, end)
        y, above = y + SMALL + 8, names
    return document(max(right + 16, 420), y + 16, title, parts, command)


def _weights(layer_map: AnyMap, index: int) -> npt.NDArray[np.float32]:
    """The weights [T, S] of a head; of a long text those that are kept, at most 2 * `SMALL` along a side."""
    if isinstance(layer_map, AttentionMap):
        whole: npt.NDArray[np.float32] = layer_map.weights[index]
        return whole
    each = -(-max(len(layer_map.queries), len(layer_map.keys)) // (2 * SMALL))
    out = np.zeros((-(-len(layer_map.queries) // each), -(-len(layer_map.keys) // each)), dtype=np.float32)
    keys, weights = layer_map.top_keys[index], layer_map.top_weights[index]
    rows = np.broadcast_to(np.arange(len(keys))[:, None], keys.shape)
    kept = keys >= 0
    np.maximum.at(out, (rows[kept] // each, keys[kept] // each), weights[kept])
    return out


def _pooled(weights: npt.NDArray[np.float32], side: int) -> npt.NDArray[np.float32]:
    """At most `side` along each side, each the largest weight that it stands for."""
    each = -(-max(weights.shape) // side)
    wide = np.pad(weights, [(0, -length % each) for length in weights.shape])
    rows, columns = wide.shape
    blocks: npt.NDArray[np.float32] = wide.reshape(rows // each, each, columns // each, each).max(axis=(1, 3))
    return blocks


def _image(weights: npt.NDArray[np.float32], x: float, y: float, width: float, height: float) -> str:
    data = base64.b64encode(_png(weights)).decode("ascii")
    return (
        f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none"'
        f' style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )


def _png(weights: npt.NDArray[np.float32]) -> bytes:
    """A picture with one pixel a weight, from 0 to the largest, in 256 shades of the page's light scale."""
    stops = np.array([[int(shade[at : at + 2], 16) for at in (1, 3, 5)] for shade in SHADES], dtype=np.float64)
    place = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(place, np.arange(len(stops)), channel) for channel in stops.T]
    palette = np.stack(channels, 1).round().astype(np.uint8)
    return png(np.rint(weights / max(float(weights.max()), 1e-12) * 255).astype(np.uint8), palette)


def document(width: float, height: float, title: str, parts: Sequence[str], command: str = "") -> str:
    """An SVG document of `width` × `height` units with a title over its `parts`; its description is `command`."""
    width = max(width, 48 + _text_width(title, 0.55 * TITLE))
    description = f"<desc>{escaped(command)}</desc>\n" if command else ""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!-- Made by Triptych -->\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{description}'
        f'<rect width="100%" height="100%" fill="#fbfaf6"/>\n<g {FONT} font-size="12" fill="#1f1e1b">\n'
        f'<text x="24" y="36" font-size="{TITLE}" font-family="sans-serif">{escaped(title)}</text>\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>\n"
    )


def _text_width(text: str, letter: float) -> int:
    return math.ceil(len(text) * letter)


def shortened(token: str, letters: int = LETTERS) -> str:
    return token if len(token) <= letters else token[: letters - 1] + "…"


def escaped(text: str) -> str:
    """Text that XML can hold: characters that it has no place for are replaced."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))
