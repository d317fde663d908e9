"""`mobilenet_v2`, without batch norm or with it."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor, nn

from opnorm.models.init import RELU_GAIN, keep_mean_square_
from opnorm.models.separable import require_counts

# expansion, output channels, blocks, stride of the first block: Sandler et al. 2018, table 2
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
NUMBERED = re.compile(r"(\d{4})\.(?:conv_\d+|fc)\.(weight|bias)")


class InvertedResidual(nn.Module):
    """y = x + f(x) where the shapes agree, else f(x); f expands the channels, filters each, and projects them back.

    Lipschitz constant at most 1 + ‖project‖·‖depthwise‖·‖expand‖: the addition costs the 1.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int, batch_norm: bool):
        super().__init__()
        hidden = in_channels * expansion
        expand = [_convolution(in_channels, hidden, 1, batch_norm=batch_norm)] if expansion > 1 else []
        filter_ = _convolution(hidden, hidden, 3, stride, groups=hidden, batch_norm=batch_norm)
        project = _convolution(hidden, out_channels, 1, batch_norm=batch_norm, activation=False)
        self.conv = nn.Sequential(*expand, filter_, *project)
        self.adds = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    """The network of Sandler et al. 2018; `mobilenet_v2` has the documentation."""

    def __init__(self, num_classes: int, width_mult: float, batch_norm: bool, dropout: float, in_channels: int):
        super().__init__()
        require_counts(num_classes=num_classes, in_channels=in_channels)
        if not 0 < width_mult < math.inf:
            raise ValueError(f"expected width_mult > 0, got {width_mult!r}")
        channels = _multiple_of_eight(32 * width_mult)
        last = _multiple_of_eight(1280 * max(1.0, width_mult))
        features: list[nn.Module] = [_convolution(in_channels, channels, 3, 2, batch_norm=batch_norm)]
        for expansion, base, count, stride in STAGES:
            out_channels = _multiple_of_eight(base * width_mult)
            for i in range(count):
                block_stride = stride if i == 0 else 1
                features.append(InvertedResidual(channels, out_channels, block_stride, expansion, batch_norm))
                channels = out_channels
        features.append(_convolution(channels, last, 1, batch_norm=batch_norm))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(dropout) if dropout else nn.Identity(), nn.Linear(last, num_classes))
        self._initialise()
        self.register_load_state_dict_pre_hook(_name_numbered_parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))

    def _initialise(self) -> None:
        """The rules of `opnorm.models.init`: every convolution is followed by a ReLU6, but for the projections."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                keep_mean_square_(module, RELU_GAIN)
        blocks = [block for block in self.features if isinstance(block, InvertedResidual)]
        branches = sum(block.adds for block in blocks)
        for block in blocks:
            project = [module for module in block.conv if isinstance(module, nn.Conv2d)][-1]
            keep_mean_square_(project, 1 / math.sqrt(branches) if block.adds else 1.0)
        keep_mean_square_(self.classifier[1])  # type: ignore[arg-type]


def mobilenet_v2(
    num_classes: int = 1000,
    width_mult: float = 1.0,
    batch_norm: bool = False,
    *,
    dropout: float = 0.0,
    in_channels: int = 3,
) -> MobileNetV2:
    """MobileNetV2 (Sandler et al. 2018), by default without batch norm as Runkel et al. 2021 train it.

    52 convolutions, 17 of them depthwise (4 with stride 2), and one linear layer. Without batch norm each convolution
    has a bias, so that a network whose batch norm was folded into its convolutions fits in. Parameters have the names
    that they have in torchvision's `mobilenet_v2`; with `batch_norm=True` there are no others, and its state dicts load
    unchanged. Checkpoints that number the parameters in the order of execution (`0000.conv_0.weight`, …,
    `0105.fc.bias`) load too, with `load_state_dict` as it is.

    Lipschitz constant, when every layer has norm K: stem K, 10 blocks with an addition 1 + K³ each, the first block
    K², 6 others K³, last convolution K, ReLU6 1, mean over the n×n pixels that are left 1/n, classifier K; in all
    K^23·(1 + K³)^10 / n, n = 7 at 224².

    Args:
        num_classes: size of the output.
        width_mult: factor on the number of channels, rounded to multiples of 8.
        batch_norm: whether each convolution is followed by batch norm instead of having a bias.
        dropout: probability before the classifier; 0 by default, so that training and evaluation compute the same
            (without batch norm), where torchvision has 0.2.
        in_channels: channels of the image.
    """
    return MobileNetV2(num_classes, width_mult, batch_norm, dropout, in_channels)


def _convolution(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    *,
    groups: int = 1,
    batch_norm: bool,
    activation: bool = True,
) -> nn.Sequential:
    """A convolution with "same" padding, and batch norm and ReLU6 where they are asked for."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=not batch_norm)
    norm = [nn.BatchNorm2d(out_channels)] if batch_norm else []
    return nn.Sequential(convolution, *norm, *([nn.ReLU6()] if activation else []))


def _multiple_of_eight(channels: float) -> int:
    """The nearest multiple of 8, one more where that would lose over a tenth: the rule behind the published widths."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def _name_numbered_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename parameters that are numbered in the order of execution, which is the order in which ours are made."""
    numbered = sorted(key for key in state_dict if NUMBERED.fullmatch(key.removeprefix(prefix)))
    layers = [name for name, layer in module.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    if len(numbered) == len(names):
        for key, name in zip(numbered, names, strict=True):
            state_dict[prefix + name] = state_dict.pop(key)
