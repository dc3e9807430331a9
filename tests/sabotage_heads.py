"""Sabotages of what stands at both ends: embeddings and heads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from sabotage import change, changed, fill, filled, of, parity, put
from triptych import spec
from triptych.attention import Rows
from triptych.model import Model
from triptych.nn import heads as head_parts
from triptych.nn import inputs, positions

changed("token_types_dropped", spec.EmbedSpec, "bert", token_types=0)
filled("missing_embedding_norm", spec.EmbedSpec, "bert", norm=None)


@parity("llama", "Embed")
@parity("gpt2", "Embed")
def embedding_scaled_by_the_root_of_the_width(model: Model, patch: pytest.MonkeyPatch) -> None:
    for embed in of(model, spec.EmbedSpec):
        patch.setattr(embed, "spec", replace(embed.spec, scale=embed.spec.width**0.5))


changed("missing_embedding_scale", spec.EmbedSpec, "marian", "mbart", "gemma3", "gemma", scale=None)


@parity("marian", "Sinusoidal")
def scale_on_the_positions_too(model: Model, patch: pytest.MonkeyPatch) -> None:
    embed = positions.Sinusoidal.embed
    patch.setattr(positions.Sinusoidal, "embed", lambda self, at: embed(self, at) * self.spec.width**0.5)


changed(
    "sines_and_cosines_in_turn", spec.SinusoidalSpec, "marian", slot="Sinusoidal.layout:halves", layout="interleaved"
)
changed("sinusoids_of_another_base", spec.SinusoidalSpec, "marian", theta=9_000.0)
changed("bart_positions_without_their_offset", spec.LearnedSpec, "bart", offset=0)
changed("missing_cap_of_the_logits", spec.LMHeadSpec, "gemma3-linear", "gemma2", softcap=None)


@parity("gpt2", "Table")
def tokens_off_by_one(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inputs.Table, "forward", lambda self, ids: self.weight[ids - 1])


changed("missing_tied_head_scale", spec.LMHeadSpec, "t5", scale=None)


@parity("t5-v1.1", "LMHead")
def tied_head_scale_on_an_untied_head(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.LMHeadSpec, scale=model.spec.decoder.width**-0.5)


@parity("bart", "LMHead")
@parity("marian-two", "LMHead")
def missing_bias_of_the_logits(model: Model, patch: pytest.MonkeyPatch) -> None:
    fill(model.module.head.proj, patch, "bias", None)


@parity("mt5", "LMHead")
def tied_head_scale_where_none_is(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.LMHeadSpec, scale=model.spec.decoder.width**-0.5)


@parity("gpt2", "Model.ties")
@parity("llama-tied", "Model.ties")
def head_not_tied(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The head keeps what it was initialized with."""
    proj = model.module.head.proj
    fresh = torch.randn(proj.weight.shape, generator=torch.Generator().manual_seed(0))
    fill(proj, patch, "weight", Parameter(fresh * proj.weight.std().item()))


@parity("electra-generator", "Embed.project")
def embedding_projected_by_another_matrix(model: Model, patch: pytest.MonkeyPatch) -> None:
    for embed in of(model, spec.EmbedSpec):
        fill(embed.project, patch, "weight", Parameter(embed.project.weight.detach().flip(0)))


@parity("electra-generator", "Embed.project")
def missing_bias_of_the_projection(model: Model, patch: pytest.MonkeyPatch) -> None:
    for embed in of(model, spec.EmbedSpec):
        fill(embed.project, patch, "bias", None)


changed(
    "relu_in_the_transform",
    spec.TransformSpec,
    "electra-classes",
    "roberta-untied",
    "bert",
    slot="Transform.act:gelu",
    act="relu",
)
changed(
    "gelu_for_relu_in_the_transform",
    spec.TransformSpec,
    "bert-untied",
    "distilbert-classes",
    slot="Transform.act:relu",
    act="gelu",
)
changed(
    "gelu_for_tanh_in_the_transform",
    spec.TransformSpec,
    "roberta-classes",
    "bert-classes",
    slot="Transform.act:tanh",
    act="gelu",
)
filled("missing_norm_of_the_transform", spec.TransformSpec, "electra-generator", "bert", norm=None)
filled("language_model_head_without_its_transform", spec.LMHeadSpec, "vision-bert", transform=None)


@parity("vision-gpt2", "Stack.project")
@parity("vision-bert", "Stack.project")
def encoder_projected_by_another_matrix(model: Model, patch: pytest.MonkeyPatch) -> None:
    project = model.module.encoder.project
    fill(project, patch, "weight", Parameter(project.weight.detach().flip(0)))


@parity("vision-gpt2", "Stack.project")
def missing_bias_of_the_encoder_s_projection(model: Model, patch: pytest.MonkeyPatch) -> None:
    fill(model.module.encoder.project, patch, "bias", None)


@parity("bert", "MaskedLMHead")
@parity("bert-untied", "MaskedLMHead")
def missing_masked_head_bias(model: Model, patch: pytest.MonkeyPatch) -> None:
    fill(model.module.head.proj, patch, "bias", None)


changed("positions_without_their_offset", spec.LearnedSpec, "roberta-untied", "roberta", offset=0)
filled("class_head_without_its_transform", spec.ClassHeadSpec, "roberta-classes", "bert-classes", transform=None)
changed("class_head_reads_the_last_token", spec.ClassHeadSpec, "bert-classes", slot="ClassHead.pool:first", pool="last")


@parity("bart-classes", "ClassHead.pool:last")
@parity("modernbert-classes", "ClassHead.pool:mean")
def class_head_reads_the_first_token_alone(model: Model, patch: pytest.MonkeyPatch) -> None:
    change(model, patch, spec.ClassHeadSpec, pool="first")


@parity("modernbert-tokens", "TokenHead.transform")
@parity("modernbert-spans", "SpanHead.transform")
def labels_of_tokens_without_their_transform(model: Model, patch: pytest.MonkeyPatch) -> None:
    put(model, patch, type(model.spec.head), "transform", None)


@parity("bert-spans", "SpanHead")
def ends_swapped(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = head_parts.SpanHead.forward
    patch.setattr(head_parts.SpanHead, "forward", lambda self, x, *rest: forward(self, x, *rest).flip(-1))


@parity("electra", "ReplacedHead")
def replaced_head_without_its_transform(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_parts.ReplacedHead, "forward", lambda self, x, rows, random: self.proj(x))


@parity("bert-tokens", "TokenHead")
def token_head_reads_the_next_token(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_parts.TokenHead, "forward", lambda self, x, rows, random: self.classes(x.roll(-1, 0)))


@parity("bert-pooler", "Pooling.dense", "Pooling.act:tanh")
def pooler_without_its_tanh(model: Model, patch: pytest.MonkeyPatch) -> None:
    pool = head_parts.Pooling.forward

    def bare(self: Any, x: Tensor, rows: Rows, random: None = None) -> Tensor:
        return self.dense(x[list(rows.starts)]) if self.spec.mode == "dense" else pool(self, x, rows)

    patch.setattr(head_parts.Pooling, "forward", bare)


@parity("bert-no-pooler", "Pooling.mode:mean")
def mean_over_the_whole_batch(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_parts.Pooling, "forward", lambda self, x, rows, random=None: x.mean(0).expand(len(rows), -1))
