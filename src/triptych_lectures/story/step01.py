"""Counts: how often each letter follows each other letter."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[3]))  # arguments: file to train on, held-out file, seed, steps of training
train_text, held_out_text = (Path(name).read_text("utf-8") for name in sys.argv[1:3])
letters = sorted(set(train_text))
number = {letter: i for i, letter in enumerate(letters)}
train, held_out = (torch.tensor([number[c] for c in text if c in number]) for text in (train_text, held_out_text))
V, T = len(letters), 128  # letters of the alphabet, letters of a row


def loss(rows):  # [B, T + 1]: each letter but the first is predicted from those before it
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


counts = torch.zeros(V, V).index_put_((train[:-1], train[1:]), torch.ones(()), accumulate=True)
chances = counts / counts.sum(1, keepdim=True)
print(f"loss on the training text: {-(counts * chances.log()).nan_to_num().sum() / counts.sum():.4f}")
chances = (counts + 1) / (counts + 1).sum(1, keepdim=True)  # one more of each pair, so that none is impossible
model = nn.Embedding.from_pretrained(chances.log())  # row i: log of the chance of each letter after letter i
rows = held_out.unfold(0, T + 1, T + 1)[:1000]
print(f"held-out loss: {sum(loss(some).item() * len(some) for some in rows.split(50)) / len(rows):.3f}")
line = [0]  # begin with the first letter of the alphabet, the end of a line
while len(line) < 200:
    line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
