"""Heads: four of them, each with weights of its own."""

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
V, T, ROWS, D, HEADS = len(letters), 128, 16, 128, 4  # D: numbers of a vector
STEPS = int(sys.argv[4]) if sys.argv[4:] else 1000


def rotated(x, place):  # [..., T, d]: each pair of numbers is turned by an angle that grows with the place
    angle = place[:, None] * 10000 ** -torch.arange(0, 1, 2 / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):  # [B, T, D]
        place = torch.arange(x.shape[1])
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.q(x), self.k(x), self.v(x)))
        q, k = rotated(q, place), rotated(k, place)
        scores = q @ k.mT / (D // HEADS) ** 0.5  # [B, HEADS, T, T]
        future = place[:, None] < place  # [T, T]: what the letter of each row may not see
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


def loss(rows):  # [B, T + 1]: each letter but the first is predicted from those before it
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


model = nn.Sequential(nn.Embedding(V, D), Attention(), nn.Linear(D, V, bias=False))
first, *inner, last = [nn.init.normal_(p, std=0.02) for p in model.parameters() if p.dim() == 2]
muon = torch.optim.Muon(inner, 1e-2, adjust_lr_fn="match_rms_adamw")  # as in the recipe of the quickstart
adam = torch.optim.Adam([first, last], 3e-3, (0.9, 0.95))
rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / 8, 1 - i / STEPS)) for o in (muon, adam)]
for step in range(STEPS):
    batch_loss = loss(train.unfold(0, T + 1, 1)[torch.randint(len(train) - T, (ROWS,))])
    model.zero_grad()
    batch_loss.backward()
    for part in (muon, adam, *rates):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {batch_loss.item():.3f}", end="")
torch.set_grad_enabled(False)
rows = held_out.unfold(0, T + 1, T + 1)[:1000]
print(f"\nheld-out loss: {sum(loss(some).item() * len(some) for some in rows.split(50)) / len(rows):.3f}")
line = [0]  # begin with the first letter of the alphabet, the end of a line
while len(line) < 200:
    line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
