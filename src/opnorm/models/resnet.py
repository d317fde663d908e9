"""`ds_resnet34`: the paper's CIFAR network."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from opnorm.models.init import RELU_GAIN, keep_mean_square_
from opnorm.models.separable import SeparableConv2d, require_counts

BLOCKS = (3, 4, 6, 3)  # per stage: ResNet-34 of He et al. 2016


class ResidualBlock(nn.Module):
    """y = relu(S x + f(x)), f = conv2 ∘ relu ∘ conv1: Lipschitz constant at most 1 + ‖conv1‖·‖conv2‖.

    The shortcut S has no parameters (option A of He et al. 2016) and norm 1: the identity, or, where the block halves
    the image, every second pixel, with zeros for the new channels.

    With a weight α, y = relu((1-α) S x + α f(x)): at most 1 - α + α·‖conv1‖·‖conv2‖, which is 1 for layers of norm 1.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, gain: float, residual_weight: float | None):
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.residual_weight = residual_weight
        self.conv1 = SeparableConv2d(in_channels, out_channels, stride=stride, gain=RELU_GAIN)
        self.conv2 = SeparableConv2d(out_channels, out_channels, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        kept, branch = self.shortcut(x), self.conv2(F.relu(self.conv1(x)))
        if self.residual_weight is None:
            return F.relu(kept + branch)
        return F.relu((1 - self.residual_weight) * kept + self.residual_weight * branch)

    def shortcut(self, x: Tensor) -> Tensor:
        """S x."""
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels)) if self.new_channels else x


class DSResNet(nn.Module):
    """A residual network of depthwise separable convolutions; `ds_resnet34` describes it."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        num_classes: int,
        *,
        in_channels: int = 3,
        width: int = 64,
        residual_weight: float | None = None,
    ):
        super().__init__()
        require_counts(num_classes=num_classes, in_channels=in_channels, width=width)
        if residual_weight is not None and not 0 < residual_weight < 1:
            raise ValueError(
                f"expected residual_weight between 0 and 1, or None for a plain sum, got {residual_weight!r}"
            )
        gain = 1.0 if residual_weight else 1 / math.sqrt(sum(blocks))
        widths = [width * 2**stage for stage in range(len(blocks))]
        self.stem = SeparableConv2d(in_channels, width, gain=RELU_GAIN)
        self.stages = nn.Sequential(
            *(
                _stage(before, after, count, gain, residual_weight)
                for before, after, count in zip([width, *widths], widths, blocks, strict=False)
            )
        )
        self.fc = nn.Linear(widths[-1], num_classes)
        keep_mean_square_(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.stem(x)))
        return self.fc(x.mean((2, 3)))


def _stage(
    in_channels: int, out_channels: int, count: int, gain: float, residual_weight: float | None
) -> nn.Sequential:
    """`count` blocks; where the number of channels changes, the first of them halves the image."""
    halves = in_channels != out_channels
    first = ResidualBlock(
        in_channels,
        out_channels,
        stride=2 if halves else 1,
        gain=max(gain, math.sqrt(0.5)) if halves else gain,  # half of the shortcut is zeros: q/2 + q/2 = q
        residual_weight=residual_weight,
    )
    rest = (
        ResidualBlock(out_channels, out_channels, stride=1, gain=gain, residual_weight=residual_weight)
        for _ in range(count - 1)
    )
    return nn.Sequential(first, *rest)


def ds_resnet34(
    num_classes: int = 10, *, in_channels: int = 3, width: int = 64, residual_weight: float | None = None
) -> DSResNet:
    """ResNet-34 for 32×32 images, every convolution depthwise separable, no batch norm (Runkel et al. 2021, 4.2).

    The paper counts 33 separable convolutions, 3 of them with stride 2, and one fully connected layer. The stem and two
    for each of 3 + 4 + 6 + 3 = 16 blocks are 1 + 2·16 = 33, and the first block of each of the last three stages has
    stride 2. Nothing is left for the shortcuts of those three blocks, so they have no parameters: with a convolution on
    each there would be 36, and 6 with stride 2. The stem is 3×3 at stride 1 without pooling, as usual for images of
    this size: the stages see 32, 16, 8 and 4 pixels.

    Lipschitz constant, when every separable convolution and the last layer have norm K: stem K, each block 1 + K² (the
    1 is what the addition costs), ReLU 1, mean over n×n pixels 1/n, last layer K; in all K²·(1 + K²)^16 / 4 on
    32×32. Even with K = 1 the additions cost 2^16. A `residual_weight` α makes that K²·(1 - α + α·K²)^16 / 4, which is
    1/4 at K = 1.

    The paper leaves open whether K bounds a separable convolution or each of its two parts, whose product is then K².
    Only the first reading agrees with its results: with the initial weights scaled to K = 5, where its accuracy is
    best, the logits are near 1 if K is the norm of the pair (√5 for each part) and 10^13 if it is that of each part.

    Args:
        num_classes: size of the output.
        in_channels: channels of the image.
        width: channels of the first stage, 64 in the paper; each later stage has twice those of the one before.
        residual_weight: α of (1-α)·shortcut + α·branch for a network with a small constant, such as 1/16; None for
            the plain sum of the paper.
    """
    return DSResNet(BLOCKS, num_classes, in_channels=in_channels, width=width, residual_weight=residual_weight)
