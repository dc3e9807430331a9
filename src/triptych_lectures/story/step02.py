"""The same table, found by gradients instead of counting."""

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
V, T, ROWS, STEPS = len(letters), 128, 128, 800


def loss(rows):  # [B, T + 1]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


model = nn.Embedding(V, V)  # row i: the logits of the letter after letter i
adam = torch.optim.AdamW(model.parameters(), 0.3, weight_decay=0)
rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: 1 - i / STEPS)
for step in range(STEPS):
    starts = torch.randint(len(train) - T, (ROWS, 1))
    now = loss(train[starts + torch.arange(T + 1)])
    model.zero_grad()
    now.backward()
    for part in (adam, rate):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {now.item():.3f}", end="")
counts = torch.zeros(V, V).index_put_((train[:-1], train[1:]), torch.ones(()), accumulate=True)
print(f"\nloss on the training text: {-(counts * model.weight.log_softmax(1)).sum() / counts.sum():.4f}")
with torch.no_grad():
    rows = held_out[: 1000 * (T + 1)].view(20, 50, T + 1)
    print(f"held-out loss: {sum(loss(some).item() for some in rows) / 20:.3f}")
    line = [number["\n"]]
    while len(line) < 200:
        line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
