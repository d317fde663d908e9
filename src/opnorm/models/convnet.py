"""`ds_convnet`: a small network for small images, quick to train."""

from __future__ import annotations

from torch import nn

from opnorm.models.init import RELU_GAIN, keep_mean_square_
from opnorm.models.separable import SeparableConv2d, require_counts


def ds_convnet(
    num_classes: int = 10, *, in_channels: int = 1, image_size: int = 8, width: int = 32, depth: int = 2
) -> nn.Sequential:
    """`depth` depthwise separable layers and a linear one, for images of 8×8 pixels such as scikit-learn's digits.

    Lipschitz constant: the product of the norms, K^(depth+1) when each separable layer and the linear one have norm K.
    No addition and no mean to pay for, and few layers, since each one that is bounded takes from the margin between
    the classes, and so from the certified radius.

    Args:
        num_classes: size of the output.
        in_channels: channels of the image. The first layer has 16 kernels for each: with one, a single filtered copy
            of a grey image would be all that the network sees.
        image_size: height and width of the image.
        width: channels of the first layer; the others have twice as many, on half the image size.
        depth: number of depthwise separable layers.
    """
    require_counts(num_classes=num_classes, in_channels=in_channels, image_size=image_size, width=width, depth=depth)
    layers: list[nn.Module] = [SeparableConv2d(in_channels, width, multiplier=16, gain=RELU_GAIN), nn.ReLU()]
    channels, size = width, image_size
    for i in range(1, depth):
        stride = 2 if i == 1 else 1
        layers += [SeparableConv2d(channels, 2 * width, stride=stride, gain=RELU_GAIN), nn.ReLU()]
        channels, size = 2 * width, -(-size // stride)
    classifier = nn.Linear(channels * size * size, num_classes)
    keep_mean_square_(classifier)
    return nn.Sequential(*layers, nn.Flatten(), classifier)
