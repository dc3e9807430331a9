"""The exercises of the lecture on fundamentals (L0), and the practice problems of the page of worked examples (L2)."""

import json
from math import log

import numpy as np
import torch

from triptych import families
from triptych.attention import attend, attention_pattern
from triptych.count import count
from triptych.spec import causal
from .exercise import Draft, Random, exercise, matrix, pick, row, small, tensor, weights_of

SENTENCE = ("She", "sat", "by", "the", "river", "bank")


@exercise("L0.1")
def attention_by_hand(random: Random) -> Draft:
    scores = np.zeros(3)
    while np.ptp(scores) == 0:  # even weights need no softmax
        x = small(random, 3, 4, low=0, high=2)
        w_q, w_k, w_v = (small(random, 2, 4, low=0, high=2) for _ in range(3))
        q, k, v = (x @ w.T for w in (w_q, w_k, w_v))
        asked = int(random.integers(3))
        scores = k @ q[asked] / np.sqrt(2)
    weights = attention_pattern(tensor(q), tensor(k))[asked]
    out = attend(tensor(q), tensor(k), tensor(v))[asked]
    texts = {"token": asked + 1, "q": q[asked], "keys": k, "values": v, "scores": scores}
    return texts | {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v}, (q[asked], weights, out)


@exercise("L0.2")
def a_block(random: Random) -> Draft:
    batch, tokens, heads = pick(random, 1, 2, 3), pick(random, 12, 16, 20), pick(random, 4, 8)
    each = pick(random, 16, 32)
    width = heads * each
    hidden = pick(random, 3, 4) * width
    attention, mlp, norms = 4 * width**2, 3 * width * hidden, 2 * width
    shapes = {"batch": batch, "tokens": tokens, "heads": heads, "each": each, "width": width, "hidden": hidden}
    return shapes | {"attention": attention, "mlp": mlp, "norms": norms}, (
        (batch, tokens, width), (batch, heads, tokens, each), (batch, tokens, hidden), attention + mlp + norms,
    )  # fmt: skip


@exercise("L0.3")
def agreement(random: Random) -> Draft:
    width, apart = pick(random, 2, 4), 0.0
    while apart < 0.05:  # equal scores are equal with any scale
        q, k, v = small(random, 2, width), small(random, 2, width), small(random, 2, 1, low=0, high=9)
        x, y, z = (tensor(one)[None] for one in (q, k, v))
        theirs = torch.nn.functional.scaled_dot_product_attention(x, y, z)[0]
        unscaled = attend(tensor(q), tensor(k), tensor(v), scale=1.0)
        apart = float((theirs - unscaled).abs().max())
    weights = row(attention_pattern(tensor(q), tensor(k)))
    texts = {"width": width, "q": q, "k": k, "v": v[:, 0], "weights": weights, "unscaled": row(unscaled)}
    return texts, (theirs, apart, 1)


