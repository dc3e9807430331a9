"""Is a backward written by hand the same as autograd's?  (Lecture L4, exercise 20; Rumelhart et al. 1986.)"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from triptych import families, nn
from triptych.model import Model
from triptych.page import TableSection
from triptych.train import Optimizer, OptimizerSettings, TrainingBatch, collate, loss
from triptych_lectures.scratch import numpy_transformer as by_hand
from triptych_lectures.scratch.numpy_transformer import Array, Config, Weights
from .bounds import rounded_up
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import curve, examples, geometric_mean

WIDTHS = tuple(10 ** (-power / 2) for power in range(2, 17))  # h of the finite differences
PARTS = ("embed", "attention", "SwiGLU", "RMSNorm", "head")


class GradientsLab(Lab):
    """Every weight's gradient by hand, by autograd and by finite differences; then training by both."""

    name = "gradients"

    vocab: int = size(29, "V, tokens that there are, two or more", least=2)
    width: int = size(24, "D, model width")
    heads: int = size(6, "H, heads, a multiple of the groups", multiple="groups")
    groups: int = size(3, "G, key/value heads")
    head_width: int = size(10, "K, width of a head, even", multiple=2)
    hidden: int = size(37, "F, MLP width")
    blocks: int = size(2, "blocks of the model")
    rows: int = size(4, "rows of a batch")
    tokens: int = size(13, "tokens of a row, at most 63", most=63)
    steps: int = size(100, "training steps")
    rate: float = size(5e-3, "learning rate")

    @property
    def config(self) -> Config:
        return Config(
            V=self.vocab, D=self.width, H=self.heads, G=self.groups, K=self.head_width, F=self.hidden,
            blocks=self.blocks, tied=False,
        )  # fmt: skip

    def findings(self, setup: Setup) -> Findings:
        config, random = self.config, np.random.default_rng(setup.seed)
        w, (ids, targets) = weights(config, random), random.integers(config.V, size=(2, self.rows, self.tokens))
        module = library(config, w)
        difference = np.abs(by_hand.forward(w, ids, config)[0] - logits(module, ids)).max()
        dw, expected = by_hand.gradients(w, ids, targets, config)[1], autograd(module, w, ids, targets)
        errors = {name: float(np.abs(dw[name] - expected[name]).max() / np.abs(expected[name]).max()) for name in w}

        setup.progress("taking finite differences")
        parts = {part: [name for name in w if part_of(name) == part] for part in PARTS}
        slopes = {part: _slopes(own, w, dw, (ids, targets), config, random) for part, own in parts.items()}
        setup.progress(f"training both for {self.steps} steps")
        losses = self.train(w, module, config, random)
        loss_difference, worst = max(abs(a - b) for a, b in losses), max(map(min, slopes.values()))
        ends = geometric_mean([min(of[0], of[-1]) / min(of) for of in slopes.values()])
        count = sum(x.size for x in w.values())
        yield clause(
            "Every backward is the chain rule on one line of the forward. Two programs that share no arithmetic"
            f" agree to rounding in each of {count:,} weights.",
            Check("logits differ by", float(difference), most=1e-10),
            Check("gradients differ from autograd's, relative to the largest, by", max(errors.values()), most=1e-8),
            instead="The gradients are not the same",
        )
        yield clause(
            "Finite differences, which use no calculus, confirm both: (loss(w + h) - loss(w - h)) / 2h differs"
            " from the slope by about h², until only rounding is left between two losses so near each other;"
            " hence the V of the curve.",
            Check("finite differences differ from the gradients, relatively, by", worst, most=1e-6),
            Check("finite differences: error at the ends over the best, mean of parts", ends, least=10.0),
            instead="Finite differences do not confirm them, or not with a V",
        )
        yield clause(
            f"So both train alike: over {self.steps} steps the loss falls by {losses[0][1] - losses[-1][1]:.2f}"
            f" nats, and the two losses differ by at most {rounded_up(loss_difference, '.1g')}.",
            Check(f"losses of {self.steps} steps of AdamW differ by", loss_difference, most=1e-6),
            Check("fall of the loss in these steps, nats", losses[0][1] - losses[-1][1], least=1.0),
            instead="Training by hand is not the library's, or it learns little",
        )
        rows = []
        for part, own in parts.items():
            largest, apart = max(float(np.abs(dw[name]).max()) for name in own), max(errors[name] for name in own)
            size = f"{sum(w[name].size for name in own):,}"
            rows.append([part, size, f"{largest:.2g}", f"{apart:.1e}", f"{min(slopes[part]):.1e}"])
        by_numpy, by_torch = zip(*losses, strict=True)
        title = f"The gradient by hand: {count:,} weights in {self.blocks} blocks, float64"
        yield TableSection(title, ("part", "weights", "largest", "from autograd", "from finite differences"), rows)
        yield curve("Finite differences beside the gradient", "h", "relative error", WIDTHS, slopes, log="xy")
        both = {"by hand": by_numpy, "the library": by_torch}
        yield curve("Training", "step", "nats a token", range(self.steps), both)

    def train(
        self, w: Weights, module: nn.Transformer, c: Config, random: np.random.Generator
    ) -> list[tuple[float, float]]:
        """Losses by hand and by the library of a model learning to count in steps, each with its own AdamW."""
        own, reference = by_hand.AdamW(w), Optimizer(module, OptimizerSettings(name="adamw", lr=self.rate))
        reference.zero()
        losses, shape = [], (self.rows, 1)
        for _ in range(self.steps):
            start, stride = random.integers(c.V, size=shape), random.integers(1, 4, size=shape)
            rows = (start + stride * np.arange(self.tokens + 1)) % c.V
            nats, dw = by_hand.gradients(w, rows[:, :-1], rows[:, 1:], c)
            own.step(dw, self.rate)
            total, count = loss(module, batch(rows[:, :-1], rows[:, 1:]))
            (total / count).backward()
            reference.step(1.0)
            losses.append((nats, float(total.detach()) / count))
        return losses


