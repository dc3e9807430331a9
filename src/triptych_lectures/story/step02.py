"""Gradients: the same table, as logits that are trained instead of counted."""

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
V, T, ROWS = len(letters), 128, 128  # letters of the alphabet, letters of a row, rows of a batch
STEPS = int(sys.argv[4]) if sys.argv[4:] else 800


def loss(rows):  # [B, T + 1]: each letter but the first is predicted from those before it
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


model = nn.Embedding(V, V)  # row i: logits of the letter after letter i
adam = torch.optim.Adam(model.parameters(), 0.3)
rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: 1 - i / STEPS)
for step in range(STEPS):
    batch_loss = loss(train.unfold(0, T + 1, 1)[torch.randint(len(train) - T, (ROWS,))])
    model.zero_grad()
    batch_loss.backward()
    for part in (adam, rate):
        part.step()
    print(f"\rstep {step + 1} of {STEPS}: loss {batch_loss.item():.3f}", end="")
counts = torch.zeros(V, V).index_put_((train[:-1], train[1:]), torch.ones(()), accumulate=True)
print(f"\nloss on the training text: {-(counts * model.weight.log_softmax(1)).sum() / counts.sum():.4f}")
torch.set_grad_enabled(False)
rows = held_out.unfold(0, T + 1, T + 1)[:1000]
print(f"held-out loss: {sum(loss(some).item() * len(some) for some in rows.split(50)) / len(rows):.3f}")
line = [0]  # begin with the first letter of the alphabet, the end of a line
while len(line) < 200:
    line.append(int(model(torch.tensor([line[-T:]]))[0, -1].softmax(-1).multinomial(1)))
print("".join(letters[i] for i in line))
