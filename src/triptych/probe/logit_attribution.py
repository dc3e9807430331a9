"""Direct logit attribution (Elhage et al. 2021): a logit as the sum of what each part of the model adds to it directly.

The residual stream before the head is a sum: the embedding, what each head, each MLP and each bias added.  Everything
from there to a logit is linear once each norm keeps the scale it had in this run, `1 / rms(x)` or `1 / std(x)`:

    LayerNorm   c -> (c - mean(c)) / std(x) * weight, and the bias as a part of its own
    RMSNorm     c -> c / rms(x) * weight

so that the parts' contributions sum to the logit.  In post-norm models (BERT) each norm acts on the whole stream, and
all parts that came before pass through it in this way.  The masked-LM head has an activation, which is taken as the
gain that it has in this run, `act(y) / y` number by number; where a head caps its logits, the sum is the logit before
the cap.  A contribution is direct: what later heads and MLPs make of a part counts as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych import ops
from triptych.arguments import checked
from triptych.errors import InputError
from triptych.nn import heads as nn_heads
from triptych.nn.attention import Attention
from triptych.nn.linear import LayerNorm, RMSNorm, Scale
from triptych.nn.stack import Block, ParallelBlock, Stack
from .display import Displayed, JsonResult, largest
from .lenses import per_head, vocabulary
from .metric import Answer, answers_of, token_id
from .prompts import ProbedModel, PromptInput, measured_at, name_tokens, prompt_of, values_at
from .sites import prefix_of, sites, stack_of

PARTS = ("embed", ".attn.z", ".cross.z", ".mlp.out", ".branch.out", "final")  # sites that hold parts of the stream


@dataclass(frozen=True, eq=False)
class LogitAttribution(JsonResult, Displayed):
    """The amount that each part adds to a logit (or to the difference of two) at one position.

    parts     C names: heads, MLPs, the embedding and biases, in the order of the forward.
    values    [C], which sum to `logit` up to `error`.
    logit     the model's own, before a softcap.
    error     |sum(values) - logit|: the rounding of fp32, and with packed weights that of their kernels.
    """

    in_json = ("position", "answers", "parts", "values", "logit", "error", "softcapped")
    position: int
    answers: tuple[str, ...]
    parts: tuple[str, ...]
    values: Tensor
    logit: float
    softcapped: bool = False

    @property
    def error(self) -> float:
        """The absolute difference between `logit` and the sum of the parts."""
        return abs(float(self.values.sum()) - self.logit)

    def largest(self, count: int = 12) -> list[tuple[str, float]]:
        """The `count` parts with the largest contributions by magnitude, as (name, contribution)."""
        return largest(self.parts, self.values, count)

    def __repr__(self) -> str:
        capped = ", before the softcap" if self.softcapped else ""
        of = " - ".join(map(repr, self.answers))
        title = f"logit of {of} at position {self.position}: {self.logit:.4f}{capped}"
        lines = [f"{value:+.4f}  {part}" for part, value in self.largest(24)]
        return "\n".join([f"{title}; all parts sum to {float(self.values.sum()):.4f}", *lines])


@checked
def attribute_logit(
    model: ProbedModel,
    text: PromptInput,
    answer: Answer | Sequence[Answer] | None = None,
    *,
    at: int | None = None,
    target: PromptInput = None,
    max_bytes: int = 1 << 30,
) -> LogitAttribution:
    """What each head, MLP, bias and the embedding add to the logit of `answer` (a token, or two for the difference of
    their logits; the likeliest token by default) at position `at` (by default as in `patch`).

    The scale of each norm is held as it was in the run, which makes the rest linear (Elhage et al. 2021).

    Raises InputError for an answer of several tokens and a position out of range, ProbeError for a head that is not
    over the vocabulary.
    """
    spec = model.spec
    vocabulary(spec)
    ids = [token_id(model, one) for one in answers_of(answer)]
    if len(ids) > 2 or len(ids) > len(set(ids)):
        raise InputError(f"{len(ids)} answers were given; a logit has one, and a difference two different tokens")
    prompt = prompt_of(model, text, target)
    position = measured_at(model, prompt, at)
    assert position is not None
    name = stack_of(spec, None)
    stack, head, prefix = getattr(model.module, name), model.module.head, prefix_of(spec, name)
    assert isinstance(stack, Stack)
    assert isinstance(head, nn_heads.LMHead | nn_heads.MaskedLMHead)
    known = [site for site in sites(spec) if site.startswith(prefix) and site.endswith(PARTS)]
    (values,) = values_at(model, [prompt], known, max_bytes)
    site_values = {site.removeprefix(prefix): value[position] for site, value in values.items()}
    with torch.no_grad():
        capless = _capless(head, site_values["final"])
        ids = ids or [int(capless.argmax())]
        parts = _stream(prefix, stack, site_values)
        _through_head(head, parts, ids)
    logit = capless[ids[0]] - (capless[ids[1]] if len(ids) > 1 else 0)
    softcapped = getattr(spec.head, "softcap", None) is not None
    contributions = torch.tensor(parts.numbers, dtype=torch.float64)
    return LogitAttribution(
        position, tuple(name_tokens(model, ids)), tuple(parts.names), contributions, float(logit), softcapped
    )


@dataclass(eq=False)
class _StreamParts:
    """The parts of one vector of the residual stream: C names, and their vectors [C, D] in fp64, which sum to it."""

    names: list[str]
    vectors: Tensor
    numbers: list[float] = field(default_factory=list)

    @property
    def total(self) -> Tensor:
        return self.vectors.sum(0)

    def add(self, names: Sequence[str], vectors: Tensor) -> None:
        """More parts, [n, D]; one that is 0 everywhere is left out."""
        kept = [i for i, vector in enumerate(vectors) if bool(vector.any())]
        self.names += [names[i] for i in kept]
        self.vectors = torch.cat([self.vectors, vectors[kept].double()])

    def add_one(self, name: str, vector: Tensor) -> None:
        self.add([name], vector[None])

    def through(self, norm: object, name: str) -> None:
        """Pass all parts through a norm whose scale is that of their sum; its bias is a part of its own."""
        total = self.total
        if isinstance(norm, Scale):
            self.vectors = self.vectors * norm.spec.factor
        elif isinstance(norm, RMSNorm):
            weight = (norm.spec.offset + norm.weight.double()) / (total.square().mean() + norm.spec.eps).sqrt()
            self.vectors = self.vectors * weight
        elif isinstance(norm, LayerNorm):
            weight = norm.weight.double() / (total.var(correction=0) + norm.spec.eps).sqrt()
            self.vectors = (self.vectors - self.vectors.mean(-1, keepdim=True)) * weight
            if norm.bias is not None:
                self.add_one(f"{name} bias", norm.bias)


def _stream(prefix: str, stack: Stack, site_values: dict[str, Tensor]) -> _StreamParts:
    """The parts of the vector that enters the head, in the order of `Block.forward`."""
    embedded = site_values["embed"]
    parts = _StreamParts([], embedded.new_zeros((0, len(embedded)), dtype=torch.float64))
    parts.add_one(f"{prefix}embed", embedded)
    for i, block in enumerate(stack.blocks):
        own, at = f"blocks.{i}", f"{prefix}blocks.{i}"
        _add_attention(parts, block.attn, block.attn_norm.out, site_values[f"{own}.attn.z"], f"{at}.attn")
        if isinstance(block, ParallelBlock):
            parts.add_one(f"{at}.mlp", site_values[f"{own}.mlp.out"])
            continue
        assert isinstance(block, Block)
        parts.through(block.attn_norm.post, f"{at}.attn_norm.post")
        if block.cross is not None:
            _add_attention(parts, block.cross, block.cross_norm.out, site_values[f"{own}.cross.z"], f"{at}.cross")
            parts.through(block.cross_norm.post, f"{at}.cross_norm.post")
        if block.mlp is not None:
            parts.add_one(f"{at}.mlp", site_values[f"{own}.mlp.out"])
            parts.through(block.mlp_norm.post, f"{at}.mlp_norm.post")
        if block.branch is not None:
            parts.add_one(f"{at}.branch", site_values[f"{own}.branch.out"])
            parts.through(block.branch.norm, f"{at}.branch.norm")
    parts.through(stack.final_norm, f"{prefix}final_norm")
    return parts


def _add_attention(parts: _StreamParts, attn: Attention, out_norm: object, z: Tensor, name: str) -> None:
    """Each head's part `W_o[:, h] z[h]` of [H, Kv], and the bias, through the norm of the sublayer's output."""
    by_head = per_head(attn, z[None])[:, 0]
    own = _StreamParts([], by_head.new_zeros((0, by_head.shape[-1])))
    own.add([f"{name} head {h}" for h in range(len(by_head))], by_head)
    if attn.out.bias is not None:
        own.add_one(f"{name}.out bias", attn.out.bias)
    own.through(out_norm, f"{name}_norm.out")
    parts.add(own.names, own.vectors)


def _through_head(head: nn_heads.LMHead | nn_heads.MaskedLMHead, parts: _StreamParts, ids: Sequence[int]) -> None:
    """From the parts of the vector that enters the head to their contributions to a logit, or to a difference."""
    transform = head.transform
    if transform is not None:
        parts.vectors = parts.vectors @ transform.dense.matrix().double().T
        if transform.dense.bias is not None:
            parts.add_one("head.transform bias", transform.dense.bias)
        total = parts.total
        gain = ops.ACTIVATIONS[transform.spec.act](total) / torch.where(total == 0, torch.ones_like(total), total)
        parts.vectors = parts.vectors * gain
        parts.through(transform.norm, "head.transform.norm")
    if isinstance(head, nn_heads.LMHead) and head.spec.scale is not None:
        parts.vectors = parts.vectors * head.spec.scale
    first, *other = (head.proj.matrix_rows(i, i + 1)[0].double() for i in ids)
    parts.numbers = (parts.vectors @ (first - other[0] if other else first)).tolist()
    if head.proj.bias is not None:
        bias, *less = (float(head.proj.bias[i]) for i in ids)
        if bias != sum(less):
            parts.names.append("head bias")
            parts.numbers.append(bias - sum(less))


def _capless(head: nn_heads.LMHead | nn_heads.MaskedLMHead, final: Tensor) -> Tensor:
    """The model's logits [V] of a vector that enters its head, before a softcap."""
    final = final[None] if head.transform is None else head.transform(final[None])
    if isinstance(head, nn_heads.LMHead) and head.spec.scale is not None:
        final = final * head.spec.scale
    return head.proj(final)[0].float()
