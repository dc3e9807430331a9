"""The three layouts of the transformer in one file of NumPy: an encoder as BERT has it (Devlin et al. 2019), a decoder
as GPT-2 has it (Radford et al. 2019), and an encoder with a decoder, the transformer of 2017 (Vaswani et al.).

    python numpy_panels.py        what tells the three apart, what a cache saves and what beams find, on random weights

One block serves all: it has the parts that there are weights for.  Names of weights are those of Triptych's modules, so

    w = {name: x.detach().double().numpy() for name, x in model.module.named_parameters(remove_duplicate=False)}

gives the weights of a BERT, GPT-2 or Marian checkpoint that `model = triptych.load(...)` has read.

Shapes:   B rows            T queries, the tokens of a row      S keys: of the same row, or of the source
          D model width     H heads, K = D / H wide             V vocabulary
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Weights = dict[str, Array]
Cache = dict[str, Array]  # keys and values [B, H, S, K] by the name of their attention


@dataclass(frozen=True)
class PanelConfig:
    """What the weights do not say.

    scale   of the embeddings of tokens: 1, or √D in the transformer of 2017.
    """

    heads: int
    activation: str = "gelu"
    eps: float = 1e-5
    scale: float = 1.0


# ---------------------------------------------------------------- on each token alone
def linear(x: Array, w: Weights, name: str) -> Array:
    """x [..., in] -> x Wᵀ + b [..., out], W being [out, in]."""
    y: Array = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
    return y


def layer_norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    """(x - mean) / √(variance + ε) · weight + bias, over the D numbers of each token (Ba et al. 2016); x itself where
    there is no such norm."""
    if f"{name}.weight" not in w:
        return x
    apart = x - x.mean(-1, keepdims=True)
    y: Array = apart / np.sqrt((apart * apart).mean(-1, keepdims=True) + eps)
    return y * w[f"{name}.weight"] + w[f"{name}.bias"]


erf = np.vectorize(math.erf, otypes=[float])  # NumPy has none

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "swish": lambda x: x / (1 + np.exp(-x)),
    # x Φ(x), the distribution function of the normal distribution (Hendrycks & Gimpel 2016); and their formula for it
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def mlp(x: Array, w: Weights, name: str, c: PanelConfig) -> Array:
    """x [B, T, D] -> [B, T, D], wider inside."""
    return linear(ACTIVATIONS[c.activation](linear(x, w, f"{name}.up")), w, f"{name}.down")


# ---------------------------------------------------------------- attention
def softmax(s: Array) -> Array:
    """exp(s) / Σ exp(s) over the last axis."""
    e = np.exp(s - s.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


def attend(q: Array, k: Array, v: Array, visible: Array | None = None) -> Array:
    """softmax(q kᵀ / √K) v: q [B, H, T, K], k and v [B, H, S, K] -> [B, H, T, K].  `visible` [T, S] is where a query
    may look; without it, everywhere."""
    s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, T, S]
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    return softmax(s) @ v


def split(x: Array, heads: int) -> Array:
    """[B, T, H·K] -> [B, H, T, K]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge(x: Array) -> Array:
    """[B, H, T, K] -> [B, T, H·K]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def self_attention(x: Array, w: Weights, name: str, c: PanelConfig, causal: bool, cache: Cache | None) -> Array:
    """Each token of x [B, T, D] looks at its row: at all of it, or if `causal` at itself and what is before it.

    With a cache, x continues rows whose keys and values it holds; those of x are added.  Nothing of the past is
    computed again, because under a causal mask no later token changes it.
    """
    q, k, v = (split(linear(x, w, f"{name}.{part}"), c.heads) for part in "qkv")
    if cache is not None:
        if f"{name}.k" in cache:
            k = np.concatenate([cache[f"{name}.k"], k], 2)
            v = np.concatenate([cache[f"{name}.v"], v], 2)
        cache[f"{name}.k"], cache[f"{name}.v"] = k, v
    queries, keys = q.shape[2], k.shape[2]
    place = np.arange(keys - queries, keys)  # of the queries: they are the last of the keys
    visible = np.arange(keys) <= place[:, None] if causal else None
    return linear(merge(attend(q, k, v, visible)), w, f"{name}.out")


def cross_attention(x: Array, source: Array, w: Weights, name: str, c: PanelConfig, cache: Cache | None) -> Array:
    """Each token of x [B, T, D] looks at every token of the encoder's output [B, S, D], whose keys and values do not
    change while the decoder writes: with a cache they are computed once."""
    q = split(linear(x, w, f"{name}.q"), c.heads)
    stored = {} if cache is None else cache
    for part in "kv":
        if f"{name}.{part}" not in stored:
            stored[f"{name}.{part}"] = split(linear(source, w, f"{name}.{part}"), c.heads)
    return linear(merge(attend(q, stored[f"{name}.k"], stored[f"{name}.v"])), w, f"{name}.out")


# ---------------------------------------------------------------- a block, and a stack of them
# Pre-norm:  x = x + f(norm(x))         as GPT-2 has it: the sum itself is never normalized on its way up
# Post-norm: x = norm(x + f(x))         as in 2017, and in BERT
def block(
    x: Array, source: Array | None, w: Weights, name: str, c: PanelConfig, causal: bool, cache: Cache | None
) -> Array:
    """x [B, T, D] -> [B, T, D]: attention, attention to the source where there is such a part, the MLP."""
    for part in ("attn", "cross", "mlp"):
        if part == "cross" and f"{name}.cross.q.weight" not in w:
            continue
        h = layer_norm(x, w, f"{name}.{part}_norm.pre", c.eps)
        if part == "attn":
            h = self_attention(h, w, f"{name}.attn", c, causal, cache)
        elif part == "cross":
            assert source is not None, "this decoder reads a source"
            h = cross_attention(h, source, w, f"{name}.cross", c, cache)
        else:
            h = mlp(h, w, f"{name}.mlp", c)
        x = layer_norm(x + h, w, f"{name}.{part}_norm.post", c.eps)
    return x


def sinusoids(positions: Array, width: int) -> Array:
    """[T] -> [T, D]: sines in the first half, cosines in the second, of position · 10000^(-2i/D).  In the paper they
    take turns, in its code they are halves; weights are learned for either order."""
    angles = positions[:, None] * 10_000.0 ** (-np.arange(width // 2) / (width // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def embed(ids: Array, past: int, w: Weights, name: str, c: PanelConfig) -> Array:
    """ids [B, T] at positions past, past + 1, ... -> [B, T, D]."""
    x = w[f"{name}.tokens.weight"][ids] * c.scale
    positions = np.arange(past, past + ids.shape[1])
    if f"{name}.position.weight" in w:
        x = x + w[f"{name}.position.weight"][positions]
    else:
        x = x + sinusoids(positions, x.shape[-1])
    if f"{name}.token_types.weight" in w:  # BERT: all tokens are of the first sentence
        x = x + w[f"{name}.token_types.weight"][0]
    return layer_norm(x, w, f"{name}.norm", c.eps)


def stack(
    name: str, ids: Array, w: Weights, c: PanelConfig, *, source: Array | None = None, cache: Cache | None = None
) -> Array:
    """The encoder or the decoder: ids [B, T] -> hidden states [B, T, D]."""
    past = 0 if cache is None else next((k.shape[2] for n, k in cache.items() if n.endswith("attn.k")), 0)
    x = embed(ids, past, w, f"{name}.embed", c)
    layer = 0
    while f"{name}.blocks.{layer}.attn.q.weight" in w:
        x = block(x, source, w, f"{name}.blocks.{layer}", c, name == "decoder", cache)
        layer += 1
    return layer_norm(x, w, f"{name}.final_norm", c.eps)


def unembed(x: Array, w: Weights, c: PanelConfig) -> Array:
    """Hidden states [..., D] -> logits [..., V].  BERT's head has a layer of its own before the words."""
    if "head.transform.dense.weight" in w:
        x = ACTIVATIONS[c.activation](linear(x, w, "head.transform.dense"))
        x = layer_norm(x, w, "head.transform.norm", c.eps)
    return linear(x, w, "head.proj")


