"""A transformer in one file of NumPy: forward, a backward written by hand, AdamW, and a text to learn.

    python numpy_transformer.py FILE.txt      learns the characters of a text, then writes

It is a decoder as Llama has it (Touvron et al. 2023): blocks of attention (rotated positions, grouped heads) and
SwiGLU, each reading the residual stream through an RMSNorm.  A function and its backward stand under their formulas:

    y, saved = f(x, w)                what it computes, and what its backward will want of it
    dx, dw = f_backward(dy, *saved)   the chain rule: from dL/dy to dL/dx and dL/dw, where L is the loss

Shapes:   B rows            T queries, the tokens of a row      S keys, here the same tokens
          D model width     H heads, G key/value heads          K head width
          F MLP width       V vocabulary                        N = B·T tokens
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Saved = tuple[Any, ...]
Weights = dict[str, Array]  # gradients too: a gradient has the name and the shape of its weight
Gradients = Callable[[Weights, Array, Array, "Config"], tuple[float, Weights]]


@dataclass(frozen=True)
class Config:
    """The sizes of a model.  A tied model has no `head`: it reads its logits off the embedding."""

    V: int
    D: int = 64
    H: int = 4
    G: int = 2
    K: int = 16
    F: int = 172
    blocks: int = 2
    tied: bool = True
    theta: float = 10_000.0  # RoPE's slowest pair takes 2πθ^(1 - 2/K) tokens for a turn
    eps: float = 1e-6


# ---------------------------------------------------------------- a linear map, on each token alone
#     y = x Wᵀ          dx = dy W          dW = Σ dyᵀ x over all tokens
def linear(x: Array, w: Array) -> tuple[Array, Saved]:
    """x [..., in], w [out, in] -> [..., out]."""
    return x @ w.T, (x, w)


def linear_backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array]:
    return dy @ w, dy.reshape(-1, w.shape[0]).T @ x.reshape(-1, w.shape[1])


# ---------------------------------------------------------------- RMSNorm (Zhang & Sennrich 2019)
#     n = x / r,   r = √(mean(x²) + ε),   y = n w
#     dn = dy w          dx = (dn - n mean(dn n)) / r          dw = Σ dy n over all tokens
# What is subtracted is r's share: stretching x changes (nearly) nothing, so no gradient points along x.
def rmsnorm(x: Array, w: Array, eps: float) -> tuple[Array, Saved]:
    """x [..., D], w [D] -> [..., D]."""
    r = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x / r * w, (x / r, r, w)


def rmsnorm_backward(dy: Array, n: Array, r: Array, w: Array) -> tuple[Array, Array]:
    dn = dy * w
    return (dn - n * (dn * n).mean(-1, keepdims=True)) / r, (dy * n).reshape(-1, len(w)).sum(0)


# ---------------------------------------------------------------- RoPE: a position is a rotation (Su et al. 2021)
# Dimensions i and i + K/2 span a plane, which turns by the angle a = position · θ^(-2i/K):
#     (y₁, y₂) = (x₁ cos a - x₂ sin a,  x₂ cos a + x₁ sin a)
# q·k then depends on the distance of two tokens, not on where they are.  The backward of a turn is the turn back.
def rope(x: Array, theta: float, turn: int = 1) -> Array:
    """x [B, heads, T, K] -> the same, turned by its positions 0 .. T-1; back again with `turn=-1`."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * theta ** (-np.arange(half) / half)  # [T, K/2]
    cos, sin = np.cos(angle), turn * np.sin(angle)
    x1, x2 = x[..., :half], x[..., half:]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


