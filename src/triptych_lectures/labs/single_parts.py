"""Statements about single parts, each decided by the library's own part: positions, the block, training, generation.

What is by hand, such as numbers and the sum of DeBERTa's three terms, is written out here and compared with the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych import families, nn, ops, spec
from triptych.attention import Rows, attend, rope_angles, rotate, sinusoidal
from triptych.attention.position_biases import t5_bucket
from triptych.errors import InputError
from triptych.files import tables_of
from triptych.generate import Sampling
from triptych.generate.sampling import sample
from triptych.model import Model
from triptych.probe import Edit, add, zero
from triptych.spec import RopeSpec, SinusoidalSpec
from triptych.text import bpe_tokenizer
from triptych.train.data import MaskedText
from triptych.train.labelled import LabelledExample
from triptych.train.objectives import TokenMasking
from triptych.train.text_tasks import ReplacedText, by_frequency
from .lab import Check, Lab, LabResult, Setup, size
from .small_models import block, decoder
from .statements import Statements, gap, normalized, result_of

WIDTH, HEADS, TOKENS, SHIFT = 16, 4, 12, 5
SPECIAL = frozenset(range(5))  # ids that stand for no word; 4 is [MASK]
ROW = [*range(TOKENS)]
FAR = 4.5  # standard deviations, beyond which a share of draws lies in 7 of a million cases
DEBERTA = {
    "model_type": "deberta", "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": TOKENS,
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 4, "initializer_range": 0.2,
    "max_position_embeddings": TOKENS, "intermediate_size": 24,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 8}
PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]
SAMPLED: tuple[tuple[dict[str, Any], list[float]], ...] = (  # settings, and by hand the weights that are drawn from
    ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),
    ({"temperature": 1.0, "top_k": 2}, [0.4, 0.3, 0, 0, 0]),
    ({"temperature": 1.0, "top_p": 0.8}, [0.4, 0.3, 0.15, 0, 0]),
    ({"temperature": 1.0, "min_p": 0.2}, [0.4, 0.3, 0.15, 0.1, 0]),
)


class SinglePartsLab(Lab):
    name = "single-parts"

    draws: int = size(2000, "tokens that each setting of the sampler draws, 1,000 or more", least=1000)
    words: int = size(40_000, "words of the text that objectives hide, a multiple of 20", least=2000, multiple=20)

    def run(self, setup: Setup) -> LabResult:
        parts, topics = SingleParts(self, setup.seed), tables_of(__file__).items()
        texts = {about: (topic, about, text) for topic, own in topics for about, text in own.items()}
        return result_of(self, parts, "Statements about parts", ("topic", "about"), texts)


def _within(claim: str, drawn: float, share: float, count: int) -> Check:
    """That the `drawn` share of `count` independent cases is one that `share` gives."""
    most = FAR * (share * (1 - share) / count) ** 0.5
    return Check(claim, drawn, share - most, share + most)


def _spread(scores: Tensor) -> float:
    """The largest difference of a head's scores [H, T, T] at one offset, over that of any; NaN where all are equal."""
    lines = [scores.diagonal(offset, 1, 2) for offset in range(1 - TOKENS, TOKENS)]
    offset, every = (max((x.amax(-1) - x.amin(-1)).amax() for x in of) for of in (lines, [scores.flatten(1)]))
    return float(offset / every)


def _moved(model: Model, site: str, edit: Edit) -> Tensor:
    """What an edit takes from the values at a site."""
    was, now = (model.trace([ROW], read=[site], edit=[edit] * n)[site][0] for n in (0, 1))
    return was - now


