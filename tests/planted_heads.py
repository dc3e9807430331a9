"""Models whose heads have known roles, with weights written by hand.

The residual stream holds the token as a one-hot vector, its place as another, a 1, and space for the token before.  A
head scores with some of these numbers and is silent, and so reads evenly, where nothing matches.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bare_attention import bare_stack
from triptych import nn
from triptych.model import Model
from triptych.spec import (
    LinearSpec,
    LMHeadSpec,
    Mask,
    ModelSpec,
    SpecialIds,
    StackSpec,
    causal,
    full,
)
from triptych.spec.positions import PositionSpec

V, P = 40, 72  # tokens, places
TOKEN, PLACE, ONE, BEFORE = 0, V, V + P, V + P + 1
D = 2 * V + P + 2  # even
TURNED = 8  # numbers of a head that a rotation turns
K = V + P + TURNED  # width of a head; what is planted by token and place stands behind those that are turned
FREE = TURNED  # the first of these
DELIMITERS, MARKED = [3, 5, 8], (30, 21)  # and the two words, the reading one first
SHARP = 24.0  # score of a match
Plant = Callable[[Tensor, Tensor], None]  # writes the query and the key matrix of one head, [K, D]


def offset(by: int) -> Plant:
    def write(q: Tensor, k: Tensor) -> None:
        for place in range(P):
            if 0 <= place + by < P:
                q[FREE + place + by, PLACE + place] = SHARP
            k[FREE + place, PLACE + place] = 1.0

    return write


def turned(by: int) -> Plant:
    """The same by rotation alone: each pair of numbers turns as positions differ, and fits at this distance."""

    def write(q: Tensor, k: Tensor) -> None:
        half = TURNED // 2
        angles = -by * torch.logspace(0, -(half - 1) / half * 4, half)
        q[:half, ONE], q[half:TURNED, ONE] = 2 * SHARP * angles.cos(), -2 * SHARP * angles.sin()
        k[:half, ONE] = 1.0

    return write


def first(q: Tensor, k: Tensor) -> None:
    q[FREE, ONE], k[FREE, PLACE] = SHARP, 1.0


def delimiter(q: Tensor, k: Tensor) -> None:
    q[FREE, ONE] = SHARP
    k[FREE, [TOKEN + token for token in DELIMITERS]] = 1.0


def duplicate(q: Tensor, k: Tensor) -> None:
    for token in range(V):
        q[FREE + token, TOKEN + token], k[FREE + token, TOKEN + token] = SHARP, 1.0
    for place in range(P):  # not itself
        q[FREE + V + place, PLACE + place], k[FREE + V + place, PLACE + place] = -SHARP, 1.0


def induction(q: Tensor, k: Tensor) -> None:
    for token in range(V):
        q[FREE + token, TOKEN + token], k[FREE + token, BEFORE + token] = SHARP, 1.0


def marked(q: Tensor, k: Tensor) -> None:
    q[FREE, TOKEN + MARKED[0]], k[FREE, TOKEN + MARKED[1]] = SHARP, 1.0


def nothing(q: Tensor, k: Tensor) -> None:
    """A head that reads evenly."""


def _stack(
    plants: Sequence[Sequence[Plant]], mask: Mask, cross: Sequence[Sequence[Plant]] = (),
    position: PositionSpec | None = None, share: int = 1,
) -> StackSpec:  # fmt: skip
    """`position` acts in attention, beside the places in the stream; `share` heads read one key."""
    return bare_stack(
        V, P, D, K, list(map(len, plants)), mask, cross=list(map(len, cross)), position=position, share=share
    )


def _write(
    module: nn.Transformer, name: str, plants: Sequence[Sequence[Plant]], values: bool = False, share: int = 1
) -> None:
    """The projections of every layer under `name`; the value of layer 0's first head is the token, written to the
    space for the token before."""
    parameters = dict(module.named_parameters())
    for layer, heads in enumerate(plants):
        at = name.format(layer)
        q, k = (torch.zeros(len(heads), K, D) for _ in range(2))
        for head, plant in enumerate(heads):
            plant(q[head], k[head])
        parameters[f"{at}.q.weight"].data.copy_(q.flatten(0, 1) * K**0.5)
        parameters[f"{at}.k.weight"].data.copy_(k[::share].flatten(0, 1))
        v, out = torch.zeros(len(heads), K, D), torch.zeros(D, len(heads) * K)
        if values and layer == 0:
            v[0, :V, TOKEN : TOKEN + V] = torch.eye(V)
            out[BEFORE : BEFORE + V, :V] = torch.eye(V)
        elif values and heads[0] is not nothing:  # what is read is predicted
            v[0, :V, TOKEN : TOKEN + V] = 20 * torch.eye(V)
            out[TOKEN : TOKEN + V, :V] = torch.eye(V)
        parameters[f"{at}.v.weight"].data.copy_(v[::share].flatten(0, 1))
        parameters[f"{at}.out.weight"].data.copy_(out)


def _embed(module: nn.Transformer, name: str) -> None:
    parameters = dict(module.named_parameters())
    tokens, places = torch.zeros(V, D), torch.zeros(P, D)
    tokens[:, TOKEN : TOKEN + V] = torch.eye(V)
    tokens[:, ONE] = 1.0
    places[:, PLACE : PLACE + P] = torch.eye(P)
    for parameter, value in parameters.items():
        if parameter.startswith(name) and value.shape in ((V, D), (P, D)):
            value.data.copy_(tokens if value.shape == (V, D) else places)


def _head(module: nn.Transformer) -> None:
    weight = dict(module.named_parameters())["head.proj.weight"]
    weight.data.zero_()
    weight.data[:, TOKEN : TOKEN + V] = torch.eye(V)


# Head 0 of layer 0 supplies the token before to head 0 of layer 1.
DECODER: tuple[tuple[Plant, ...], ...] = (
    (offset(-1), offset(-2), delimiter, duplicate, nothing),
    (induction, marked, first, offset(-5), nothing),
)
NAMES = {
    (0, 0): "previous", (0, 1): "offset", (0, 2): "delimiter", (0, 3): "duplicate",
    (1, 0): "induction", (1, 1): "marked", (1, 2): "first", (1, 3): "offset",
}  # fmt: skip


def decoder(plants: Sequence[Sequence[Plant]] = DECODER, position: object = None, share: int = 1) -> Model:
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    stack = _stack(plants, causal(), position=position, share=share)
    module = nn.new(ModelSpec(family="triptych", decoder=stack, head=head, context=P))
    with torch.no_grad():
        _embed(module, "decoder.embed")
        _write(module, "decoder.blocks.{}.attn", plants, values=True, share=share)
        _head(module)
    return Model(module)


def encoder() -> Model:
    plants = ((offset(1), offset(3), delimiter, nothing),)
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    module = nn.new(ModelSpec(family="triptych", encoder=_stack(plants, full()), head=head, context=P))
    with torch.no_grad():
        _embed(module, "encoder.embed")
        _write(module, "encoder.blocks.{}.attn", plants, values=True)
        _head(module)
    return Model(module)


def encoder_decoder() -> Model:
    own, cross = ((nothing, offset(-2)),), ((offset(0), first, nothing),)
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    spec = ModelSpec(
        family="triptych",
        encoder=_stack(own, full()),
        decoder=_stack(own, causal(), cross),
        head=head,
        context=P,
        ids=SpecialIds(start=1),
    )
    module = nn.new(spec)
    with torch.no_grad():
        for name in ("encoder", "decoder"):
            _embed(module, f"{name}.embed")
            _write(module, name + ".blocks.{}.attn", own, values=True)
        _write(module, "decoder.blocks.{}.cross", cross, values=True)
        _head(module)
    return Model(module)


def texts(rows: int = 6, length: int = 40, seed: int = 3) -> list[list[int]]:
    """Random tokens with delimiters between."""
    noise = np.random.default_rng(seed)
    words = [token for token in range(V) if token not in DELIMITERS]
    every = noise.choice(words, (rows, length))
    for row in every:
        row[noise.choice(np.arange(2, length), 8, replace=False)] = noise.choice(DELIMITERS, 8)
    return every.tolist()


def links(rows: int = 8, seed: int = 5) -> list[tuple[list[int], int, int]]:
    """Texts in each of which both marked words stand once, at varying distances."""
    noise = np.random.default_rng(seed)
    words = [token for token in range(V) if token not in (*DELIMITERS, *MARKED)]
    made = []
    for _ in range(rows):
        row = noise.choice(words, 20)
        row[int(noise.integers(2, 8))], row[int(noise.integers(9, 19))] = MARKED[1], MARKED[0]
        made.append((row.tolist(), *MARKED))
    return made
