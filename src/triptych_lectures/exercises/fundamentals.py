"""The exercises of the lecture on fundamentals (L0), and the practice problems of the page of worked examples (L2)."""

import json
from math import log

import numpy as np
import torch

from triptych import families
from triptych.attention import attend, attention_pattern
from triptych.count import count
from triptych.spec import causal
from .exercise import Draft, Random, exercise, listed, matrix, number, pick, row, small, tensor, weights_of

SENTENCE = ("She", "sat", "by", "the", "river", "bank")


@exercise("L0.1", "Attention on a few tokens")
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
    statement = (
        "Three tokens of width 4 and one head of width 2. The rows of each W are its outputs, so q = x Wᵀ.",
        matrix("X", x), matrix("W_Q", w_q), matrix("W_K", w_k), matrix("W_V", w_v),
    )  # fmt: skip
    return statement, [
        (f"What is the query of token {asked + 1}?", q[asked], f"Its row of X times W_Qᵀ: {listed(q[asked])}."),
        (
            f"What are the attention weights of token {asked + 1}, with 1/√d and without a mask?",
            weights,
            f"The keys are {', '.join(listed(one) for one in k)}; the scores over √2 are {listed(scores)}; softmax of "
            "them adds up to 1.",
        ),
        ("What is its output?", out, f"The weights times the values {', '.join(listed(one) for one in v)}, added up."),
    ]


