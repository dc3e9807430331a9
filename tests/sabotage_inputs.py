"""Sabotages of what enters a model that reads no words: frames and patches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sabotage import changed, fill, of, parity
from triptych import spec
from triptych.attention import Rows
from triptych.model import Model
from triptych.nn import inputs


@parity("whisper", "Frames")
def frames_without_their_last_gelu(model: Model, patch: pytest.MonkeyPatch) -> None:
    def bare(self: Any, frames: Tensor, rows: Rows, *rest: Any) -> Tensor:
        lengths = [2 * n for n in rows.lengths]
        return self.conv2(F.gelu(self.conv1(frames, lengths)), lengths) + self.position.embed(rows.positions())

    patch.setattr(inputs.Frames, "forward", bare)


@parity("whisper", "Frames")
def frames_that_see_the_next_row(model: Model, patch: pytest.MonkeyPatch) -> None:
    def joined(self: Any, frames: Tensor, rows: Rows, *rest: Any) -> Tensor:
        one = [len(frames)]
        return F.gelu(self.conv2(F.gelu(self.conv1(frames, one)), one)) + self.position.embed(rows.positions())

    patch.setattr(inputs.Frames, "forward", joined)


@parity("whisper", "Conv", "Conv.kernel")
def kernel_that_runs_backwards(model: Model, patch: pytest.MonkeyPatch) -> None:
    for conv in of(model, spec.ConvSpec):
        fill(conv, patch, "weight", torch.nn.Parameter(conv.weight.detach().flip(-1)))


@parity("whisper", "Conv.stride")
def stride_of_the_second_convolution_in_the_first(model: Model, patch: pytest.MonkeyPatch) -> None:
    frames = model.module.input
    for conv, stride in ((frames.conv1, 2), (frames.conv2, 1)):
        patch.setattr(conv, "spec", replace(conv.spec, stride=stride))
    second = frames.conv2.forward
    patch.setattr(frames.conv2, "forward", lambda x, lengths: second(x, [n // 2 for n in lengths]))


@parity("vit", "Patches", "Patches.patch")
def patches_read_column_by_column(model: Model, patch: pytest.MonkeyPatch) -> None:
    flat = inputs.Patches.flat
    patch.setattr(inputs.Patches, "flat", lambda self, rows: flat(self, [row.transpose(1, 2) for row in rows]))


@parity("vit", "Patches")
def own_vector_after_the_patches(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = inputs.Patches.forward

    def last(self: Any, patches: Tensor, rows: Rows, *rest: Any) -> Tensor:
        place = self.position.embed(rows.positions())
        x = (forward(self, patches, rows, None) - place).unflatten(0, (len(rows), -1))
        return x.roll(-1, 1).flatten(0, 1) + place

    patch.setattr(inputs.Patches, "forward", last)


@parity("vit-base", "Patches.channels")
def channels_in_another_order(model: Model, patch: pytest.MonkeyPatch) -> None:
    flat = inputs.Patches.flat
    patch.setattr(inputs.Patches, "flat", lambda self, rows: flat(self, [row.flip(0) for row in rows]))


changed("exact_gelu_in_a_vit", spec.MLPSpec, "vit-unbiased", slot="MLP.act:gelu_tanh", act="relu")
