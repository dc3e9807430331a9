"""Without the mask, an encoder that fills gaps; with a second input, a decoder that writes what it reads."""

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
V, T, ROWS, STEPS, D, HEADS, LAYERS = len(letters), 64, 16, 400, 128, 4, 2
vowels = torch.tensor([number[c] for c in "AEIOUaeiou"])


def rotated(x):  # [..., T, d]: each pair of numbers is turned by an angle that grows with the place
    angle = torch.arange(x.shape[-2])[:, None] * 10000 ** -torch.arange(0, 1, 2 / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Block(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.gate, self.up = nn.Linear(D, 344, bias=False), nn.Linear(D, 344, bias=False)
        self.down = nn.Linear(344, D, bias=False)
        self.masked = masked

    def forward(self, x, source=None):  # [B, T, D]; keys and values are of x or of the source [B, S, D]
        y = self.norm(x)
        source = y if source is None else source
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.q(y), self.k(source), self.v(source)))
        scores = rotated(q) @ rotated(k).mT / (D // HEADS) ** 0.5  # [B, HEADS, T, S]
        future = torch.ones_like(scores).triu(1) * self.masked == 1
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def losses(rows, shift=0):  # [B, T + 1]; with a shift, the source is of another row
    hidden = torch.isin(rows[:, 1:], vowels)
    source, x = model[0](rows[:, 1:].masked_fill(hidden, V)), model[0](rows[:, :-1])
    for block in model[1 : 1 + LAYERS]:  # the encoder
        source = block(source)
    for block in model[1 + LAYERS : -2]:  # the decoder reads itself, then the source
        x = block(x, None if block.masked else model[-2](source).roll(shift, 0))
    filled, written = model[-1](model[-2](source)), model[-1](model[-2](x))
    return F.cross_entropy(filled[hidden], rows[:, 1:][hidden]), F.cross_entropy(written.mT, rows[:, 1:])


blocks = [Block(masked=False) for _ in range(LAYERS)] + [Block(masked=i % 2 == 0) for i in range(2 * LAYERS)]
model = nn.ModuleList([nn.Embedding(V + 1, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False)])
matrices = [nn.init.normal_(p, std=0.02) for p in model.parameters() if p.dim() == 2]
muon = torch.optim.Muon(matrices[1:-1], 1e-2, adjust_lr_fn="match_rms_adamw")  # all but the embedding and the last
adam = torch.optim.AdamW([*{*model.parameters()} - {*matrices[1:-1]}], 3e-3, (0.9, 0.95), weight_decay=0)
rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / 8, 1 - i / STEPS)) for o in (muon, adam)]
for step in range(STEPS):
    starts = torch.randint(len(train) - T, (ROWS, 1))
    now = sum(losses(train[starts + torch.arange(T + 1)]))
    model.zero_grad()
    now.backward()
    for part in (muon, adam, *rates):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {now.item():.3f}", end="")
with torch.no_grad():
    rows = held_out[: 1000 * (T + 1)].view(20, 50, T + 1)
    for shift, whose in ((0, "its own"), (1, "another")):
        fill, write = torch.tensor([losses(some, shift) for some in rows]).mean(0)
        print(f"\nloss with {whose} source: {fill:.3f} for a vowel filled in, {write:.3f} for a letter written")