def weights(c: Config, random: np.random.Generator) -> Weights:
    """Initial weights plus noise, large enough for every part to matter, and norms other than 1."""
    start = by_hand.initial(c, random)
    return {n: x + random.normal(0, 0.3 if x.ndim == 1 else x.shape[1] ** -0.5, x.shape) for n, x in start.items()}


def library(c: Config, w: Weights) -> nn.Transformer:
    """The library's Llama with the same sizes and weights, in float64."""
    hf = {
        "model_type": "llama", "vocab_size": c.V, "hidden_size": c.D, "intermediate_size": c.F, "head_dim": c.K,
        "num_hidden_layers": c.blocks, "num_attention_heads": c.H, "num_key_value_heads": c.G, "rope_theta": c.theta,
        "rms_norm_eps": c.eps, "tie_word_embeddings": c.tied, "max_position_embeddings": 64,
    }  # fmt: skip
    module = nn.new(families.read_config(hf), dtype=torch.float64)
    with torch.no_grad():
        for name, value in w.items():
            module.get_parameter(library_name(name)).copy_(torch.from_numpy(value))
    return module


def library_name(name: str) -> str:
    """`blocks.1.attn.q` -> `decoder.blocks.1.attn.q.weight`."""
    outside = {"embed": "decoder.embed.tokens.weight", "head": "head.proj.weight"}
    slot = ".pre" if name.endswith(("attn_norm", "mlp_norm")) else ""
    return outside.get(name, f"decoder.{name}{slot}.weight")


def batch(ids: Array, targets: Array) -> TrainingBatch:
    """Rows [B, T] as a batch of the library, every token trained."""
    return collate(examples(ids.astype(np.int32), targets.astype(np.int32)))


def logits(module: nn.Transformer, ids: Array) -> Array:
    """[B, T] -> the library's [B, T, V]."""
    return np.stack([row.numpy() for row in Model(module).logits(ids.tolist())])


def autograd(module: nn.Transformer, names: Iterable[str], ids: Array, targets: Array) -> Weights:
    """The gradients of the library's mean loss, under the names of `numpy_transformer`."""
    module.zero_grad()
    total, count = loss(module, batch(ids, targets))
    (total / count).backward()
    return {name: np.asarray(module.get_parameter(library_name(name)).grad) for name in names}


def part_of(name: str) -> str:
    if name.endswith("norm"):
        return "RMSNorm"
    return "attention" if ".attn." in name else "SwiGLU" if ".mlp." in name else name


def _slopes(
    own: Sequence[str], w: Weights, dw: Weights, rows: tuple[Array, Array], c: Config, random: np.random.Generator
) -> list[float]:
    """For each h of WIDTHS the relative error of the slope along one direction in the weights of these names: half the
    gradient, half noise, so that the slope is neither 0 nor determined by the gradient alone."""
    gradient = _unit({name: dw[name] for name in own})
    noise = _unit({name: random.normal(size=w[name].shape) for name in own})
    way = {name: gradient[name] + noise[name] for name in own}
    slope = sum(float((dw[name] * way[name]).sum()) for name in own)

    def at(h: float) -> float:
        moved = w | {name: w[name] + h * way[name] for name in own}
        return by_hand.cross_entropy(by_hand.forward(moved, rows[0], c)[0], rows[1])[0]

    return [abs((at(h) - at(-h)) / (2 * h) / slope - 1) for h in WIDTHS]


def _unit(way: Weights) -> Weights:
    length = np.sqrt(sum((x * x).sum() for x in way.values()))
    return {name: x / length for name, x in way.items()}
