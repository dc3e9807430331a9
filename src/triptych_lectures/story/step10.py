"""Layouts: an encoder without a mask fills gaps, and a decoder reads it as a second input."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[3]))  # arguments: file to train on, held-out file, seed, steps of training
train_text, held_out_text = (Path(name).read_text("utf-8") for name in sys.argv[1:3])
letters = [*sorted(set(train_text)), "_"]  # the last stands for any vowel
number = {letter: i for i, letter in enumerate(letters)}
train, held_out = (torch.tensor([number[c] for c in text if c in number]) for text in (train_text, held_out_text))
V, T, ROWS, D, HEADS, LAYERS = len(letters), 128, 16, 128, 4, 4  # D: numbers of a vector
STEPS = int(sys.argv[4]) if sys.argv[4:] else 400
hidden = torch.tensor([V - 1 if c in "AEIOUaeiou_" else number[c] for c in letters])


def rotated(x, place):  # [..., T, d]: each pair of numbers is turned by an angle that grows with the place
    angle = place[:, None] * 10000 ** -torch.arange(0, 1, 2 / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in ((D, 344), (D, 344), (344, D)))

    def forward(self, x, source=None):  # [B, T, D]: x reads all of the source or, without one, its own past
        place = torch.arange(x.shape[1])
        y, read = self.norm(x), self.norm(x if source is None else source)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.q(y), self.k(read), self.v(read)))
        q, k = rotated(q, place), rotated(k, place)
        scores = q @ k.mT / (D // HEADS) ** 0.5  # [B, HEADS, T, T]
        future = (place[:, None] < place) & (source is None)  # [T, T]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def predicted(rows, others):  # [B, T + 1]: what the encoder fills in, and what the decoder writes
    x, source = model[0](rows[:, :-1]), model[0](hidden[others[:, 1:]])
    for block in model[1:3]:  # the encoder: each letter reads all others
        source = block(source, source)
    x = model[4](model[3](x), source)  # the decoder: each letter reads its past, then the source
    return model[-2:](source), model[-2:](x)


def loss(rows, shift=0):  # [B, T + 1]: of the encoder and of the decoder, whose source is so many rows away
    return torch.stack([F.cross_entropy(y.mT, rows[:, 1:]) for y in predicted(rows, rows.roll(shift, 0))])


model = nn.Sequential(nn.Embedding(V, D), *(Block() for _ in range(LAYERS)), nn.RMSNorm(D), nn.Linear(D, V, bias=False))
first, *inner, last = [nn.init.normal_(p, std=0.02) for p in model.parameters() if p.dim() == 2]
muon = torch.optim.Muon(inner, 1e-2, adjust_lr_fn="match_rms_adamw")  # as in the recipe of the quickstart
adam = torch.optim.Adam([first, last, *(p for p in model.parameters() if p.dim() == 1)], 3e-3, (0.9, 0.95))
rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / 8, 1 - i / STEPS)) for o in (muon, adam)]
for step in range(STEPS):
    batch_loss = loss(train.unfold(0, T + 1, 1)[torch.randint(len(train) - T, (ROWS,))]).sum()
    model.zero_grad()
    batch_loss.backward()
    for part in (muon, adam, *rates):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {batch_loss.item():.3f}", end="")
torch.set_grad_enabled(False)
rows = held_out.unfold(0, T + 1, T + 1)[:1000]
for shift, whose in ((0, "its own"), (1, "another row's")):
    fill, write = sum(loss(some, shift) * len(some) for some in rows.split(50)) / len(rows)
    print(f"\nloss with {whose} source: {fill:.3f} of the encoder, {write:.3f} of the decoder")
row = rows[:1].clone()
for i in range(T):
    row[0, i + 1] = predicted(row, rows[:1])[1][0, i].argmax()
filled = predicted(row, rows[:1])[0][0].argmax(-1)
for name, line in (("source", hidden[rows[0, 1:]]), ("filled", filled), ("written", row[0, 1:])):
    print(f"{name}: {''.join(letters[i] for i in line)}")