# ---------------------------------------------------------------- softmax
#     p = exp(s) / Σ exp(s)          ds = p (dp - Σ dp p), as in `attend_backward`
# Raising all of s changes nothing: the maximum may come off first, and the sum of ds is 0.
def softmax(s: Array) -> Array:
    e = np.exp(s - s.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


# ---------------------------------------------------------------- attention itself (Vaswani et al. 2017)
#     s = q kᵀ / √K,   s = -∞ where the key comes after the query,   p = softmax(s),   z = p v
#     dp = dz vᵀ       dv = pᵀ dz       dq = ds k / √K       dk = dsᵀ q / √K
# Head h reads key/value group h·G//H (Ainslie et al. 2023): the H/G heads of a group lie on an axis that k and v do not
# have, so dk and dv are sums over it.  The mask needs no backward: where p is 0, so is ds.
def attend(q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
    """q [B, H, T, K], k and v [B, G, S, K] -> z [B, H, T, K]."""
    (B, H, T, K), (G, S) = q.shape, k.shape[1:3]
    q, k, v = q.reshape(B, G, H // G, T, K), k[:, :, None], v[:, :, None]
    s = q @ k.swapaxes(-1, -2) / np.sqrt(K)  # [B, G, H/G, T, S]
    future = np.arange(S) > np.arange(T)[:, None]
    p = softmax(np.where(future, -np.inf, s))
    return (p @ v).reshape(B, H, T, K), (q, k, v, p)


def attend_backward(dz: Array, q: Array, k: Array, v: Array, p: Array) -> tuple[Array, Array, Array]:
    shape, dz = dz.shape, dz.reshape(q.shape)
    dp = dz @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    dk, dv = (ds.swapaxes(-1, -2) @ q).sum(2), (p.swapaxes(-1, -2) @ dz).sum(2)
    return (ds @ k).reshape(shape), dk, dv


# ---------------------------------------------------------------- the attention layer: project, turn, attend, project
# q, k and v are one x through three maps, so dx is the sum of what comes back through each.
def attention(x: Array, w: Weights, c: Config) -> tuple[Array, Saved]:
    """x [B, T, D] -> [B, T, D]."""
    q, for_q = linear(x, w["attn.q"])  # [B, T, H·K]
    k, for_k = linear(x, w["attn.k"])  # [B, T, G·K]
    v, for_v = linear(x, w["attn.v"])
    z, for_z = attend(rope(split(q, c.H), c.theta), rope(split(k, c.G), c.theta), split(v, c.G))
    y, for_y = linear(merge(z), w["attn.out"])
    return y, (for_q, for_k, for_v, for_z, for_y, c)


def attention_backward(dy: Array, *saved: Any) -> tuple[Array, Weights]:
    for_q, for_k, for_v, for_z, for_y, c = saved
    dz, dw_out = linear_backward(dy, *for_y)
    dq, dk, dv = attend_backward(split(dz, c.H), *for_z)
    dx_q, dw_q = linear_backward(merge(rope(dq, c.theta, turn=-1)), *for_q)
    dx_k, dw_k = linear_backward(merge(rope(dk, c.theta, turn=-1)), *for_k)
    dx_v, dw_v = linear_backward(merge(dv), *for_v)
    return dx_q + dx_k + dx_v, {"attn.q": dw_q, "attn.k": dw_k, "attn.v": dw_v, "attn.out": dw_out}


def split(x: Array, heads: int) -> Array:
    """[B, T, heads·K] -> [B, heads, T, K]: numbers keep their values, so `merge` is its backward."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge(x: Array) -> Array:
    """[B, heads, T, K] -> [B, T, heads·K]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


# ---------------------------------------------------------------- SwiGLU (Shazeer 2020)
#     g = x W_gateᵀ,   u = x W_upᵀ,   a = silu(g) u,   y = a W_downᵀ,   silu(g) = g σ(g),   σ(g) = 1 / (1 + exp(-g))
#     dg = da u σ (1 + g (1 - σ))          du = da g σ
def swiglu(x: Array, w: Weights) -> tuple[Array, Saved]:
    """x [B, T, D], F wide inside -> [B, T, D]."""
    g, for_g = linear(x, w["mlp.gate"])
    u, for_u = linear(x, w["mlp.up"])
    sigma = 1 / (1 + np.exp(-g))
    y, for_y = linear(g * sigma * u, w["mlp.down"])
    return y, (g, u, sigma, for_g, for_u, for_y)


def swiglu_backward(dy: Array, *saved: Any) -> tuple[Array, Weights]:
    g, u, sigma, for_g, for_u, for_y = saved
    da, dw_down = linear_backward(dy, *for_y)
    dx_g, dw_gate = linear_backward(da * u * sigma * (1 + g * (1 - sigma)), *for_g)
    dx_u, dw_up = linear_backward(da * g * sigma, *for_u)
    return dx_g + dx_u, {"mlp.gate": dw_gate, "mlp.up": dw_up, "mlp.down": dw_down}


# ---------------------------------------------------------------- a block: two sublayers on the residual stream
#     x = x + attention(norm(x))          x = x + swiglu(norm(x))
# A gradient goes back both ways, past the sublayer as it came and through it, and the two are added.
def block(x: Array, w: Weights, c: Config) -> tuple[Array, Saved]:
    """x [B, T, D] -> [B, T, D]."""
    n, for_norm1 = rmsnorm(x, w["attn_norm"], c.eps)
    y, for_attn = attention(n, w, c)
    x = x + y
    n, for_norm2 = rmsnorm(x, w["mlp_norm"], c.eps)
    y, for_mlp = swiglu(n, w)
    return x + y, (for_norm1, for_attn, for_norm2, for_mlp)


def block_backward(dx: Array, *saved: Any) -> tuple[Array, Weights]:
    for_norm1, for_attn, for_norm2, for_mlp = saved
    dn, dw_mlp = swiglu_backward(dx, *for_mlp)
    through, dw_norm2 = rmsnorm_backward(dn, *for_norm2)
    dx = dx + through
    dn, dw_attn = attention_backward(dx, *for_attn)
    through, dw_norm1 = rmsnorm_backward(dn, *for_norm1)
    return dx + through, dw_mlp | dw_attn | {"attn_norm": dw_norm1, "mlp_norm": dw_norm2}


# ---------------------------------------------------------------- the model: embedding, blocks, final norm, head
#     x = E[ids]          dE[id] = Σ dx over the tokens that are id
def forward(w: Weights, ids: Array, c: Config) -> tuple[Array, Saved]:
    """Token ids [B, T] -> logits [B, T, V]."""
    x, for_blocks = w["embed"][ids], []  # [B, T, D]
    for i in range(c.blocks):
        x, saved = block(x, {name.removeprefix(f"blocks.{i}."): value for name, value in w.items()}, c)
        for_blocks.append(saved)
    n, for_norm = rmsnorm(x, w["final_norm"], c.eps)
    logits, for_head = linear(n, w["embed" if c.tied else "head"])
    return logits, (ids, for_blocks, for_norm, for_head, c)


def backward(dlogits: Array, *saved: Any) -> Weights:
    ids, for_blocks, for_norm, for_head, c = saved
    dn, dw_head = linear_backward(dlogits, *for_head)
    dx, dw_norm = rmsnorm_backward(dn, *for_norm)
    dw = {"final_norm": dw_norm}
    for i in reversed(range(c.blocks)):
        dx, inside = block_backward(dx, *for_blocks[i])
        dw |= {f"blocks.{i}.{name}": d for name, d in inside.items()}
    embed = dw_head if c.tied else np.zeros((c.V, c.D), dx.dtype)
    np.add.at(embed, ids, dx)
    return dw | {"embed": embed} | ({} if c.tied else {"head": dw_head})


# ---------------------------------------------------------------- the loss: cross-entropy
#     L = - mean log p[target],   p = softmax(logits)          dlogits = (p - onehot(target)) / N
def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """logits [B, T, V], targets [B, T] -> (nats a token, dlogits)."""
    p, at = softmax(logits), targets[..., None]
    right = np.take_along_axis(p, at, -1)
    np.put_along_axis(p, at, right - 1, -1)
    return float(-np.log(right).mean()), p / targets.size


def gradients(w: Weights, ids: Array, targets: Array, c: Config) -> tuple[float, Weights]:
    """(loss, gradient of every weight) of predicting `targets` from `ids`, both [B, T]."""
    logits, saved = forward(w, ids, c)
    loss, dlogits = cross_entropy(logits, targets)
    return loss, backward(dlogits, *saved)


# ---------------------------------------------------------------- AdamW (Loshchilov & Hutter 2019)
#     m = β₁ m + (1 - β₁) dw        the gradient, smoothed        m̂ = m / (1 - β₁ᵗ)     as both begin at 0
#     v = β₂ v + (1 - β₂) dw²       and its square                v̂ = v / (1 - β₂ᵗ)
#     w = w - lr (m̂ / (√v̂ + ε) + decay w)         matrices alone decay, not the embedding and not the norms
class AdamW:
    """Changes the weights `w` in place, one `step` at a time."""

    def __init__(self, w: Weights, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, decay: float = 0.1):
        self.w, self.betas, self.eps, self.t = w, betas, eps, 0
        self.m, self.v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
        self.decay = {name: decay if value.ndim == 2 and name != "embed" else 0.0 for name, value in w.items()}

    def step(self, dw: Weights, lr: float) -> None:
        self.t, (b1, b2) = self.t + 1, self.betas
        for name, w in self.w.items():
            m = self.m[name] = b1 * self.m[name] + (1 - b1) * dw[name]
            v = self.v[name] = b2 * self.v[name] + (1 - b2) * dw[name] ** 2
            size = np.sqrt(v / (1 - b2**self.t)) + self.eps
            w -= lr * (m / (1 - b1**self.t) / size + self.decay[name] * w)


# ---------------------------------------------------------------- a model to begin with, what it learns, what it writes
def initial(c: Config, random: np.random.Generator) -> Weights:
    """Small normal weights, and norms of 1."""
    qo, kv, mlp = (c.H * c.K, c.D), (c.G * c.K, c.D), (c.F, c.D)
    attn = {"attn_norm": (c.D,), "attn.q": qo, "attn.k": kv, "attn.v": kv, "attn.out": qo[::-1]}
    inside = attn | {"mlp_norm": (c.D,), "mlp.gate": mlp, "mlp.up": mlp, "mlp.down": mlp[::-1]}
    shapes = {"embed": (c.V, c.D), "final_norm": (c.D,)} | ({} if c.tied else {"head": (c.V, c.D)})
    shapes |= {f"blocks.{i}.{name}": shape for i in range(c.blocks) for name, shape in inside.items()}
    return {n: np.ones(s) if n.endswith("norm") else random.normal(0, 0.02, s) for n, s in shapes.items()}


def write(w: Weights, ids: list[int], new: int, context: int, c: Config, random: np.random.Generator) -> list[int]:
    """`ids` and `new` more, each drawn from what the model says of those before it (no more than `context`)."""
    for _ in range(new):  # all of the row, every time: that k and v of the past are the same again is what a cache uses
        logits, _saved = forward(w, np.array([ids[-context:]]), c)
        ids = [*ids, int(random.choice(c.V, p=softmax(logits[0, -1])))]
    return ids


def main(arguments: list[str] | None = None, gradients: Gradients = gradients) -> None:
    parser = argparse.ArgumentParser(description="Learn the characters of a text with a transformer made of NumPy.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    options, (B, T), random = parser.parse_args(arguments), (16, 64), np.random.default_rng(0)
    text = options.file.read_text(encoding="utf-8") if options.file.is_file() else ""
    if len(text) <= T:
        parser.error(f"{options.file} is not a text of more than {T} characters")
    letters = sorted(set(text))
    data, c = np.array([letters.index(letter) for letter in text]), Config(V=len(letters))
    optimizer = AdamW(w := initial(c, random))
    print(f"{len(text):,} characters, {c.V} different; {sum(x.size for x in w.values()):,} weights")
    for step in range(options.steps):
        rows = data[random.integers(len(data) - T, size=(B, 1)) + np.arange(T + 1)]
        loss, dw = gradients(w, rows[:, :-1], rows[:, 1:], c)  # each token from those before it
        optimizer.step(dw, lr=3e-3 * min(1, 20 * (step + 1) / options.steps) * (1 - step / options.steps))
        if step % max(1, options.steps // 20) == 0 or step == options.steps - 1:
            print(f"step {step:5}   {loss:.3f} nats a character", flush=True)
    print("".join(letters[i] for i in write(w, data[:1].tolist(), 300, T, c, random)))


if __name__ == "__main__":
    main()