# ---------------------------------------------------------------- the three layouts
def encoder_logits(ids: Array, w: Weights, c: PanelConfig) -> Array:
    """What a masked token could be: ids [B, T] -> [B, T, V].  Every token has seen the whole row."""
    return unembed(stack("encoder", ids, w, c), w, c)


def decoder_logits(ids: Array, w: Weights, c: PanelConfig, cache: Cache | None = None) -> Array:
    """The next token after each: ids [B, T] -> [B, T, V]."""
    return unembed(stack("decoder", ids, w, c, cache=cache), w, c)


def both_logits(source: Array, ids: Array, w: Weights, c: PanelConfig) -> Array:
    """The next token of the target after each of ids [B, T], for sources [B, S] -> [B, T, V]."""
    return unembed(stack("decoder", ids, w, c, source=stack("encoder", source, w, c)), w, c)


# ---------------------------------------------------------------- writing
def greedy(ids: Array, new: int, w: Weights, c: PanelConfig, *, source: Array | None = None) -> Array:
    """ids [B, T], and `new` more, each the likeliest after those before it -> [B, T + new].  Of each token its keys and
    values are computed once; `source` [B, S] are ids for the encoder."""
    memory = None if source is None else stack("encoder", source, w, c)
    cache: Cache = {}
    latest = ids
    for _ in range(new):
        hidden = stack("decoder", latest, w, c, source=memory, cache=cache)
        latest = unembed(hidden[:, -1:], w, c).argmax(-1)  # [B, 1]
        ids = np.concatenate([ids, latest], 1)
    return ids


@dataclass(frozen=True)
class Text:
    """What a search has written: its tokens without the start, and the sum of their log-probabilities (nats)."""

    tokens: list[int]
    logprob: float

    def score(self, penalty: float) -> float:
        """Log-probability a token, so that short texts are not preferred; `penalty` is the power of the length."""
        return float(self.logprob / max(len(self.tokens), 1) ** penalty)


