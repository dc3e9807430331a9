"""Statements of the lectures that are wrong, or hold only sometimes, each beside what this library computes.

The corrections that need an experiment of their own are in other labs: √d in `scaling`, order in `permutation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych import families, nn, spec
from triptych.attention import attend
from triptych.count import count
from triptych.files import tables_of
from triptych.model import Model
from triptych.spec import causal, dense, keys
from .lab import Check, Lab, LabResult, Setup, size
from .small_models import parameters
from .statements import Statements, gap, normalized, result_of

_TABLES: Mapping[str, Mapping[str, Any]] = tables_of(__file__)
PUBLISHED, WIDTHS, SMALL = _TABLES["published"], _TABLES["widths"], _TABLES["small"]


class CorrectionsLab(Lab):
    name = "corrections"

    tokens: int = size(7, "queries and keys of the random tensors, 3 to 30", least=3, most=30)
    width: int = size(16, "width of these queries and keys")
    mlp: int = size(96, "model width at which SwiGLU and a plain MLP are compared, a multiple of 3", multiple=3)

    def run(self, setup: Setup) -> LabResult:
        statements = Corrected(self, setup.seed)
        texts = {name: (one["lecture"], one["says"], one["finding"]) for name, one in _TABLES["statements"].items()}
        instead = "“{1}” ({0}) is not refuted"
        return result_of(self, statements, "Statements of the lectures", ("lecture", "it says"), texts, instead)


def _small(name: str) -> spec.ModelSpec:
    return families.read_config(SMALL[name], where=name)


def _stacks(name: str) -> list[spec.StackSpec]:
    """The encoder and the decoder of a small model, or the one that it has."""
    model = _small(name)
    return [stack for stack in (model.encoder, model.decoder) if stack is not None]


class Corrected(Statements):
    """What decides each statement of `corrections.toml`, in the method of its name, on random tensors and small models
    with random weights."""

    def __init__(self, sizes: CorrectionsLab, seed: int) -> None:
        super().__init__(seed)
        self.tokens, self.width, self.mlp = sizes.tokens, sizes.width, sizes.mlp

    def _new(self, name: str, dtype: torch.dtype = torch.float64) -> Model:
        """A small model with random weights."""
        return Model(nn.new(_small(name), self.seed, dtype))

    def large_negative(self) -> Iterator[Check]:
        n = self.tokens
        (q,), visible = self.drawn((n, self.width)), torch.ones(n, n).tril(-1).bool()  # the first row sees nothing
        ours = attend(q, q, torch.eye(n, dtype=q.dtype), mask=dense(visible))[0]
        filled = (q @ q.mT).masked_fill(~visible, -1e9).softmax(-1)[0]
        added = (q @ q.mT + torch.zeros(n, n, dtype=q.dtype).masked_fill(~visible, -torch.inf)).softmax(-1)[0]
        undefined = float(added.isnan().sum()) / n
        even = gap(filled, torch.tensor(1 / n, dtype=q.dtype))
        yield Check("largest weight of a row that sees nothing", float(ours.max()), 0.0, 0.0)
        yield Check("a row that sees nothing filled with -1e9, distance from even weights", even, most=1e-12)
        yield Check("share of the weights of that row that are NaN where -∞ is added", undefined, 1, 1)

    def mask_order(self) -> Iterator[Check]:
        n, root = self.tokens, self.width**0.5
        q, k, bias = self.drawn((n, self.width), (n, self.width), (n, n))
        hidden = torch.zeros(n, n, dtype=q.dtype).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        # a mask of 0 and -∞ and a finite bias, each added before the division and after it
        (mask_before, mask_after), (before, after) = (
            (((q @ k.mT + added) / root).softmax(-1), (q @ k.mT / root + added).softmax(-1)) for added in (hidden, bias)
        )
        ours = attend(q, k, torch.eye(n, dtype=q.dtype), bias=bias)
        of_mask = gap(mask_before, mask_after)
        yield Check("a mask of 0 and -∞ before or after the division, difference", of_mask, most=1e-12)
        yield Check("a finite bias before or after it, difference", gap(before, after), least=0.02)
        yield Check("distance of `attend` from the order after", gap(ours, after), most=1e-12)

    def cross_mask(self) -> Iterator[Check]:
        n, width = self.tokens, self.width
        q, k, padding = self.drawn((n, width), (n, width), (2, width))
        alone, padded = attend(q, k, k), torch.cat([k, padding])
        masked, unmasked = (gap(attend(q, padded, padded, mask=mask), alone) for mask in (keys(n), None))
        yield Check("change by padding of the source, masked", masked, most=1e-12)
        yield Check("change by padding, unmasked", unmasked, least=0.01)

    def value_width(self) -> Iterator[Check]:
        q, k, v = self.drawn(*((self.tokens, width) for width in (192, 192, 128)))  # of DeepSeek-V2's latent attention
        yield Check("width of values beside keys of 192", attend(q, k, v, mask=causal()).shape[-1], 128, 128)

    def sharpness(self) -> Iterator[Check]:
        drawn = np.random.default_rng(0)  # one seed, since the page quotes these entropies
        q, k = (torch.from_numpy(drawn.standard_normal((64, 64))) for _ in range(2))

        def entropy(scale: float | None) -> float:
            pattern = attend(q, k, torch.eye(64, dtype=q.dtype), scale=scale)
            return float(-torch.special.xlogy(pattern, pattern).sum(-1).mean())

        yield Check("entropy of 64 weights, d 64, without the division, nats", entropy(1.0), 0.6107, 0.6109)
        yield Check("entropy of 64 weights, d 64, divided by √d, nats", entropy(None), 3.6808, 3.6810)

    def layer_norm(self) -> Iterator[Check]:
        x = torch.tensor([0.0, 0.001, 0.002, 0.003], dtype=torch.float64)
        ours = normalized(x, spec.LayerNormSpec(width=4, eps=1e-5))
        lecture = (x - x.mean()) / (x.std(correction=0) + 1e-5)
        yield Check("last of LayerNorm([0, .001, .002, .003]), ε 1e-5", float(ours[3]), 0.44721, 0.44722)
        yield Check("third of LayerNorm([0, .001, .002, .003]), ε 1e-5", float(ours[2]), 0.14907, 0.14908)
        yield Check("the last with σ + ε", float(lecture[3]), 1.3297, 1.3298)
        yield Check("the third with σ + ε", float(lecture[2]), 0.44324, 0.44326)

    def t5_scale(self) -> Iterator[Check]:
        site = "encoder.blocks.0.attn"
        trace = self._new("T5").trace([[5, 6, 7, 9, 11, 3]], [[0, 2]], read=[f"{site}.*"])
        q, k, scores = (trace[f"{site}.{name}"][0] for name in ("q", "k", "scores"))
        products = q.transpose(0, 1) @ k.permute(1, 2, 0)

        def left(explained: Tensor) -> float:
            """How far the rest of the scores is from one bias for each distance."""
            rest = scores - explained
            diagonals = [rest.diagonal(n, 1, 2) for n in range(-4, 5)]
            return max(float((line - line[:, :1]).abs().max()) for line in diagonals)

        divided = products / products.new_tensor(16.0).sqrt()
        yield Check("T5's scores less q·k: distance from a bias of the distance", left(products), most=1e-12)
        yield Check("T5's scores less q·k/√d: distance from a bias of the distance", left(divided), least=1e-3)

    def gpt2(self) -> Iterator[Check]:
        base, medium = (count(families.read_config(PUBLISHED[name], where=name)) for name in ("GPT-2", "GPT-2 medium"))
        biases = sum(
            shape[0] for name, shape in base.spec.shapes().items() if ".mlp." in name and name.endswith(".bias")
        )
        yield Check("parameters with D 768", base.total, 124_439_808, 124_439_808)
        yield Check("parameters with D 1024, GPT-2 medium", medium.total, 354_823_168, 354_823_168)
        yield Check("biases of the 12 MLPs", biases, 12 * (3072 + 768), 12 * (3072 + 768))

    def mlp_width(self) -> Iterator[Check]:
        near = ("Llama-1 13B", "Llama-1 33B", "Llama-2 7B")
        for name, (width, hidden) in WIDTHS.items():
            yield Check(f"F over D of {name}", hidden / width, *((2.68, 2.7) if name in near else (3.5, None)))

    def norm_places(self) -> Iterator[Check]:

        def after(*names: str) -> float:
            """The share of their blocks whose attention normalizes after the addition."""
            norms = [block.attn_norm for name in names for stack in _stacks(name) for block in stack.blocks]
            return fmean(norm.post is not None and norm.pre is None for norm in norms)

        yield Check("share of post-norm blocks, BERT and BART", after("BERT", "BART"), 1.0, 1.0)
        yield Check("share of post-norm blocks, GPT-2 and Llama", after("GPT-2", "Llama"), 0.0, 0.0)

    def attention_norms(self) -> Iterator[Check]:

        def away(name: str, site: str) -> float:
            """How far the mean square of a head's queries is from 1, at most."""
            (queries,) = self._new(name).trace([[3, 14, 15]], read=[f"blocks.0.attn.{site}"])[f"blocks.0.attn.{site}"]
            return float((queries.square().mean(-1) - 1).abs().max())

        of, distance = "queries of", "mean square, distance from 1"
        yield Check(f"{of} Qwen3 as scores read them: {distance}", away("Qwen3", "q_rot"), most=0.02)
        yield Check(f"{of} Qwen3 before their norm: {distance}", away("Qwen3", "q"), least=0.1)
        yield Check(f"{of} Llama, which has no such norm: {distance}", away("Llama", "q_rot"), least=0.1)

    def gpt_and_bert(self) -> Iterator[Check]:
        (bert,), (gpt,) = _stacks("BERT"), _stacks("GPT-2")
        differences = {
            "places of the norms": (bert.blocks[0].attn_norm.pre is None) != (gpt.blocks[0].attn_norm.pre is None),
            "token types": getattr(bert.embed, "token_types", 0) != getattr(gpt.embed, "token_types", 0),
            "final norm": (bert.final_norm is None) != (gpt.final_norm is None),
            "head": type(_small("BERT").head) is not type(_small("GPT-2").head),
        }
        yield Check(f"differences beside the mask: {', '.join(differences)}", sum(differences.values()), 4, 4)

    def swiglu(self) -> Iterator[Check]:
        width = self.mlp
        plain = parameters(nn.build(spec.mlp(width, 4 * width, "gelu")))
        wide, narrow = (
            parameters(nn.build(spec.glu(width, hidden, "silu"))) / plain for hidden in (4 * width, 8 * width // 3)
        )
        yield Check("parameters of SwiGLU with 4 d over a plain MLP's", wide, 1.5, 1.5)
        yield Check("parameters of SwiGLU with 8/3 d over a plain MLP's", narrow, 1.0, 1.0)
