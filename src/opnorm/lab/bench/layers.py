"""The layers that `opnorm bench peers` measures: sizes of real networks, where the exact norm can be computed."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from opnorm import ConvGeometry, ConvOperator, models, operators_of
from opnorm.lab.loading import load_checkpoint


def dense(
    channels: int, out: int, kernel: int, pixels: int, stride: int, dim: int = 2, groups: int = 1
) -> ConvGeometry:
    """A layer with the same sizes along each dimension, padded by k // 2."""
    sizes = (kernel,) * dim, (pixels,) * dim
    return ConvGeometry(channels, out, *sizes, stride=stride, padding=kernel // 2, groups=groups)


def depthwise(channels: int, kernel: int, pixels: int, stride: int, dim: int = 2) -> ConvGeometry:
    """The same, depthwise."""
    return dense(channels, channels, kernel, pixels, stride, dim, groups=channels)


# kind: {cell: layer}; a string is the name of a layer of MobileNetV2
KINDS: dict[str, dict[str, str | ConvGeometry]] = {
    "MobileNetV2, depthwise 3×3": {
        "mobilenet_v2_144_56_s1": "features.3.conv.1.0",
        "mobilenet_v2_960_7_s1": "features.15.conv.1.0",
        "mobilenet_v2_144_56_s2": "features.4.conv.1.0",
        "mobilenet_v2_576_14_s2": "features.14.conv.1.0",
    },
    "EfficientNet-like, depthwise 5×5": {
        "efficientnet_672_14_s1": depthwise(672, 5, 14, 1),
        "efficientnet_144_56_s2": depthwise(144, 5, 56, 2),
    },
    "ConvNeXt-like, depthwise 7×7": {
        "convnext_384_14_s1": depthwise(384, 7, 14, 1),
        "convnext_768_7_s1": depthwise(768, 7, 7, 1),
        "convnext_384_14_s2": depthwise(384, 7, 14, 2),
    },
    "ResNet-like, dense 3×3": {
        "resnet_32_16_s1": dense(32, 32, 3, 16, 1),
        "resnet_32_64_16_s2": dense(32, 64, 3, 16, 2),
    },
    "3-D, depthwise 3×3×3": {
        "depthwise3d_32_16_s1": depthwise(32, 3, 16, 1, dim=3),
        "depthwise3d_32_16_s2": depthwise(32, 3, 16, 2, dim=3),
    },
    "3-D, dense 3×3×3": {
        "dense3d_8_8_s1": dense(8, 8, 3, 8, 1, dim=3),
        "dense3d_8_16_8_s2": dense(8, 16, 3, 8, 2, dim=3),
    },
    "Pointwise": {
        "mobilenet_v2_pointwise_96_576_s1": "features.12.conv.0.0",
        "resnet_pointwise_64_128_s2": dense(64, 128, 1, 16, 2),
    },
}
CELLS = {cell: (kind, layer) for kind, cells in KINDS.items() for cell, layer in cells.items()}


def operators(weights: Path | None, seed: int) -> dict[str, ConvOperator]:
    """The layer of every cell, with Gaussian weights; those of MobileNetV2 with its own where a file gives them."""
    model = models.build("mobilenet_v2")
    if weights:
        load_checkpoint(model, weights)
    trained = {name: operator.detach() for name, operator in operators_of(model, (3, 224, 224)).items()}
    found = {}
    for cell, (_, layer) in CELLS.items():
        if isinstance(layer, ConvGeometry):
            found[cell] = gaussian(layer, seed)
        else:
            found[cell] = trained[layer] if weights else gaussian(trained[layer].geometry, seed)
    return found


def gaussian(geometry: ConvGeometry, seed: int) -> ConvOperator:
    """Entries of variance 1 over the number of inputs of an output."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(geometry.weight_shape, generator=generator)
    return ConvOperator(geometry, weight / math.sqrt(weight[0].numel()))


def small(geometry: ConvGeometry) -> ConvOperator:
    """A layer of the same kind, which loads what is loaded at a first call."""
    groups = 1 if geometry.groups == 1 else 2
    inputs, outputs = (min(4, c // geometry.groups) * groups for c in (geometry.in_channels, geometry.out_channels))
    sizes = geometry.kernel_size, (8,) * geometry.dim
    return gaussian(
        ConvGeometry(inputs, outputs, *sizes, stride=geometry.stride, padding=geometry.padding, groups=groups), 0
    )