class SingleParts(Statements):
    """What decides the statements."""

    def __init__(self, sizes: SinglePartsLab, seed: int) -> None:
        super().__init__(seed)
        self.draws, self.words = sizes.draws, sizes.words

    def _model(self, layers: int = 1, hidden: int | None = None, **positions: Any) -> Model:
        """A model in which every token sees every other."""
        small = decoder(TOKENS, [block(WIDTH, HEADS, hidden)] * layers, mask=spec.full(), **positions)
        return Model(nn.new(small, self.seed, torch.float64))

    def _of_config(self, config: dict[str, Any]) -> Model:
        return Model(nn.new(families.read_config(config, where="config"), self.seed, torch.float64))

    def sinusoids(self) -> Iterator[Check]:
        first = sinusoidal(torch.tensor([1]), SinusoidalSpec(width=4))[0]
        waves = sinusoidal(torch.arange(64), SinusoidalSpec(width=WIDTH))
        back = rope_angles(RopeSpec(width=WIDTH), torch.tensor([-SHIFT]))
        rotated = rotate(waves[:-SHIFT, None], *back, "interleaved")[:, 0]
        products = (waves[:-SHIFT] * waves[SHIFT:]).sum(-1)
        (table,) = self.drawn((64, WIDTH))
        before, after = table[:-SHIFT], table[SHIFT:]
        left = after - before @ torch.linalg.lstsq(before, after).solution
        yield Check("PE(1) for d 4, distance", gap(first, torch.tensor([0.8415, 0.5403, 0.01, 1])), most=5.1e-5)
        yield Check("PE(p + 5), distance from PE(p) rotated", gap(waves[SHIFT:], rotated), most=1e-4)
        yield Check("PE(p)·PE(p + 5), spread over p", float(products.max() - products.min()), most=1e-4)
        yield Check("random table: left by linear maps", float(left.square().sum() / after.square().sum()), least=0.5)

    def offsets(self) -> Iterator[Check]:
        (rope, q, turned), (sinusoids, *_) = (
            [self._model(**at).trace([[7] * TOKENS], read=[one])[one][0] for one in sites]
            for sites in [[f"blocks.0.attn.{name}" for name in ("scores", "q", "q_rot")]]
            for at in ({"inside": RopeSpec(width=WIDTH // HEADS)}, {"embedded": SinusoidalSpec(width=WIDTH)})
        )
        yield Check("RoPE: spread at one offset", _spread(rope), most=1e-9)
        yield Check("RoPE: change of a query's length", gap(q.norm(dim=-1), turned.norm(dim=-1)), most=1e-12)
        yield Check("sinusoids: spread at one offset", _spread(sinusoids), least=0.1)

    def lengths(self) -> Iterator[Check]:
        def longest(model: Model, *lengths: int) -> int:
            """The longest row, of these ascending lengths, that a model reads."""
            tokens = 0
            with suppress(InputError):
                for length in lengths:
                    tokens = len(model.logits([[7] * length])[0])
            return tokens

        waves = self._model(embedded=SinusoidalSpec(width=WIDTH))
        rope = self._model(inside=RopeSpec(width=WIDTH // HEADS))
        yield Check("longest row a table of 8 reads", longest(self._of_config(GPT2), 8, 9), 8, 8)
        yield Check("sinusoids and RoPE read, of 40", min(longest(waves, 40), longest(rope, 40)), 40, 40)

    def distances(self) -> Iterator[Check]:
        model = self._of_config(DEBERTA)
        model.module.requires_grad_(requires_grad=False)
        trace = model.trace([ROW], read=["blocks.0.attn.*"])
        q, k, scores = (trace[f"blocks.0.attn.{site}"][0] for site in ("q", "k", "scores"))
        part = model.module.get_submodule
        table = part("encoder.kinds.self.position").get_parameter("weight")
        span = len(table) // 2
        rows = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) + span).clamp(0, 2 * span - 1)
        pos_q, pos_k = (
            part(f"encoder.blocks.0.attn.{name}")(table).view(2 * span, *q.shape[1:])[rows]
            for name in ("pos_q", "pos_k")
        )
        sums = {"ihd,jhd->hij": (q, k), "ihd,ijhd->hij": (q, pos_k), "ijhd,jhd->hij": (pos_q, k)}
        terms = torch.stack([torch.einsum(of, *pair) for of, pair in sums.items()]) / (3 * q.shape[-1]) ** 0.5
        without = min(gap(scores, terms.sum(0) - term) for term in terms)
        yield Check("score, distance from three terms", gap(scores, terms.sum(0)), most=1e-12)
        yield Check("without one, over largest score", without / float(scores.abs().max()), least=0.01)

    def buckets(self) -> Iterator[Check]:
        by_hand = {0: 0, -1: 1, -7: 7, -8: 8, -16: 10, -64: 14, -127: 15, -1000: 15, 1: 17, 7: 23, 8: 24, 1000: 31}
        ours = t5_bucket(torch.tensor([*by_hand])).tolist()
        causal = t5_bucket(torch.tensor([5, 0, -15, -16, -1000]), bidirectional=False).tolist()
        yield Check("distances in another bucket than by hand", sum(map(int.__ne__, ours, by_hand.values())), most=0)
        yield Check("the same in a decoder", sum(map(int.__ne__, causal, [0, 0, 15, 16, 31])), most=0)
        yield Check("buckets of distances 0 to 7", len({*t5_bucket(-torch.arange(8)).tolist()}), 8, 8)
        yield Check("buckets of distances 64 to 127", len({*t5_bucket(-torch.arange(64, 128)).tolist()}), 2, 2)
        yield Check("buckets of keys ahead", len({*t5_bucket(torch.arange(1, 999)).tolist()} - {*range(16)}), 15, 15)

    def activations(self) -> Iterator[Check]:
        gelu, relu, smooth = (ops.ACTIVATIONS[name] for name in ("gelu", "relu", "gelu_tanh"))
        ones, many = torch.tensor([1.0, -1.0]), torch.linspace(-5, 5, 1001)
        right = torch.tensor([0.8413, -0.1587, 1, 0])
        yield Check("GELU and ReLU of ±1, distance", gap(torch.cat((gelu(ones), relu(ones))), right), most=5.1e-5)
        yield Check("the form with tanh, from GELU", gap(smooth(many), gelu(many)), 1e-5, 1e-3)

    def norms(self) -> Iterator[Check]:
        x = torch.arange(1, 5, dtype=torch.float64)
        layer = partial(normalized, norm=spec.LayerNormSpec(width=4, eps=1e-12))
        rms = partial(normalized, norm=spec.RMSNormSpec(width=4, eps=1e-12))
        right = x.new_tensor([-1.3416, -0.4472, 0.4472, 1.3416, 0.3651, 0.7303, 1.0954, 1.4606])
        yield Check("both norms, distance", gap(torch.cat((layer(x), rms(x))), right), most=5.1e-5)
        yield Check("LayerNorm: change by adding 10", gap(layer(x), layer(x + 10)), most=1e-9)
        yield Check("RMSNorm: change by adding 10", gap(rms(x), rms(x + 10)), least=0.1)

    def places(self) -> Iterator[Check]:
        model, elsewhere = self._model(hidden=4 * WIDTH), torch.arange(TOKENS) != 3
        (other,) = self.drawn((WIDTH,))
        mlp, attention = (
            _moved(model, f"blocks.0.{part}.out", add(f"blocks.0.{part}.in", other, at=3)).abs().amax(-1)
            for part in ("mlp", "attn")
        )
        yield Check("MLP: change elsewhere, over own", float(mlp[elsewhere].max() / mlp[3]), most=1e-12)
        yield Check("attention: smallest change elsewhere", float(attention[elsewhere].min()), least=1e-6)

    def heads(self) -> Iterator[Check]:
        model, width, site = self._model(), WIDTH // HEADS, "blocks.0.attn.out"

        def outside() -> float:
            """The share of what a head writes, in squares, that is outside its slice: the mean over the heads."""
            edits = [zero("blocks.0.attn.z", heads=head) for head in range(HEADS)]
            wrote = torch.stack([_moved(model, site, edit).square().sum(0) for edit in edits])
            wrote = wrote.view(HEADS, HEADS, width).sum(-1)
            return 1 - float((wrote.diagonal() / wrote.sum(-1)).mean())

        full, weight = outside(), model.module.get_parameter(f"decoder.{site}.weight")
        weight.data *= torch.block_diag(*[torch.ones(width, width)] * HEADS)
        yield Check("written outside a head's slice", full, least=0.375)
        yield Check("the same, block-diagonal", outside(), most=1e-12)

    def masks(self) -> Iterator[Check]:
        q, k, v = self.drawn(*[(TOKENS, WIDTH)] * 3)
        visible = torch.ones(TOKENS, TOKENS).tril().bool()
        boolean, bias = attend(q, k, v, mask=spec.dense(visible)), q.new_zeros(TOKENS, TOKENS)
        infinite, large, one = (
            gap(boolean, attend(q, k, v, bias=bias.masked_fill(~visible, -x))) for x in (inf, 1e9, 1)
        )
        yield Check("boolean less 0/-∞ or 0/-1e9 mask", max(infinite, large), most=1e-12)
        yield Check("boolean less 0/-1 mask", one, least=0.01)

    def dropout(self) -> Iterator[Check]:
        rate, x = 0.2, torch.ones(10_000, dtype=torch.float64)
        dropped = ops.dropout(x, rate, training=True, random=ops.RowNoise(self.seed, [0]))
        kept, mean = dropped[dropped != 0], FAR * (rate / (1 - rate) / len(x)) ** 0.5
        yield Check("p 0.2: factor, distance from 1.25", gap(kept, kept.new_tensor(1.25)), most=1e-12)
        yield Check("mean of 10,000 ones", float(dropped.mean()), 1 - mean, 1 + mean)
        yield Check("change outside training", gap(ops.dropout(x, rate, training=False), x), 0.0, 0.0)

    def _text(self, shares: NDArray[np.float64], hides: TokenMasking) -> MaskedText:
        """A text of words, the ids from 5 on, which are so frequent; each step reads it once."""
        words = np.random.default_rng(self.seed).choice(len(shares), self.words, p=shares) + 5
        return MaskedText.of([words.astype(np.int32)], len(words) + 2, hides, [2], [3])

    def masking(self) -> Iterator[Check]:
        words = 1000  # a random one is the original in one of 1,000 cases
        text = self._text(np.full(words, 1 / words), TokenMasking(4, words + 5, SPECIAL))
        [first], [second], [again] = (text.draw(self.seed, step, 1) for step in (0, 1, 0))
        at, chosen = first.trained, int(first.trained.sum())
        mask, same = (first.ids[at] == 4).mean(), (first.ids[at] == first.targets[at]).mean()
        others = first.ids[at & (first.ids != 4) & (first.ids != first.targets)]
        different = max(1.0, words * (1 - (1 - 1 / words) ** len(others)))  # of so many random words, as is expected
        yield Check("share predicted by BERT", chosen / self.words, 0.15, 0.15)
        yield _within("share read as [MASK]", mask, 0.8, chosen)
        yield _within("share read unchanged", same, 0.1 + 0.1 / words, chosen)
        yield Check("other words read, different ones over expected", len(set(others)) / different, 0.85, 1.15)
        yield _within("hidden next epoch too", second.trained[at].mean(), 0.15, chosen)
        yield Check("hidden by the same draw", again.trained[at].mean(), 1.0, 1.0)

    def replacing(self) -> Iterator[Check]:
        shares = 1 / np.arange(1, 11)
        shares /= shares.sum()
        text = self._text(shares, TokenMasking(4, 15, SPECIAL, shares=(1.0, 0.0)))
        replacer = by_frequency(np.append(np.zeros(5), shares))
        [row] = ReplacedText(**vars(text), replacer=replacer).draw(self.seed, 0, 1)
        assert isinstance(row, LabelledExample)
        labels, differs = row.goal[1:-1], row.ids[1:-1] != text.stream.arrays[0]
        chosen = 3 * self.words // 20
        other = 1 - float(shares @ shares)  # the chance that a sample is not the original
        yield Check("ELECTRA: share with a loss", row.trained.mean(), 1.0, 1.0)
        yield Check("wrong labels of ELECTRA", int((labels != differs).sum()), 0, 0)
        yield _within("labelled replaced, of chosen", labels.sum() / chosen, other, chosen)

    def recomputing(self) -> Iterator[Check]:
        module = self._model(layers=2, hidden=4 * WIDTH).module.train()
        stack, calls = module.decoder, list[object]()
        assert stack is not None
        for part in stack.blocks:
            part.register_forward_pre_hook(lambda *_: calls.append(1))

        def step(*, recompute: bool) -> tuple[Tensor, int, int]:
            """The gradients, the calls of blocks, and the bytes that are kept for the backward."""
            kept: dict[int, int] = {}
            weights = {one.untyped_storage().data_ptr() for one in module.parameters()}

            def keep(x: Tensor) -> Tensor:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            stack.recompute = recompute
            module.zero_grad()
            calls.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = module.logits(nn.Batch(inputs=torch.tensor(ROW), rows=Rows((TOKENS,)))).square().sum()
            loss.backward()
            grads = [torch.zeros_like(own) if own.grad is None else own.grad for own in module.parameters()]
            return (
                torch.cat([one.flatten() for one in grads]),
                len(calls),
                sum(size for place, size in kept.items() if place not in weights),
            )

        (plain, once, whole), (again, twice, inputs) = step(recompute=False), step(recompute=True)
        yield Check("checkpointed: gradients, distance", gap(plain, again) / float(plain.abs().max()), most=1e-12)
        yield Check("checkpointed: block calls, ratio", twice / once, 2, 2)
        yield Check("checkpointed: bytes kept, ratio", inputs / whole, most=0.5)

    def _far(self, settings: dict[str, Any], weights: Sequence[float]) -> float:
        """How far the shares of what is drawn are from those of `weights`, at most, in standard deviations."""
        logits, right = torch.tensor(PROBABILITIES).log().expand(self.draws, -1), np.array(weights) / sum(weights)
        drawn = sample(logits, Sampling(seed=self.seed, **settings), range(self.draws), [[]] * self.draws)
        off = np.abs(np.bincount(drawn, minlength=len(right)) / self.draws - right)
        return float(np.divide(off, np.sqrt(right * (1 - right) / self.draws), where=off > 0, out=off).max())

    def sampling(self) -> Iterator[Check]:
        with np.errstate(divide="ignore"):  # a token that is not kept must never be drawn
            own = max(self._far(*one) for one in SAMPLED)
            unset = min(self._far({"temperature": 1.0}, weights) for _, weights in SAMPLED)
        yield Check("four settings: standard deviations off", own, most=FAR)
        yield Check("without settings: off", unset, least=FAR)

    def merges(self) -> Iterator[Check]:
        tokenizer = bpe_tokenizer(["old"] * 5 + ["cold"] * 4 + ["gold"] * 2 + ["color"] * 3, 260)
        made, cut = tokenizer.tokens([257, 258, 259]), tokenizer.tokens(tokenizer.encode("told"))
        right = [a == b for a, b in zip(made, ("ol", "old", "cold"), strict=True)]
        yield Check("right merges, of 3", sum(right), 3, 3)
        yield Check("right pieces of told", sum(piece in ("t", "old") for piece in cut), 2, 2)
