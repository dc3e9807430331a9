"""A decoder of two attention layers whose weights are written by hand: an induction circuit and heads beside it.

The residual stream has four parts: the token, its position, the token before (which head 0 of block 0 writes there) and
the answer (which head 1 of block 1 writes, and the unembedding alone reads).  Head 1 of block 1 compares its own token
with the token before each key: after S A B C A it finds the place after the first A and copies B.  Head 1 of block 0
copies the first token to a fifth part that nothing reads, and the other heads write nothing.
"""

import torch

from bare_attention import bare_stack
from triptych import nn
from triptych.model import Model
from triptych.spec import LinearSpec, LMHeadSpec, ModelSpec, causal

VOCAB, PLACES, HEADS, WIDTH = 7, 6, 3, 9
TOKEN, POSITION, BEFORE, ANSWER, UNREAD = range(5)
SIZES = (VOCAB, PLACES, VOCAB, VOCAB, VOCAB)
D = sum(SIZES)
SHARP = 300.0  # a score this far above the others leaves them a weight of 0 in fp32
START, A, B, C, X = range(5)  # tokens
CLEAN, CORRUPT = [START, A, B, C, A], [START, X, B, C, A]  # B follows; there is nothing to copy
PREVIOUS, FIRST, COPIER = ("blocks.0.attn", 0), ("blocks.0.attn", 1), ("blocks.1.attn", 1)


def part(which: int, size: int) -> slice:
    start = sum(SIZES[:which])
    return slice(start, start + size)


def induction() -> Model:
    """Without norms and MLPs, so that every value can be followed by hand."""
    stack = bare_stack(VOCAB, PLACES, D, WIDTH, [HEADS] * 2, causal(), scale=1.0)
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=VOCAB))
    model = Model(nn.new(ModelSpec(family="tiny", decoder=stack, head=head, context=PLACES)))
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
        _write(model.module)
    return model


def _write(module: nn.Transformer) -> None:
    names = dict(module.named_parameters())
    names["decoder.embed.tokens.weight"][:, part(TOKEN, VOCAB)] = torch.eye(VOCAB)
    names["decoder.embed.position.weight"][:, part(POSITION, PLACES)] = torch.eye(PLACES)
    names["head.proj.weight"][:, part(ANSWER, VOCAB)] = 10 * torch.eye(VOCAB)

    def weight(block: int, matrix: str) -> torch.Tensor:
        """[D', H, K] of q, k and v by head, a view."""
        w = names[f"decoder.blocks.{block}.attn.{matrix}.weight"]
        return w.view(D, HEADS, WIDTH) if matrix == "out" else w.view(HEADS, WIDTH, D)

    def reads(block: int, matrix: str, head: int, which: int, size: int, factor: float = 1.0) -> None:
        weight(block, matrix)[head, :size, part(which, size)] = factor * torch.eye(size)

    def writes(block: int, head: int, which: int) -> None:
        weight(block, "out")[part(which, VOCAB), head, :VOCAB] = torch.eye(VOCAB)

    later = torch.zeros(PLACES, PLACES)  # position p asks for position p - 1, the first for itself
    later[[0, *range(PLACES - 1)], list(range(PLACES))] = SHARP
    weight(0, "q")[0, :PLACES, part(POSITION, PLACES)] = later
    reads(0, "k", 0, POSITION, PLACES)
    reads(0, "v", 0, TOKEN, VOCAB)
    writes(0, 0, BEFORE)
    weight(0, "q")[1, 0, part(POSITION, PLACES)] = SHARP  # every position asks for the first
    reads(0, "k", 1, POSITION, PLACES)
    reads(0, "v", 1, TOKEN, VOCAB)
    writes(0, 1, UNREAD)
    reads(1, "q", 1, TOKEN, VOCAB, SHARP)
    reads(1, "k", 1, BEFORE, VOCAB)
    reads(1, "v", 1, TOKEN, VOCAB)
    writes(1, 1, ANSWER)
