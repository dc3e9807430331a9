"""Input parts other than token ids, as data: frames of sound and patches of an image.

Whatever it reads, an input part gives one vector a position, and the rows of the flat batch count positions: two
frames make one, and an image has one more than it has patches.
"""

from .part import Part, Shapes
from .positions import LearnedSpec


class ConvSpec(Part):
    """A convolution along a row: `out[t] = bias + sum_j weight[:, :, j] @ x[stride * t + j - kernel // 2]`, with zeros
    beyond both ends of the row."""

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1

    def tensors(self) -> Shapes:
        return {"weight": (self.outputs, self.inputs, self.kernel), "bias": (self.outputs,)}


class FramesSpec(Part):
    """Mel frames to vectors: `gelu(conv2(gelu(conv1(frames)))) + position` (Radford et al. 2022)."""

    conv1: ConvSpec
    conv2: ConvSpec
    position: LearnedSpec
    dropout: float = 0.0

    @property
    def outputs(self) -> int:
        """D."""
        return self.conv2.outputs

    @property
    def stride(self) -> int:
        """The number of frames that make one position."""
        return self.conv1.stride * self.conv2.stride


class PatchesSpec(Part):
    """An image of `image` = (height, width) pixels to vectors: `first`, then `weight @ pixels + bias` of each square of
    `patch` by `patch`, row by row, all of it `+ position` (Dosovitskiy et al. 2021)."""

    channels: int
    image: tuple[int, int]
    patch: int
    width: int
    position: LearnedSpec
    dropout: float = 0.0

    def tensors(self) -> Shapes:
        square = (self.width, self.channels, self.patch, self.patch)
        return {"first": (self.width,), "weight": square, "bias": (self.width,)}

    @property
    def outputs(self) -> int:
        """D."""
        return self.width
