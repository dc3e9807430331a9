"""Is a backward written by hand the same as autograd's?  (Lecture L4, exercise 20; Rumelhart et al. 1986.)"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from triptych import families, nn
from triptych import numpy_transformer as by_hand
from triptych.attention import Rows
from triptych.labs.lab import Check, Finding, Setup
from triptych.numpy_transformer import Array, Config, Weights
from triptych.page import Curve, TableSection
from triptych.train import Batch, Optimizer, OptimizerSettings, loss

CONFIG = Config(V=29, D=24, H=6, G=3, K=10, F=37, blocks=2, tied=False)
ROWS, TOKENS = 4, 13
STEPS, LR = 100, 5e-3
NUDGES = tuple(10 ** (-power / 2) for power in range(2, 17))
PARTS = ("embed", "attention", "SwiGLU", "RMSNorm", "head")
Points = list[tuple[float, float]]


def run(setup: Setup) -> Finding:
    """The gradient of every weight of one model by hand, by autograd and by nudging; then training by both."""
    random = np.random.default_rng(setup.seed)
    w, (ids, targets) = weights(CONFIG, random), random.integers(CONFIG.V, size=(2, ROWS, TOKENS))
    module = library(CONFIG, w)
    off = np.abs(by_hand.forward(w, ids, CONFIG)[0] - logits(module, ids)).max()
    dw, theirs = by_hand.gradients(w, ids, targets, CONFIG)[1], autograd(module, w, ids, targets)
    errors = {name: float(np.abs(dw[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in w}

    setup.say("nudging the weights")
    nudged = {part: _nudge(part, w, dw, (ids, targets), random) for part in PARTS}
    setup.say(f"training both for {STEPS} steps")
    losses = train(w, module, CONFIG, STEPS, random)
    apart = max(abs(a - b) for a, b in losses)
    checks = (
        Check("logits differ by", float(off), most=1e-10),
        Check("gradients differ from autograd's, relative to the largest, by", max(errors.values()), most=1e-8),
        Check(
            "slopes found by nudging differ from the gradients, relatively, by",
            max(map(_best, nudged.values())),
            most=1e-6,
        ),
        Check(f"losses of {STEPS} steps of AdamW differ by", apart, most=1e-6),
        Check("while they fall by, nats", losses[0][1] - losses[-1][1], least=1.0),
    )
    meaning = (
        "Every backward is the chain rule on one line of the forward: a matrix product goes back through its other"
        " factor, a value used twice adds two gradients, softmax and the norms take away what their division cancels."
        " Two programs that share no arithmetic agree to rounding, weight by weight and step by step. Nudging knows no"
        " calculus: (loss(w + h) - loss(w - h)) / 2h misses the slope by about h², until the two losses are so near"
        " each other that only rounding is left between them; hence the V. It confirms a gradient at the price of two"
        " forwards a direction; one backward gives all directions."
    )
    size = f"{sum(x.size for x in w.values()):,} weights in {CONFIG.blocks} blocks, float64"
    rows = [_row(part, w, dw, errors, nudged[part]) for part in PARTS]
    table = TableSection(
        f"The gradient by hand: {size}", ("part", "weights", "largest", "off autograd", "off nudging"), rows
    )
    steps = [(float(step), a) for step, (a, _) in enumerate(losses)], [(float(s), b) for s, (_, b) in enumerate(losses)]
    shown = (
        Curve("Slopes found by nudging, beside the gradient", "nudge", "relative error", nudged, {}, "xy"),
        Curve("Training", "step", "nats a token", {"by hand": steps[0], "the library": steps[1]}, {}),
    )
    return Finding("Is a backward written by hand the same as autograd's?", meaning, checks, (table, *shown))


def weights(c: Config, random: np.random.Generator) -> Weights:
    """Large enough for every part to matter, norms other than 1."""
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


def batch(ids: Array, targets: Array) -> Batch:
    """Rows [B, T] as the library takes them, end to end."""
    flat = (torch.from_numpy(x.reshape(-1)) for x in (ids, targets))
    return Batch(next(flat), Rows((ids.shape[1],) * len(ids)), torch.arange(ids.size), next(flat))


def logits(module: nn.Transformer, ids: Array) -> Array:
    """[B, T] -> the library's [B, T, V]."""
    rows = batch(ids, ids)
    with torch.no_grad():
        return np.asarray(module.logits(nn.Batch(inputs=rows.ids, rows=rows.rows))).reshape(*ids.shape, -1)


def autograd(module: nn.Transformer, names: Iterable[str], ids: Array, targets: Array) -> Weights:
    """The gradients of the library's mean loss, under the names of `numpy_transformer`."""
    module.zero_grad()
    total, count = loss(module, batch(ids, targets))
    (total / count).backward()
    return {name: np.asarray(module.get_parameter(library_name(name)).grad) for name in names}


def train(
    w: Weights, module: nn.Transformer, c: Config, steps: int, random: np.random.Generator
) -> list[tuple[float, float]]:
    """Losses by hand and by the library of a model learning to count in steps, each with its own AdamW."""
    mine, theirs = by_hand.AdamW(w), Optimizer(module, OptimizerSettings(name="adamw", lr=LR))
    theirs.zero()
    found = []
    for _ in range(steps):
        start, stride = random.integers(c.V, size=(ROWS, 1)), random.integers(1, 4, size=(ROWS, 1))
        rows = (start + stride * np.arange(TOKENS + 1)) % c.V
        nats, dw = by_hand.gradients(w, rows[:, :-1], rows[:, 1:], c)
        mine.step(dw, LR)
        total, count = loss(module, batch(rows[:, :-1], rows[:, 1:]))
        (total / count).backward()
        theirs.step(1.0)
        found.append((nats, float(total.detach()) / count))
    return found


def part_of(name: str) -> str:
    if name.endswith("norm"):
        return "RMSNorm"
    return "attention" if ".attn." in name else "SwiGLU" if ".mlp." in name else name


def _nudge(part: str, w: Weights, dw: Weights, rows: tuple[Array, Array], random: np.random.Generator) -> Points:
    """(h, relative error of the slope) along one direction in the weights of `part`: half its gradient, half noise,
    so that the slope is neither 0 nor all the gradient says of itself."""
    own = [name for name in w if part_of(name) == part]
    gradient = _unit({name: dw[name] for name in own})
    noise = _unit({name: random.normal(size=w[name].shape) for name in own})
    way = {name: gradient[name] + noise[name] for name in own}
    slope = sum(float((dw[name] * way[name]).sum()) for name in own)

    def at(h: float) -> float:
        moved = w | {name: w[name] + h * way[name] for name in own}
        return by_hand.cross_entropy(by_hand.forward(moved, rows[0], CONFIG)[0], rows[1])[0]

    return [(h, abs((at(h) - at(-h)) / (2 * h) / slope - 1)) for h in NUDGES]


def _unit(way: Weights) -> Weights:
    length = np.sqrt(sum((x * x).sum() for x in way.values()))
    return {name: x / length for name, x in way.items()}


def _best(points: Points) -> float:
    return min(error for _, error in points)


def _row(part: str, w: Weights, dw: Weights, errors: dict[str, float], points: Points) -> list[str]:
    own = [name for name in w if part_of(name) == part]
    size, largest = sum(w[n].size for n in own), max(float(np.abs(dw[n]).max()) for n in own)
    return [part, f"{size:,}", f"{largest:.2g}", f"{max(errors[n] for n in own):.1e}", f"{_best(points):.1e}"]
