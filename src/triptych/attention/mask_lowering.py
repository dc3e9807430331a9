"""Simplifies symbolic masks, and derives from them what kernels need: windows, causality, blocks.

`simplify` drops the parts of a mask that forbid nothing at the sizes of a request, so `causal() & window(4096)` over
300 keys is plain causality.  `AttentionRequest.visible` (request.py) writes the rest as booleans.

Under a cache, masks compare absolute positions: T queries are by default the last T of S keys, and a key at a negative
position is an empty slot (`AttentionRequest.points` in request.py).  A single query after a cache therefore sees
everything; for rows of an engine, `RowPlan` (row_plan.py) drops causality where no key is in a query's future.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.arguments import readable
from triptych.errors import InputError, shown
from triptych.spec.masks import (
    And,
    BlockSparse,
    Causal,
    Dense,
    Full,
    Keys,
    Mask,
    Or,
    Prefix,
    SameDocument,
    Window,
)

FULL, CAUSAL = Full(), Causal()
_SIMPLE = (Full, Causal)  # the fast path: every step of a generation has one of these


def rewrite(mask: Mask, leaf: Callable[[Mask], Mask]) -> Mask:
    """The same tree with every leaf replaced."""
    if not isinstance(mask, (And, Or)):
        return leaf(mask)
    parts = [rewrite(part, leaf) for part in mask.parts]
    joined = parts[0]
    for part in parts[1:]:
        joined = (joined & part) if isinstance(mask, And) else (joined | part)
    return joined


def leaves(mask: Mask) -> list[Mask]:
    """Every leaf of the tree."""
    if isinstance(mask, (And, Or)):
        return [leaf for part in mask.parts for leaf in leaves(part)]
    return [mask]


def conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The parts that all must hold."""
    return mask.parts if isinstance(mask, And) else (mask,)


def adopt(mask: Any, device: torch.device) -> Mask:
    """A mask as given: a `Mask`, a boolean array (true where visible), or None for everything.

    Arrays become tensors that broadcast against `[B, H, T, S]`.
    """
    if mask is None:
        return FULL
    return rewrite(mask if isinstance(mask, Mask) else Dense(mask), lambda leaf: _on_device(leaf, device))


def _on_device(leaf: Mask, device: torch.device) -> Mask:
    if not isinstance(leaf, Dense):
        return leaf
    try:
        array = torch.as_tensor(leaf.array)
    except (TypeError, ValueError, RuntimeError):  # nothing that a tensor can be made of
        raise InputError(
            f"mask={shown(leaf.array)}: give a mask such as triptych.causal(), or booleans true where visible"
        ) from None
    if device.type != "meta":
        readable(array, "mask")
    array = array.to(device)
    if array.dtype != torch.bool or not 1 <= array.dim() <= 4:
        raise InputError(
            f"mask of {array.dtype} and shape {list(array.shape)}: give booleans [T, S], [B, T, S] or [B, H, T, S], "
            "true where visible (what is added to scores is `bias`)"
        )
    array = array[:, None] if array.dim() == 3 else array
    return Dense(array[(None,) * (4 - array.dim())])


def for_rows(mask: Mask, rows: Sequence[int]) -> Mask:
    """The mask of some rows of a batch: per-row lengths and arrays of those rows alone."""
    return rewrite(mask, partial(_of_rows, rows))


def _of_rows(rows: Sequence[int], leaf: Mask) -> Mask:
    if isinstance(leaf, (Keys, Prefix)) and len(leaf.lengths) > 1:
        return replace(leaf, lengths=tuple(leaf.lengths[row] for row in rows))
    if isinstance(leaf, Dense) and leaf.array.shape[0] > 1:
        return Dense(leaf.array[list(rows)])
    return leaf


def needs_documents(mask: Mask) -> bool:
    """Some part compares documents."""
    if isinstance(mask, _SIMPLE):
        return False
    return any(isinstance(leaf, SameDocument) for leaf in leaves(mask))


def check_documents(mask: Mask, *, q_doc: bool, k_doc: bool) -> None:
    """Raise InputError where documents and a mask that compares them do not come together."""
    if needs_documents(mask) and not q_doc:
        raise InputError("same_document() compares documents and none are given; give q_doc (and k_doc for other keys)")
    if not needs_documents(mask) and (q_doc or k_doc):
        raise InputError("documents are given and the mask does not compare them; add `& same_document()` to the mask")


def simplify(mask: Mask, queries: int, keys: int, *, aligned: bool) -> Mask:
    """Drop what forbids nothing.  `aligned`: keys stand at 0..S-1 and queries at the last T of them."""
    if isinstance(mask, Full):
        return mask
    return rewrite(mask, partial(_simplified, queries, keys, aligned))


def _simplified(queries: int, keys: int, aligned: bool, leaf: Mask) -> Mask:
    match leaf:
        case Keys(lengths) if min(lengths) >= keys:
            return FULL
        case Causal() if aligned and queries == 1:
            return FULL
        case Window(back, ahead) if aligned and back >= keys:
            return FULL if ahead >= queries - 1 else leaf if ahead else CAUSAL
        case _:
            return leaf


def implies_causal(mask: Mask) -> bool:
    """No query sees a later position."""
    return CAUSAL in conjuncts(mask) or any(isinstance(p, Window) and p.ahead == 0 for p in conjuncts(mask))


def only_keys(mask: Mask) -> bool:
    """Every query sees the same keys."""
    if isinstance(mask, _SIMPLE):
        return isinstance(mask, Full)
    return all(isinstance(leaf, (Full, Keys, Prefix)) for leaf in leaves(mask))


def reads_positions(mask: Mask) -> bool:
    """Some part compares positions, not places or documents."""
    if isinstance(mask, _SIMPLE):
        return isinstance(mask, Causal)
    return any(isinstance(leaf, (Causal, Window, Prefix, BlockSparse)) for leaf in leaves(mask))


def reads_distances(mask: Mask) -> bool:
    """Every part asks only how far a key is from the query."""
    return all(isinstance(leaf, (Full, Causal, Window)) for leaf in leaves(mask))


def without_causal(mask: Mask) -> Mask:
    """The mask without its causal parts, for requests in which no key lies after any query."""
    if isinstance(mask, _SIMPLE):
        return FULL
    return rewrite(mask, lambda leaf: FULL if isinstance(leaf, Causal) else leaf)


def window_of(mask: Mask) -> tuple[int, int] | None:
    """`(back, ahead)`: a query sees no key `back` or more positions behind it, none more than `ahead` in front.

    None when the mask promises no such band.
    """
    windows = [part for part in conjuncts(mask) if isinstance(part, Window)]
    if not windows:
        return None
    ahead = 0 if CAUSAL in conjuncts(mask) else min(part.ahead for part in windows)
    return min(part.back for part in windows), ahead


def blocks_of(mask: Mask) -> BlockSparse | None:
    """The block pattern that bounds the mask, if one does."""
    return next((part for part in conjuncts(mask) if isinstance(part, BlockSparse)), None)


def per_row(rows: int, device: torch.device, values: Sequence[int]) -> Tensor:
    """Numbers that a mask asks for, one a row, as `[B, 1, 1, 1]`."""
    if len(values) not in (1, rows):
        raise InputError(f"mask: {len(values)} lengths for {rows} rows; give one, or one a row")
    return torch.tensor(values, device=device).view(-1, 1, 1, 1)
