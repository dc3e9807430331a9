"""A sequence through one fixed vector, and attention over all of it (Cho et al. 2014; Bahdanau et al. 2015; lectures L0
and L1).

A recurrent encoder-decoder copies sequences.  The claim is false if its fixed vector copies long ones as well as short
ones, if a wider vector does not carry more, or if attention, added to the narrowest vector, loses letters at any length
too.  That a far state gets no gradient is false if the gradient through a GRU does not shrink by a factor each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import attend
from triptych.labs.lab import Check, LabResult, Setup
from triptych.labs.small import growth, power
from triptych.page import Curve, TableSection

SYMBOLS, WIDTH = 20, 64  # sequences of distinct symbols; width of embeddings and states
LENGTHS = (1, 2, 4, 8, 12, 16)
NARROW, WIDE = 4, 64  # numbers in the fixed vector
STEPS, ROWS, TESTED, RATE, WARMUP = 400, 64, 256, 5e-3, 20
BACK = (16, 32, 64, 128, 256, 512)  # steps back, of the gradient
DRAWS = 8


@dataclass(frozen=True)
class ArchitectureKind:
    """How the decoder learns what the source is: a vector of `code` numbers, and attention over its states or not."""

    code: int
    attention: bool


KINDS = {
    f"vector of {NARROW}": ArchitectureKind(NARROW, attention=False),
    f"vector of {WIDE}": ArchitectureKind(WIDE, attention=False),
    "attention": ArchitectureKind(NARROW, attention=True),
}


class Copier(nn.Module):
    """A GRU encoder and a GRU decoder.  The last state of the source, mapped to `code` numbers, starts the decoder and
    is part of each of its inputs; with attention its states also query all states of the source (Luong et al. 2015).
    """

    def __init__(self, kind: ArchitectureKind) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(SYMBOLS + 1, WIDTH)  # the last one starts the target
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.code, self.first_state = nn.Linear(WIDTH, kind.code), nn.Linear(kind.code, WIDTH)
        self.decoder = nn.GRU(WIDTH + kind.code, WIDTH, batch_first=True)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH if kind.attention else WIDTH, SYMBOLS)

    def forward(self, source: Tensor) -> Tensor:
        """`[B, T]` -> logits `[B, T, SYMBOLS]` of a copy, the right symbols before each one given."""
        states, last = self.encoder(self.embed(source))
        code = self.code(last[0]).tanh()
        begin = torch.full_like(source[:, :1], SYMBOLS)
        written = self.embed(torch.cat([begin, source[:, :-1]], 1))
        inputs = torch.cat([written, code[:, None].expand(-1, source.shape[1], -1)], -1)
        own, _ = self.decoder(inputs, self.first_state(code).tanh()[None])
        if self.kind.attention:
            read = attend(self.query(own)[:, None], self.key(states)[:, None], states[:, None])[:, 0]
            own = torch.cat([own, read], -1)
        logits: Tensor = self.head(own)
        return logits


def run(setup: Setup) -> LabResult:
    """Copies of 1 to 16 symbols by two fixed vectors and by attention; the gradient through 16 to 512 steps."""
    right: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for name, kind in KINDS.items():
        setup.progress(f"{name}: training {STEPS} steps")
        right[name], sizes[name] = _train(kind, setup.seed)
    setup.progress("gradients through untrained states")
    through, looked = ([_gradient(name, back, setup.seed) for back in BACK] for name in ("GRU", "attention"))
    each, falls = math.exp(growth(BACK, through)), power(BACK[-3:], looked[-3:])
    narrow, wide, attention = right.values()
    middle = LENGTHS.index(4)
    checks = (
        Check(f"vector of {NARROW}: symbols right at length {LENGTHS[0]}", narrow[0], least=0.95),
        Check(f"vector of {NARROW}: symbols right at length {LENGTHS[-1]}", narrow[-1], most=0.5),
        Check(f"vector of {WIDE}: symbols right at length 4, less of {NARROW}", wide[middle] - narrow[middle], 0.15),
        Check(f"vector of {WIDE}: symbols right at length {LENGTHS[-1]}", wide[-1], most=0.8),
        Check("attention: symbols right, the worst over all lengths", min(attention), least=0.95),
        Check(
            f"parameters, attention over vector of {WIDE}", sizes["attention"] / sizes[f"vector of {WIDE}"], most=1.0
        ),
        Check("GRU, untrained: what is left of the gradient after each further step", each, most=0.9),
        Check(f"attention, untrained: the gradient from T {BACK[-3]} on goes as T to the power", falls, -1.2, -0.8),
    )
    meaning = (
        f"A vector of {NARROW} numbers copies one symbol and loses more the longer the source is:"
        f" {narrow[middle]:.0%} of 4, {narrow[-1]:.0%} of {LENGTHS[-1]}. Trained alike, {WIDE} numbers carry"
        f" {wide[middle]:.0%} of 4 symbols and {wide[-1]:.0%} of {LENGTHS[-1]}: what does not fit is lost, and more"
        " training was not given to either. With attention the narrow vector is enough at every length, because the"
        " decoder reads the source's states instead. Learning to keep something in a recurrent state is hard as well:"
        f" before training each step leaves {each:.2f} of the gradient, while attention reaches any place in one step"
        " and its gradient is the weight of one place among T. A GRU can hold more with more width and training; the"
        " limits here are those of these sizes."
    )
    return LabResult("What does a fixed vector hold?", meaning, checks, _sections(right, sizes, through, looked))


def _train(kind: ArchitectureKind, seed: int) -> tuple[list[float], int]:
    """(share of symbols right at each length, parameters)"""
    noise = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Copier(kind)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / STEPS)
        source = _sources(int(torch.randint(1, LENGTHS[-1] + 1, (1,), generator=noise)), ROWS, noise)
        loss = F.cross_entropy(model(source).flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        tests = [_sources(length, TESTED, noise) for length in LENGTHS]
        right = [float((model(source).argmax(-1) == source).float().mean()) for source in tests]
    return right, sum(p.numel() for p in model.parameters())


def _sources(length: int, rows: int, noise: torch.Generator) -> Tensor:
    """`[rows, length]` of distinct symbols, so that the previous symbol says where in the source the next one is."""
    return torch.rand(rows, SYMBOLS, generator=noise).argsort(1)[:, :length]


def _gradient(name: str, back: int, seed: int) -> float:
    """Norm of the gradient of the last of `back + 1` outputs with respect to the first input: geometric mean over
    draws of weights and inputs, in fp64, since fp32 would round the smallest to 0."""
    logs = []
    for draw in range(DRAWS):
        noise = torch.Generator().manual_seed(seed * DRAWS + draw)
        x = torch.randn(1, back + 1, WIDTH, generator=noise, dtype=torch.float64, requires_grad=True)
        with torch.random.fork_rng():
            torch.manual_seed(seed * DRAWS + draw)
            gru, query, key = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if name == "GRU":
            out = gru.double()(x)[0]
        else:
            out = attend(query.double()(x)[:, None], key.double()(x)[:, None], x[:, None])[:, 0]
        (gradient,) = torch.autograd.grad(out[0, -1].sum(), x)
        logs.append(math.log(float(gradient[0, 0].norm())))
    return math.exp(sum(logs) / DRAWS)


def _sections(
    right: dict[str, list[float]], sizes: dict[str, int], through: list[float], looked: list[float]
) -> tuple[TableSection, TableSection, Curve, Curve]:
    rows = [[name, f"{sizes[name]:,}", *(f"{x:.0%}" for x in line)] for name, line in right.items()]
    copied = TableSection("Symbols copied right", ("model", "parameters", *(f"length {n}" for n in LENGTHS)), rows)
    steps = TableSection(
        "Gradient of the last output at the first input, before training",
        ("steps back", "GRU", "attention"),
        [[str(n), f"{a:.1g}", f"{b:.1g}"] for n, a, b in zip(BACK, through, looked, strict=True)],
    )
    quality = {name: [(float(n), x) for n, x in zip(LENGTHS, line, strict=True)] for name, line in right.items()}
    reach = {
        name: [(float(n), x) for n, x in zip(BACK, line, strict=True)]
        for name, line in (("GRU", through), ("attention", looked))
    }
    return (
        copied,
        steps,
        Curve("Symbols copied right", "length of the source", "share", quality, {"chance": 1 / SYMBOLS}, ""),
        Curve("Gradient of the last output at the first input", "steps back", "norm", reach, {}, "xy"),
    )
