"""Recurrent encoder-decoders that copy sequences through one fixed vector or with attention (Cho et al. 2014; Bahdanau
et al. 2015; lectures L0 and L1).  Lab `gates` has the gradient over distance."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import attend
from triptych.page import TableSection
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import curve, parameters

WARMUP = 20  # training steps


class BottleneckLab(Lab):
    name = "bottleneck"

    symbols: int = size(20, "distinct symbols, at least as many as the longest source has")
    width: int = size(64, "width of embeddings and states")
    lengths: Ints = size((1, 2, 4, 8, 12, 16), "symbols of a source, ascending", ascending=True, most="symbols")
    narrow: int = size(4, "numbers in the narrow vector", below="wide")
    wide: int = size(64, "numbers in the wide vector")
    steps: int = size(400, "training steps")
    rows: int = size(64, "rows of a training step")
    rate: float = size(5e-3, "learning rate")
    tested: int = size(256, "sources of each length that are tested")

    def findings(self, setup: Setup) -> Findings:
        right: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        narrow_one, wide_one = (f"vector of {code}" for code in (self.narrow, self.wide))
        for name, code in ((narrow_one, self.narrow), (wide_one, self.wide), ("attention", self.narrow)):
            setup.progress(f"{name}: training {self.steps} steps")
            right[name], sizes[name] = self._train(code, name == "attention", setup.seed)
        first, last = self.lengths[0], self.lengths[-1]
        narrow, wide, attention = right.values()
        parameter_ratio = sizes["attention"] / sizes[wide_one]
        right_at, chance = "symbols right at length", 1 / self.symbols
        yield clause(
            f"A vector of {self.narrow} numbers copies a source of {first} and loses more the longer the source is:"
            f" {narrow[-1]:.0%} of {last} symbols are right. {self.wide} numbers carry more, {wide[-1]:.0%} of"
            f" {last}, and not all of it either, after the same training.",
            Check(f"{narrow_one}: {right_at} {first}", narrow[0], least=0.95),
            Check(f"{narrow_one}: {right_at} {last}", narrow[-1], least=chance, most=0.5),
            Check(f"{wide_one}: {right_at} {last}, more than {self.narrow}", wide[-1] - narrow[-1], least=0.1),
            Check(f"{wide_one}: {right_at} {last}", wide[-1], most=0.8),
            instead="That a fixed vector loses long sources, and a narrow one more, was not seen",
        )
        yield clause(
            f"With attention the narrow vector is enough at every length ({min(attention):.1%} right at the worst),"
            " because the decoder reads the states of the source instead, and with fewer parameters than the wide"
            " vector takes.",
            Check("attention: symbols right, the worst over all lengths", min(attention), least=0.95),
            Check(f"parameters, attention over {wide_one}", parameter_ratio, most=1.0),
            instead="Attention did not make up for the narrow vector with fewer parameters",
        )
        rows = [[name, f"{sizes[name]:,}", *(f"{x:.0%}" for x in line)] for name, line in right.items()]
        copied = "Symbols copied right"
        yield TableSection(copied, ("model", "parameters", *(f"length {n}" for n in self.lengths)), rows)
        yield curve(copied, "length of the source", "share", self.lengths, right, {"chance": chance})

    def _train(self, code: int, attention: bool, seed: int) -> tuple[list[float], int]:
        """(share of symbols right at each length, parameters)"""
        noise = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Copier(code, attention, self.symbols, self.width)
        optimizer = torch.optim.Adam(model.parameters(), self.rate)
        for step in range(self.steps):
            optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (step + 1) / WARMUP) * (1 - step / self.steps)
            length = int(torch.randint(1, self.lengths[-1] + 1, (1,), generator=noise))
            source = _sources(length, self.rows, self.symbols, noise)
            loss = F.cross_entropy(model(source).flatten(0, 1), source.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            tests = [_sources(length, self.tested, self.symbols, noise) for length in self.lengths]
            right = [float((model(source).argmax(-1) == source).float().mean()) for source in tests]
        return right, parameters(model)


class Copier(nn.Module):
    """A GRU encoder and a GRU decoder.  The last state of the source, mapped to `code` numbers, starts the decoder and
    is part of each of its inputs; with attention its states also query all states of the source (Luong et al. 2015).
    """

    def __init__(self, code: int, attention: bool, symbols: int, width: int) -> None:
        super().__init__()
        self.attention, self.symbols = attention, symbols
        self.embed = nn.Embedding(symbols + 1, width)  # the last one starts the target
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.code, self.first_state = nn.Linear(width, code), nn.Linear(code, width)
        self.decoder = nn.GRU(width + code, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(2 * width if attention else width, symbols)

    def forward(self, source: Tensor) -> Tensor:
        """`[B, T]` -> logits `[B, T, symbols]` of a copy, the right symbols before each one given."""
        states, last = self.encoder(self.embed(source))
        code = self.code(last[0]).tanh()
        begin = torch.full_like(source[:, :1], self.symbols)
        written = self.embed(torch.cat([begin, source[:, :-1]], 1))
        inputs = torch.cat([written, code[:, None].expand(-1, source.shape[1], -1)], -1)
        own, _ = self.decoder(inputs, self.first_state(code).tanh()[None])
        if self.attention:
            read = attend(self.query(own)[:, None], self.key(states)[:, None], states[:, None])[:, 0]
            own = torch.cat([own, read], -1)
        logits: Tensor = self.head(own)
        return logits


def _sources(length: int, rows: int, symbols: int, noise: torch.Generator) -> Tensor:
    """`[rows, length]` of distinct symbols, so that the previous symbol says where in the source the next one is."""
    return torch.rand(rows, symbols, generator=noise).argsort(1)[:, :length]
