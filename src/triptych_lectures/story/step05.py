"""Positions: scores depend on how far apart two letters are."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[3]))
text, other_text = (Path(name).read_text("utf-8") for name in sys.argv[1:3])
letters = sorted(set(text))
number = {letter: i for i, letter in enumerate(letters)}
train, held_out = (torch.tensor([number[c] for c in s if c in number]) for s in (text, other_text))
V, T, ROWS, STEPS, D = len(letters), 128, 16, 1000, 128


def rotated(x):  # [..., T, d]: each pair of numbers is turned by an angle that grows with the place
    angle = torch.arange(x.shape[-2])[:, None] * 10000 ** -torch.arange(0, 1, 2 / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):  # [B, T, D]
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = rotated(q) @ rotated(k).mT / D**0.5  # [B, T, T]
        future = torch.ones_like(scores).triu(1) == 1
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return x + weights @ v


def loss(rows):  # [B, T + 1]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


model = nn.Sequential(nn.Embedding(V, D), Attention(), nn.Linear(D, V, bias=False))
matrices = [nn.init.normal_(p, std=0.02) for p in model.parameters() if p.dim() == 2]
muon = torch.optim.Muon(matrices[1:-1], 1e-2, adjust_lr_fn="match_rms_adamw")  # all but the embedding and the last
adam = torch.optim.AdamW([*{*model.parameters()} - {*matrices[1:-1]}], 3e-3, (0.9, 0.95), weight_decay=0)
rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / 8, 1 - i / STEPS)) for o in (muon, adam)]
for step in range(STEPS):
    starts = torch.randint(len(train) - T, (ROWS, 1))
    now = loss(train[starts + torch.arange(T + 1)])
    model.zero_grad()
    now.backward()
    for part in (muon, adam, *rates):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {now.item():.3f}", end="")
with torch.no_grad():
    rows = held_out[: 1000 * (T + 1)].view(20, 50, T + 1)
    print(f"\nheld-out loss: {sum(loss(some).item() for some in rows) / 20:.3f}")
    line = [number["\n"]]
    while len(line) < 200:
        line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
