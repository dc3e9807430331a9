"""Counts: how often each letter follows each other letter."""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[3]))
text, other_text = (Path(name).read_text("utf-8") for name in sys.argv[1:3])
letters = sorted(set(text))
number = {letter: i for i, letter in enumerate(letters)}
train, held_out = (torch.tensor([number[c] for c in s if c in number]) for s in (text, other_text))
V, T = len(letters), 128


def loss(rows):  # [B, T + 1]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


counts = torch.zeros(V, V).index_put_((train[:-1], train[1:]), torch.ones(()), accumulate=True)
chances = counts / counts.sum(1, keepdim=True)
print(f"loss on the training text: {-(counts * chances.log()).nan_to_num().sum() / counts.sum():.4f}")
chances = (counts + 1) / (counts + 1).sum(1, keepdim=True)  # no pair is impossible
model = chances.log().__getitem__
with torch.no_grad():
    rows = held_out[: 1000 * (T + 1)].view(20, 50, T + 1)
    print(f"held-out loss: {sum(loss(some).item() for some in rows) / 20:.3f}")
    line = [number["\n"]]
    while len(line) < 200:
        line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
