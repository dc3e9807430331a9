"""Attention maps as SVG: one head with its tokens, or all heads of a model as small pictures.  No library is needed."""

import base64
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
SMALL = 72  # units of a head among many
LETTERS = 24  # of a token
FONT = 'font-family="ui-monospace, Menlo, Consolas, monospace"'


def svg(maps: Sequence[AnyMap], title: str, command: str = "") -> str:
    """One SVG document: the head with its tokens where there is one, else all heads in root scale.  `command` is what
    made it, which the picture says."""
    if len(maps) == 1 and len(maps[0].head_names) == 1 and max(len(maps[0].queries), len(maps[0].keys)) <= NAMED:
        return _enlarged(maps[0], title, command)
    return _many(maps, title, command)


def _enlarged(layer_map: AnyMap, title: str, command: str) -> str:
    weights = _weights(layer_map, 0)
    queries, keys = ([shortened(token) for token in tokens] for tokens in (layer_map.queries, layer_map.keys))
    left, top = (8 * max(map(len, tokens)) + 40 for tokens in (queries, keys))
    top += 30
    across, down = CELL * len(keys), CELL * len(queries)
    parts = [_image(weights, left, top, across, down)]
    for t, token in enumerate(queries):
        y = top + (t + 0.72) * CELL
        parts.append(f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end">{escaped(token)}</text>')
    for s, token in enumerate(keys):
        at = f"translate({left + (s + 0.72) * CELL:.1f} {top - 6}) rotate(-90)"
        parts.append(f'<text transform="{at}">{escaped(token)}</text>')
    parts.append(f'<text x="{left}" y="{top + down + 24}">0 to {float(weights.max()):.3f}</text>')
    where = f"{layer_map.stack} layer {layer_map.layer}, head {layer_map.head_names[0]}"
    return document(max(left + across + 24, 420), top + down + 40, f"{title}: {where}", parts, command)


def _many(maps: Sequence[AnyMap], title: str, command: str) -> str:
    parts = []
    step = SMALL + 8
    for row, layer_map in enumerate(maps):
        y = 66 + row * step
        parts.append(f'<text x="24" y="{y + SMALL / 2}">{layer_map.stack} {layer_map.layer}</text>')
        for column, name in enumerate(layer_map.head_names):
            weights = np.sqrt(_pooled(_weights(layer_map, column), 2 * SMALL))
            x = 130 + column * step
            parts.append(f"<g><title>{layer_map.stack} layer {layer_map.layer}, head {name}</title>")
            parts.append(_image(weights, x, y, SMALL, SMALL * len(layer_map.queries) / len(layer_map.keys)) + "</g>")
    widest = max(len(layer_map.head_names) for layer_map in maps)
    return document(max(130 + widest * step + 16, 420), 66 + len(maps) * step + 16, title, parts, command)


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
    description = f"<desc>{escaped(command)}</desc>\n" if command else ""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!-- Made by Triptych -->\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{description}'
        f'<rect width="100%" height="100%" fill="#fbfaf6"/>\n<g {FONT} font-size="12" fill="#1f1e1b">\n'
        f'<text x="24" y="36" font-size="17" font-family="sans-serif">{escaped(title)}</text>\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>\n"
    )


def shortened(token: str, letters: int = LETTERS) -> str:
    return token if len(token) <= letters else token[: letters - 1] + "…"


def escaped(text: str) -> str:
    """Text that XML can hold: characters that it has no place for are replaced."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))
