"""TEMPORARY: the interface of the next forward over the present one, a cache for each slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.attention import Rows as OldRows
from triptych.nn import NO_TAPS


class Rows(OldRows):
    def __init__(self, lengths, past=(), slots=()):
        super().__init__(lengths, past)
        object.__setattr__(self, "slots", tuple(slots) or tuple(range(len(lengths))))


class SlotCache:
    def __init__(self, module):
        self.module, self.slots, self.unused = module, {}, []

    def add(self, n):
        out = []
        for _ in range(n):
            s = self.unused.pop(0) if self.unused else len(self.slots)
            self.slots[s] = self.module.decoder.cache(1)
            out.append(s)
        return out

    def free(self, slots):
        for s in slots:
            assert s not in self.unused
            self.slots[s] = None
            self.unused.append(s)

    def trim(self, slot, n):
        self.slots[slot].trim([n])

    def copy(self, a, b):
        for s, t in zip(a, b, strict=True):
            self.slots[t] = self.slots[s].fork()

    @property
    def lengths(self):
        return [0 if c is None else c.lengths[0] for c in self.slots.values()]


class Crosses(dict):
    def free(self, slots):
        for s in slots:
            self.pop(s, None)

    def copy(self, a, b):
        for s, t in zip(a, b, strict=True):
            self[t] = self[s].fork()


@dataclass
class Batch:
    inputs: object
    rows: Rows
    cache: object
    cross: object
    taps: object = NO_TAPS


def forward(module, batch):
    outs = []
    items = getattr(getattr(batch.taps, "session", None), "items", None)
    for i, (ids, n, past, slot) in enumerate(
        zip(torch.split(batch.inputs, list(batch.rows.lengths)), batch.rows.lengths, batch.rows.past, batch.rows.slots)
    ):
        if items is not None:
            batch.taps.session.items = [items[i]]
        outs.append(
            module.decode(
                ids,
                OldRows((n,), (past,)),
                cache=batch.cache.slots[slot],
                cross=None if batch.cross is None else batch.cross[slot],
                taps=batch.taps,
            )
        )
    if items is not None:
        batch.taps.session.items = items
    return torch.cat(outs)


def encode(module, rows, crosses, slots, taps, session, items):
    for row, slot, item in zip(rows, slots, items):
        source, where = module.flat([row])
        if session is not None:
            session.items = [item]
        crosses[slot] = module.remember(module.encode(source, where, taps=taps), where, taps=taps)