def beam_search(
    source: Array, start: int, end: int, w: Weights, c: PanelConfig, *, beams: int, new: int, penalty: float = 1.0
) -> list[Text]:
    """The best texts for one source [S], at most `beams` of them and `new` tokens long, best first (Sutskever et al.
    2014).  The rows of a batch are the texts so far: after each step the likeliest continuations of all are kept, and
    the cache follows them."""
    memory = stack("encoder", source[None], w, c)
    live, done, cache = [Text([], 0.0)], list[Text](), Cache()
    while live:
        latest = np.array([text.tokens[-1:] or [start] for text in live])
        hidden = stack("decoder", latest, w, c, source=np.repeat(memory, len(live), 0), cache=cache)
        logits = unembed(hidden[:, -1], w, c)  # [live, V]
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        totals = log_p + np.array([text.logprob for text in live])[:, None]
        rows: list[int] = []
        grown: list[Text] = []
        for rank, place in enumerate(np.argsort(-totals, axis=None, kind="stable")[: 2 * beams].tolist()):
            row, token = divmod(place, totals.shape[1])
            text = Text([*live[row].tokens, token], float(totals[row, token]))
            if token == end:
                done += [text] * (rank < beams)  # an end less likely than `beams` continuations ends nothing
            elif len(grown) < beams:
                grown.append(text)
                rows.append(row)
        done = sorted(done, key=lambda text: -text.score(penalty))[:beams]
        length = len(grown[0].tokens)
        if len(done) == beams and done[-1].score(penalty) >= max(text.logprob for text in grown) / length**penalty:
            break  # no text, were it to end now, would be better than the worst of these
        if length == new:
            done = sorted(done + grown, key=lambda text: -text.score(penalty))[:beams]
            break
        live, cache = grown, {name: array[rows] for name, array in cache.items()}
    return done


# ---------------------------------------------------------------- random weights, and what they show
def initial(kind: str, random: np.random.Generator, *, V: int = 30, D: int = 32, blocks: int = 2) -> Weights:
    """Weights of an "encoder", a "decoder", or "both", 64 positions long where positions are learned."""

    def matrix(name: str, rows: int, columns: int, bias: bool = True) -> Weights:
        weight = {f"{name}.weight": random.normal(0, columns**-0.5, (rows, columns))}
        return weight | ({f"{name}.bias": random.normal(0, 0.1, rows)} if bias else {})

    def norm(name: str) -> Weights:
        return {f"{name}.weight": random.normal(1, 0.1, D), f"{name}.bias": random.normal(0, 0.1, D)}

    w = matrix("head.proj", V, D, bias=kind != "decoder")
    for side in ("encoder", "decoder") if kind == "both" else (kind,):
        w |= matrix(f"{side}.embed.tokens", V, D, bias=False)
        if kind != "both":
            w |= matrix(f"{side}.embed.position", 64, D, bias=False)
        for name in (f"{side}.blocks.{i}" for i in range(blocks)):
            attentions = ("attn", "cross") if kind == "both" and side == "decoder" else ("attn",)
            for part in attentions:
                for matrix_name in ("q", "k", "v", "out"):
                    w |= matrix(f"{name}.{part}.{matrix_name}", D, D)
            w |= matrix(f"{name}.mlp.up", 4 * D, D) | matrix(f"{name}.mlp.down", D, 4 * D)
            for part in (*attentions, "mlp"):
                w |= norm(f"{name}.{part}_norm.{'pre' if kind == 'decoder' else 'post'}")
        if kind == "decoder":
            w |= norm(f"{side}.final_norm")
    return w


def main() -> None:
    random = np.random.default_rng(1)
    ids, c = random.integers(2, 30, (1, 12)), PanelConfig(heads=4)
    other = ids.copy()
    other[0, -1] = 1  # another last token
    for kind, logits in (("encoder", encoder_logits), ("decoder", decoder_logits)):
        w = initial(kind, random)
        moved = np.abs(logits(ids, w, c) - logits(other, w, c)).max(-1)[0]
        print(f"{kind}: another last token moves the logits of the first token by {moved[0]:.3f}, of the last by "
              f"{moved[-1]:.3f}")  # fmt: skip
    cache: Cache = {}
    steps = [decoder_logits(ids[:, t : t + 1], w, c, cache) for t in range(ids.shape[1])]
    apart = np.abs(np.concatenate(steps, 1) - decoder_logits(ids, w, c)).max()
    numbers = sum(array.size for array in cache.values())
    print(f"cache: token by token, the logits differ by {apart:.0e}; 12 tokens keep {numbers:,} numbers")
    w = initial("both", random)
    first, second = (both_logits(source, ids, w, c)[0, 0] for source in (ids, other))
    print(f"both: another last token of the source moves the first logits of the target by "
          f"{np.abs(first - second).max():.3f}")  # fmt: skip
    for beams in (1, 4):
        best = beam_search(ids[0], 0, 1, w, c, beams=beams, new=8)[0]
        print(f"{beams} beam{'s' * (beams > 1)}: {best.score(1.0):.3f} nats a token, tokens {best.tokens}")


if __name__ == "__main__":
    main()
