"""Rows that are continued one token after the other, each from the whole row again, for labs about what can write."""

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.attention import Rows
from triptych.train.objectives import Ids


@torch.no_grad()
def logits_at(module: nn.Transformer, ids: Tensor, place: int) -> Tensor:
    """[B, T] -> [B, V], at one place of each row."""
    b, t = ids.shape
    x = module(nn.Batch(inputs=ids.flatten(), rows=Rows((t,) * b))).unflatten(0, (b, t))
    return module.unembed(x[:, place], Rows((1,) * b, (place % t,) * b))


def next_logits(module: nn.Transformer, ids: Tensor, mask: int | None = None) -> Tensor:
    """[B, T] -> [B, V], of the token after each row: at its last token or, of an encoder, at a `mask` put after it.  No
    logit of the mask itself is among them, so it must be the last id."""
    if mask is None:
        return logits_at(module, ids, -1)
    hidden = torch.full((len(ids), 1), mask)
    return logits_at(module, torch.cat([ids, hidden], 1), -1)[:, :mask]


def nats_of_prefixes(module: nn.Transformer, texts: Ids, mask: int | None = None) -> float:
    """Mean nats of each token from the third on, predicted from a row that ends before it."""
    ids = torch.from_numpy(texts.astype(np.int64))
    nats = [
        torch.nn.functional.cross_entropy(next_logits(module, ids[:, :t], mask), ids[:, t])
        for t in range(2, ids.shape[1])
    ]
    return torch.stack(nats).mean().item()


def written(module: nn.Transformer, texts: Ids, mask: int | None = None) -> Ids:
    """Rows that begin with the first two tokens of `texts`; the others are the likeliest, one after the other."""
    ids = torch.from_numpy(texts[:, :2].astype(np.int64))
    while ids.shape[1] < texts.shape[1]:
        ids = torch.cat([ids, next_logits(module, ids, mask).argmax(-1, keepdim=True)], 1)
    return ids.numpy().astype(np.int32)