@exercise("L0.2", "Shapes and parameters of a block")
def a_block(random: Random) -> Draft:
    batch, tokens, heads = pick(random, 1, 2, 3), pick(random, 12, 16, 20), pick(random, 4, 8)
    width = heads * pick(random, 16, 32)
    hidden = pick(random, 3, 4) * width
    attention, mlp, norms = 4 * width**2, 3 * width * hidden, 2 * width
    statement = (
        f"A block of multi-head attention with {heads} heads, SwiGLU of hidden width {hidden}, RMSNorm before each and "
        f"residuals; no biases. It reads [{batch}, {tokens}, {width}]."
    )
    return statement, [
        ("What is the shape of its output?", (batch, tokens, width), "A residual stream keeps its shape."),
        (
            "What is the shape of the queries, as batch, heads, tokens, head width?",
            (batch, heads, tokens, width // heads),
            f"{width} / {heads} = {width // heads} numbers for each head.",
        ),
        (
            "What is the shape inside the MLP?",
            (batch, tokens, hidden),
            "gate and up both give the hidden width, and their product keeps it.",
        ),
        (
            "How many parameters has the block?",
            attention + mlp + norms,
            f"Attention 4·D² = {attention:,}, SwiGLU 3·D·F = {mlp:,}, two norms 2·D = {norms:,}.",
        ),
    ]


@exercise("L0.3", "Agreement with PyTorch, and what breaks it")
def agreement(random: Random) -> Draft:
    width, apart = pick(random, 2, 4), 0.0
    while apart < 0.05:  # equal scores are equal with any scale
        q, k, v = small(random, 2, width), small(random, 2, width), small(random, 2, 1, low=0, high=9)
        x, y, z = (tensor(one)[None] for one in (q, k, v))
        theirs = torch.nn.functional.scaled_dot_product_attention(x, y, z)[0]
        unscaled = attend(tensor(q), tensor(k), tensor(v), scale=1.0)
        apart = float((theirs - unscaled).abs().max())
    statement = (
        f"Two tokens, one head of width {width}.", matrix("q", q), matrix("k", k), f"  v = {listed(v[:, 0])}",
    )  # fmt: skip
    return statement, [
        (
            "What does scaled_dot_product_attention of PyTorch give for the two tokens?",
            theirs,
            f"It divides by √{width}; the weights are {listed(row(attention_pattern(tensor(q), tensor(k))))}, "
            "row by row.",
        ),
        (
            "How far from it, at most, is the same without the division by √d?",
            apart,
            f"Without it the outputs are {listed(row(unscaled))}.",
        ),
        ("For which head width would the two be equal?", 1, "√1 = 1: there is nothing to divide by."),
    ]


@exercise("L0.4", "What a decoder can lose, and what it must not see")
def losses(random: Random) -> Draft:
    vocab, tokens = pick(random, 61, 65, 80, 96), pick(random, 32, 64, 128)
    loss = round(float(random.uniform(1.2, 2.2)), 2)
    statement = (
        f"A character decoder has {vocab} characters and is trained on rows of {tokens} tokens. After 1,000 steps its "
        f"loss on held-out text is {loss} nats a character."
    )
    return statement, [
        (
            "What loss, in nats, has a decoder that knows nothing?",
            log(vocab),
            f"Every character has probability 1/{vocab}, so the loss is ln {vocab}.",
        ),
        (
            "Among how many characters does the trained one choose, on average (its perplexity)?",
            np.exp(loss),
            f"exp({loss}).",
        ),
        (
            "How many pairs of a token and a later one, which it must not see, are in a row?",
            tokens * (tokens - 1) // 2,
            f"T(T−1)/2 of {tokens}: without the mask each token sees the next one, which is its answer, so that the "
            "loss falls towards 0 and generation is nonsense.",
        ),
    ]


@exercise("L0.5", "Which head ties two words")
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
    weights = weights.round(2)
    ratio = weights[:, 4] / usual.round(2)
    statement = (
        f"{' '.join(SENTENCE)}: the weights of the last word on each word, by {heads} heads.",
        matrix("pattern, row of bank", weights, [f"head {h + 1}" for h in range(heads)]),
        f"What each head gives to the word just before, on average over other texts: {listed(usual.round(2))}",
    )  # fmt: skip
    best = int(ratio.argmax())
    return statement, [
        (
            "Which head reads the word river most?",
            int(weights[:, 4].argmax()) + 1,
            f"Its weights on river are {listed(weights[:, 4])}.",
        ),
        (
            "Which head links bank to river more than its habit of reading the word before explains?",
            best + 1,
            f"Weight over habit is {listed(ratio)}: a head that always reads the word before says nothing about the "
            "two words. What the link does to the model only its removal shows.",
        ),
    ]


@exercise("L0.6", "Parameters of a model")
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
    statement = (
        f"D = {width:,}, {heads} heads of width 64, {layers} layers, SwiGLU with F = {hidden:,}, V = {vocab:,}, "
        "RMSNorm before each sublayer and at the end, no biases, the head tied to the embedding."
    )
    return statement, [
        ("How many parameters has the attention of one layer?", attention, f"4·D² = 4·{width:,}²."),
        ("How many has its MLP?", mlp, f"3·D·F = 3·{width:,}·{hidden:,}."),
        (
            "How many has the model?",
            total,
            f"{layers} layers of {attention + mlp + norms:,} with their norms, V·D = {vocab * width:,} for the "
            f"embedding and head, D = {width:,} for the last norm.",
        ),
    ]


@exercise("L0.7", "What happens when tokens change places")
def permuted(random: Random) -> Draft:
    names = "ABCD"
    outputs = small(random, 4, 2, low=-5, high=6)
    order = random.permutation(4)
    while (order == np.arange(4)).any():
        order = random.permutation(4)
    asked = int(random.integers(4))
    statement = (
        "One layer of attention without positions and without a mask reads the tokens A B C D and gives",
        matrix("Z", outputs, list(names)), f"Now it reads {' '.join(names[i] for i in order)}.",
    )  # fmt: skip
    return statement, [
        (
            f"What is its output at place {asked + 1}?",
            outputs[order[asked]],
            f"{names[order[asked]]} stands there, and its output moves with it: the layer is equivariant.",
        ),
        (
            "What is the mean of the four outputs now?",
            outputs.mean(0),
            "A mean does not depend on the order: pooled, the layer is invariant.",
        ),
        (
            "Does the output of A stay the same if the layer has a causal mask, yes or no?",
            "no",
            "A stood first and saw only itself; now it sees the tokens before it too.",
        ),
    ]


@exercise("L0.8", "A real config, read")
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
    first = "decoder.blocks.0."
    statement = "config.json says\n" + "\n".join(
        f"  {json.dumps(key)}: {json.dumps(config[key])}" for key in list(config)[1:6]
    )
    return statement, [
        (
            "What is the shape of layer 0's query projection, outputs before inputs?",
            shapes[f"{first}attn.q.weight"],
            f"{heads} heads of {head} numbers, from {width:,}.",
        ),
        (
            "What is that of its key projection?",
            shapes[f"{first}attn.k.weight"],
            f"{groups} key/value heads of {head} numbers: {heads // groups} query heads read each.",
        ),
        (
            "What is that of the MLP's down projection?",
            shapes[f"{first}mlp.down.weight"],
            f"From F = {hidden:,} back to D = {width:,}.",
        ),
    ]


@exercise("L2.1", "Attention with one number a token")
def one_number_a_token(random: Random) -> Draft:
    tokens = 3
    q, k = small(random, tokens, 1, low=-1, high=3), small(random, tokens, 1)
    v = 10 * small(random, tokens, 1, low=1, high=6)
    asked = int(random.integers(tokens))
    weights = attention_pattern(tensor(q), tensor(k), scale=1.0)[asked]
    scores = q[asked, 0] * k[:, 0]
    out = attend(tensor(q), tensor(k), tensor(v), scale=1.0)[asked, 0]
    statement = (
        "Three tokens have a query, a key and a value of one number each; scores are not scaled.",
        f"  q = {listed(q[:, 0])}   k = {listed(k[:, 0])}   v = {listed(v[:, 0])}",
    )  # fmt: skip
    return statement, [
        (
            f"What are the scores of token {asked + 1} against the three tokens?",
            scores,
            f"Its query {number(q[asked, 0])} times each key: {listed(scores)}.",
        ),
        (
            "What are its three attention weights?",
            weights,
            f"softmax({listed(scores)}): each exp(score) over their sum {number(float(np.exp(scores).sum()))}.",
        ),
        (
            "What is its output?",
            out,
            f"The weights {listed(row(weights))} times the values {listed(v[:, 0])}, added up.",
        ),
    ]


@exercise("L2.2", "Shapes of the heads")
def shapes_of_heads(random: Random) -> Draft:
    heads, width, tokens = pick(random, 4, 8, 12, 16), pick(random, 32, 64, 80), pick(random, 48, 100, 128, 200)
    model = heads * width
    return f"A layer has width D = {model:,} and {heads} heads that share it evenly. It reads {tokens} tokens.", [
        ("How wide is each head?", width, f"D / H = {model:,} / {heads} = {width}."),
        (
            "What is the shape of W_Q of one head, inputs before outputs, where a token is a row x and q = x W_Q?",
            (model, width),
            f"From {model:,} numbers to {width}; W_K and W_V of a head have the same shape, and those of all {heads} "
            f"heads side by side {model:,} by {model:,}.",
        ),
        (
            "What is the shape of all heads' scores, as heads, queries, keys?",
            (heads, tokens, tokens),
            f"Each of the {heads} heads compares {tokens} queries with {tokens} keys.",
        ),
        (
            "What is the shape of the concatenated heads, and so of the output?",
            (tokens, model),
            f"{heads} vectors of {width} numbers side by side are {model:,} numbers for each of {tokens} tokens.",
        ),
    ]


@exercise("L2.3", "Where the causal mask enters")
def where_the_mask_enters(random: Random) -> Draft:
    tokens = 4
    at = int(random.integers(1, tokens - 1))
    scores = small(random, tokens, tokens, low=-1, high=4)
    with_mask = weights_of(scores, mask=causal())[at]
    without = weights_of(scores)[at]
    statement = matrix("scores q·kᵀ/√d of 4 tokens", scores) + "\nThe mask adds 0 or −∞ to them before softmax."
    later = float(without[at + 1 :].sum())
    return statement, [
        (
            f"What are the four weights of token {at + 1} under the causal mask?",
            with_mask,
            f"Only the first {at + 1} scores of its row are left; softmax over {listed(scores[at, : at + 1])}, "
            "then zeros.",
        ),
        (
            "Without the mask, how much of its weight would go to later tokens?",
            later,
            f"softmax over the whole row {listed(scores[at])} is {listed(row(without))}; the last {tokens - at - 1} "
            f"add up to {number(later)}. In training they hold the answer, in generation they do not exist.",
        ),
        (
            "How many of the 16 scores does the mask remove?",
            tokens * (tokens - 1) // 2,
            "Those above the diagonal: T(T−1)/2 = 6.",
        ),
    ]