@exercise("L0.4")
def losses(random: Random) -> Draft:
    vocab, tokens = pick(random, 61, 65, 80, 96), pick(random, 32, 64, 128)
    loss = round(float(random.uniform(1.2, 2.2)), 2)
    texts = {"vocab": vocab, "tokens": tokens, "loss": loss}
    return texts, (log(vocab), np.exp(loss), tokens * (tokens - 1) // 2)


@exercise("L0.5")
def which_head(random: Random) -> Draft:
    heads = pick(random, 3, 4, 5, 6)
    chosen = int(random.integers(heads))
    weights = random.uniform(0.02, 0.2, (heads, len(SENTENCE)))
    usual = weights[:, 4] * random.uniform(0.8, 1.25, heads)
    weights[chosen, 4] = random.uniform(0.4, 0.6)
    usual[chosen] = random.uniform(0.05, 0.1)
    sink = (chosen + 1) % heads
    weights[sink, 4], usual[sink] = 0.65, 0.62  # it reads the word before, whatever that is
    weights[:, [0, 1, 2, 3, 5]] *= ((1 - weights[:, 4]) / weights[:, [0, 1, 2, 3, 5]].sum(1))[:, None]
    weights, usual = weights.round(2), usual.round(2)
    ratio = weights[:, 4] / usual
    pattern = matrix("pattern, row of bank", weights, [f"head {h + 1}" for h in range(heads)])
    texts = {"sentence": " ".join(SENTENCE), "heads": heads, "pattern": pattern, "usual": usual, "ratio": ratio}
    return texts | {"on_river": weights[:, 4]}, (int(weights[:, 4].argmax()) + 1, int(ratio.argmax()) + 1)


@exercise("L0.6")
def parameters(random: Random) -> Draft:
    heads, layers = pick(random, 16, 20, 32), pick(random, 12, 24, 36)
    width, hidden, vocab = heads * 64, 512 * pick(random, 5, 8, 11), 1000 * pick(random, 32, 50, 152)
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    total = count(families.read_config(config)).total
    attention, mlp, norms = 4 * width**2, 3 * width * hidden, 2 * width
    texts = {"width": width, "heads": heads, "layers": layers, "hidden": hidden, "vocab": vocab}
    return texts | {"layer": attention + mlp + norms, "table": vocab * width}, (attention, mlp, total)


@exercise("L0.7")
def permuted(random: Random) -> Draft:
    names = "ABCD"
    outputs = small(random, 4, 2, low=-5, high=6)
    order = random.permutation(4)
    while (order == np.arange(4)).any():
        order = random.permutation(4)
    asked = int(random.integers(4))
    texts = {"outputs": matrix("Z", outputs, list(names)), "order": " ".join(names[i] for i in order)}
    texts |= {"place": f"{asked + 1}", "there": names[order[asked]]}
    return texts, (outputs[order[asked]], outputs.mean(0), "no")


@exercise("L0.8")
def config_shapes(random: Random) -> Draft:
    heads, width = pick(random, 16, 24, 32), 128 * pick(random, 12, 16, 20)
    groups, head = heads // pick(random, 2, 4, 8), pick(random, 64, 128)
    hidden, theta = 256 * pick(random, 22, 32, 38), pick(random, 10_000, 500_000, 1_000_000)
    config = {
        "model_type": "qwen3", "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": head, "intermediate_size": hidden, "num_hidden_layers": 2, "vocab_size": 1000, "rope_theta": theta,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = families.read_config(config).shapes()
    asked = [shapes[f"decoder.blocks.0.{name}.weight"] for name in ("attn.q", "attn.k", "mlp.down")]
    shown = "\n".join(f"  {json.dumps(key)}: {json.dumps(config[key])}" for key in list(config)[1:6])
    texts = {"config": shown, "heads": heads, "groups": groups, "readers": heads // groups, "head": head}
    return texts | {"width": width, "hidden": hidden}, asked


@exercise("L2.1")
def one_number_a_token(random: Random) -> Draft:
    tokens = 3
    q, k = small(random, tokens, 1, low=-1, high=3), small(random, tokens, 1)
    v = 10 * small(random, tokens, 1, low=1, high=6)
    asked = int(random.integers(tokens))
    weights = attention_pattern(tensor(q), tensor(k), scale=1.0)[asked]
    scores = q[asked, 0] * k[:, 0]
    out = attend(tensor(q), tensor(k), tensor(v), scale=1.0)[asked, 0]
    texts = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "token": asked + 1, "query": q[asked, 0], "scores": scores}
    return texts | {"total": np.exp(scores).sum(), "weights": weights}, (scores, weights, out)


@exercise("L2.2")
def shapes_of_heads(random: Random) -> Draft:
    heads, width, tokens = pick(random, 4, 8, 12, 16), pick(random, 32, 64, 80), pick(random, 48, 100, 128, 200)
    model = heads * width
    texts = {"heads": heads, "width": width, "tokens": tokens, "model": model}
    return texts, (width, (model, width), (heads, tokens, tokens), (tokens, model))


@exercise("L2.3")
def where_the_mask_enters(random: Random) -> Draft:
    tokens = 4
    at = int(random.integers(1, tokens - 1))
    scores = small(random, tokens, tokens, low=-1, high=4)
    with_mask = weights_of(scores, mask=causal())[at]
    without = weights_of(scores)[at]
    later = float(without[at + 1 :].sum())
    texts = {"scores": scores, "token": at + 1, "seen": scores[at, : at + 1], "row": scores[at]}
    texts |= {"without": without, "count": tokens - at - 1, "later": later}
    return texts, (with_mask, later, tokens * (tokens - 1) // 2)
