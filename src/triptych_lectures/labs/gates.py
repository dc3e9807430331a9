"""A first token that decides the answer after the last: a plain RNN, LSTMs, a GRU and one layer of attention.

Lectures L0 and L1: "gates that helped but didn't eliminate the problem".  Hochreiter and Schmidhuber 1997; Gers et al.
2000 and Jozefowicz et al. 2015, on the bias of the forget gate; Cho et al. 2014, the GRU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import attend
from triptych.page import TableSection
from triptych.train import OptimizerSettings, Schedule
from .lab import Check, Clauses, Findings, Ints, Lab, Setup, clause, size
from .small_models import curve, descend, geometric_mean, growth, line_table, power

PLAIN, GRU, ATTENTION = "plain RNN", "GRU", "attention"
BIASES = (0.0, 1.0, 3.0)  # of the forget gate, before training; a gate of 0.5, 0.73 and 0.95
LSTMS = tuple(f"LSTM, forget bias {bias:g}" for bias in BIASES)
GATED = (*LSTMS, GRU)
RECURRENT = (PLAIN, *GATED)
READERS = (*RECURRENT, ATTENTION)
TESTED_EVERY = 10  # training steps
LEARNED = 0.95  # share of new rows that are right


class GatesLab(Lab):
    name = "gates"

    symbols: int = size(8, "first tokens that there are, of which one is asked for, two or more", least=2)
    others: int = size(4, "kinds of tokens between the first and the last")
    width: int = size(32, "width of embeddings and states")
    lags: Ints = size(
        (4, 8, 16, 32, 64, 128),
        "steps from the first token to the last; a recurrent network tries them in this order until it fails at one",
        values=2,
        ascending=True,
    )
    steps: int = size(400, "training steps at most, for each lag")
    starts: int = size(5, "initializations, of which each is trained, where it says that there are several")
    rows: int = size(32, "rows of a training step")
    rate: float = size(5e-3, "learning rate of AdamW")
    tested: int = size(200, "new rows that are tested")
    back: Ints = size((8, 16, 32, 64), "steps back, of the gradient", values=3, ascending=True)

    def findings(self, setup: Setup) -> Findings:
        seeds = range(setup.seed * self.starts, (setup.seed + 1) * self.starts)
        before, after, needed = dict[str, list[float]](), dict[str, list[float]](), dict[str, dict[int, int]]()
        tried: dict[str, dict[int, list[float]]] = {}
        for name in READERS:
            before[name] = self._typical([self._reader(name, seed) for seed in seeds], seeds)
            trained, tried[name] = self._tries(name, self.lags[:1], seeds, setup)
            after[name] = self._typical(trained, seeds)
        for name in RECURRENT:
            needed[name] = {}
            for lag in self.lags:
                setup.progress(f"{name}, lag {lag}: at most {self.steps} steps")
                _, steps = self._learned(name, lag, setup.seed)
                if steps is None:
                    break
                needed[name][lag] = steps
        furthest = max(GATED, key=lambda name: max(needed[name], default=0))
        second, last = self.lags[1:2], self.lags[-1:]
        for name, lags in ((PLAIN, second), (LSTMS[1], second), (furthest, last), (ATTENTION, self.lags[1:])):
            tried[name] |= self._tries(name, lags, seeds, setup)[1]
        setup.progress("shuffled answers")
        chance = self._control(setup.seed)
        measured = Measured(self, before, after, needed, tried, furthest, chance)
        rows = [[name, *(str(steps.get(lag, "-")) for lag in self.lags)] for name, steps in needed.items()]
        header, back = ("model", *(f"lag {lag}" for lag in self.lags)), "steps back"
        title = f"Steps until {LEARNED:.0%} of new rows are right, at most {self.steps}; -: not learned, or not tried"
        whens, first = ("before training", f"after training at lag {self.lags[0]}"), "of the answer at the first token"
        factors = {when: of.values() for when, of in zip(whens, measured.factors, strict=True)}
        yield line_table(f"What a further step leaves of the gradient {first}", "model", READERS, factors, ".3f")
        yield TableSection(title, header, rows)
        yield measured.table
        yield from (
            curve(f"Gradient {first}, {when}", back, "norm", self.back, of, log="xy")
            for when, of in zip(whens, (before, after), strict=True)
        )
        yield from measured.conclusion

    def _reader(self, name: str, seed: int) -> Reader:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Reader(name, self.symbols + self.others + 1, self.symbols, self.width)

    def _rows(self, count: int, lag: int, noise: torch.Generator) -> Tensor:
        """`[count, lag + 1]`: a symbol, other tokens, and one that asks for the symbol."""
        rows = torch.randint(self.symbols, self.symbols + self.others, (count, lag + 1), generator=noise)
        rows[:, 0] = torch.randint(self.symbols, (count,), generator=noise)
        rows[:, -1] = self.symbols + self.others
        return rows

    def _learned(self, name: str, lag: int, seed: int, *, shuffled: bool = False) -> tuple[Reader, int | None]:
        """The model after training, and the steps that it needed; None where it did not learn the lag.  With
        `shuffled`, each row has the answer of the one before it."""
        reader, noise = self._reader(name, seed), torch.Generator().manual_seed(seed)

        def loss(step: int) -> Tensor:
            rows = self._rows(self.rows, lag, noise)
            answers = rows[:, 0].roll(1) if shuffled else rows[:, 0]
            return F.cross_entropy(reader(rows), answers)

        optimizer = OptimizerSettings(name="adamw", lr=self.rate, weight_decay=0.0)
        schedule = Schedule(shape="constant", warmup=0.05)
        for step, _ in enumerate(descend(reader, loss, steps=self.steps, optimizer=optimizer, schedule=schedule), 1):
            if step % TESTED_EVERY == 0 and self._right(reader, lag, noise) >= LEARNED:
                return reader, step
        return reader, None

    @torch.no_grad()
    def _right(self, reader: Reader, lag: int, noise: torch.Generator) -> float:
        rows = self._rows(self.tested, lag, noise)
        return float((reader(rows).argmax(-1) == rows[:, 0]).double().mean())

    def _control(self, seed: int) -> float:
        """The mean probability of the right answer after training on shuffled ones.  The likeliest answer would say
        less: where nothing is learned, it hangs on small differences, and for each symbol is the same in all rows."""
        reader, _ = self._learned(GRU, self.lags[0], seed, shuffled=True)
        rows = self._rows(self.tested, self.lags[0], torch.Generator().manual_seed(seed))
        with torch.no_grad():
            return float(reader(rows).softmax(-1).gather(1, rows[:, :1]).mean())

    def _tries(self, name: str, lags: Ints, seeds: range, setup: Setup) -> tuple[list[Reader], dict[int, list[float]]]:
        """What each initialization becomes at the last of the lags, and the steps that it needed for each lag, infinite
        where it did not learn it."""
        trained, needed = list[Reader](), dict[int, list[float]]()
        for lag in lags:
            setup.progress(f"{name}, lag {lag}: {self.starts} initializations")
            each = [self._learned(name, lag, seed) for seed in seeds]
            trained = [reader for reader, _ in each]
            needed[lag] = [math.inf if steps is None else steps for _, steps in each]
        return trained, needed

    def _typical(self, readers: list[Reader], seeds: range) -> list[float]:
        """The gradients of several initializations, geometric mean for each length."""
        each = [self._gradients(reader, seed) for reader, seed in zip(readers, seeds, strict=True)]
        return [geometric_mean(norms) for norms in zip(*each, strict=True)]

    def _gradients(self, reader: Reader, seed: int) -> list[float]:
        """For each length: the norm of the gradient of the right answer's logit at the first token's embedding,
        geometric mean over rows, in fp64, since fp32 would round the smallest to 0."""
        noise, reader, norms = torch.Generator().manual_seed(seed), reader.double(), []
        for back in self.back:
            rows = self._rows(16, back, noise)
            embedded = reader.embed(rows).detach().requires_grad_()
            right = reader.answer(embedded).gather(1, rows[:, :1]).sum()
            (gradient,) = torch.autograd.grad(right, embedded)
            norms.append(math.exp(float(gradient[:, 0].norm(dim=-1).log().mean())))
        return norms


class Reader(nn.Module):
    """Reads a row of tokens, and answers from its last state, which is that of a recurrent network, or what the last
    token reads of all embeddings by attention."""

    def __init__(self, name: str, vocab: int, symbols: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, symbols)
        self.cell: nn.RNNBase | None = None
        if name == ATTENTION:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        elif name in LSTMS:
            self.cell = nn.LSTM(width, width, batch_first=True)
            # the gates stand in the order input, forget, cell, output, and each has two biases
            for bias, value in (("bias_ih_l0", BIASES[LSTMS.index(name)]), ("bias_hh_l0", 0.0)):
                nn.init.constant_(self.cell.get_parameter(bias)[width : 2 * width], value)
        else:
            self.cell = (nn.GRU if name == GRU else nn.RNN)(width, width, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.answer(self.embed(ids))

    def answer(self, x: Tensor) -> Tensor:
        """Embeddings `[B, T, D]` -> logits `[B, symbols]`."""
        if self.cell is not None:
            state = self.cell(x)[0][:, -1]
        else:
            state = attend(self.q(x[:, -1:])[:, None], self.k(x)[:, None], self.v(x)[:, None])[:, 0, 0]
        logits: Tensor = self.head(state)
        return logits


@dataclass(frozen=True)
class Measured:
    """What the lab measured.

    before, after   gradients over length, by model, before and after training, typical of several initializations.
    needed          the steps that each lag needed, by recurrent network.
    tried           the steps that each of several initializations needed for a lag, infinite where it was not learned:
                    the first lag by all models, each by attention, the longest by the gated network that came
                    `furthest`, and the second by the plain network and the LSTM whose forget bias is 1.
    chance          the probability of the right answer after training on shuffled ones.
    """

    lab: GatesLab
    before: dict[str, list[float]]
    after: dict[str, list[float]]
    needed: dict[str, dict[int, int]]
    tried: dict[str, dict[int, list[float]]]
    furthest: str
    chance: float

    @property
    def factors(self) -> list[dict[str, float]]:
        """By model, what is left of the gradient after each further step, before and after training: the base of the
        exponential fitted to it."""
        return [
            {name: math.exp(growth(self.lab.back, of[name])) for name in READERS} for of in (self.before, self.after)
        ]

    def learned(self, name: str, lag: int) -> int:
        """How many of the initializations learned the lag."""
        return sum(map(math.isfinite, self.tried[name][lag]))

    @property
    def table(self) -> TableSection:
        rows = [
            [name, str(lag), str(self.learned(name, lag)), *(format(steps, "g") for steps in (median(each), max(each)))]
            for name, lags in self.tried.items()
            for lag, each in lags.items()
        ]
        title = f"Steps of {self.lab.starts} initializations, at most {self.lab.steps}; inf: not learned"
        return TableSection(title, ("model", "lag", "learned", "median", "most"), rows)

    @property
    def conclusion(self) -> Clauses:
        lab, falls = self.lab, power(self.lab.back, self.before[ATTENTION])
        (old, new), (closed, open_, wide) = self.factors, LSTMS
        lag = {name: max(self.needed[name], default=1) for name in RECURRENT}  # 1 needs no memory of a step before
        (first, second, *_), last, starts, gated = lab.lags, lab.lags[-1], lab.starts, self.furthest
        far, learn = self.learned(gated, last), f"initializations of {starts} that learn"
        guess, gates = 1 / lab.symbols, min(old[name] for name in GATED) - old[PLAIN]
        medians = {at: median(each) for at, each in self.tried[ATTENTION].items()}
        slowest = max(medians, key=lambda at: medians[at])
        plain, biased = (median(self.tried[name][second]) for name in (PLAIN, open_))
        counts = {at: self.learned(ATTENTION, at) for at in lab.lags}
        rise = min((PLAIN, GRU, closed), key=lambda name: new[name] - old[name])
        in_order = ", ".join(f"{lag[name]} ({name})" for name in RECURRENT)
        needed = [f"{at:g} steps" if math.isfinite(at) else "beyond these steps" for at in (plain, biased)]
        yield clause(
            f"Before training each further step leaves {old[PLAIN]:.2f} of the first token's gradient in a plain"
            f" RNN, {old[GRU]:.2f} in a GRU, and {old[closed]:.2f}, {old[open_]:.2f} and {old[wide]:.2f} in an LSTM"
            " whose forget bias is 0, 1 and 3: gates help, and their bias says how much.",
            Check("before training: factor of the gated network with the least, less the plain one's", gates, 0.05),
            Check("before training: factor with forget bias 1, less with 0", old[open_] - old[closed], 0.05),
            Check("before training: factor with forget bias 3, less with 1", old[wide] - old[open_], 0.05),
            instead="The gradient did not tell the networks apart as expected",
        )
        yield clause(
            f"With at most {lab.steps} steps, the longest lags that one initialization learned are {in_order}. For lag"
            f" {second} the median of {starts} is {needed[0]} in the plain RNN and {needed[1]} with forget bias 1.",
            Check("longest lag learned, GRU over plain RNN", lag[GRU] / lag[PLAIN], least=2),
            Check(f"steps for lag {second}, median: plain RNN over forget bias 1", plain / biased, least=2),
            Check("longest lag learned, forget bias 3 over 0", lag[wide] / lag[closed], least=2),
            instead="That gates, and open ones more, make longer lags learnable was not seen",
        )
        yield clause(
            f"The problem is not eliminated: with as many steps {far} of {starts}"
            f" initializations of the best of them ({gated}) learn lag {last}. Attention's gradient falls as the"
            f" length to the power {falls:.2f} and not exponentially; it learns lags {', '.join(map(str, counts))}"
            f" from {', '.join(map(str, counts.values()))} of {starts} initializations, and the slowest, lag"
            f" {slowest}, in a median of {medians[slowest]:g} steps.",
            Check(f"attention: {learn} a lag, the fewest", min(counts.values()), least=starts // 2 + 1),
            Check(f"best gated network: {learn} the longest lag", far, most=(starts - 1) // 2),
            Check("attention, untrained: the gradient falls as the length to the power", falls, -1.3, -0.7),
            instead="That attention learns what gated networks do not was not seen",
        )
        yield clause(
            f"Training raises the factor, at lag {first} to {new[PLAIN]:.2f} in a plain RNN and {new[GRU]:.2f} in a"
            f" GRU. Control: trained on shuffled answers, it gives the right one {self.chance:.0%}.",
            Check("rise of the factor with training, the least of three", new[rise] - old[rise], least=0.1),
            Check("control: probability of the right answer, trained on shuffled ones", self.chance, most=guess + 0.1),
            instead="Training did not raise the factors, or shuffled answers were learned",
        )
